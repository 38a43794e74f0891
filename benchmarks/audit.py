"""A first audit of 50,000 x 128 embeddings with labels, the default set of rules, on CPU.

    python benchmarks/audit.py                  # 2 threads; also a batch of 512, as logged in training

Embeddings are noise around 100 centres, float32, with second views as positives. The clock's seconds and the
processor's are given: on a busy machine only the second says what the audit costs, and threads must not spin while they
wait for each other (OMP_WAIT_POLICY, set here). Memory is the peak of the call above
what the process held before it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded

import torch
from dense_loss import cpu_name, git, peak, reset_peak
from torch import Tensor

from hardneg.auditing import Audit, audit

ROOT = Path(__file__).resolve().parent.parent


def make_data(n: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 100, (n,), generator=random)
    first = torch.randn(100, dim, generator=random)[labels] + 1.5 * torch.randn(n, dim, generator=random)
    return first, first + 0.5 * torch.randn(n, dim, generator=random), labels


def timed(**arguments: Any) -> tuple[Audit, dict[str, float]]:
    reset_peak()
    before = peak()
    clock, processor = time.perf_counter(), time.process_time()
    found = audit(**arguments)
    took = {"seconds": time.perf_counter() - clock, "processor_seconds": time.process_time() - processor}
    return found, {
        **{name: round(value, 4) for name, value in took.items()},
        "extra_mib": round((peak() - before) / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "audit.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    z, views, labels = make_data(options.rows, options.dim)
    results: dict[str, Any] = {}
    for name, more in {
        "labels": {},
        "labels and second views": {"positives": views, "tau_plus": 0.01},
        "labels, second views and suggestions": {"positives": views, "tau_plus": 0.01, "wanted_false_negatives": 0.02},
    }.items():
        found, took = timed(embeddings=z, labels=labels, **more)
        results[name] = {**took, "rules": len(found.rows), "anchors": found.num_anchors}
        print(name, results[name], flush=True)
    batch = {"embeddings": z[:512], "labels": labels[:512], "positives": views[:512]}
    tries = [timed(negatives="Tilt(1.0)", frontier=False, **batch)[1] for _ in range(20)]
    results["one rule on a batch of 512"] = min(tries, key=lambda took: took["processor_seconds"])
    print("batch", results["one rule on a batch of 512"])
    written = {
        "command": shlex.join(["python", *sys.argv]),
        "commit": git("rev-parse", "--short", "HEAD"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cpu": cpu_name(),
        "threads": options.threads,
        "load": list(os.getloadavg()),
        "rows": options.rows,
        "dim": options.dim,
        "results": results,
    }
    options.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
