"""The streamed loss: any distribution, any objective, any device, without [b, n].

Bounds, then row statistics, then the pairs, each a sweep over tiles. Memory is that of a few tiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from hardneg.core.bounds import Largest
from hardneg.core.checks import check_parts
from hardneg.core.errors import ArgumentError
from hardneg.core.objectives import Objective, Row, reduce_sums
from hardneg.core.pairing import Pairing
from hardneg.kernels.bounds import bounds_of
from hardneg.kernels.largest import LargestValue
from hardneg.kernels.leaves import Piece
from hardneg.kernels.pairs import PromotedPairs, masked_sum
from hardneg.kernels.plan import Plan, with_gradient
from hardneg.kernels.products import narrows
from hardneg.kernels.row_statistics import RowStatistics, statistics_of
from hardneg.kernels.swept import sweep
from hardneg.negatives.base import Negatives, not_pointwise


class Own(NamedTuple):
    """The scores of the anchors' own positives, and which of them are real; None: all."""

    s: Annotated[Tensor, "b p"]
    valid: Annotated[Tensor, "b p"] | None


class Streamed(NamedTuple):
    """A loss, and beside it the statistics of the rows and the anchors' own positives, whose gradients nobody needs."""

    loss: Tensor
    row: Row
    own: Own


def streamed(
    pairing: Pairing,
    negatives: Negatives,
    objective: Objective,
    reduction: str = "anchors",
    tile: tuple[int, int] | None = None,
) -> Streamed:
    """The loss of a pairing, and the statistics of its rows.

    The same as ``reduce(objective.losses(scores, negatives.log_weights(scores)), scores, reduction)`` of dense scores.
    """
    check_parts(pairing)
    if pairing.guide is not None:
        check_parts(pairing.guide)
    check_streamable(negatives)
    with torch.autocast(pairing.anchors.vectors.device.type, enabled=False):
        ready = pairing.prepared()
        own = _own_scores(pairing, ready)
        plan = Plan(ready, negatives.factors, objective, own, tile, narrows(pairing.anchors.vectors))
        ready = ready.changed(positives=plan.pairing.positives)
        row = _row(plan, ready, own)
        real = plan.pairing.real(slice(0, len(pairing)))
        sums, counts = masked_sum(objective, own, row, real), real.sum(-1, keepdim=True).to(own.dtype)
        if pairing.label_positives:
            names = tuple(row.statistics)
            pieces = [*plan.pieces, *(Piece(row.statistics[name], True) for name in names)]
            more, number = sweep(PromotedPairs(plan, pieces, names), ready, pieces)
            sums, counts = sums + more, counts + number
    plain = Row({name: value.detach() for name, value in row.statistics.items()}, row.temperature)
    return Streamed(reduce_sums(sums[:, 0], counts[:, 0], reduction), plain, Own(own.detach(), real))


def _own_scores(pairing: Pairing, ready: Pairing) -> Annotated[Tensor, "b p"]:
    """Those of two views from the halves of the rows: a copy of the positives would be kept for the backward pass."""
    if pairing.num_views != 2:
        return ready.positive_scores()
    first, second = ready.anchors.vectors.chunk(2)
    return (first * second).sum(-1, keepdim=True).repeat(2, 1) / ready.temperature


def _row(plan: Plan, pairing: Pairing, own: Tensor) -> Row:
    """The statistics of all rows, and before them the bounds of the factors."""
    bounds = bounds_of(plan)
    pieces, last = list(plan.pieces), Piece(own, True)
    largest = []
    for place in with_gradient(plan.factors):
        (value,) = sweep(LargestValue(plan, [*plan.pieces, last], bounds, place), pairing, [*plan.pieces, last])
        largest.append((*place, len(pieces)))
        pieces.append(Piece(value, value.ndim > 0))
    plan.holders = replace(plan.holders, largest=tuple(largest))
    values = sweep(RowStatistics(plan, [*pieces, last], bounds), pairing, [*pieces, last])
    return Row(dict(zip(statistics_of(plan.objective), values, strict=True)), pairing.temperature)


def check_streamable(negatives: Negatives) -> None:
    """Raises, by name, for a factor that needs whole rows, or the gradient of a bound that has none in tiles."""
    for factor in negatives.factors:
        if not factor.pointwise:
            raise not_pointwise(factor, "a streamed loss (impl='streamed')")
        for name in dense_only(factor):
            what = f"a Largest as bound {name!r} with grad=True in a streamed loss"
            raise ArgumentError(type(factor).__name__, what, type(factor.bounds()[name]).__name__, "use impl='dense'")


def streamable(negatives: Negatives) -> bool:
    return all(factor.pointwise and not dense_only(factor) for factor in negatives.factors)


def dense_only(factor: Negatives) -> list[str]:
    """The names of the bounds whose gradient needs dense scores."""
    return [name for name, bound in factor.bounds().items() if bound.grad and type(bound) is not Largest]
