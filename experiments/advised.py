"""Whether following ``hardneg advise`` pays: its first suggestion against the default and against its second one.

For two data sets that are in no study: sentences of SICK that mean nearly the same, and paraphrases of MRPC, as vectors
of MiniLM (128) and wordllama (64), as in the world *vectors*. Every arm has the same tries, as in the studies.

    HARDNEG_DATA=... python experiments/advised.py --models build/models
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from atlas import RESULTS, ROOT, one_thread
from worlds import DATA, STATIC_DIM, Encoders, held_out, rows, shortened

from hardneg.cli.advise import ATLAS, advice_on, profile_of
from hardneg.comparing.comparing import Prepared, carry_out, prepare
from hardneg.comparing.progress import Watcher
from hardneg.comparing.request import Comparison
from hardneg.comparing.runs import run_of
from hardneg.comparing.statistics import difference_of, outcomes_of
from hardneg.io.files import write_json
from hardneg.io.provenance import environment
from hardneg.training.data.pairs import TextPairs

COMMON = {"encoder": "linear", "dim": 64, "batch_size": 64, "epochs": 4, "device": "cpu", "save_every": 100}
TUNE = {"temperature": (0.05, 0.1, 0.2), "learning_rate": (0.003, 0.01)}
TRIES, SEEDS, LEAST_SCORE = 4, 5, 4.0


def sick() -> list[tuple[str, str]]:
    """Return pairs of SICK with a relatedness of at least 4 of 5; sentences occur in several pairs."""
    found = [one for one in rows(DATA / "sts" / "sts.tsv.gz") if one["task"] == "SICKR"]
    return [(one["sentence1"], one["sentence2"]) for one in found if float(one["score"]) >= LEAST_SCORE]


def mrpc() -> list[tuple[str, str]]:
    """Return the paraphrases of MRPC."""
    found = [one for one in rows(DATA / "textcls" / "textcls.tsv.gz") if one["task"] == "MRPC" and one["label"] == "1"]
    return [(one["text"], one["text2"]) for one in found]


SETS = {"sick": sick, "mrpc": mrpc}


def advised(data: str, out: Path) -> dict[str, Any]:
    """Ask for advice on data, and compare the first two suggestions with the default."""
    entries = json.loads(ATLAS.read_text(encoding="utf-8"))["entries"]
    advice = advice_on(profile_of(data), entries, data)
    suggested = [one["arm"] for one in advice["suggestions"] if one["arm"] != "pairs()"][:2]
    comparison = Comparison(("pairs()", *suggested), SEEDS, {**COMMON, "data": data}, TUNE, num_tries=TRIES)
    prepared = prepare(comparison, out, 1)
    prepared = replace(prepared, how=replace(prepared.how, here=True))
    summary = carry_out(prepared, Watcher(print, prepared.steps))
    wanted = ("rows", "verdicts", "sentences", "tuned", "metric", "num_test")
    advice = {name: value for name, value in advice.items() if name != "command"}
    return {
        "advice": advice,
        **{name: summary[name] for name in wanted},
        "first_over_second": first_over_second(summary, prepared, out),
    }


def first_over_second(summary: dict[str, Any], prepared: Prepared, out: Path) -> dict[str, float] | None:
    """Return the difference between the first and the second suggestion, with half of its 95 % interval."""
    outcomes = []
    for arm in prepared.arms[1:]:
        tuned = arm.tuned((summary["tuned"] or {}).get(arm.text, {}))
        results = [run_of(tuned, seed, out).result() for seed in range(SEEDS)]
        outcomes.append(outcomes_of([one for one in results if one is not None], summary["metric"]))
    found = difference_of(*outcomes) if len(outcomes) == 2 else None
    return found and {"value": found.value, "half_width": found.half_width}


def write_pairs(name: str, encoders: Encoders, out: Path) -> str:
    """Write the vectors of a data set and return its name for ``--data``."""
    firsts, seconds = (shortened(side) for side in zip(*SETS[name](), strict=True))
    items = TextPairs.of(firsts, seconds, [], name)
    own = {"first": encoders.minilm(name, firsts), "second": encoders.wordllama(seconds, STATIC_DIM)}
    file = out / f"{name}.npz"
    np.savez(file, **own, documents=items.documents.numpy(), test=held_out(len(firsts)))
    return f"embeddings:{file}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models")
    parser.add_argument("--worlds", type=Path, default=ROOT / "build" / "worlds", help="folder of computed vectors")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "advised")
    options, found = parser.parse_args(), {}
    one_thread()
    options.out.mkdir(parents=True, exist_ok=True)
    encoders = Encoders(options.models, options.worlds)
    for name in SETS:
        found[name] = advised(write_pairs(name, encoders, options.out), options.out / name)
        write_json(RESULTS / "advised.json", {"sets": found, **environment()}, "run it again")


if __name__ == "__main__":
    main()
