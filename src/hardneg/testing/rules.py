"""The checks of the conformance suite: one function per property, which returns None or the problem and its fix.

The first line of each docstring is the property; it is shown if a distribution raises an exception. The tuples
``rules_of_text`` and ``rules_of_weights`` list all checks, for ``check_negatives`` and for parametrized tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import pad

from hardneg.core.keyed import uniform_of_pairs
from hardneg.core.objectives import InfoNCE, info_nce, reduce
from hardneg.core.pairing import Pairing
from hardneg.core.scoring import dense
from hardneg.core.types import NEVER, Keys, LogWeights, PairLosses, Scores, with_support
from hardneg.kernels.engine import Tiles
from hardneg.mining import Search
from hardneg.mining.entry import mine_vectors
from hardneg.negatives import Negatives, OtherLabel, Product, parse
from hardneg.search.draws import gumbel_order
from hardneg.search.topk import top_of_rows
from hardneg.testing.examples import make_pairing, make_scores, take_columns, take_rows, weights_by_tiles

Violation = str | None
"""What is wrong and how to fix it, to follow the name of the distribution; None if the check passes."""
Check = Callable[[Negatives], Violation]
"""A property of every distribution."""

# Sizes of the check of mining, which the blocks do not divide.
_QUERIES, _CORPUS, _K, _TEMPERATURE = 12, 60, 5, 0.5


def mines_as_whole_rows(negatives: Negatives) -> Violation:
    """Mining by blocks and by shards gives the negatives of whole rows, ties included, also for seeded draws.

    The miner reads the corpus in blocks and may skip blocks by the bounds that a distribution declares; a wrong bound
    loses negatives. Distributions that depend on a batch or on sources are not checked.
    """
    if negatives.batch_scope or "source" in negatives.reads():
        return None  # mining has no batch, and its corpus is a single source
    pairing = make_mining()
    queries, corpus, guide = pairing.anchors, pairing.candidates[0], pairing.guide
    assert guide is not None
    assert pairing.positives.ids is not None
    searches = [Search(query_block=4, corpus_block=7, similarity="dot")]
    searches += [replace(searches[0], shards=3)] if negatives.pointwise else []
    for draw in ("top", "gumbel"):
        right = _from_whole_rows(negatives, pairing, draw)
        for search in searches:
            vectors = guide.anchors.vectors, guide.candidates[0].vectors
            options = {"temperature": _TEMPERATURE, "search": search, "guide": vectors}
            found = mine_vectors(queries, corpus, pairing.positives.ids, negatives, _K, draw, **options)  # type: ignore[arg-type]
            if not torch.equal(found.rows, right):
                where = "shards" if search.shards > 1 else "blocks"
                return (
                    f"gives other negatives by {where} than from whole rows (draw={draw!r}); do not override shown() "
                    "and monotone unless they hold for every row, and set removes = True if it can remove a candidate"
                )
    return None


def make_mining() -> Pairing:
    """Return queries with one or two positives each and a corpus with duplicates, labels, clusters and a guide.

    Vectors are multiples of 1/4, so dot products are exact and ties stay ties however they are computed.
    """
    random = torch.Generator().manual_seed(0)

    def exact(rows: int) -> Tensor:
        return torch.randint(-2, 3, (rows, 6), generator=random).double() / 4.0

    def keys(rows: int, first_id: int) -> Keys:
        number = torch.arange(rows)
        return Keys(exact(rows), number + first_id, number % 4, number % 3)

    queries, corpus = keys(_QUERIES, 50), keys(_CORPUS, 0)  # the first ten queries are documents
    corpus.vectors[40:55] = corpus.vectors[:15]
    own = torch.stack([torch.arange(_QUERIES) * 3, torch.where(torch.arange(_QUERIES) % 2 == 0, -1, 41)], 1)
    positives = Keys(corpus.vectors[own.clamp(min=0)], own)
    other = Keys(exact(_CORPUS))
    guide = Pairing(Keys(exact(_QUERIES)), Keys(other.vectors[own.clamp(min=0)]), (other,), 1.0)
    return Pairing(queries, positives, (corpus,), _TEMPERATURE, own >= 0).guided(guide)


def _from_whole_rows(negatives: Negatives, pairing: Pairing, draw: str) -> Tensor:
    """Return the negatives chosen from the dense scores, as the reference."""
    scores = dense(pairing)
    log_w = negatives.log_weights(scores)
    if draw == "gumbel":
        rows = torch.arange(_CORPUS).expand(_QUERIES, -1)
        return gumbel_order(log_w, uniform_of_pairs(0, torch.arange(_QUERIES), rows), _K)
    values, rows = top_of_rows(scores.candidates.masked_fill(log_w == NEVER, NEVER), _K)
    return rows.masked_fill(values == NEVER, -1)


_what_to_write = (
    "declare the property of the row that it needs, def bounds(self): return {'closest': Largest(lambda tile: "
    "tile.s)}, and read tile.bound['closest'], [r, 1] (docs/extend.md)"
)


def reads_back(negatives: Negatives) -> Violation:
    """parse(repr(q)) == q: use @dataclass(frozen=True, repr=False) with numbers and names, or set textual = False.

    Run records, manifests and checkpoints store distributions as text and restore them from it.
    """
    if not all(factor.textual for factor in negatives.factors):
        return None
    again = parse(repr(negatives))
    return None if again == negatives else f"is parsed as {again!r}, which is not equal; leave eq to the dataclass"


def evaluates_schedules(negatives: Negatives) -> Violation:
    """.at(step, total) returns the distribution with numbers instead of schedules; do not override it.

    Losses call it at every step; schedules are evaluated nowhere else.
    """
    now = negatives.at(0, 10)
    if isinstance(now, Negatives) and not now.schedules():
        return None
    return f"returns {now!r} for .at(0, 10), which still has schedules; do not override at()"


def has_shape_and_dtype(negatives: Negatives) -> Violation:
    """log_weights is [b, n] in the dtype of the scores, for shared and for private candidates.

    Shared candidates have tags [1, n] and private ones [b, n]. Another dtype would change that of the loss.
    """
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for private in (False, True):
            scores = make_scores(dtype, private=private)
            log_w = negatives.log_weights(scores)
            if log_w.shape != scores.valid.shape:
                return (
                    f"returns shape {tuple(log_w.shape)} for scores {tuple(scores.valid.shape)}; the tags of shared "
                    "candidates are [1, n], so end with .expand_as(scores.valid)"
                )
            if log_w.dtype != scores.candidates.dtype:
                return (
                    f"returns {log_w.dtype} for scores of {scores.candidates.dtype}; create tensors with "
                    "scores.candidates.new_zeros(...)"
                )
    return None


def never_takes_invalid(negatives: Negatives) -> Violation:
    """A candidate that is not valid has the log-weight NEVER.

    Candidates are invalid because they are the anchor itself, a positive, padding, or because a factor removed them.
    """
    scores = make_scores()
    scores = scores.narrowed(torch.arange(scores.valid.shape[1]) % 3 != 0)  # invalid for other reasons than ids too
    if (negatives.log_weights(scores)[~scores.valid] == NEVER).all():
        return None
    return "gives weight to invalid candidates; end with .masked_fill(~scores.valid, NEVER)"


def is_a_function(negatives: Negatives) -> Violation:
    """The same scores give the same log-weights and are not modified.

    Randomness belongs to ``hardneg.draw``, which samples from the weights with keys that reproduce on every machine.
    """
    scores = make_scores()
    first = negatives.log_weights(scores)
    if not torch.equal(scores.candidates, make_scores().candidates):
        return "modifies the scores; use operations without a trailing _, such as masked_fill"
    if not torch.allclose(first, negatives.log_weights(scores), rtol=0.0, atol=0.0, equal_nan=True):
        return "gives different weights for the same scores; return weights, and let hardneg.draw sample from them"
    return None


def has_sound_values(negatives: Negatives) -> Violation:
    """A log-weight is finite or NEVER; with masks = True it is 0 or NEVER.

    ``masks`` lets kernels skip the weights and keep only the support.
    """
    log_w = negatives.log_weights(make_scores())
    if (torch.isnan(log_w) | (log_w == torch.inf)).any():
        return "gives NaN or +inf for finite scores; a log-weight is finite or NEVER, which is -inf"
    if all(factor.masks for factor in negatives.factors) and (log_w[log_w != NEVER] != 0).any():
        return "has masks = True but weighs the remaining candidates; return 0 or NEVER, or leave masks = False"
    return None


def ignores_order_of_anchors(negatives: Negatives) -> Violation:
    """Permuting the anchors permutes the rows of the weights.

    Batches are split over ranks and chunks, so a row number means nothing.
    """
    scores = make_scores(private=True)
    order = torch.tensor([3, 5, 0, 4, 1, 2])
    plain, permuted = negatives.log_weights(scores), negatives.log_weights(take_rows(scores, order))
    if _close(_log_q(plain)[order], _log_q(permuted)):
        return None
    return "depends on the order of the anchors; use their tags, not their row numbers"


def ignores_order_of_candidates(negatives: Negatives) -> Violation:
    """Permuting the candidates changes neither the loss nor the chosen scores.

    Twins with equal scores may change places, so the chosen scores are compared and not the columns.
    """
    scores = make_scores()
    order = torch.randperm(scores.valid.shape[1], generator=torch.Generator().manual_seed(1))
    if _same_choice(negatives, scores, take_columns(scores, order)):
        return None
    return "depends on the order of the candidates; use scores and tags, not column numbers"


def ignores_invalid(negatives: Negatives) -> Violation:
    """Invalid candidates change nothing, whatever their scores.

    Three are added, two of them with extreme scores.
    """
    scores = make_scores()
    n = scores.valid.shape[1]
    more = take_columns(scores, torch.tensor([0, n - 1, n // 2, *range(n)]))
    extra = torch.arange(n + 3) < 3
    beyond = torch.tensor([4.0, -4.0, 0.0, *[0.0] * n], dtype=scores.candidates.dtype)
    more = replace(more, candidates=torch.where(extra, beyond, more.candidates), valid=more.valid & ~extra)
    if _same_choice(negatives, scores, more):
        return None
    return "changes when invalid candidates are added; leave them out of means, maxima, ranks and counts"


def survives_empty_row(negatives: Negatives) -> Violation:
    """An anchor without valid candidates has loss 0 and gradient 0.

    A NaN in a branch that torch.where discards still makes the gradient NaN, so the gradient is checked too.
    """
    scores = make_scores().narrowed(torch.arange(6)[:, None] != 2)
    inputs = _leaves(scores)
    losses = _losses(negatives, replace(scores, positives=inputs[0], candidates=inputs[1]))
    if not (losses[2] == 0).all():
        return f"has loss {losses[2].tolist()} for an anchor without candidates; return NEVER in the whole row"
    gradients = torch.autograd.grad(losses.sum(), inputs)
    if all(bool(torch.isfinite(g).all()) and bool((g[2] == 0).all()) for g in gradients):
        return None
    return (
        "gives an anchor without candidates a gradient that is not zero; fill the row with a harmless number by "
        "torch.where before a division, a softmax or a log, not after it"
    )


def survives_no_candidates(negatives: Negatives) -> Violation:
    """Scores [b, 0] give loss 0; the maximum of an empty row needs a separate case.

    Such scores come from an empty bank or pool.
    """
    losses = _losses(negatives, take_columns(make_scores(), torch.tensor([], dtype=torch.long)))
    return None if (losses == 0).all() else "has a nonzero loss without any candidate, for scores [b, 0]"


def shows_nan(negatives: Negatives) -> Violation:
    """NaN in a valid candidate with weight gives a NaN loss, never a finite one.

    All comparisons with NaN are false, so a mask can drop it silently and hide a diverged model.
    """
    scores = make_scores()
    supported = negatives.log_weights(scores) != NEVER
    for poisoned in (supported, supported & (supported.cumsum(-1) == 1)):
        losses = _losses(negatives, replace(scores, candidates=scores.candidates.masked_fill(poisoned, torch.nan)))
        if not torch.isnan(losses[poisoned.any(-1)[:, None] & scores.positive_valid]).all():
            return "hides NaN in a candidate's score; exclude with ~(score < limit), not with score >= limit"
    return None


def agrees_in_low_precision(negatives: Negatives) -> Violation:
    """float32 agrees with float64 on the same scores at temperature 0.01, also for vectors in bfloat16.

    Scores reach 100 there, where exp overflows in float32.
    """
    for dtype in (torch.float32, torch.bfloat16):
        scores = make_scores(dtype, temperature=0.01)
        wide = replace(scores, positives=scores.positives.double(), candidates=scores.candidates.double())
        if not _same_choice(negatives, wide, scores):
            return (
                f"differs between float32 and float64 at temperature 0.01 (vectors of {dtype}); stay in log-space: "
                "no exp of a score, no log of a weight"
            )
    return None


def composes(negatives: Negatives) -> Violation:
    """OtherLabel() * q and q * OtherLabel() have a finite loss.

    The other factor leaves some anchors with one candidate or none.
    """
    scores = make_scores()
    other, row = scores.valid & ~scores.same_label("check_negatives"), torch.arange(6)[:, None]
    # OtherLabel leaves one candidate to anchor 0 and none to anchor 1.
    few = (row > 1) | ~other | (row == 0) & (other.cumsum(-1) == 1)
    for product in (OtherLabel() * negatives, Product((*negatives.factors, OtherLabel()))):
        if not torch.isfinite(_losses(product, scores.narrowed(few))).all():
            return (
                f"has a loss that is not finite in {product!r}, where anchors are left with one candidate or none; "
                "check divisions by a count or a standard deviation"
            )
    return None


def compiles(negatives: Negatives) -> Violation:
    """torch.compile(fullgraph=True) works: no .item(), no if on values of a tensor, no loop over rows.

    The compiled loss and its gradients must equal the eager ones.
    """

    def loss(positives: Tensor, candidates: Tensor) -> PairLosses:
        return _losses(negatives, replace(scores, positives=positives, candidates=candidates))

    scores = make_scores()
    inputs = _leaves(scores)
    torch.compiler.reset()  # all distributions are compiled in this one function, whose cache is limited
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs)
    eager = loss(*inputs)
    gradients = [torch.autograd.grad(losses.sum(), inputs) for losses in (eager, compiled)]
    if _close(eager, compiled) and all(_close(one, other) for one, other in zip(*gradients, strict=True)):
        return None
    return "has another loss or gradient when compiled; keep no state in log_weights"


def works_in_tiles(negatives: Negatives) -> Violation:
    """A weight depends on its pair and on declared bounds of its row: any split into tiles is the same.

    Large pools and mining never hold whole rows. Scores are rounded so that ties occur at the edges of tiles.
    """
    scores = make_scores()
    scores = scores.changed(candidates=(scores.candidates * 4).round() / 4)  # makes ties
    whole = negatives.log_weights(scores)
    n = whole.shape[1]
    if not negatives.pointwise:
        return None  # checked by declares_what_it_needs
    for edges in ((0, 5, 6, n), (0, n), (0, *range(1, n + 1)), (0, 0, n, n)):
        tiled = weights_by_tiles(negatives, scores, edges)
        if not torch.equal(whole == NEVER, tiled == NEVER) or not _close(_log_q(whole), _log_q(tiled)):
            return (
                "gives other weights when its candidates come in several tiles; log_weight(tile) may look at each pair "
                f"and at tile.bound, not at the other columns of the tile: {_what_to_write}"
            )
    return None


def declares_what_it_needs(negatives: Negatives) -> Violation:
    """Check that a class with only log_weights(scores) weighs each candidate independently, or declares ranks = True.

    Every second candidate is removed; the weights of the others must not change.
    """
    if negatives.pointwise or any(factor.looks_around for factor in negatives.factors):
        return None
    scores = make_scores()
    whole = negatives.log_weights(scores)
    some = torch.arange(0, whole.shape[1], 2)
    if _close(whole[:, some], negatives.log_weights(take_columns(scores, some))):
        return None
    return (
        "weighs a candidate by the other candidates of its row without declaring it; write log_weight(tile) instead "
        f"of log_weights(scores): {_what_to_write}"
    )


def streams(negatives: Negatives) -> Violation:
    """The streamed loss has the value and the gradient of the dense one, for shared and private candidates.

    Gradients are compared with respect to anchors and candidates, in tiles whose size does not divide the batch.
    """
    if not negatives.pointwise:
        return None
    for private in (False, True):
        pairing = make_pairing(private=private)
        vectors = [keys.vectors.requires_grad_() for keys in (pairing.anchors, pairing.candidates[0])]
        scores = dense(pairing)
        losses = reduce(info_nce(scores, negatives.log_weights(scores)), scores, "none")
        found = Tiles((4, 5)).rows(pairing, negatives, InfoNCE()).loss(InfoNCE(), "none")
        gradients = [torch.autograd.grad(each.sum(), vectors, materialize_grads=True) for each in (losses, found)]
        if not _close(losses, found) or not all(_close(*both) for both in zip(*gradients, strict=True)):
            return "has another loss or gradient when streamed; tensors with a gradient must be fields, not closed over"
    return None


rules_of_text: tuple[Check, ...] = (reads_back, evaluates_schedules)
"""Checks of the distribution as written, before its schedules are evaluated."""
rules_of_weights: tuple[Check, ...] = (
    has_shape_and_dtype,
    never_takes_invalid,
    is_a_function,
    works_in_tiles,
    has_sound_values,
    ignores_order_of_anchors,
    ignores_order_of_candidates,
    ignores_invalid,
    survives_empty_row,
    survives_no_candidates,
    shows_nan,
    agrees_in_low_precision,
    composes,
    compiles,
    declares_what_it_needs,
    streams,
    mines_as_whole_rows,
)
"""Checks of its weights, at one step of its schedules."""


def _leaves(scores: Scores) -> tuple[Tensor, Tensor]:
    """Return copies of the scores that collect gradients."""
    return scores.positives.clone().requires_grad_(), scores.candidates.clone().requires_grad_()


def _losses(negatives: Negatives, scores: Scores) -> PairLosses:
    """Return the loss of each positive [b, p]."""
    return info_nce(scores, negatives.log_weights(scores))


def _log_q(log_w: LogWeights) -> LogWeights:
    """Return the logarithm of the distribution: weights without the arbitrary constant of each row."""
    some, safe = with_support(log_w)
    return torch.where(some, torch.log_softmax(safe, dim=-1), NEVER)


def _same_choice(negatives: Negatives, first: Scores, second: Scores) -> bool:
    """Whether both have the same loss and choose the same scores."""
    log_w, other = negatives.log_weights(first), negatives.log_weights(second)
    chosen, other_chosen = _chosen(first, log_w), _chosen(second, other)
    chosen = pad(chosen, (0, other_chosen.shape[1] - chosen.shape[1]), value=NEVER)
    return _close(chosen, other_chosen) and _close(info_nce(first, log_w), info_nce(second, other))


def _chosen(scores: Scores, log_w: LogWeights) -> Annotated[Tensor, "b n"]:
    """Return the scores with weight in descending order [b, n], the others as NEVER at the end."""
    return scores.candidates.masked_fill(log_w == NEVER, NEVER).sort(dim=-1, descending=True).values


def _close(first: Tensor, second: Tensor) -> bool:
    """Whether tensors agree within a thousand roundings of the narrower dtype, relative to at least 1."""
    tolerance = 1000 * max(torch.finfo(first.dtype).eps, torch.finfo(second.dtype).eps)
    return torch.allclose(first.double(), second.double(), rtol=tolerance, atol=tolerance)
