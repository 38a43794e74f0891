"""`hardneg mine --engine ray` beside `--engine local`: the same job, the same bytes, and what Ray adds.

    python benchmarks/mining_engines.py                                      # 1,000,000 documents x 64, 20,000 queries
    python benchmarks/mining_engines.py --rows 50000 --queries 1000 --rounds 1

Local uses two processes, Ray two raylets of this machine with one core each (ray.cluster_utils.Cluster), in turn, each
in a fresh process. The start-up of Ray is measured apart: the cluster, and a first task in each raylet that imports
what the job needs. The overhead is the median over the rounds of ray / local - 1, side by side. Ray lowers the priority
of its workers: on a machine that others use, set RAY_worker_niceness=0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from dense_loss import cpu_name
from mining_scale import DIM, K, write_queries, write_vectors
from rich.console import Console

from hardneg.io.provenance import environment

ROOT = Path(__file__).resolve().parent.parent
RAYLETS = 2


def _imports(_: int) -> int:
    import hardneg.mining.job  # noqa: F401

    time.sleep(0.5)  # so that the other raylet takes the next
    return os.getpid()


@contextmanager
def engine_started(name: str) -> Iterator[float]:
    """Seconds until each raylet has imported what a job needs; none for processes."""
    if name == "local":
        yield 0.0
        return
    begin = time.perf_counter()
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(RAYLETS):
            cluster.add_node(num_cpus=1, include_dashboard=False)
        ray.init(address=cluster.address, log_to_driver=False)
        task = ray.remote(num_cpus=1)(_imports)
        workers: set[int] = set()
        while len(workers) < RAYLETS:
            workers |= set(ray.get([task.remote(i) for i in range(RAYLETS)]))
        yield time.perf_counter() - begin
    finally:
        ray.shutdown()
        cluster.shutdown()


def one(engine: str, folder: Path) -> dict[str, Any]:
    """The job on one engine."""
    import torch

    from hardneg.mining.job import run
    from hardneg.mining.options import MineOptions

    torch.set_num_threads(1)
    out = folder / f"{engine}.jsonl"
    job = MineOptions(
        queries=str(folder / "queries.npy"),
        corpus_embeddings=str(folder / "corpus.npy"),
        judgements=str(folder / "pairs.csv"),
        out=str(out),
        similarity="dot",
        k=K,
        format="ids",
        engine=engine,
        jobs=RAYLETS if engine == "local" else 0,
        shards=8,
        overwrite=True,
    )
    with engine_started(engine) as startup:
        begin = time.perf_counter()
        run(job)
        seconds = time.perf_counter() - begin
    return {"seconds": seconds, "startup": startup, "sha256": hashlib.sha256(out.read_bytes()).hexdigest()}


def rounds_of(options: argparse.Namespace, folder: Path) -> list[dict[str, dict[str, Any]]]:
    rounds = []
    for number in range(options.rounds):
        found: dict[str, dict[str, Any]] = {}
        for engine in ("local", "ray") if number % 2 == 0 else ("ray", "local"):
            command = [sys.executable, __file__, "--one", engine, "--folder", str(folder)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[engine] = json.loads(done.stdout.splitlines()[-1])
        Console().print(found)
        rounds.append(found)
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "mining_engines.json")
    parser.add_argument("--one", choices=("local", "ray"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sys.stdout.write("\n" + json.dumps(one(options.one, options.folder)) + "\n")
        return
    with tempfile.TemporaryDirectory(prefix="mining_engines") as name:
        write_vectors(Path(name) / "corpus.npy", options.rows, 0)
        write_queries(Path(name), options.queries)
        rounds = rounds_of(options, Path(name))
    found = {
        "rows": options.rows,
        "dim": DIM,
        "queries": options.queries,
        "equal_bytes": len({each["sha256"] for one_round in rounds for each in one_round.values()}) == 1,
        "overhead": median(each["ray"]["seconds"] / each["local"]["seconds"] for each in rounds) - 1,
        "startup_seconds": median(each["ray"]["startup"] for each in rounds),
        "rounds": rounds,
        "load": os.getloadavg(),
        "cpu": cpu_name(),
        **environment(),
    }
    Console().print({key: found[key] for key in ("equal_bytes", "overhead", "startup_seconds")})
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
