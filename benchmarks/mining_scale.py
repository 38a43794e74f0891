"""`hardneg mine` over a corpus on disk: time, memory and bytes read, for one or several sizes of the corpus.

    python benchmarks/mining_scale.py                            # 1 and 10 million documents x 64, 20,000 queries
    python benchmarks/mining_scale.py --rows 200000 --queries 2000

The corpus is made on the fly in a temporary folder, as .npy, and removed afterwards. The job is the command as a user
types it, in a process of its own, by processes of one thread each. "bytes read" counts the rows that the search takes
from the file; the digest of the manifest reads the file once more. Memory is the largest of the sum over the job's
processes, sampled (shared pages count once), without pages of the file, which the system may drop at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from dense_loss import cpu_name, git

ROOT = Path(__file__).resolve().parent.parent
DIM, K = 64, 5


def write_vectors(path: Path, rows: int, seed: int) -> None:
    """Unit vectors, written by pieces."""
    random = np.random.default_rng(seed)
    out = np.lib.format.open_memmap(path, "w+", np.float32, (rows, DIM))
    for low in range(0, rows, 100_000):
        part = random.standard_normal((min(100_000, rows - low), DIM), dtype=np.float32)
        out[low : low + len(part)] = part / np.linalg.norm(part, axis=1, keepdims=True)
    out.flush()


def write_queries(folder: Path, queries: int) -> None:
    """Near a document each, which is the positive."""
    corpus = np.load(folder / "corpus.npy", mmap_mode="r")
    random = np.random.default_rng(1)
    own = np.sort(random.choice(len(corpus), queries, replace=False))
    noise = random.standard_normal((queries, DIM), dtype=np.float32)
    near = corpus[own] + 1.2 * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    np.save(folder / "queries.npy", (near / np.linalg.norm(near, axis=1, keepdims=True)).astype(np.float32))
    lines = "".join(f"{query},{row}\n" for query, row in enumerate(own))
    (folder / "pairs.csv").write_text("query_id,corpus_id\n" + lines)


def memory_of(root: int) -> int:
    """Proportional private and anonymous memory of a process and its children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
            except OSError:
                continue
    total, pending = 0, [root]
    while pending:
        process = pending.pop()
        pending += children.get(process, [])
        try:
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    total += int(line.split()[1]) * 1024
        except OSError:
            continue
    return total


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "hardneg", "mine", "queries.npy", "--corpus-embeddings", "corpus.npy"]
    command += ["--judgements", "pairs.csv", "--similarity", "dot", "-n", options.negatives, "-k", str(K)]
    command += ["--format", "ids", "-o", "mined.jsonl", "--workers", str(options.workers)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HARDNEG_COUNT_ROWS": str(folder / "rows")}
    begin, most = time.perf_counter(), 0
    job = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while job.poll() is None:
        most = max(most, memory_of(job.pid))
        time.sleep(0.5)
    seconds = time.perf_counter() - begin
    assert job.stdout is not None
    if job.returncode:
        sys.exit(job.stdout.read().decode())
    manifest = json.loads((folder / "mined.jsonl.manifest.json").read_text())
    return {"seconds": seconds, "peak_mib": most / 2**20, "short": manifest["explain"]["short"]}
