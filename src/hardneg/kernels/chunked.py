"""The streamed loss: any distribution, any objective, any device, without [b, n].

Bounds, then row statistics, then the pairs, each a sweep over the same tiles. The backward pass recomputes the tiles
and takes the vector-Jacobian product of the pointwise functions: memory is that of a few tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hardneg.core.objectives import Objective, Row, reduce_sums
from hardneg.core.pairing import Pairing
from hardneg.core.scoring import check_parts
from hardneg.core.sweep import find_bounds
from hardneg.kernels.largest import LargestValue
from hardneg.kernels.pairs import PromotedPairs, own_pairs
from hardneg.kernels.plan import Plan
from hardneg.kernels.row_statistics import RowStatistics
from hardneg.negatives.base import Negatives, not_pointwise


class Streamed(NamedTuple):
    loss: Tensor
    row: Row
    """The statistics, without gradient."""


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
    check_streamable(negatives)
    with torch.autocast(pairing.anchors.vectors.device.type, enabled=False):
        plan = Plan(pairing.prepared(), negatives.factors, objective, tile)
        tensors = plan.leaves.tensors
        bounds = find_bounds(plan.factors, plan.blocks())
        largest = [LargestValue.apply(plan, bounds, place, *tensors) for place in plan.largest]  # type: ignore[no-untyped-call]
        names = list(plan.statistics(objective))
        values = RowStatistics.apply(plan, bounds, *tensors, *largest)  # type: ignore[no-untyped-call]
        row = Row(dict(zip(names, values, strict=True)), plan.pairing.temperature)
        sums, counts = own_pairs(plan, row)
        if pairing.label_positives:
            more, number = PromotedPairs.apply(plan, names, *tensors, *values)  # type: ignore[no-untyped-call]
            sums, counts = sums + more, counts + number
    plain = Row({name: value.detach() for name, value in row.statistics.items()}, row.temperature)
    return Streamed(reduce_sums(sums[:, 0], counts[:, 0], reduction), plain)


def check_streamable(negatives: Negatives) -> None:
    """Raises, by name, for a factor that needs whole rows."""
    for factor in negatives.factors:
        if not factor.pointwise:
            raise not_pointwise(factor, "a streamed loss (impl='streamed')")
