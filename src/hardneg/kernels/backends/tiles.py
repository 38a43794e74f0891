"""The streamed backend for any distribution, objective and device, without a [b, n] tensor.

It computes bounds, then row statistics, then positives by label, each in a sweep over tiles; memory is that of a few
tiles. ``plan`` cuts the tiles and ``passes`` has the sweeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from torch import Tensor

import hardneg.kernels.backends.tilted as tilted
from hardneg.core.bounds import Largest
from hardneg.core.errors import ArgumentError
from hardneg.core.objectives.base import Objective, Row, RowResult
from hardneg.core.pairing import Pairing, check_parts
from hardneg.kernels.passes import LargestValue, PromotedPairs, RowStatisticsPass, statistics_of
from hardneg.kernels.plan import Leaf, SweepPlan, narrows, with_gradient
from hardneg.kernels.sweep import bounds_of, sweep
from hardneg.negatives.base import Negatives, not_pointwise


@dataclass(frozen=True)
class Tiles:
    """Computes the statistics in sweeps over tiles.

    Attributes:
        tile: Rows and columns of a tile; None chooses them by device and memory.
    """

    tile: tuple[int, int] | None = None

    def why_not(self, pairing: Pairing, negatives: Negatives, objective: Objective) -> str | None:
        """Return why this distribution needs whole rows; None if it works on tiles."""
        return None if streamable(negatives) else f"{negatives!r} needs whole rows"

    def rows(self, pairing: Pairing, negatives: Negatives, objective: Objective) -> RowResult:
        """Sweep the bounds, then the statistics; positives by label are swept when the loss needs them.

        Uniform and tilted negatives of normalised views on a CPU go through ``tilted`` instead, without a sweep.
        """
        check_streamable(negatives)
        form = None if self.tile else tilted.symmetric_form(pairing, negatives, objective)
        if form is not None:
            return tilted.symmetric_rows(pairing, form)
        if pairing.guide is not None:
            check_parts(pairing.guide)
        ready = pairing.prepared()
        own = _own_scores(pairing, ready)
        plan = SweepPlan(ready, negatives.factors, objective, own, self.tile, narrows(pairing.anchors.vectors))
        ready = ready.changed(positives=plan.pairing.positives)  # drop vectors that are not needed again
        row = _row(plan, ready, own)
        sum_pairs = partial(_sum_promoted, plan, ready, row) if pairing.label_positives else None
        return RowResult(row, own, plan.pairing.real(slice(0, len(pairing))), sum_pairs)


def _own_scores(pairing: Pairing, ready: Pairing) -> Annotated[Tensor, "b p"]:
    """Score the own positives; for two views from the halves of the rows.

    A copy of the positives would be kept for the backward pass.
    """
    if pairing.num_views != 2:
        return ready.positive_scores()
    first, second = ready.anchors.vectors.chunk(2)
    return (first * second).sum(-1, keepdim=True).repeat(2, 1) / ready.temperature


def _row(plan: SweepPlan, pairing: Pairing, own: Tensor) -> Row:
    """Compute the statistics of all rows, and before them the bounds of the factors."""
    bounds = bounds_of(plan)
    leaves, last = list(plan.leaves), Leaf(own, True)
    largest = []
    for place in with_gradient(plan.factors):
        (value,) = sweep(LargestValue(plan, [*plan.leaves, last], bounds, place), pairing, [*plan.leaves, last])
        largest.append((*place, len(leaves)))
        leaves.append(Leaf(value, value.ndim > 0))
    plan.functions = replace(plan.functions, largest=tuple(largest))
    values = sweep(RowStatisticsPass(plan, [*leaves, last], bounds), pairing, [*leaves, last])
    return Row(dict(zip(statistics_of(plan.objective), values, strict=True)), pairing.temperature)


def _sum_promoted(plan: SweepPlan, pairing: Pairing, row: Row, objective: Objective) -> tuple[Tensor, Tensor]:
    """Sum the losses of each anchor's positives by label, and count them; the plan has the objective."""
    assert objective is plan.objective
    names = tuple(row.statistics)
    leaves = [*plan.leaves, *(Leaf(row.statistics[name], True) for name in names)]
    sums, number = sweep(PromotedPairs(plan, leaves, names), pairing, leaves)
    return sums[:, 0], number[:, 0]


def check_streamable(negatives: Negatives) -> None:
    """Raise for a factor that needs whole rows, or for a bound whose gradient cannot be computed in tiles.

    Raises:
        ArgumentError: With the name of the factor and a fix.
    """
    for factor in negatives.factors:
        if not factor.pointwise:
            raise not_pointwise(factor, "a streamed loss (impl='streamed')")
        for name in dense_only(factor):
            what = f"a bound of type Largest for {name!r} with grad=True in a streamed loss"
            raise ArgumentError(type(factor).__name__, what, type(factor.bounds()[name]).__name__, "use impl='dense'")


def streamable(negatives: Negatives) -> bool:
    """True if every factor works on tiles, with its gradients."""
    return all(factor.pointwise and not dense_only(factor) for factor in negatives.factors)


def dense_only(factor: Negatives) -> list[str]:
    """The names of the bounds whose gradient needs dense scores."""
    return [name for name, bound in factor.bounds().items() if bound.grad and type(bound) is not Largest]
