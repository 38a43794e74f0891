"""The streamed loss of a pairing without a ContrastiveLoss, in tiles of a given size."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hardneg.core.objectives import Objective, Row
from hardneg.core.pairing import Pairing
from hardneg.core.tensors import without_autocast
from hardneg.core.views import check_parts
from hardneg.kernels.engine import Tiles
from hardneg.negatives import Negatives


class Streamed(NamedTuple):
    """A loss and the statistics that it was made of."""

    loss: Tensor
    row: Row


def streamed(
    pairing: Pairing,
    negatives: Negatives,
    objective: Objective,
    reduction: str = "anchors",
    tile: tuple[int, int] | None = None,
) -> Streamed:
    check_parts(pairing)
    with without_autocast(pairing.anchors.vectors.device):
        found = Tiles(tile).rows(pairing, negatives, objective)
        return Streamed(found.loss(objective, reduction), found.row)
