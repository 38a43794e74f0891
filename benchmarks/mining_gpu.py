"""1,000,000 queries x 1,000,000 documents of dimension 128, 10 negatives each, on one GPU; needs torch and hardneg.

    python benchmarks/mining_gpu.py
    python benchmarks/mining_gpu.py --rows 2000 --device cpu     # a small try anywhere

Three things in one run: the matrix products alone (the limit), hn.mine without a filter, and hn.mine with a margin
below the positive. Products are float32; --tf32 lets the tensor cores round their inputs, and the share of equal
negatives is then part of the result. The first rows are checked against a plain search of whole rows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.io.provenance import environment
from hardneg.mining import Search, mine

ROOT = Path(__file__).resolve().parent.parent
K = 10


def make_data(n: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Queries near their positives, the document of the same row."""
    random = torch.Generator(device).manual_seed(0)
    corpus = normalize(torch.randn(n, dim, generator=random, device=device), dim=-1)
    noise = normalize(torch.randn(n, dim, generator=random, device=device), dim=-1)
    return normalize(corpus + 1.2 * noise, dim=-1), corpus


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin, result


def products(queries: Tensor, corpus: Tensor, search: Search) -> None:
    """The matrix products of the search and nothing else."""
    rows, columns = search.blocks(queries.device)
    out = torch.empty(rows * min(columns, len(corpus)), device=queries.device)
    for part in torch.split(queries, rows):
        for low in range(0, len(corpus), columns):
            block = corpus[low : low + columns]
            torch.mm(part, block.T, out=out[: len(part) * len(block)].view(len(part), len(block)))


def check(queries: Tensor, corpus: Tensor, rows: Tensor) -> float:
    """The share of the first queries' negatives that a plain search of whole rows also gives."""
    first = min(256, len(queries))
    similarity = queries[:first] @ corpus.T
    similarity[torch.arange(first), torch.arange(first)] = -torch.inf
    return float((similarity.topk(K, dim=1).indices.cpu() == rows[:first]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--query-block", type=int, default=0)
    parser.add_argument("--corpus-block", type=int, default=0)
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "mining_gpu.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    queries, corpus = make_data(options.rows, options.dim, device)
    search = Search(query_block=options.query_block, corpus_block=options.corpus_block)
    keys, documents, own = hn.Keys(queries), hn.Keys(corpus), torch.arange(options.rows)

    def mined(text: str, number: int) -> Tensor:
        return mine(hn.Keys(queries[:number]), documents, own[:number], text, K, search=search).rows

    some = min(options.rows, 4 * search.blocks(device)[0])
    products(queries[:some], corpus, search)  # warms up
    mined("BelowPositive(0.05)", some)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "rows": options.rows,
        "dim": options.dim,
        "tf32": options.tf32,
        "blocks": search.blocks(device),
    }
    found["products_seconds"], _ = timed(lambda: products(queries, corpus, search), device)
    found["mine_seconds"], rows = timed(lambda: mined("Uniform()", len(keys)), device)
    found["margin_seconds"], _ = timed(lambda: mined("BelowPositive(relative=0.05)", len(keys)), device)
    for name in ("mine", "margin"):
        found[f"{name}_share_of_limit"] = found["products_seconds"] / found[f"{name}_seconds"]
    operations = 2.0 * options.rows**2 * options.dim
    found["products_teraflops"] = operations / found["products_seconds"] / 1e12
    torch.backends.cuda.matmul.allow_tf32 = False
    found["equal_to_whole_rows"] = check(queries, corpus, rows)
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    print(json.dumps(found, indent=1))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found | environment(), indent=1) + "\n")


if __name__ == "__main__":
    main()
