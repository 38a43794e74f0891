"""Streamed and dense losses on a CPU, forward and backward: seconds, and memory above what was held before.

    python benchmarks/streamed_cpu.py --rows 16384 --out benchmarks/results/streamed_cpu.json

Each loss in a fresh process, all of them in turn, several rounds: the first step, which asks for its memory, and the
second. Plain NT-Xent is that of dense_loss.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from dense_loss import Loss, make_embeddings, peak, plain_nt_xent, reset_peak, step

import hardneg as hn
from hardneg.io.provenance import environment

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    "Uniform()": ("Uniform()", 0.0, False),
    "HCL": ("Tilt(1.0)", 0.1, False),
    "HCL, ids": ("Tilt(1.0)", 0.1, True),
    "Tilt(0.7)": ("Tilt(0.7)", 0.0, False),
}
LOSSES = ["plain NT-Xent", *(f"{kind}, {impl}" for kind in KINDS for impl in ("dense", "streamed"))]


def build(name: str, temperature: float = 0.5) -> Loss:
    if name == "plain NT-Xent":
        return lambda embeddings: plain_nt_xent(embeddings, temperature)
    kind, _, impl = name.rpartition(", ")
    negatives, tau_plus, ids = KINDS[kind]
    loss = hn.ContrastiveLoss(negatives, temperature, tau_plus, impl=impl)
    return lambda embeddings: loss(*embeddings.chunk(2), ids=torch.arange(len(embeddings) // 2) if ids else None)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    loss, embeddings = build(options.job), make_embeddings(options.rows, options.dim)
    for _ in range(4):  # past the calls at which a loss looks at its negatives
        step(loss, make_embeddings(64, options.dim))
    before, seconds = reset_peak(), []
    for _ in range(2):
        begun = perf_counter()
        step(loss, embeddings)
        seconds.append(perf_counter() - begun)
    return {"seconds": seconds, "extra_mib": (peak() - before) / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384, help="of both views together")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "streamed_cpu.json")
    parser.add_argument("--job", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        print(json.dumps(measure(options)))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in LOSSES}
    for _ in range(options.rounds):
        for name in LOSSES:
            done = subprocess.run([*sys.orig_argv, f"--job={name}"], capture_output=True, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{name:20} {found[name][-1]}", flush=True)
    figures = {
        name: {
            "first_seconds": median(each["seconds"][0] for each in rounds),
            "second_seconds": median(each["seconds"][1] for each in rounds),
            "extra_mib": max(each["extra_mib"] for each in rounds),
            "rounds": rounds,
        }
        for name, rounds in found.items()
    }
    given = {"rows": options.rows, "dim": options.dim, "threads": options.threads}
    options.out.write_text(json.dumps({"figures": figures, "options": given, **environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
