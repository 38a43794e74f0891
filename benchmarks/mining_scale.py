"""`hardneg mine` over a corpus on disk: time, memory and bytes read, for one or several sizes of the corpus.

    python benchmarks/mining_scale.py                            # 1 and 10 million documents x 64, 20,000 queries
    python benchmarks/mining_scale.py --rows 200000 --queries 2000

The corpus is made on the fly in --folder, as .npy, and removed afterwards. The job runs in a process of its own with
one thread for each worker. A run that was killed resumes from the finished pieces of its job, and the seconds of both
runs are added up; with --resume, sizes that are in --out are not measured again. "read" counts the rows that the stages
take from the file: queries that the first search leaves short are searched deeper by a second. The digest in the
manifest reads the corpus once more. Memory is the largest sum over the processes of the job, sampled: anonymous pages,
shared ones once, without those of the file, which the system may drop at any time; "rss" is the largest of any process
with them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shlex
import shutil
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


def progress_of(begin: float) -> Any:
    """Prints each piece that is done, at most one line in five seconds."""

    def progress(what: str, steps: int) -> Any:
        done, last = 0, 0.0

        def step(number: int) -> None:
            nonlocal done, last
            done += number
            now = time.perf_counter()
            if now - last > 5 or done == steps:
                print(f"{now - begin:7.0f} s  {what} {done} of {steps}", file=sys.stderr, flush=True)
                last = now

        return step

    return progress


def work(folder: Path, options: argparse.Namespace) -> None:
    """The job itself, which counts the bytes that its stages read."""
    import torch

    from hardneg.mining.job import run
    from hardneg.mining.options import MineOptions
    from hardneg.search import exact

    torch.set_num_threads(1)
    begin, counted = time.perf_counter(), multiprocessing.Value("q", 0)
    original = exact.DocumentBlock.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, corpus: Any, low: int, high: int, **more: Any) -> Any:
        with counted.get_lock():
            counted.value += (high - low) * DIM * 4
        return original(cls, corpus, low, high, **more)

    exact.DocumentBlock.of = classmethod(of)  # type: ignore[assignment, method-assign]
    run(
        MineOptions(
            queries=str(folder / "queries.npy"),
            corpus_embeddings=str(folder / "corpus.npy"),
            judgements=str(folder / "pairs.csv"),
            out=str(folder / "mined.jsonl"),
            similarity="dot",
            negatives=options.negatives,
            k=K,
            format="ids",
            jobs=options.workers,
        ),
        progress_of(begin),
    )
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    processor = sum(each.ru_utime + each.ru_stime for each in used)
    most = max(each.ru_maxrss for each in used) / 1024
    print(json.dumps({"read_bytes": counted.value, "rss_mib": most, "processor_seconds": processor}))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--job", str(folder), "--workers", str(options.workers)]
    command += ["--negatives", options.negatives]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    spent = folder / "spent.json"
    before = json.loads(spent.read_text()) if spent.exists() else {"seconds": 0.0, "peak_mib": 0.0, "runs": 0}
    begin, most = time.perf_counter(), before["peak_mib"]
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    while job.poll() is None:
        most = max(most, memory_of(job.pid) / 2**20)
        seconds = before["seconds"] + time.perf_counter() - begin
        spent.write_text(json.dumps({"seconds": seconds, "peak_mib": most, "runs": before["runs"] + 1}))
        time.sleep(0.5)
    assert job.stdout is not None
    if job.returncode:
        sys.exit(job.returncode)
    found = json.loads(job.stdout.read().splitlines()[-1])
    manifest = json.loads((folder / "mined.jsonl.manifest.json").read_text())
    size = (folder / "corpus.npy").stat().st_size
    return {
        **json.loads(spent.read_text()),
        "corpus_bytes": size,
        "read_by_stages": found["read_bytes"] / size,  # of the last run, if one was killed
        "read_for_digest": 1.0,
        "short": manifest["explain"]["short"],
        **found,
    }


def provenance() -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "benchmarks/mining_scale.py", *sys.argv[1:]]),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": bool(git("status", "--porcelain", "--", "src", "benchmarks/mining_scale.py")),
        "cpu": cpu_name(),
        "load_at_start": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--negatives", default="BelowPositive(relative=0.05)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "mining_scale.json")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the corpus is made")
    parser.add_argument("--resume", action="store_true", help="keep the sizes that are in --out")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        work(options.job, options)
        return
    known = json.loads(options.out.read_text()) if options.resume and options.out.exists() else {}
    found: dict[str, Any] = {**known, "provenance": provenance()}
    for rows in options.rows:
        name = f"{rows:,} x {DIM}, {options.queries:,} queries"
        if name in known:
            continue
        folder = options.folder / f"mining_scale_{rows}_{options.queries}"
        if not (folder / "pairs.csv").exists():
            folder.mkdir(parents=True, exist_ok=True)
            print(f"making {rows:,} vectors in {folder}", flush=True)
            write_vectors(folder / "corpus.npy", rows, 0)
            write_queries(folder, options.queries)
        found[name] = measure(folder, options)
        shutil.rmtree(folder)
        print(json.dumps(found, indent=1), flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
