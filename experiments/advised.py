"""Whether following ``hardneg advise`` pays: its first suggestion against the default and against its second one.

For data that are in no study. Every arm has the same tries, as in the studies.

    python experiments/advised.py subj mr --data build/worlds
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from atlas import RESULTS, ROOT

from hardneg.cli.advise import ATLAS, advice_on, profile_of
from hardneg.comparing.comparing import carry_out, prepare
from hardneg.comparing.progress import Watcher
from hardneg.comparing.request import Comparison
from hardneg.io.files import write_json
from hardneg.io.provenance import environment

COMMON = {"encoder": "linear", "dim": 64, "batch_size": 64, "epochs": 4, "device": "cpu", "save_every": 100}
TUNE = {"temperature": (0.05, 0.1, 0.2), "learning_rate": (0.003, 0.01)}
TRIES, SEEDS = 4, 5


def without_labels(file: Path, out: Path) -> str:
    """Copy vectors without their classes and mined negatives, which no data of the studies of pairs have."""
    found = np.load(file)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(out, **{name: found[name] for name in ("first", "second", "documents", "test")})
    return f"embeddings:{out}"


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
    parser.add_argument("sets", nargs="+")
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "worlds")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "advised")
    options, found = parser.parse_args(), {}
    for name in options.sets:
        file = without_labels(options.data / f"{name}-vectors.npz", options.out / f"{name}.npz")
        found[name] = advised(file, options.out / name)
        write_json(RESULTS / "advised.json", {"sets": found, **environment()}, "run it again")


if __name__ == "__main__":
    main()
