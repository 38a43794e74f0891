"""Where stages, processes and second opinions meet: guides in the search, forks, products at the ends of a format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import hardneg as hn
from hardneg.core.errors import ArgumentError, NotFinite
from hardneg.mining import Search
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions


def test_ties_with_the_positive_under_a_guide_are_judged_in_float64() -> None:
    torch.manual_seed(0)
    vectors, corpus = torch.randn(24, 16), torch.randn(2000, 16)
    guide = torch.randn(24, 16), torch.randn(2000, 16)
    guide[1][:1900] = guide[1][0]  # copies of every positive, under the guide
    right = hn.mine(
        vectors.double(), corpus.double(), [0] * 24, 'BelowPositive(absolute=0.0, by="guide")', 20,
        guide=(guide[0].double(), guide[1].double()),
    )  # fmt: skip
    for search in (Search(), Search(corpus_block=333, shards=3)):
        found = hn.mine(
            vectors, corpus, [0] * 24, 'BelowPositive(absolute=0.0, by="guide")', 20, guide=guide, search=search
        )
        assert torch.equal(found.rows, right.rows)


@pytest.mark.parametrize("scale", [1e-22, 1e-20, 1.0, 1e15])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_products_at_the_ends_of_the_format(scale: float, precision: str) -> None:
    torch.manual_seed(0)
    queries, corpus = torch.randn(20, 32) * scale, torch.randn(3000, 32) * scale
    search = Search(corpus_block=1000, precision=precision, similarity="dot")
    found = hn.mine(queries, corpus, [[]] * 20, "Uniform()", 5, search=search)
    right = (queries.double() @ corpus.double().T).topk(5).indices
    assert torch.equal(found.rows, right)


def test_products_that_overflow_are_refused() -> None:
    with pytest.raises(NotFinite):
        hn.mine(torch.randn(4, 8) * 1e25, torch.randn(50, 8) * 1e25, [[]] * 4, "Uniform()", 5, similarity="dot")


def test_a_lower_precision_of_products_widens_the_screen_only_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    from hardneg.search.exact import rounding_of_products

    one = torch.ones(1, 1, dtype=torch.float64)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert 2.0**-7 < float(rounding_of_products(256, torch.float32, one, 1.0)) < 0.02


def test_several_processes_read_the_pieces_of_their_parent(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "q.npy", rng.normal(size=(300, 8)).astype(np.float32))
    np.save(tmp_path / "c.npy", rng.normal(size=(900, 8)).astype(np.float32))
    judged = "\n".join(f"{i}\t{i}\t1" for i in range(300))
    (tmp_path / "judged.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}\n")
    outputs = []
    for workers in (1, 4):
        options = MineOptions(
            queries=str(tmp_path / "q.npy"), corpus_embeddings=str(tmp_path / "c.npy"), shards=4, jobs=workers,
            judgements=str(tmp_path / "judged.tsv"), out=str(tmp_path / f"{workers}.jsonl"), format="ids",
            negatives="Ring(0.2, 0.4)", query_block=32,
        )  # fmt: skip
        run(options)
        outputs.append((tmp_path / f"{workers}.jsonl").read_bytes())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("more", "needs"),
    [
        (
            {"search": "bm25", "guide": "model", "negatives": "BelowPositive(absolute=0.0, by='guide')"},
            "embeddings for",
        ),
        ({"bm25": True, "quotas": ("bm25=9",), "k": 5}, "quotas of at most"),
        ({"draw": "categorical", "shards": 3}, "an exact search"),
        ({"bm25": True, "negatives": "From('bm25') * From('embedding')"}, "one source"),
        ({"part": "0/2", "jobs": 4}, "one process for a part"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_encoded(
    more: dict[str, object], needs: str, tmp_path: Path
) -> None:
    (tmp_path / "q.jsonl").write_text('{"query": "a", "positive": "b"}\n')
    with pytest.raises(ArgumentError, match=needs):
        run(MineOptions(queries=str(tmp_path / "q.jsonl"), out=str(tmp_path / "out.jsonl"), encoder="no:such", **more))  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir()} <= {"q.jsonl", ".out.jsonl.lock"}
