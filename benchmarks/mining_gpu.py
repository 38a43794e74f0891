"""1,000,000 queries x 1,000,000 documents of dimension 128, 10 negatives each, on one GPU; needs torch and hardneg.

    python benchmarks/mining_gpu.py
    python benchmarks/mining_gpu.py --rows 2000 --device cpu                      # a small try anywhere
    TRITON_INTERPRET=1 python benchmarks/mining_gpu.py --rows 300 --device cpu    # also of the kernel

hn.mine with a screen of bfloat16 on the tensor cores, by the Triton kernel and by products that are written out,
without a filter and with a margin below the positive; with products of float32; and the matrix products alone, the
limit of each. Where a run goes is timed phase by phase, with a wait for the GPU after each. The negatives and scores
of the float32 search on the first queries are compared with those of the screen, and the first rows with a plain search
of whole rows in float64. A path that raises is printed, and the others are measured all the same.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.io.provenance import environment
from hardneg.mining import Search, mine
from hardneg.mining.miner import Miner
from hardneg.mining.stages import Stages
from hardneg.search import triton_groups as triton_groups
from hardneg.search.exact import GROUP, DocumentBlock, RunningNearest

ROOT = Path(__file__).resolve().parent.parent
K, BELOW = 10, "BelowPositive(relative=0.05)"
PHASES: tuple[tuple[Any, str], ...] = (
    (Miner, "__init__"),
    (Miner, "alignment"),
    (Miner, "needs_filters"),
    (DocumentBlock, "of"),
    (RunningNearest, "__init__"),
    (RunningNearest, "_screened_by_groups"),
    (RunningNearest, "_least"),
    (RunningNearest, "_similarity"),
    (RunningNearest, "_extend"),
    (Stages, "_lists"),
    (Stages, "_chosen"),
)
TILES = ((128, 64, 8, 4), (128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 3), (256, 64, 8, 4))


def make_data(n: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Queries near their positives, the document of the same row."""
    random = torch.Generator(device).manual_seed(0)
    corpus = normalize(torch.randn(n, dim, generator=random, device=device), dim=-1)
    noise = normalize(torch.randn(n, dim, generator=random, device=device), dim=-1)
    return normalize(corpus + 1.2 * noise, dim=-1), corpus


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    wait()
    begin = time.perf_counter()
    result = call()
    wait()
    return time.perf_counter() - begin, result


@contextmanager
def phases() -> Iterator[dict[str, float]]:
    """Seconds of each phase, those of the phases inside it included."""
    spent: dict[str, float] = {}

    def watched(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            seconds, result = timed(lambda: function(*args, **options))
            spent[name] = spent.get(name, 0.0) + seconds
            return result

        return call

    with ExitStack() as stack:
        for owner, name in PHASES:
            plain = owner.__dict__[name]
            is_class = isinstance(plain, classmethod)
            function = watched(f"{owner.__name__}.{name}", plain.__func__ if is_class else plain)
            stack.enter_context(mock.patch.object(owner, name, classmethod(function) if is_class else function))
        kernel = watched("triton_groups.largest_of_groups", triton_groups.largest_of_groups)
        stack.enter_context(mock.patch.object(triton_groups, "largest_of_groups", kernel))
        yield spent


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


def tile_shapes(queries: Tensor, corpus: Tensor, rows: int) -> dict[str, Any]:
    """Seconds of the kernel alone for all queries, by (rows, columns, warps, stages) of its tiles."""
    found: dict[str, Any] = {}
    some, documents = queries[:rows].bfloat16(), corpus.bfloat16()
    for tile in TILES:
        try:
            names = ("ROWS", "COLUMNS", "WARPS", "STAGES")
            with mock.patch.multiple(triton_groups, **dict(zip(names, tile, strict=True))):
                triton_groups.largest_of_groups(some, documents, GROUP)
                seconds, _ = timed(lambda: triton_groups.largest_of_groups(some, documents, GROUP))
            found[str(tile)] = seconds * len(queries) / len(some)
        except Exception as error:  # a shape that does not fit is a result
            found[str(tile)] = repr(error)[:200]
    return found


class Bench:
    """The data, the searches and what was found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.queries, self.corpus = make_data(options.rows, options.dim, self.device)
        blocks = {"query_block": options.query_block, "corpus_block": options.corpus_block}
        self.searches = {name: Search(precision=name, **blocks) for name in ("bfloat16", "float32")}
        self.found: dict[str, Any] = {
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "rows": options.rows,
            "dim": options.dim,
            "blocks": self.searches["bfloat16"].blocks(self.device),
        }

    def note(self, name: str, value: Any) -> None:
        self.found[name] = value
        print(name, json.dumps(value), flush=True)
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        self.options.out.write_text(json.dumps(self.found | environment(), indent=1) + "\n")

    def mined(self, precision: str, text: str, number: int) -> hn.mining.Mined:
        own = torch.arange(number)
        return mine(hn.Keys(self.queries[:number]), hn.Keys(self.corpus), own, text, K, search=self.searches[precision])

    def path(self, name: str, right: hn.mining.Mined) -> None:
        """All measures of one way to screen; an error ends them, not the benchmark."""
        try:
            for text in ("Uniform()", BELOW):  # compiles and warms up
                self.mined("bfloat16", text, min(self.options.rows, 2 * self.found["blocks"][0]))
            self.seconds(name, "Uniform()", right)
            self.note(f"{name}_margin_seconds", timed(lambda: self.mined("bfloat16", BELOW, self.options.rows))[0])
            for case, text in (("", "Uniform()"), ("_margin", BELOW)):
                with phases() as spent:
                    self.mined("bfloat16", text, self.options.rows)
                self.note(f"{name}{case}_phases", {key: round(value, 3) for key, value in spent.items()})
        except Exception:
            self.note(f"{name}_error", traceback.format_exc().splitlines()[-1][:500])
            traceback.print_exc()

    def seconds(self, name: str, text: str, right: hn.mining.Mined) -> None:
        runs = [timed(lambda: self.mined("bfloat16", text, self.options.rows)) for _ in range(2)]
        self.note(f"{name}_seconds", min(seconds for seconds, _ in runs))
        mined, checked = runs[0][1], len(right.rows)
        self.note(f"{name}_equal_rows", float((right.rows == mined.rows[:checked]).all(1).float().mean()))
        self.note(f"{name}_equal_scores", bool(torch.equal(right.scores, mined.scores[:checked])))
        self.note(f"{name}_equal_to_whole_rows", check(self.queries, self.corpus, mined.rows))

    def run(self) -> None:
        options, screen = self.options, self.searches["bfloat16"]
        self.note("checked_queries", min(options.checked, options.rows))
        right = self.mined("float32", "Uniform()", self.found["checked_queries"])
        if triton_groups.can_run(self.device):
            self.path("triton", right)
            self.note("triton_tiles", tile_shapes(self.queries, self.corpus, self.found["blocks"][0]))
        with mock.patch.object(triton_groups, "can_run", return_value=False):
            self.path("written_products", right)
        self.note(
            "bfloat16_products_seconds",
            timed(lambda: products(self.queries.bfloat16(), self.corpus.bfloat16(), screen))[0],
        )
        if options.float32:
            self.note("float32_seconds", timed(lambda: self.mined("float32", "Uniform()", options.rows))[0])
            self.note("float32_products_seconds", timed(lambda: products(self.queries, self.corpus, screen))[0])
        if self.device.type == "cuda":
            self.note("peak_gib", torch.cuda.max_memory_allocated(self.device) / 2**30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--query-block", type=int, default=0)
    parser.add_argument("--corpus-block", type=int, default=0)
    parser.add_argument("--checked", type=int, default=100_000, help="queries searched in float32 too")
    parser.add_argument("--float32", action=argparse.BooleanOptionalAction, default=True, help="measure float32, too")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "mining_gpu.json")
    Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()
