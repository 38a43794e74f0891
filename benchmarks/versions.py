"""This version of the package against another one: losses, mining, graphs, walks and imports, in turn on one core.

    python benchmarks/versions.py --old path/to/other/src --rounds 15

Each version runs in a process that stays alive. In each round both compute the same case, so that they meet the same
load, and the order alternates. A figure is the median over the rounds of new / old, in seconds of the processor; below
1 the new version is faster. Imports are measured in fresh processes. ``--control`` compares the old version with
itself, which shows how far ratios stray when nothing changed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Work = Callable[[], Any]

MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""Settings of glibc that keep freed memory: otherwise each call has 300 to 700 page faults, by chance of its process,
which makes all calls of a process up to 5 % faster or slower."""
ALGEBRA = (
    "Uniform()",
    "Tilt(1.0)",
    "OtherLabel() * Tilt(1.0)",
    "Ring(0.1, 0.5)",
    "Rank(0, 50)",
    "Threshold(0.1)",
    "BelowPositive(0.05)",  # not of the family that a CPU computes in fused tiles
)
HCL = {"negatives": "Tilt(1.0)", "tau_plus": 0.1}
CASES: dict[str, dict[str, Any]] = {
    **{
        f"{impl} {text} at {rows}": {"kind": "loss", "rows": rows, "options": {"negatives": text, "impl": impl}}
        for rows in (512, 2048)
        for text in ALGEBRA
        for impl in ("dense", "streamed")
    },
    "dense BelowPositive(0.05) at 64": {
        "kind": "loss",
        "rows": 64,
        "options": {"negatives": "BelowPositive(0.05)", "impl": "dense"},
    },
    "dense HCL at 512": {"kind": "loss", "rows": 512, "options": HCL},
    "dense HCL with ids at 512": {"kind": "loss", "rows": 512, "ids": True, "options": HCL},
    "dense SupCon at 512": {"kind": "loss", "rows": 512, "options": {"positives": "label"}},
    "streamed SupCon at 2048": {"kind": "loss", "rows": 2048, "options": {"positives": "label", "impl": "streamed"}},
    "dense MoCo at 256 x 4096": {"kind": "loss", "rows": 512, "pool": 4096, "options": {"views": "pool"}},
    "streamed MoCo at 256 x 16384": {
        "kind": "loss",
        "rows": 512,
        "pool": 16384,
        "options": {"views": "pool", "impl": "streamed"},
    },
    "streamed HCL at 8192": {"kind": "loss", "rows": 8192, "options": {**HCL, "impl": "streamed"}},
    "streamed Tilt(0.7) at 8192": {
        "kind": "loss",
        "rows": 8192,
        "options": {"negatives": "Tilt(0.7)", "impl": "streamed"},
    },
    "mine Uniform() in 5000 x 64": {"kind": "mine", "rows": 5000, "dim": 64, "negatives": "Uniform()"},
    "mine Uniform() in 5000 x 384": {"kind": "mine", "rows": 5000, "dim": 384, "negatives": "Uniform()"},
    "mine a margin in 5000 x 64": {
        "kind": "mine",
        "rows": 5000,
        "dim": 64,
        "negatives": "BelowPositive(relative=0.05) * Rank(0, 100)",
    },
    "mine a draw in 2000 x 64": {
        "kind": "mine",
        "rows": 2000,
        "dim": 64,
        "negatives": "Tilt(10.0)",
        "options": {"draw": "gumbel"},
    },
    "build a graph of 5000 x 128": {"kind": "graph", "rows": 5000},
    "plan walks over 5000": {"kind": "walks", "rows": 5000},
    "import hardneg": {"kind": "import", "line": "import hardneg"},
    "hn.ContrastiveLoss": {"kind": "import", "line": "import hardneg; hardneg.ContrastiveLoss"},
    "hn.mine": {"kind": "import", "line": "import hardneg; hardneg.mine"},
}


def loss_of(case: dict[str, Any]) -> Work:
    """Return a step of a loss: forward and backward."""
    import torch

    import hardneg as hn

    random = torch.Generator().manual_seed(0)
    batch = case["rows"] // 2
    z1, z2 = (torch.randn(batch, 128, generator=random, requires_grad=True) for _ in range(2))
    arguments: dict[str, Any] = {"labels": torch.randint(0, 100, (batch,), generator=random)}
    if case.get("ids"):
        arguments["ids"] = torch.arange(batch)
    if "pool" in case:
        arguments["pool"] = torch.nn.functional.normalize(torch.randn(case["pool"], 128, generator=random), dim=-1)
        arguments["pool"] = hn.Keys(arguments["pool"], labels=torch.randint(0, 100, (case["pool"],), generator=random))
    loss = hn.ContrastiveLoss(temperature=0.2, **case["options"])
    loss._calls = 2**40  # no call looks for warnings, which happens at powers of two
    return lambda: loss(z1, z2, **arguments).backward()


def mining_of(case: dict[str, Any]) -> Work:
    """Return a mining job over random vectors, each query with its own positive."""
    import torch
    from torch.nn.functional import normalize

    import hardneg as hn

    random = torch.Generator().manual_seed(0)
    queries = normalize(torch.randn(case["rows"], case["dim"], generator=random), dim=-1)
    corpus = normalize(queries + 0.1 * torch.randn(queries.shape, generator=random), dim=-1)
    positives, options = torch.arange(case["rows"]), case.get("options", {})
    return lambda: hn.mine(queries, corpus, positives, case["negatives"], 5, **options)


def graph_of(case: dict[str, Any]) -> Work:
    """Return the construction of a proximity graph, or the planning of one epoch of walks over it."""
    import torch
    from torch.nn.functional import normalize

    import hardneg as hn

    random = torch.Generator().manual_seed(0)
    vectors = normalize(torch.randn(case["rows"], 128, generator=random), dim=-1)

    def build() -> Any:
        return hn.build_graph(vectors, 32, 500, torch.Generator().manual_seed(0))

    if case["kind"] == "graph":
        return build
    sampler = hn.ProximityBatchSampler(num_instances=case["rows"], batch_size=128, seed=0)
    sampler.graph = build()

    def plan() -> None:
        sampler.set_epoch(0)
        list(sampler)

    return plan


KINDS = {"loss": loss_of, "mine": mining_of, "graph": graph_of, "walks": graph_of}


def serve(generic: bool) -> None:
    """Read a case per line and write its seconds per call, from calls of at least 0.1 s of the processor.

    Args:
        generic: Whether to compute tilts without their shortcut.
    """
    import torch

    torch.set_num_threads(1)
    if generic:
        from hardneg.kernels.backends import tilted

        tilted.dense_form = tilted.rows = lambda *given: None  # older and newer name
    works: dict[str, Work] = {}
    for line in sys.stdin:
        case = json.loads(line)
        if line not in works:
            works = {line: KINDS[case["kind"]](case)}  # the memory of other cases is released
            for _ in range(2):
                works[line]()
        begun, calls = time.process_time(), 0
        while calls == 0 or time.process_time() - begun < 0.1:
            works[line]()
            calls += 1
        print(json.dumps((time.process_time() - begun) / calls), flush=True)


class Worker:
    """A process that imports one version of the package and measures cases.

    Args:
        source: The ``src`` folder of the version.
        options: Further flags of this script.
    """

    def __init__(self, source: str, *options: str) -> None:
        self.environment = os.environ | MEMORY | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def seconds(self, **case: Any) -> float:
        """Return the seconds of a case."""
        if case.get("kind") == "import":
            timed = f"import time\n{case['line']}\nprint(time.process_time())"
            command = [sys.executable, "-c", timed]
            return float(subprocess.run(command, check=True, capture_output=True, env=self.environment).stdout)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(case), file=self.process.stdin, flush=True)
        return float(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def ratio(
    first: Worker, second: Worker, case: dict[str, Any], other_case: dict[str, Any], rounds: int
) -> dict[str, float]:
    """Measure two cases in turn, after one round that is not counted, and return the median of first / second."""
    found: list[tuple[float, float]] = []
    for i in range(rounds + 1):
        if i % 2:
            other, one = second.seconds(**other_case), first.seconds(**case)
        else:
            one, other = first.seconds(**case), second.seconds(**other_case)
        found.append((one, other))
    pairs = found[1:]
    return {
        "ratio": statistics.median(one / other for one, other in pairs),
        "first_s": statistics.median(one for one, _ in pairs),
        "second_s": statistics.median(other for _, other in pairs),
    }


def commit_of(source: str) -> str:
    """Return the commit of a checkout."""
    command = ["git", "-C", source, "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Compare the versions and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", help="src folder of another version to compare with")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="cases whose names contain this text")
    parser.add_argument("--control", action="store_true", help="compare the old version with itself")
    parser.add_argument("--out", type=Path, help="JSON file; figures of cases that are not measured now are kept")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--generic", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.generic)
    if options.old is None:
        parser.error("--old is required")
    new_source = options.old if options.control else str(ROOT / "src")
    new, old = (Worker(source) for source in (new_source, options.old))
    figures: dict[str, Any] = {}
    if options.out and options.out.exists():
        figures = json.loads(options.out.read_text())["figures"]
    for name, case in CASES.items():
        if options.only not in name:
            continue
        found = ratio(new, old, case, case, options.rounds)
        figures[name] = {
            "new / old": found["ratio"],
            "new_s": found["first_s"],
            "old_s": found["second_s"],
            "rounds": options.rounds,
            "commit": commit_of(new_source),
        }
        print(f"{found['ratio']:6.3f}  {found['first_s'] * 1e3:9.2f} ms  {name}", flush=True)
        if options.out:
            about = {
                "old commit": commit_of(options.old),
                "python": platform.python_version(),
                "machine": platform.machine(),
                "command": "python benchmarks/versions.py --old OLD/src",
            }
            options.out.write_text(json.dumps({**about, "figures": figures}, indent=1) + "\n")
    for worker in (new, old):
        worker.close()
    return None


if __name__ == "__main__":
    main()
