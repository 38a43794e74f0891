"""1,000,000 queries x 1,000,000 documents of dimension 128, 10 negatives each, on one GPU; needs torch and hardneg.

    python benchmarks/mining_gpu.py
    python benchmarks/mining_gpu.py --rows 2000 --device cpu     # a small try anywhere

hn.mine with products of bfloat16 on the tensor cores as a screen, without a filter and with a margin below the
positive, and with products of float32; beside them the matrix products alone, the limit of each. All negatives and
scores of the float32 search on the first queries are compared with those of the screen, and the first rows with a plain
search of whole rows in float64.
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
K, BELOW = 10, "BelowPositive(relative=0.05)"


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
    out = torch.empty(rows * min(columns, len(corpus)), device=queries.device, dtype=queries.dtype)
    for part in torch.split(queries, rows):
        for low in range(0, len(corpus), columns):
            block = corpus[low : low + columns]
            torch.mm(part, block.T, out=out[: len(part) * len(block)].view(len(part), len(block)))


def check(queries: Tensor, corpus: Tensor, rows: Tensor) -> float:
    """The share of the first queries' negatives that a plain search of whole rows also gives."""
    first = min(256, len(queries))
    similarity = queries[:first].double() @ corpus.double().T
    similarity[torch.arange(first), torch.arange(first)] = -torch.inf
    return float((similarity.topk(K, dim=1).indices.cpu() == rows[:first]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--query-block", type=int, default=0)
    parser.add_argument("--corpus-block", type=int, default=0)
    parser.add_argument("--checked", type=int, default=100_000, help="queries searched in float32 too")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "mining_gpu.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    queries, corpus = make_data(options.rows, options.dim, device)
    documents, own = hn.Keys(corpus), torch.arange(options.rows)
    blocks = {"query_block": options.query_block, "corpus_block": options.corpus_block}
    searches = {name: Search(precision=name, **blocks) for name in ("bfloat16", "float32")}

    def mined(name: str, text: str, number: int) -> hn.mining.Mined:
        return mine(hn.Keys(queries[:number]), documents, own[:number], text, K, search=searches[name])

    screen = searches["bfloat16"]
    some = min(options.rows, 2 * screen.blocks(device)[0])
    for name in searches:  # warms up
        mined(name, "BelowPositive(0.05)", some)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "rows": options.rows,
        "dim": options.dim,
        "blocks": screen.blocks(device),
    }

    def note(name: str, value: Any) -> None:
        found[name] = value
        print(name, value, flush=True)

    seconds, result = timed(lambda: mined("bfloat16", "Uniform()", options.rows), device)
    note("bfloat16_seconds", seconds)
    note("bfloat16_margin_seconds", timed(lambda: mined("bfloat16", BELOW, options.rows), device)[0])
    checked = min(options.checked, options.rows)
    right = mined("float32", "Uniform()", checked)
    note("checked_queries", checked)
    note("equal_rows", float((right.rows == result.rows[:checked]).all(1).float().mean()))
    note("equal_scores", bool(torch.equal(right.scores, result.scores[:checked])))
    note("equal_to_whole_rows", check(queries, corpus, result.rows))
    note("bfloat16_products_seconds", timed(lambda: products(queries.bfloat16(), corpus.bfloat16(), screen), device)[0])
    note("float32_seconds", timed(lambda: mined("float32", "Uniform()", options.rows), device)[0])
    note("float32_products_seconds", timed(lambda: products(queries, corpus, screen), device)[0])
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    print(json.dumps(found, indent=1))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found | environment(), indent=1) + "\n")


if __name__ == "__main__":
    main()
