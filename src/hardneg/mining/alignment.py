"""Warnings that save a week: positives no closer than random documents, and negatives easier than those.

Ids that do not belong together (1-based judgements of 0-based rows, a file in a different order, two
models) raise no error, because every id exists. The positives are then no closer than chance. Three
figures reveal it:

- closer: how often a positive is closer to its query than a random document is; 1/2 if ids are not aligned.
- shift: whether the row before or after each positive is closer, by more than chance. It finds ids
  counted from 1 even if neighbours in the file share a topic.
- skew: how far the nearest documents are above the mean, divided by how far the farthest are below
  it. It is 1 for vectors of random numbers, in which nothing can be aligned, and well above 1 for
  the vectors of any model.

``alignment_of`` computes the figures on a sample; the ``warn_of_...`` functions are called by
``hn.mine`` and jobs. Audits use the same figures.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import MiningWarning, spelled, warn_once
from hardneg.core.tensors import unit
from hardneg.mining.explain import TOO_FEW, Explanation
from hardneg.mining.pairs import Pairs
from hardneg.negatives import Negatives

_queries, _documents, _positives = 256, 4096, 8  # sizes of the sample; positives are per query
_least_queries = 32
_by_chance = 0.6  # misaligned ids: 0.50, with 256 queries up to 0.56; nfcorpus with a weak model: 0.72
_least_skew = 1.1
_least_gain, _sure = 0.02, 5.0  # smallest gain of a shift: in share of comparisons, and in standard errors


@dataclass(frozen=True)
class Alignment:
    """How close positives are compared with random documents, on a sample.

    Attributes:
        queries: Number of queries in the sample.
        closer: Share of comparisons in which a positive is closer than a random document.
        positive: Mean similarity of the positives.
        random: Mean similarity of random documents.
        skew: Skew of the similarities; see the module.
        shift: Offset (-1 or 1) of rows that are closer than the positives; 0 if there is none.
    """

    queries: int
    closer: float
    positive: float
    random: float
    skew: float
    shift: int = 0

    @property
    def known(self) -> bool:
        """True if the sample is large enough to judge and the vectors are more than random numbers."""
        return self.queries >= _least_queries and self.skew >= _least_skew

    @property
    def lost(self) -> bool:
        """True if positives are no closer than random documents, or less close than their neighbouring rows."""
        return self.shift != 0 or (self.known and self.closer < _by_chance)


def alignment_of(queries: Tensor, corpus: Tensor, positives: Pairs, *, cosine: bool) -> Alignment:
    """Compute the figures on a sample of queries with positives; each query counts once.

    Args:
        queries: Vectors of the queries [q, d].
        corpus: Vectors of the documents [n, d].
        positives: Positives of each query, by row.
        cosine: Whether vectors are compared by the cosine.
    """
    some = positives.count().nonzero()[:, 0].cpu()
    some = some[_sampled(len(some), _queries)]
    rows = _sampled(len(corpus), _documents)
    if not len(some):
        return Alignment(0, 1.0, 0.0, 0.0, 1.0)
    place, column, own = (each.cpu() for each in positives.columns(some.to(positives.rows.device)))
    place, own = place[column < _positives], own[column < _positives]
    anchors, others = _vectors(queries, some, cosine), _vectors(corpus, rows, cosine)
    similarity = anchors @ others.T
    ordered = similarity.sort(1).values

    def closer(shift: int) -> tuple[Tensor, Tensor]:
        neighbours = _vectors(corpus, (own + shift) % len(corpus), cosine)
        # A row that is the query itself, as in a file of pairs, is not evidence: use the positive instead.
        neighbours = torch.where(
            (neighbours == anchors[place]).all(1, keepdim=True), _vectors(corpus, own, cosine), neighbours
        )
        pairs = (anchors[place] * neighbours).sum(-1)
        ends = [torch.searchsorted(ordered[place], pairs[:, None], right=right) for right in (False, True)]
        share = (ends[0] + ends[1])[:, 0].double() / (2 * len(rows))  # ties count half
        return _per_query(share, place, len(some)), _per_query(pairs, place, len(some))

    share, pairs = closer(0)
    gains = {_gain(closer(shift)[0] - share): shift for shift in (-1, 1)}
    among = others[:_queries] @ others.T
    among.fill_diagonal_(float(among.mean()))
    skew = max(_skew(similarity), _skew(among))
    shift = gains[max(gains)] if max(gains) > _sure and len(some) >= _least_queries else 0
    return Alignment(len(some), float(share.mean()), float(pairs.mean()), float(similarity.mean()), skew, shift)


def warn_of_alignment(found: Alignment) -> None:
    """Warn if the positives are not aligned; once for the same figures, so corrected ids are judged again."""
    if found.lost:
        warn_once(f"alignment: {sentence(found)}", sentence(found))


def sentence(found: Alignment) -> str:
    """Return what is wrong with the positives and what to check."""
    where = f"mean similarity {found.positive:.3f} against {found.random:.3f} of random ones"
    if found.shift:
        side, size = ("before", "large") if found.shift < 0 else ("after", "small")
        return (
            f"The rows {side} the positives are closer to the queries than the positives ({where}). Are the ids "
            f"aligned? Rows without ids are numbered from 0; these ids seem to be 1 too {size}."
        )
    return (
        f"The positives are no closer to their queries than random documents ({where}; closer in "
        f"{100 * found.closer:.0f} of 100 comparisons). Are the ids aligned? Rows without ids are numbered from 0, "
        "judgements often from 1; vectors must be in the order of their table and come from one model."
    )


def warn_of_easy_negatives(
    found: Alignment, negatives: Negatives, draw: str, scores: Annotated[Tensor, "m"], several: bool
) -> None:
    """Warn if a margin below the positives leaves only candidates that are easier than random documents.

    With several positives, one of them may be far away; with one, a relative margin may be wider
    than the range of a model's similarities.

    Args:
        found: Figures of the positives.
        negatives: The expression.
        draw: How negatives are drawn; only ``"top"`` is judged.
        scores: Similarities of the chosen negatives [m].
        several: Whether any query has several positives.
    """
    margin = next((factor for factor in negatives.factors if _looks_at_positives(factor)), None)
    if margin is None or draw != "top" or not found.known or found.lost or not len(scores):
        return
    mean = float(scores.double().mean())
    if mean < found.random:
        why = f"is too wide a margin below the positives (mean similarity {found.positive:.3f})"
        fix = "Use a smaller margin"
        if several:
            why, fix = "compares with the lowest-scored of several positives", "Keep only the best positives of a query"
        message = (
            f"The negatives are easier than random documents (mean similarity {mean:.3f} against {found.random:.3f}): "
            f"{margin!r} {why}. {fix}, or use {spelled('mine', 'near_positive')} or a ring, such as Ring(0.01, 0.1), "
            "instead."
        )
        warn_once(f"alignment: {message}", message)


def warn_of_missing_positives(positives: Pairs, negatives: Negatives, stacklevel: int = 4) -> None:
    """Warn if a factor compares with the positives and some queries have none, so it removes nothing there.

    ``stacklevel`` is that of ``warnings.warn``: the number of calls between the warning and the user's line.
    """
    margin = next((factor for factor in negatives.factors if _looks_at_positives(factor)), None)
    missing = int((positives.count() == 0).sum())
    if margin is not None and missing:
        message = (
            f"{missing:,} of {len(positives):,} queries have no positive, so {margin!r} removes nothing there and may "
            "leave false negatives. Give their positives, or leave these queries out."
        )
        warnings.warn(MiningWarning(message, "no positive"), stacklevel=stacklevel)


def warn_of_short(found: Explanation, k: int) -> None:
    """Warn if queries have fewer than k negatives."""
    if found.short:
        few = found.reason() == TOO_FEW
        fix = "add documents to the corpus" if few else f"remove fewer candidates than {found.cause()} does"
        message = (
            f"{found.short:,} of {found.queries:,} queries have fewer than k={k} negatives, {found.empty:,} of them "
            f"none: their rows are padded. Lower k, or {fix}."
        )
        warnings.warn(MiningWarning(message, "short"), stacklevel=4)


def _looks_at_positives(factor: Negatives) -> bool:
    return factor.masks and any(bound.over == "positives" for bound in factor.bounds().values())


def _gain(difference: Annotated[Tensor, "b"]) -> float:
    """Return the mean of a paired difference in standard errors; 0 if it is small, as between rows of one topic."""
    if len(difference) < 2 or float(difference.mean()) < _least_gain:
        return 0.0
    return float(difference.mean() / (difference.std() / len(difference) ** 0.5).clamp(min=1e-6))


def _per_query(values: Tensor, place: Tensor, size: int) -> Annotated[Tensor, "b"]:
    total = torch.zeros(size, dtype=torch.float64).index_add(0, place, values.double())
    return total / torch.bincount(place, minlength=size)


def _sampled(size: int, most: int) -> Tensor:
    """Return row numbers spread evenly over the file: neighbours would share a topic."""
    return torch.arange(size) if size <= most else torch.linspace(0, size - 1, most, dtype=torch.float64).long()


def _vectors(vectors: Tensor, rows: Tensor, cosine: bool) -> Tensor:
    taken = vectors[rows.to(vectors.device)].detach().cpu()
    return (unit(taken) if cosine else taken).double()


def _skew(similarity: Annotated[Tensor, "b n"]) -> float:
    mean = similarity.mean(1)
    above, below = (similarity.amax(1) - mean).mean(), (mean - similarity.amin(1)).mean()
    return float(above / below.clamp(min=1e-12))
