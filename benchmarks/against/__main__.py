"""The library beside what people would use instead, on a CPU: losses, search, batches, texts and commands.

    python benchmarks/against --budget 1 --out benchmarks/results/against.json    # about 10 minutes on idle cores
    python benchmarks/against --only SupCon --rounds 9

A case has a name, a peer, a goal and sizes. Its function returns what both sides compute for one size: here "ours" and
"theirs", which must give the same numbers. Each case runs in a fresh process, where both sides take turns; a figure is
the median over the rounds of ours / theirs in seconds of the processor, with the quartiles as its spread. A case
without a peer only shows how our time grows with the size. A peer that is not installed is skipped, by its name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and FAISS are loaded

import batches  # noqa: F401  registers its cases, as those below
import commands  # noqa: F401
import texts  # noqa: F401
from cases import CASES, measure, summary

import losses  # noqa: F401
import search  # noqa: F401


def main() -> None:
    """Measure the cases and write the figures; those of cases that are not measured now are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names contain this text")
    parser.add_argument("--sizes", type=int, nargs="+", help="only these sizes")
    parser.add_argument("--rounds", type=int, default=7, help="largest number of rounds")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds after which a size gets no further round")
    parser.add_argument("--large", action="store_true", help="also the largest sizes, which take minutes each")
    parser.add_argument("--out", type=Path, help="JSON file; figures of cases that are not measured now are kept")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        measure_here(options)
        return
    from hardneg.io.provenance import environment

    facts = environment()
    known = json.loads(options.out.read_text())["cases"] if options.out and options.out.exists() else {}
    for name in CASES:
        if options.only in name:
            load = round(os.getloadavg()[0], 1)  # above 1 or 2, other work took part of the caches
            known[name] = in_fresh_process(name, options) | {"commit": facts["commit"], "load": load}
            if options.out:
                kept = {each: known[each] for each in CASES if each in known}
                options.out.write_text(json.dumps({**facts, "threads": 1, "cases": kept}, indent=1) + "\n")


def measure_here(options: argparse.Namespace) -> None:
    """Measure all sizes of a case in this process, and print a line of JSON for each."""
    import torch

    torch.set_num_threads(1)
    chosen = CASES[options.case]
    for size in (*chosen.sizes, *(chosen.more if options.large else ())):
        if not options.sizes or size in options.sizes:
            print(json.dumps([size, measure(options.case, size, options.rounds, options.budget)]), flush=True)


def in_fresh_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a case in a process of its own."""
    chosen = CASES[name]
    about = {"peer": chosen.peer, "goal": chosen.goal, "goal_s": chosen.seconds, "at": chosen.at, "unit": chosen.unit}
    if absent := [module for module in chosen.needs if importlib.util.find_spec(module) is None]:
        print(f"{name}: skipped, {', '.join(absent)} is not installed", flush=True)
        return {**about, "skipped": f"{', '.join(absent)} is not installed"}
    done = subprocess.run([sys.executable, *sys.argv, "--case", name], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout}\n{done.stderr}")
    figures = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    found = summary(name, figures)
    for size, figure in figures.items():
        ratio = "{ratio:7.2f}x  {quartiles}".format(**figure) if "ratio" in figure else ""
        print(f"{figure['ours_s'] * 1e3:10.2f} ms {ratio}  {name}, {size:,} {chosen.unit}", flush=True)
    print(f"{'':14}goal {chosen.goal or chosen.seconds}: {found}", flush=True)
    return {**about, "sizes": figures, **found}


if __name__ == "__main__":
    main()
