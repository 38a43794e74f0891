"""The recipes of docs/guides/recipes.md against plain loops, value and gradient, and against sentence-transformers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from support.errors import raises
from support.libraries import part_of_sentence_transformers

B, K, DIM, TEMPERATURE = 6, 2, 8, 0.1
IDS = torch.tensor([3, 1, 4, 1, 5, 9])  # rows 1 and 3 are the same text


def unit(*shape: int) -> Tensor:
    return normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


@pytest.fixture
def texts() -> dict[str, Tensor]:
    torch.manual_seed(0)
    named = {"q": unit(B, DIM), "d": unit(B, DIM), "hard": unit(B, K, DIM)}
    named["d"] = normalize(named["q"] + 2.0 * named["d"], dim=-1)
    return {name: value.requires_grad_() for name, value in named.items()}


def assert_same(loss: Tensor, expected: Tensor, texts: dict[str, Tensor]) -> None:
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    for value in texts.values():
        got, wanted = (
            torch.autograd.grad(one, value, retain_graph=True, allow_unused=True)[0] for one in (loss, expected)
        )
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-12)


def normalised(texts: dict[str, Tensor]) -> dict[str, Tensor]:
    """For losses that normalise inside: their gradient is tangent to the sphere."""
    return {name: normalize(value, dim=-1) for name, value in texts.items()}


def mean_nce(scores: hn.Scores, negatives: hn.negatives.Negatives, **options: object) -> Tensor:
    return hn.reduce(hn.info_nce(scores, negatives.log_weights(scores), **options), scores)  # type: ignore[arg-type]


def cross_entropy(positive: Tensor, negatives: list[Tensor]) -> Tensor:
    return torch.logsumexp(torch.stack([positive, *negatives]), 0) - positive if negatives else positive * 0.0


def test_gistembed_filter_equals_a_loop(texts: dict[str, Tensor]) -> None:
    q, d = texts["q"], texts["d"]
    guide_q, guide_d = unit(B, DIM), unit(B, DIM)
    scores = hn.cross_views(q, d, TEMPERATURE, IDS).guided(hn.cross_views(guide_q, guide_d, 0.3, IDS))
    expected, dropped = [], 0
    for i in range(B):
        kept = []
        for j in range(B):
            if IDS[j] == IDS[i]:
                continue
            if guide_q[i] @ guide_d[j] > guide_q[i] @ guide_d[i]:
                dropped += 1
            else:
                kept.append(q[i] @ d[j] / TEMPERATURE)
        expected.append(cross_entropy(q[i] @ d[i] / TEMPERATURE, kept))
    assert 0 < dropped < B * (B - 1)
    assert_same(
        mean_nce(scores, hn.parse('BelowPositive(absolute=0.0, by="guide")')), torch.stack(expected).mean(), texts
    )


def test_a_guide_is_asked_for_by_name(texts: dict[str, Tensor]) -> None:
    scores = hn.cross_views(texts["q"], texts["d"], TEMPERATURE)
    with pytest.raises(ValueError, match=r"scores\.guided"):
        hn.BelowPositive(absolute=0.0, by="guide").log_weights(scores)
    with pytest.raises(ValueError, match="same pairs"):
        scores.guided(hn.two_views(texts["q"], texts["d"], 1.0))


def test_qwen3_denominator_and_mask_equal_a_loop(texts: dict[str, Tensor]) -> None:
    q, d = texts["q"], texts["d"]
    scores = hn.core.scoring.concatenate_scores(
        hn.cross_views(q, d, TEMPERATURE, IDS),
        hn.score(hn.Keys(q, IDS), d, hn.Keys(q, IDS, source="queries"), TEMPERATURE),
        hn.score(hn.Keys(d, IDS), d, hn.Keys(d, IDS, source="documents"), TEMPERATURE),
    )
    expected, dropped = [], 0
    for i in range(B):
        positive, kept = q[i] @ d[i], []
        for j in range(B):
            for similarity in (q[i] @ d[j], q[i] @ q[j], d[i] @ d[j]):
                if IDS[i] == IDS[j]:
                    continue
                if similarity > positive + 0.1:
                    dropped += 1
                else:
                    kept.append(similarity / TEMPERATURE)
        expected.append(cross_entropy(positive / TEMPERATURE, kept))
    assert dropped > 0
    assert_same(mean_nce(scores, hn.BelowPositive(absolute=-0.1)), torch.stack(expected).mean(), texts)
    assert scores.source_names == ("batch", "queries", "documents")


def hardness_scores(texts: dict[str, Tensor], ids: Tensor) -> hn.Scores:
    hard = texts["hard"]
    others = hn.Keys(hard.flatten(0, 1), ids.repeat_interleave(K), source="batch")
    return hn.cross_views(texts["q"], texts["d"], TEMPERATURE, ids, extra=[others, hn.Keys(hard, source="mined")])


MODES = {"in_batch_negatives": "batch", "hard_negatives": "mined", "all_negatives": None}


@pytest.mark.parametrize("mode", MODES)
def test_additive_hardness_equals_a_loop(texts: dict[str, Tensor], mode: str) -> None:
    q, d, hard, strength = texts["q"], texts["d"], texts["hard"], 5.0
    tilt = hn.Tilt(strength * TEMPERATURE, detach=True, source=MODES[mode])
    expected = []
    for i in range(B):
        logits = []
        for j in range(B):
            own = IDS[i] == IDS[j]
            in_batch = [] if own else [d[j], *hard[j]]
            mined = list(hard[j]) if i == j else []
            for group, name in ((in_batch, "in_batch_negatives"), (mined, "hard_negatives")):
                for vector in group:
                    similarity = q[i] @ vector
                    penalised = mode in (name, "all_negatives")
                    logits.append(similarity / TEMPERATURE + (strength * similarity.detach() if penalised else 0.0))
        expected.append(cross_entropy(q[i] @ d[i] / TEMPERATURE, logits))
    loss = mean_nce(hardness_scores(texts, IDS), tilt, num_negatives="mass")
    assert_same(loss, torch.stack(expected).mean(), texts)


@pytest.mark.parametrize("mode", MODES)
def test_additive_hardness_equals_sentence_transformers(texts: dict[str, Tensor], mode: str) -> None:
    pytest.importorskip("sentence_transformers", minversion="6", reason="older ones have no hardness_mode")
    losses = part_of_sentence_transformers("losses")
    theirs = losses.MultipleNegativesRankingLoss(
        torch.nn.Identity(), scale=1.0 / TEMPERATURE, hardness_mode=mode, hardness_strength=5.0
    )
    columns = [texts["q"], texts["d"], *texts["hard"].unbind(1)]
    expected = theirs.compute_loss_from_embeddings(columns, None)
    tilt = hn.Tilt(5.0 * TEMPERATURE, detach=True, source=MODES[mode])
    scores = hardness_scores(normalised(texts), torch.arange(B))
    assert_same(mean_nce(scores, tilt, num_negatives="mass"), expected, texts)


def test_percentage_of_the_positive_equals_a_loop(texts: dict[str, Tensor]) -> None:
    """NV-Retriever as in docs/guides/recipes.md: at most 95 % of the score of the positive, tested on both sides."""
    q, d = texts["q"], normalize(texts["q"] + texts["d"], dim=-1)
    pool = hn.Keys(torch.stack([share * d for share in (0.2, 0.94, 0.9499, 0.9501, 0.96, 1.1)], 1), source="mined")
    scores = hn.score(hn.Keys(q, IDS), d, pool, TEMPERATURE)
    assert bool((q * d).sum(1).min() > 0)
    expected = []
    for i in range(B):
        positive = q[i] @ d[i]
        kept = [q[i] @ v / TEMPERATURE for v in pool.vectors[i] if q[i] @ v <= 0.95 * positive]
        assert len(kept) == 3
        expected.append(cross_entropy(positive / TEMPERATURE, kept))
    assert_same(mean_nce(scores, hn.BelowPositive(relative=0.05)), torch.stack(expected).mean(), texts)


def test_the_margin_below_a_negative_score_is_below_it(texts: dict[str, Tensor]) -> None:
    """0.95 times a score below 0 would be above it."""
    q = texts["q"]
    pool = hn.Keys(torch.stack([-share * q for share in (0.2, 0.96, 1.04, 1.06)], 1), source="mined")
    scores = hn.score(hn.Keys(q, IDS), -q, pool, TEMPERATURE)
    kept = hn.BelowPositive(relative=0.05).log_weights(scores) == 0
    assert kept.tolist() == [[False, False, False, True]] * B


def test_siglip_equals_a_loop(texts: dict[str, Tensor]) -> None:
    q, d = texts["q"], texts["d"]
    bias = torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)
    scores = hn.cross_views(q, d, TEMPERATURE)
    loss = hn.reduce(hn.sigmoid(scores, hn.Uniform().log_weights(scores), bias=bias), scores)
    total = q.new_zeros(())
    for i in range(B):
        for j in range(B):
            sign = 1.0 if i == j else -1.0
            total = total - torch.nn.functional.logsigmoid(sign * (q[i] @ d[j] / TEMPERATURE + bias))
    assert_same(loss, total / B, {**texts, "bias": bias})


def test_clip_with_a_learnt_temperature_equals_two_cross_entropies(texts: dict[str, Tensor]) -> None:
    log_temperature = torch.tensor(0.07, dtype=torch.float64).log().requires_grad_()
    temperature = log_temperature.exp()
    loss = hn.ContrastiveLoss(views="cross")
    found = 0.5 * sum(
        loss(*pair, temperature=temperature) for pair in ((texts["q"], texts["d"]), (texts["d"], texts["q"]))
    )
    logits = normalize(texts["q"], dim=-1) @ normalize(texts["d"], dim=-1).T / temperature
    expected = 0.5 * sum(torch.nn.functional.cross_entropy(side, torch.arange(B)) for side in (logits, logits.T))
    assert_same(found, expected, texts | {"log_temperature": log_temperature})


def test_sigmoid_takes_any_weights(texts: dict[str, Tensor]) -> None:
    q, d = texts["q"], texts["d"]
    scores = hn.cross_views(q, d, TEMPERATURE)
    loss = hn.reduce(hn.sigmoid(scores, hn.Tilt(2.0).log_weights(scores), bias=0.5, num_negatives=7.0), scores)
    expected = q.new_zeros(())
    for i in range(B):
        s = torch.stack([q[i] @ d[j] / TEMPERATURE for j in range(B) if j != i])
        weights = torch.softmax(2.0 * s, 0)
        own = torch.nn.functional.softplus(-(q[i] @ d[i] / TEMPERATURE) - 0.5)
        expected = expected + own + 7.0 * (weights * torch.nn.functional.softplus(s + 0.5)).sum()
    assert_same(loss, expected / B, texts)


def test_known_pairs_are_never_weighted_or_positive(texts: dict[str, Tensor]) -> None:
    q, d = texts["q"], texts["d"]
    ids = torch.arange(B)
    judged = {(0, 2): -math.inf, (0, 5): -1.5, (4, 1): 0.5}
    anchors, candidates = torch.tensor(list(judged)).T
    pairs = hn.negatives.KnownPairs(anchors, candidates, torch.tensor(list(judged.values())))
    scores = hn.cross_views(q, d, TEMPERATURE, ids)
    log_w = hn.Known(pairs).log_weights(scores)
    for i in range(B):
        for j in range(B):
            assert log_w[i, j] == (-math.inf if i == j else judged.get((i, j), 0.0))
    relabelled = hn.core.scoring.more_positives(scores, pairs.look_up(scores)[0])
    assert relabelled.positive_valid.sum(1).tolist() == [3, 1, 1, 1, 2, 1]
    assert not bool((relabelled.valid & relabelled.positive_valid[:, 1:]).any())


def test_known_pairs_match_nothing_unknown(texts: dict[str, Tensor]) -> None:
    q = texts["q"]
    pairs = hn.negatives.KnownPairs(torch.tensor([1]), torch.tensor([2]))
    pool = hn.Keys(unit(4, DIM), torch.tensor([2, -1, 10**6, 3]))
    known, _ = pairs.look_up(hn.score(hn.Keys(q, torch.tensor([1, 0, -1, 2, 3, 4])), texts["d"], pool, TEMPERATURE))
    assert known.nonzero().tolist() == [[0, 0]]
    with raises(ValueError, who="to_text", got="Known(<1 pairs>)"):
        hn.negatives.to_text(hn.Known(pairs))
    with pytest.raises(ValueError, match="needs ids"):
        hn.Known(pairs).log_weights(hn.score(hn.Keys(q), texts["d"], unit(4, DIM), TEMPERATURE))


def test_gistembed_with_blocks_equals_sentence_transformers(texts: dict[str, Tensor]) -> None:
    pytest.importorskip("sentence_transformers", minversion="6", reason="older ones have no embed_columns to replace")
    losses = part_of_sentence_transformers("losses")
    q, d, ids = texts["q"], texts["d"], torch.arange(B)
    guide_q, guide_d = unit(B, DIM), unit(B, DIM)
    theirs = losses.GISTEmbedLoss.__new__(losses.GISTEmbedLoss)
    torch.nn.Module.__init__(theirs)
    columns = iter([[q, d], [guide_q, guide_d]])
    module = pytest.importorskip(losses.GISTEmbedLoss.__module__)
    patched, module.embed_columns = module.embed_columns, lambda *_: next(columns)
    try:
        theirs.__dict__.update(
            model=None, guide=None, must_retokenize=False, gather_across_devices=False, temperature=TEMPERATURE,
            margin_strategy="absolute", margin=0.0, contrast_anchors=True, contrast_positives=True,
        )  # fmt: skip
        theirs.similarity_fct = torch.nn.CosineSimilarity(dim=-1)
        theirs.cross_entropy_loss = torch.nn.CrossEntropyLoss()
        expected = theirs([{}, {}], None)
    finally:
        module.embed_columns = patched

    def blocks(q: Tensor, d: Tensor, temperature: float) -> list[hn.Scores]:
        return [
            hn.cross_views(q, d, temperature, ids),
            hn.score(hn.Keys(q, ids), d, hn.Keys(q, ids, source="queries"), temperature),
            hn.score(hn.Keys(d, ids), d, hn.Keys(d, ids, source="documents"), temperature),
        ]

    ours = (normalised(texts)[name] for name in ("q", "d"))
    guided = [
        mine.guided(guide)
        for mine, guide in zip(blocks(*ours, temperature=TEMPERATURE), blocks(guide_q, guide_d, 1.0), strict=True)
    ]
    loss = mean_nce(hn.core.scoring.concatenate_scores(*guided), hn.BelowPositive(absolute=0.0, by="guide"))
    assert_same(loss, expected, texts)
