"""The loss and the miner for pytorch-metric-learning against its own losses, reducers, distances and a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core.errors import ArgumentError

pml: Any = pytest.importorskip("pytorch_metric_learning", reason="pytorch-metric-learning is not installed")
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers  # noqa: E402

from hardneg.integrations.pytorch_metric_learning import NegativesLoss, NegativesMiner  # noqa: E402
from support.errors import raises  # noqa: E402

LABELS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3, 0, 4])  # one label has a single row
REF_LABELS = torch.tensor([0, 1, 2, 2, 3, 1, 0])


def vectors(rows: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=random, dtype=torch.float64).requires_grad_()


def assert_same_losses(ours: Any, theirs: Any, *, ref: bool = False, indices: Any = None) -> None:
    """Value and gradient, with an upstream gradient that is not 1."""
    found = []
    for loss in (ours, theirs):
        given = [vectors(len(LABELS))] + ([vectors(len(REF_LABELS), seed=1)] if ref else [])
        rest = {"ref_emb": given[1], "ref_labels": REF_LABELS} if ref else {}
        value = loss(given[0], LABELS, indices, **rest)
        (2 * value).backward()
        found.append((value.detach(), [each.grad for each in given]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)


def nt_xent(**options: Any) -> Any:
    return NegativesLoss(hn.ContrastiveLoss(temperature=0.2, reduction="pairs"), **options)


def sup_con(**options: Any) -> Any:
    loss = hn.ContrastiveLoss(temperature=0.2, positives_in_denominator="all", reduction="anchors")
    return NegativesLoss(loss, **options)


@pytest.mark.parametrize("ref", [False, True])
def test_pairs_are_nt_xent_loss(ref: bool) -> None:
    assert_same_losses(nt_xent(), losses.NTXentLoss(0.2), ref=ref)


@pytest.mark.parametrize("ref", [False, True])
def test_anchors_are_sup_con_loss(ref: bool) -> None:
    """Its reducer leaves out anchors without a positive."""
    assert_same_losses(sup_con(reducer=reducers.AvgNonZeroReducer()), losses.SupConLoss(0.2), ref=ref)


def test_distances_reducers_and_regularizers_are_those_of_the_library() -> None:
    for distance in (distances.LpDistance(), distances.DotProductSimilarity(normalize_embeddings=False)):
        assert_same_losses(nt_xent(distance=distance), losses.NTXentLoss(0.2, distance=distance))
    options: dict[str, Any] = {"reducer": reducers.SumReducer(), "embedding_regularizer": regularizers.LpRegularizer()}
    assert_same_losses(nt_xent(**options), losses.NTXentLoss(0.2, **options))
    classes = {"reducer": reducers.ClassWeightedReducer(torch.arange(5.0, dtype=torch.float64))}
    assert_same_losses(nt_xent(**classes), losses.NTXentLoss(0.2, **classes))


def test_the_pairs_of_a_miner_are_read() -> None:
    indices = miners.PairMarginMiner(0.9, -0.5, distance=distances.CosineSimilarity())(vectors(len(LABELS)), LABELS)
    assert len(indices[2]) < (LABELS[:, None] != LABELS).sum()
    assert_same_losses(nt_xent(), losses.NTXentLoss(0.2), indices=indices)
    assert_same_losses(sup_con(reducer=reducers.AvgNonZeroReducer()), losses.SupConLoss(0.2), indices=indices)
    triplets = (torch.tensor([0, 0, 3]), torch.tensor([1, 1, 2]), torch.tensor([4, 7, 8]))
    pairs = (triplets[0][1:], triplets[1][1:], triplets[0], triplets[2])  # (0, 1) once
    assert_same_losses(
        lambda *given: nt_xent()(given[0], None, triplets), lambda *given: losses.NTXentLoss(0.2)(given[0], None, pairs)
    )


def test_a_tilt_equals_a_plain_loop() -> None:
    loss = NegativesLoss(hn.ContrastiveLoss("Tilt(2.0)", temperature=0.2, reduction="pairs"))
    given = vectors(len(LABELS)).detach()
    unit = normalize(given, dim=1)
    total = []
    for i in range(len(LABELS)):
        s = unit @ unit[i] / 0.2
        negative = s[LABELS[i] != LABELS]
        mean = len(negative) * (torch.softmax(2.0 * negative, 0) * negative.exp()).sum()
        others = (LABELS[i] == LABELS) & (torch.arange(len(LABELS)) != i)
        total += [-torch.log(s[j].exp() / (s[j].exp() + mean)) for j in torch.where(others)[0]]
    torch.testing.assert_close(loss(given, LABELS), torch.stack(total).mean())


def test_schedules_and_learnt_temperatures() -> None:
    temperature = torch.nn.Parameter(torch.tensor(0.2, dtype=torch.float64))
    loss = NegativesLoss(hn.ContrastiveLoss("Tilt(linear(2.0, 0.0))", temperature, reduction="pairs"))
    loss.loss.set_progress(1, 1)
    value = loss(vectors(len(LABELS)), LABELS)
    torch.testing.assert_close(value, losses.NTXentLoss(0.2)(vectors(len(LABELS)), LABELS))
    value.backward()
    assert temperature.grad is not None
    assert set(dict(loss.named_parameters())) == {"loss.temperature"}


def test_no_positive_pair_costs_nothing() -> None:
    given = vectors(4)
    value = nt_xent()(given, torch.arange(4))
    value.backward()
    assert value.item() == 0.0


def test_what_is_not_a_loss_of_pairs_is_refused() -> None:
    for loss in (losses.NTXentLoss(), hn.ContrastiveLoss(reduction="none")):
        with pytest.raises(ArgumentError, match=r"hardneg\.ContrastiveLoss"):
            NegativesLoss(loss)
    with raises(ArgumentError, who="NegativesLoss", what="indices_tuple", got="neither"):
        nt_xent()(vectors(4), None)
    with pytest.raises(ArgumentError, match="generate=None"):
        NegativesLoss(hn.ContrastiveLoss(generate="mochi(num_hardest=2)"))(vectors(len(LABELS)), LABELS)


# The miner ------------------------------------------------------------------------------------------------------------


def mined(miner: Any, seed: int = 0) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    a1, p, a2, n = miner(vectors(len(LABELS), seed), LABELS)
    positives, negatives = (list(zip(*map(Tensor.tolist, pair), strict=True)) for pair in ((a1, p), (a2, n)))
    assert len(set(negatives)) == len(negatives)
    return set(positives), set(negatives)


def test_a_miner_of_all_is_no_miner() -> None:
    positives, negatives = mined(NegativesMiner("Uniform()"))
    same = LABELS[:, None] == LABELS
    assert positives == {(i, j) for i, j in torch.nonzero(same).tolist() if i != j}
    assert negatives == {(i, j) for i, j in torch.nonzero(~same).tolist()}
    given = vectors(len(LABELS))
    indices = NegativesMiner("Uniform()")(given, LABELS)
    torch.testing.assert_close(losses.NTXentLoss()(given, LABELS, indices), losses.NTXentLoss()(given, LABELS))


def test_a_rank_takes_the_closest_of_other_labels() -> None:
    _, negatives = mined(NegativesMiner("Rank(0, 2)"))
    unit = normalize(vectors(len(LABELS)).detach(), dim=1)
    expected = set()
    for i, row in enumerate(unit @ unit.T):
        others = row.masked_fill(LABELS[i] == LABELS, -2.0)
        expected |= {(i, j) for j in others.topk(2).indices.tolist()}
    assert negatives == expected


def test_below_positive_is_a_margin_on_the_similarity() -> None:
    _, negatives = mined(NegativesMiner("BelowPositive(absolute=0.2)"))
    unit = normalize(vectors(len(LABELS)).detach(), dim=1)
    similarity = unit @ unit.T
    same = (LABELS[:, None] == LABELS) & ~torch.eye(len(LABELS), dtype=torch.bool)
    for i, j in torch.nonzero(LABELS[:, None] != LABELS).tolist():
        if same[i].any():
            assert ((i, j) in negatives) == bool(similarity[i, j] <= similarity[i][same[i]].min() - 0.2)


def test_k_are_drawn_harder_with_a_tilt_and_resumed_exactly() -> None:
    unit = normalize(vectors(len(LABELS)).detach(), dim=1)
    similarity = unit @ unit.T

    def hardness(text: str) -> float:
        miner, found = NegativesMiner(text, k=3), []
        for _ in range(20):
            _, negatives = mined(miner)
            assert len(negatives) == 3 * len(LABELS)
            found += [similarity[pair] for pair in negatives]
        return float(torch.stack(found).mean())

    assert hardness("Tilt(2.0)") > hardness("Uniform()") + 0.2
    miner, other = NegativesMiner("Uniform()", k=3), NegativesMiner("Uniform()", k=3)
    first = mined(miner)
    other.load_state_dict(miner.state_dict())
    second = mined(miner)
    assert second != first
    assert mined(other) == second


def test_a_miner_of_references() -> None:
    a1, p, a2, n = NegativesMiner("Rank(0, 1)")(
        vectors(len(LABELS)), LABELS, vectors(len(REF_LABELS), seed=1), REF_LABELS
    )
    assert (LABELS[a1] == REF_LABELS[p]).all()
    assert (LABELS[a2] != REF_LABELS[n]).all()
    assert len(a2) == len(LABELS)


def test_the_miner_feeds_the_memory_of_the_library() -> None:
    """CrossBatchMemory takes losses by their names, and any miner."""
    memory = losses.CrossBatchMemory(losses.NTXentLoss(), 6, memory_size=32, miner=NegativesMiner("Rank(0, 2)"))
    assert memory(vectors(len(LABELS)).float(), LABELS).item() > 0
    with pytest.raises(Exception, match="not supported"):
        losses.CrossBatchMemory(nt_xent(), 6)
