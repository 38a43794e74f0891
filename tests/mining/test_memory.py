"""Memory and disk: both bounded, estimated, and checked before work is lost."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core.errors import ArgumentError, FileError
from hardneg.mining import checks
from hardneg.mining import encode as encode_module
from hardneg.mining import estimate as estimates
from hardneg.mining.candidates import Finder
from hardneg.mining.encode import KeyedEncoder, encoder_of_function
from hardneg.mining.estimate import estimate, piece_bytes
from hardneg.mining.job import run
from hardneg.mining.miner import Miner
from hardneg.mining.options import MineOptions
from hardneg.mining.search import Search
from hardneg.mining.select import Rule
from hardneg.mining.stages import FileStore, PieceArrays, Stage, Stages, Store, chosen_pieces
from hardneg.negatives import parse
from hardneg.search import exact

RULES = ["BelowPositive(relative=0.05)", "Ring(0.1, 0.4)"]


def vectors(rows: int, seed: int) -> Tensor:
    return normalize(torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)), dim=-1)


def miner_of(text: str, search: Search, k: int = 4) -> Miner:
    queries, corpus = vectors(300, 0), vectors(900, 1)
    return Miner(hn.Keys(queries), hn.Keys(corpus), torch.arange(300), Rule(parse(text), k), search=search)


@pytest.mark.parametrize("draw", ["top", "gumbel"])
@pytest.mark.parametrize("text", RULES)
def test_little_memory_changes_nothing(text: str, draw: str) -> None:
    queries, corpus = hn.Keys(vectors(60, 0)), hn.Keys(vectors(500, 1))
    few = Search(memory=10_000, query_block=8, shards=3)
    whole = hn.mine(queries, corpus, torch.arange(60), text, 4, draw, search=Search(shards=3))
    found = hn.mine(queries, corpus, torch.arange(60), text, 4, draw, search=few)
    assert torch.equal(found.rows, whole.rows)
    assert torch.equal(found.scores, whole.scores)
    assert miner_of(text, few).finder.at_once(4) < 60


def pieces_of(miner: Miner, store: Store, after: Callable[[Stage], None] = lambda stage: None) -> Iterator[PieceArrays]:
    """What is chosen, stage by stage; ``after`` is called after each stage."""
    stages = Stages(miner, store)

    def perform(stage: Stage) -> None:
        for piece in range(stage.pieces):
            store.write(stage.name, piece, stages.perform(stage, piece))
        after(stage)

    return chosen_pieces(miner, store, perform)


def test_groups_of_queries_of_a_killed_run_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version may search for more queries at a time."""
    miner, store = miner_of("Uniform()", Search(shards=4, corpus_block=225, query_block=8)), FileStore(tmp_path)
    expected = miner.joined(pieces_of(miner, Store()))
    monkeypatch.setattr(Finder, "at_once", lambda self, size, shards=1: 20)
    next(pieces_of(miner, store))
    monkeypatch.setattr(Finder, "at_once", lambda self, size, shards=1: 50)
    assert torch.equal(miner.joined(pieces_of(miner, store)).rows, expected.rows)


@pytest.mark.parametrize("text", RULES)
def test_the_estimate_covers_the_pieces(text: str, tmp_path: Path) -> None:
    miner = miner_of(text, Search(shards=4, corpus_block=225))
    list(pieces_of(miner, FileStore(tmp_path)))
    written = sum(file.stat().st_size for file in tmp_path.iterdir() if file.name.startswith("0."))
    assert 0.4 * piece_bytes(miner, 300) < written < 1.2 * piece_bytes(miner, 300)


def test_lists_are_no_longer_than_their_shard() -> None:
    whole, parted = (miner_of("BelowPositive(relative=0.05)", Search(shards=n, corpus_block=225), 400) for n in (1, 4))
    store, widths = Store(), set()

    def look(stage: Stage) -> None:
        widths.update(store.read(stage.name, 0)["0.rows"].shape[1:] if stage.kind == "lists" else ())

    found = parted.joined(pieces_of(parted, store, look))
    assert widths == {225}
    assert torch.equal(found.rows, whole.joined(whole.mined()).rows)


@pytest.mark.parametrize(("text", "k"), [("Uniform()", 40), ("Uniform()", 200), ("Ring(0.1, 0.4)", 40)])
def test_the_lists_of_all_shards_are_within_the_memory(text: str, k: int) -> None:
    memory, store = 1 << 18, Store()
    miner = miner_of(text, Search(shards=9, corpus_block=100, query_block=4, memory=memory), k)
    held = []

    def look(stage: Stage) -> None:
        lists = [piece for (name, _), piece in store.pieces.items() if "-lists" in name or "-bounds" in name]
        held.append(sum(array.nbytes for piece in lists for array in piece.values()))

    list(pieces_of(miner, store, look))
    assert memory / 16 < max(held) <= memory / 2


def test_counts_of_one_pass_are_held_at_a_time() -> None:
    miner, store, passes = miner_of("Ring(0.1, 0.4)", Search(shards=4, corpus_block=225)), Store(), []
    list(pieces_of(miner, store, lambda stage: passes.append(len({n for n, _ in store.pieces if "-bounds" in n}))))
    assert len(passes) > 4
    assert max(passes) == 1


@pytest.fixture
def texts(tmp_path: Path) -> MineOptions:
    rows = [{"id": str(i), "query": f"query {i}", "positive": f"text {i}"} for i in range(100)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return MineOptions(str(tmp_path / "pairs.jsonl"), out=str(tmp_path / "mined.jsonl"), encoder="test_memory:encode")


encoded: list[int] = []


def encode(texts: list[str]) -> Tensor:
    encoded.append(len(texts))
    return torch.stack([vectors(1, int(text.split()[1]))[0] for text in texts])


def with_free(monkeypatch: pytest.MonkeyPatch, free: Callable[[], int]) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": free()}))


def test_a_full_disk_is_seen_before_anything_is_encoded(texts: MineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded.clear()
    with_free(monkeypatch, lambda: 100)
    with pytest.raises(FileError, match="for its pieces"):
        run(texts)
    assert not encoded


def test_a_disk_without_room_for_embeddings_is_seen_after_the_first_piece(
    texts: MineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded.clear()
    with_free(monkeypatch, lambda: 1 << 30 if not encoded else 1000)
    with pytest.raises(FileError, match=r"for its embeddings.*another --cache"):
        run(texts)
    assert encoded == [1, 64]  # the first call loads, the second is the first piece


def guided_by(encode: Callable[[list[str]], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this function be the guide, in the place of a model of sentence-transformers, which is not imported."""

    def guide(options: Any) -> tuple[KeyedEncoder, KeyedEncoder]:
        assert options.guide == "a model"
        return (KeyedEncoder("guide", encode),) * 2

    monkeypatch.setattr(estimates, "load_guide", guide)
    monkeypatch.setattr(checks, "optional", lambda name, *rest, **more: None)


def test_an_estimate_counts_the_guide(texts: MineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = estimate(texts)
    guided_by(lambda some: torch.ones(len(some), 1000) + torch.rand(len(some), 1000), monkeypatch)
    by_guide = 'BelowPositive(absolute=-2.0, by="guide") * BelowPositive(relative=0.05)'
    guided = estimate(replace(texts, guide="a model", negatives=by_guide))
    assert guided.disk_bytes - plain.disk_bytes >= 200 * 1000 * 4  # vectors of 100 queries and 100 documents
    assert guided.encoding_seconds > 0


def test_an_estimate_counts_the_file_of_all_pieces(texts: MineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = estimate(texts)
    monkeypatch.setattr(encode_module, "_in_memory", 1)
    assert estimate(texts).disk_bytes - plain.disk_bytes == 200 * 8 * 4
    run(texts)
    written = sum(file.stat().st_size for file in Path(f"{texts.out}.embeddings").rglob("*.npy"))
    assert written >= 2 * 200 * 8 * 4


@pytest.mark.parametrize(("limit", "numbers"), [(1 << 20, 200 * 8), (1, 100 + 8 - 1 + 100 + 8 - 1)])
def test_an_estimate_holds_no_more_vectors_than_the_run(
    texts: MineOptions, monkeypatch: pytest.MonkeyPatch, limit: int, numbers: int
) -> None:
    held: list[Tensor] = []
    make = estimates._random_rows
    monkeypatch.setattr(estimates, "_random_rows", lambda *sizes: held.append(make(*sizes)) or held[-1])
    monkeypatch.setattr(encode_module, "_in_memory", limit)
    estimate(texts)
    assert [tuple(one.shape) for one in held] == [(100, 8)] * 2
    assert all(len(one.unique(dim=0)) == 100 for one in held), "the rows differ"
    assert sum(one.untyped_storage().nbytes() for one in held) == 4 * numbers


def test_an_estimate_of_vectors_alone_with_a_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "vectors.npy", vectors(20, 0).numpy())
    (tmp_path / "pairs.csv").write_text("query_id,corpus_id\n0,1\n")
    place = str(tmp_path / "vectors.npy")
    given = MineOptions(place, corpus=place, judgements=str(tmp_path / "pairs.csv"), out=str(tmp_path / "mined.jsonl"))
    guided_by(encode, monkeypatch)
    with pytest.raises(ArgumentError, match="texts"):
        estimate(replace(given, guide="a model", negatives='BelowPositive(absolute=0.0, by="guide")'))


@pytest.mark.parametrize("memory", [-1.0, float("inf"), float("nan")])
def test_memory_that_is_no_number_of_bytes(texts: MineOptions, memory: float) -> None:
    with pytest.raises(ArgumentError, match="memory in"):
        run(replace(texts, memory=memory))


def test_an_encoder_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("from test_memory import encode\n")
    monkeypatch.chdir(tmp_path)
    packed = pickle.dumps(encoder_of_function("own.py:encode"))
    monkeypatch.chdir("/")
    assert pickle.loads(packed).encode(["text 1"]).shape == (1, 8)


def test_copies_of_one_vector_are_not_all_gathered_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, pair_similarity = [], exact.pair_similarity

    def counting(first: Tensor, second: Tensor, **options: Any) -> Tensor:
        sizes.append(len(first))
        return pair_similarity(first, second, **options)

    monkeypatch.setattr(exact, "pair_similarity", counting)
    monkeypatch.setattr(exact, "_MAX_GATHERED", 40)
    found = hn.mine(torch.ones(3, 4), torch.ones(50, 4), [0, 1, 2], "Uniform()", 2)
    assert found.rows.tolist() == [[1, 2], [0, 2], [0, 1]]
    assert max(sizes) == 10
