"""The losses with real models, against those of sentence-transformers: value and gradient of every parameter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hardneg as hn
from hardneg.core.errors import ArgumentError
from hardneg.integrations.sentence_transformers import CachedNegativesLoss, NegativesLoss
from support.errors import raises
from support.libraries import needs_option, part_of_sentence_transformers, tokens
from support.tiny_bert import rows, tiny_bert
from support.two_ranks import on_two_ranks

losses = part_of_sentence_transformers("losses")
gist_blocks = ("query_to_doc", "anchor_to_anchor", "positive_to_positive")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bert")


def features_of(model: Any, negatives: int, b: int = 9, seed: int = 0) -> list[dict[str, Tensor]]:
    return [tokens(model, column) for column in rows(b, seed, negatives).values()]


def value_and_gradients(model: Any, loss: Any, negatives: int) -> tuple[Tensor, list[Tensor]]:
    """With dropout: both losses draw the same numbers if they embed the same texts in the same order."""
    model.train()
    model.zero_grad()
    torch.manual_seed(3)
    value = loss(features_of(model, negatives), None)
    (2 * value).backward()
    return value.detach(), [each.grad.clone() for each in model.parameters() if each.grad is not None]


def assert_same(model: Any, ours: Any, theirs: Any, negatives: int) -> None:
    value, gradients = value_and_gradients(model, ours, negatives)
    other, others = value_and_gradients(model, theirs, negatives)
    assert len(gradients) == len(others) > 10
    torch.testing.assert_close(value, other)
    torch.testing.assert_close(gradients, others)


@pytest.mark.parametrize("negatives", [0, 1, 3])
def test_uniform_is_multiple_negatives_ranking(folder: Path, negatives: int) -> None:
    model = tiny_bert(folder, precise=True)
    assert_same(
        model,
        NegativesLoss(model, "Uniform()", temperature=0.05),
        losses.MultipleNegativesRankingLoss(model),
        negatives,
    )


@pytest.mark.parametrize("negatives", [0, 2])
def test_cached_is_cached_multiple_negatives_ranking(folder: Path, negatives: int) -> None:
    model = tiny_bert(folder, precise=True)
    theirs = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)
    assert_same(model, CachedNegativesLoss(model, mini_batch_size=4), theirs, negatives)


@pytest.mark.parametrize("size", [1, 4, 9, 32])
def test_cached_is_uncached(folder: Path, size: int) -> None:
    model = tiny_bert(folder, dropout=0.0, precise=True)
    text = 'Tilt(1.0, source="mined")'
    assert_same(model, CachedNegativesLoss(model, text, mini_batch_size=size), NegativesLoss(model, text), 2)


@needs_option(losses.MultipleNegativesRankingLoss, "hardness_mode")
@pytest.mark.parametrize(
    ("mode", "source"), [("hard_negatives", '"mined"'), ("in_batch_negatives", '"batch"'), ("all_negatives", "None")]
)
@pytest.mark.parametrize("cached", [False, True])
def test_hardness_modes(folder: Path, mode: str, source: str, cached: bool) -> None:
    model, text = tiny_bert(folder, precise=True), f"Tilt({5.0 * 0.05}, detach=True, source={source})"
    options: dict[str, Any] = {"mini_batch_size": 4} if cached else {}
    kinds = (CachedNegativesLoss, losses.CachedMultipleNegativesRankingLoss)
    mine, other = kinds if cached else (NegativesLoss, losses.MultipleNegativesRankingLoss)
    theirs = other(model, hardness_mode=mode, hardness_strength=5.0, **options)
    assert_same(model, mine(model, text, num_negatives="mass", **options), theirs, 2)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("negatives", [0, 2])
def test_matryoshka_wraps_both(folder: Path, cached: bool, negatives: int) -> None:
    model = tiny_bert(folder, precise=True)
    options: dict[str, Any] = {"mini_batch_size": 4} if cached else {}
    kinds = (CachedNegativesLoss, losses.CachedMultipleNegativesRankingLoss)
    mine, other = kinds if cached else (NegativesLoss, losses.MultipleNegativesRankingLoss)
    ours, theirs = (losses.MatryoshkaLoss(model, kind(model, **options), [16, 8, 4]) for kind in (mine, other))
    if cached and not hasattr(ours, "uses_gradient_cache"):  # before version 6
        with pytest.raises(ArgumentError, match="a newer sentence-transformers"):
            ours(features_of(model, negatives), None)
        return
    assert_same(model, ours, theirs, negatives)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("strategy", "margin"), [("absolute", 0.0), ("absolute", 0.1), ("relative", 0.05)])
@pytest.mark.parametrize("other_words", [False, True])
def test_a_guide_is_gistembed(folder: Path, cached: bool, strategy: str, margin: float, other_words: bool) -> None:
    """Without the blocks of queries and positives, and with them, as it is by default."""
    model, guide = tiny_bert(folder, precise=True), tiny_bert(folder, seed=1, hidden=24, precise=True)
    if other_words:
        guide.max_seq_length = 8  # shorter than the model's: the texts are decoded and tokenised again
    options: dict[str, Any] = {"mini_batch_size": 4} if cached else {}
    text = f'BelowPositive({strategy}={margin}, by="guide")'
    mine = CachedNegativesLoss if cached else NegativesLoss
    gist = losses.CachedGISTEmbedLoss if cached else losses.GISTEmbedLoss
    for blocks, negatives in ((False, 1), (True, 0), (True, 1)):
        names = gist_blocks if blocks else ("query_to_doc",)
        theirs = gist(
            model, guide, temperature=0.05, margin_strategy=strategy, margin=margin, contrast_anchors=blocks,
            contrast_positives=blocks, **options,
        )  # fmt: skip
        assert_same(model, mine(model, text, guide=guide, directions=names, **options), theirs, negatives)
        assert model.training


@needs_option(losses.MultipleNegativesRankingLoss, "directions")
def test_both_directions_are_the_symmetric_loss(folder: Path) -> None:
    model = tiny_bert(folder, precise=True)
    names = ("query_to_doc", "doc_to_query")
    theirs = losses.MultipleNegativesRankingLoss(model, directions=names, partition_mode="per_direction")
    assert_same(model, NegativesLoss(model, directions=names, partition_mode="per_direction"), theirs, 2)


def test_a_guide_by_its_path(folder: Path, tmp_path: Path) -> None:
    model, guide = tiny_bert(folder, precise=True), tiny_bert(folder, seed=1, precise=True)
    guide.save(str(tmp_path))
    text = 'BelowPositive(absolute=0.0, by="guide")'
    assert_same(model, NegativesLoss(model, text, guide=str(tmp_path)), NegativesLoss(model, text, guide=guide), 1)


def test_evaluation_of_a_cached_loss(folder: Path) -> None:
    model = tiny_bert(folder, dropout=0.0, precise=True)
    with torch.no_grad():
        value = CachedNegativesLoss(model, mini_batch_size=4)(features_of(model, 1), None)
    torch.testing.assert_close(value, NegativesLoss(model)(features_of(model, 1), None).detach())


def test_what_cannot_be_cut_is_refused(folder: Path) -> None:
    model = tiny_bert(folder, precise=True)
    with raises(ArgumentError, who="CachedNegativesLoss", got="flattened tokens (offsets)"):
        CachedNegativesLoss(model)([{"input_ids": torch.arange(6), "offsets": torch.tensor([0, 3])}] * 2)
    with raises(ArgumentError, who="CachedNegativesLoss", what="mini_batch_size", got="mini_batch_size=0"):
        CachedNegativesLoss(model, mini_batch_size=0)


def test_a_queue_survives_in_the_state_of_the_loss(folder: Path) -> None:
    model = tiny_bert(folder, precise=True)
    loss = CachedNegativesLoss(model, queue=hn.Queue(32, 16), mini_batch_size=4)
    labels = torch.arange(27).view(9, 3)
    loss(features_of(model, 0), labels).backward()
    assert loss.queue is not None
    assert loss.queue.keys().ids.tolist() == labels[:, 2].tolist()  # type: ignore[union-attr]


# In version 5.2 the GISTEmbedLoss of rank 1 masks its own positives, and keeps those of rank 0.
right_gist = needs_option(losses.MultipleNegativesRankingLoss, "directions")


def on_rank(folder: Path, cached: bool, guided: bool, rank: int) -> list[list[Tensor]]:
    """Each rank has its rows of the batch; DDP averages the gradients."""
    options: dict[str, Any] = {"gather_across_devices": True, **({"mini_batch_size": 2} if cached else {})}
    ours = partial(CachedNegativesLoss if cached else NegativesLoss, **options)
    theirs = getattr(losses, f"{'Cached' * cached}{'GISTEmbedLoss' if guided else 'MultipleNegativesRankingLoss'}")
    theirs = partial(theirs, **options)
    if guided:
        guide = tiny_bert(folder, seed=1, precise=True)
        ours = partial(ours, negatives='BelowPositive(absolute=0.1, by="guide")', guide=guide, directions=gist_blocks)
        theirs = partial(theirs, guide=guide, temperature=0.05, margin=0.1)
    results = []
    for kind in (ours, theirs):
        model = tiny_bert(folder, dropout=0.0, precise=True)
        wrapped = torch.nn.parallel.DistributedDataParallel(  # as the trainer has it
            model, find_unused_parameters=True, broadcast_buffers=False
        )
        loss = kind(model)
        loss.model = wrapped
        features = features_of(model, 1, b=8)
        mine = [
            {name: each[rank * 4 : rank * 4 + 4] if isinstance(each, Tensor) else each for name, each in column.items()}
            for column in features
        ]
        value = loss(mine, None)
        value.backward()
        results.append([value.detach(), *(each.grad for each in model.parameters() if each.grad is not None)])
    return results


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("guided", [False, pytest.param(True, marks=right_gist)])
def test_two_ranks_are_those_of_sentence_transformers(folder: Path, cached: bool, guided: bool) -> None:
    tiny_bert(folder, dropout=0.0, precise=True)
    tiny_bert(folder, seed=1, precise=True)
    for ours, theirs in on_two_ranks(partial(on_rank, folder, cached, guided)):
        assert len(ours) == len(theirs) > 10
        torch.testing.assert_close(ours, theirs)


def trained_on_rank(folder: Path, cached: bool, rank: int) -> list[Tensor]:
    """The weights after three steps: with copies of the model, and with FSDP, where each rank holds a part."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for sharded in (False, True):
        model = tiny_bert(folder, dropout=0.0, precise=True)
        copies = None if sharded else torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        options: dict[str, Any] = {"mini_batch_size": 2} if cached else {}
        kind = CachedNegativesLoss if cached else NegativesLoss
        loss = kind(model, "Tilt(1.0)", queue=hn.Queue(32, 16), gather_across_devices=True, **options)
        loss.model = copies or fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            features = [dict(each) for each in features_of(model, 1, b=4, seed=2 * step + rank)]
            optimizer.zero_grad()
            loss(features, torch.arange(16).view(4, 4) + 100 * (2 * step + rank)).backward()
            optimizer.step()
        whole = [each.full_tensor() if sharded else each for each in model.parameters()]  # type: ignore[operator]
        found.append(torch.cat([each.detach().flatten() for each in whole]))
    return found


@pytest.mark.parametrize("cached", [False, True])
def test_a_sharded_model_trains_as_copies_do(folder: Path, cached: bool) -> None:
    before = torch.cat([each.detach().flatten() for each in tiny_bert(folder, dropout=0.0, precise=True).parameters()])
    for copies, sharded in on_two_ranks(partial(trained_on_rank, folder, cached)):
        torch.testing.assert_close(sharded, copies)
        assert not torch.allclose(copies, before)
