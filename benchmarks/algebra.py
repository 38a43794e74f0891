"""The cost of the algebra on a CPU: tiles against matrices, and the generic engine against the shortcut for tilts.

    python benchmarks/algebra.py --rows 512 1024 2048 --out benchmarks/results/algebra.json

Both sides of a ratio are measured in turn on one core, in seconds of the processor; a figure is the median over the
rounds. "generic / shortcut" shows what ``kernels/backends/tilted.py`` saves: above 1 it is worth its code.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import versions

NEGATIVES = versions.ALGEBRA


def main() -> None:
    """Measure every ratio and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--negatives", nargs="+", default=NEGATIVES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    source = str(versions.ROOT / "src")
    usual, generic = versions.Worker(source), versions.Worker(source, "--generic")
    found: dict[str, Any] = {}
    for rows in options.rows:
        for text in options.negatives:
            dense, tiles = (
                {"kind": "loss", "rows": rows, "options": {"negatives": text, "impl": impl}}
                for impl in ("dense", "streamed")
            )
            result = {"streamed / dense": versions.ratio(usual, usual, tiles, dense, options.rounds)}
            if text in ("Uniform()", "Tilt(1.0)"):
                result["generic / shortcut, dense"] = versions.ratio(generic, usual, dense, dense, options.rounds)
                result["generic / shortcut, streamed"] = versions.ratio(generic, usual, tiles, tiles, options.rounds)
            found[f"{text} at {rows}"] = result
            print(f"{rows:6} {text:28}", {name: round(each["ratio"], 2) for name, each in result.items()}, flush=True)
    usual.close()
    generic.close()
    if options.out:
        about = {"commit": versions.commit_of(source), "rounds": options.rounds}
        options.out.write_text(json.dumps({**about, "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
