"""Whether following ``hardneg advise`` pays: its first suggestion against the default and against its second one.

For pairs of texts that are in no study: sentences of SICK that mean nearly the same, and paraphrases of MRPC. Every arm
has the same tries, as in the studies.

    HARDNEG_DATA=... python experiments/advised.py
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from atlas import RESULTS, ROOT, one_thread
from worlds import DATA, rows, shortened

from hardneg.cli.advise import ATLAS, advice_on, profile_of
from hardneg.comparing.comparing import carry_out, prepare
from hardneg.comparing.progress import Watcher
from hardneg.comparing.request import Comparison
from hardneg.io.files import write_json
from hardneg.io.provenance import environment

COMMON = {"dim": 64, "batch_size": 64, "epochs": 1, "device": "cpu", "save_every": 100}
TUNE = {"temperature": (0.05, 0.1, 0.2), "learning_rate": (0.01, 0.03)}
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
    return {"advice": advice, **{name: summary[name] for name in wanted}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "advised")
    options, found = parser.parse_args(), {}
    one_thread()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, pairs in SETS.items():
        file = options.out / f"{name}.jsonl"
        lines = [json.dumps(dict(zip(("first", "second"), shortened(pair), strict=True))) for pair in pairs()]
        file.write_text("\n".join([*lines, ""]), encoding="utf-8")
        found[name] = advised(f"pairs:{file}", options.out / name)
        write_json(RESULTS / "advised.json", {"sets": found, **environment()}, "run it again")


if __name__ == "__main__":
    main()
