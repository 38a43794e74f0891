"""Mining beside the bare search and beside sentence-transformers' mine_hard_negatives, on CPU.

    python benchmarks/mining.py                  # 20,000 x 20,000, dimensions 64 and 384, 5 negatives each
    python benchmarks/mining.py --large          # also 200,000 x 200,000 of dimension 128, with its peak memory

Embeddings are given, so that no encoder counts. "bare search" is what any exact miner must do: blocks of a matrix
product and the top k + 1 of each row; it drops no positive and writes nothing. sentence-transformers gets an encoder
that looks the embeddings up. Each contender runs in a fresh process, all of them in turn, several rounds; the first,
small call of a process loads what is needed and is not counted. Time is the processor's, so that other work on the
machine does not count; the clock's is in the file too. Memory is the peak of the call above what the process held.

The first lines check that hn.mine and sentence-transformers choose the same negatives with the same options.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from dense_loss import cpu_name, git, peak, reset_peak
from rich.console import Console
from rich.table import Table

import hardneg as hn
from hardneg.mining import mine

ROOT = Path(__file__).resolve().parent.parent
BARE, OURS, MARGIN, PEER = "bare search", "hn.mine", "hn.mine, margin", "sentence-transformers, FAISS"
K = 5


def make_vectors(n: int, dim: int, seed: int) -> torch.Tensor:
    noise = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(noise, dim=-1)


def make_data(n: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries near their positives, the document of the same row."""
    corpus = make_vectors(n, dim, 0)
    return torch.nn.functional.normalize(corpus + 1.2 * make_vectors(n, dim, 1), dim=-1), corpus


def bare(queries: torch.Tensor, corpus: torch.Tensor) -> None:
    for low in range(0, len(queries), 1024):
        (queries[low : low + 1024] @ corpus.T).topk(K + 1, dim=1)


def ours(queries: torch.Tensor, corpus: torch.Tensor, text: str = "Uniform()") -> torch.Tensor:
    return mine(hn.Keys(queries), hn.Keys(corpus), torch.arange(len(queries)), text, K).rows


class LookUp:
    """As much of a SentenceTransformer as its miner uses; a text is the number of its row."""

    device = torch.device("cpu")

    def __init__(self, queries: torch.Tensor, corpus: torch.Tensor) -> None:
        self.queries, self.corpus = queries.numpy(), corpus.numpy()

    def encode_query(self, texts: list[str], **_: Any) -> Any:
        return self.queries[[int(text[1:]) for text in texts]]

    def encode_document(self, texts: list[str], **_: Any) -> Any:
        return self.corpus[[int(text[1:]) for text in texts]]

    def get_embedding_dimension(self) -> int:
        return int(self.corpus.shape[1])

    def similarity(self, a: Any, b: Any) -> torch.Tensor:
        return torch.as_tensor(a) @ torch.as_tensor(b).T

    def similarity_pairwise(self, a: Any, b: Any) -> torch.Tensor:
        return (torch.as_tensor(a) * torch.as_tensor(b)).sum(-1)


def peer(queries: torch.Tensor, corpus: torch.Tensor, **options: Any) -> Any:
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives

    rows = range(len(queries))
    pairs = Dataset.from_dict({"anchor": [f"q{i}" for i in rows], "positive": [f"d{i}" for i in rows]})
    documents = [f"d{i}" for i in range(len(corpus))]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return mine_hard_negatives(
            pairs, LookUp(queries, corpus), corpus=documents, num_negatives=K, use_faiss=True, verbose=False, **options
        )


CONTENDERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    BARE: bare,
    OURS: ours,
    MARGIN: lambda queries, corpus: ours(queries, corpus, "BelowPositive(relative=0.05) * Rank(0, 100)"),
    PEER: peer,
}


def agreement(n: int, dim: int) -> dict[str, float]:
    """The share of equal negatives; similarities closer than the rounding of float32 may stand in either order."""
    queries, corpus = make_data(n, dim)
    found = {}
    for name, text, options in (
        ("top 5", "Uniform()", {}),
        ("ranks 10 to 50", "Rank(10, 50)", {"range_min": 10, "range_max": 50}),
        ("margin 5%", "BelowPositive(relative=0.05)", {"range_max": 200, "relative_margin": 0.05}),
    ):
        theirs = peer(queries, corpus, output_format="n-tuple", **options)
        kept = np.array([int(text[1:]) for text in theirs["anchor"]])
        rows = np.array([[int(one[1:]) for one in theirs[f"negative_{i + 1}"]] for i in range(K)]).T
        own = ours(queries, corpus, text).numpy()[kept]
        wide = queries.double().numpy()[kept]
        gap = [np.einsum("qd,qkd->qk", wide, corpus.double().numpy()[each]) for each in (own, rows)]
        found[name] = float(((own == rows) | (abs(gap[0] - gap[1]) < 1e-6)).mean())
        if found[name] < 1.0:
            raise AssertionError(f"{name}: only {found[name]:.4%} of the negatives are those of sentence-transformers.")
    return found


def measure(name: str, n: int, dim: int) -> dict[str, float]:
    queries, corpus = make_data(n, dim)
    CONTENDERS[name](queries[:200].clone(), corpus[:200].clone())
    before = reset_peak()
    clock, processor = time.perf_counter(), time.process_time()
    CONTENDERS[name](queries, corpus)
    return {
        "processor_seconds": time.process_time() - processor,
        "seconds": time.perf_counter() - clock,
        "extra_mib": (peak() - before) / 2**20,
        "peak_mib": peak() / 2**20,
    }


def in_fresh_process(job: str, options: argparse.Namespace, n: int, dim: int) -> Any:
    command = [sys.executable, __file__, f"--job={job}", f"--rows={n}", f"--dims={dim}", f"--threads={options.threads}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}  # FAISS reads it
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"{job} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(options: argparse.Namespace, dim: int, console: Console) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(options.rounds):
        for name in CONTENDERS:
            rounds[name].append(in_fresh_process(name, options, options.rows, dim))
    table = Table(title=f"{options.rows:,} x {options.rows:,}, dimension {dim}, {K} negatives", title_justify="left")
    for column in ("", "processor s", "times the bare search", "extra MiB", "clock s"):
        table.add_column(column, justify="left" if not column else "right")
    found = {}
    for name, each in rounds.items():
        ratios = [a["processor_seconds"] / b["processor_seconds"] for a, b in zip(each, rounds[BARE], strict=True)]
        found[name] = {what: median(one[what] for one in each) for what in each[0]} | {"ratio": median(ratios)}
        cells = (found[name][what] for what in ("processor_seconds", "ratio", "extra_mib", "seconds"))
        table.add_row(name, *(f"{cell:.2f}" for cell in cells))
    console.print(table)
    return {"rounds": rounds, "medians": found}


def linear_in_queries(options: argparse.Namespace) -> dict[str, float]:
    """Processor time of 1, 2 and 4 parts of the queries against the whole corpus, per query of the smallest."""
    queries, corpus = make_data(options.rows, 64)
    ours(queries[:512], corpus)
    spent = {}
    for parts in (1, 2, 4):
        begin = time.process_time()
        ours(queries[: options.rows * parts // 4], corpus)
        spent[f"{parts}/4 of the queries"] = time.process_time() - begin
    return spent


def provenance() -> dict[str, Any]:
    from importlib.metadata import version

    packages = ("hardneg", "torch", "numpy", "sentence-transformers", "datasets", "faiss-cpu")
    return {
        "command": shlex.join(["python", "benchmarks/mining.py", *sys.argv[1:]]),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": bool(git("status", "--porcelain", "--", "src", "benchmarks/mining.py")),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "cpu": cpu_name(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="more only on a quiet machine: waiting threads spin")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "mining.json")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.job == "agreement":
        print(json.dumps(agreement(options.rows, options.dims[0])))
        return
    if options.job == "linear":
        print(json.dumps(linear_in_queries(options)))
        return
    if options.job:
        print(json.dumps(measure(options.job, options.rows, options.dims[0])))
        return
    console = Console()
    found: dict[str, Any] = {"provenance": provenance()}
    found["agreement"] = in_fresh_process("agreement", options, options.rows, options.dims[0])
    console.print("equal to sentence-transformers:", found["agreement"])
    for dim in options.dims:
        found[f"dimension {dim}"] = compare(options, dim, console)
    found["linear"] = in_fresh_process("linear", options, options.rows, 64)
    console.print("processor seconds:", found["linear"])
    if options.large:
        found["200,000 x 200,000 x 128"] = in_fresh_process(OURS, options, 200_000, 128)
        console.print("200,000 x 200,000 x 128:", found["200,000 x 200,000 x 128"])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
