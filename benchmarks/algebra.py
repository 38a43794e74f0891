"""The cost of the algebra on a CPU: the dense loss against another version of the package, and tiles against dense.

    python benchmarks/algebra.py --old path/to/other/src --rows 512 2048 --out benchmarks/results/algebra.json

Old and new run in turn, each in a process of its own, so that both meet the same load; a figure is the median of the
ratios of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NEGATIVES = ("Uniform()", "Tilt(1.0)", "OtherLabel() * Tilt(1.0)", "Ring(0.1, 0.5)", "Rank(0, 50)", "Threshold(0.1)")


def work() -> None:
    """Reads a case per line, writes the seconds of a forward and backward pass: the median of three after a first."""
    import torch

    import hardneg as hn

    torch.set_num_threads(1)
    for line in sys.stdin:
        case = json.loads(line)
        batch, options = case["rows"] // 2, case.get("options", {})
        random = torch.Generator().manual_seed(0)
        z1, z2 = (torch.randn(batch, 128, generator=random, requires_grad=True) for _ in range(2))
        labels = torch.randint(0, 100, (batch,), generator=random)
        loss = hn.ContrastiveLoss(case["negatives"], 0.2, **options)
        loss._calls = 8  # the next calls look at no warnings
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            loss(z1, z2, labels=labels).backward()
            seconds.append(time.perf_counter() - start)
        print(json.dumps(statistics.median(seconds[1:])), flush=True)


class Worker:
    def __init__(self, source: str) -> None:
        environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--work"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def seconds(self, **case: Any) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(case), file=self.process.stdin, flush=True)
        return float(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def ratio(
    first: tuple[Worker, dict[str, Any]], second: tuple[Worker, dict[str, Any]], repeats: int
) -> dict[str, float]:
    """The median time of the first over that of the second, in turn, after one round that is not counted."""
    rounds = [[worker.seconds(**case) for worker, case in (first, second)] for _ in range(repeats + 1)][1:]
    return {
        "ratio": statistics.median(one / other for one, other in rounds),
        "first_s": statistics.median(one for one, _ in rounds),
        "second_s": statistics.median(other for _, other in rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", help="src folder of another version to compare with")
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--negatives", nargs="+", default=NEGATIVES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work()
    new = Worker(str(Path(__file__).parents[1] / "src"))
    old = Worker(options.old) if options.old else None
    found: dict[str, Any] = {}
    for rows in options.rows:
        for text in options.negatives:
            case = {"negatives": text, "rows": rows}
            dense, tiles = ({**case, "options": {"impl": impl}} for impl in ("dense", "streamed"))
            result = {"streamed / dense": ratio((new, tiles), (new, dense), options.repeats)}
            if old is not None:
                result["dense / old"] = ratio((new, dense), (old, case), options.repeats)
                result["auto / old"] = ratio((new, case), (old, case), options.repeats)
            found[f"{text} at {rows}"] = result
            print(f"{rows:6} {text:28}", {name: round(each["ratio"], 2) for name, each in result.items()}, flush=True)
    new.close()
    if old is not None:
        old.close()
    if options.out:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        options.out.write_text(json.dumps({"commit": commit, "figures": found}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
