"""Views of a batch as pairings: SimCLR's, with any number of views, and one view against the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.core.constants import kept
from hardneg.core.errors import ArgumentError
from hardneg.core.pairing import Pairing
from hardneg.core.types import Keys, Tags

NUMBERED = 2**62
"""From here on, ids are numbers of rows that have no id of their own: no data set has so many."""


def pair_views(
    views: Sequence[Annotated[Tensor, "b d"]],
    temperature: float | Tensor,
    tags: Tags = Tags(),
    extra: Sequence[Keys] = (),
    **options: Any,
) -> Pairing:
    """All views are anchors and candidates; every other view of the same row is a positive.

    ``options`` are fields of the pairing.
    """
    check_views("two_views", views)
    number, given, rows = len(views), tags.ids is not None, views[0].shape[0]
    if given or tags.labels is not None or tags.clusters is not None or not views[0].is_floating_point():
        one = Keys(views[0], tags.ids, tags.labels, tags.clusters)  # an error about them has the numbers of the caller
        tags = Tags(batch_ids(views[0], one.ids) if given else None, one.labels, one.clusters)
        tags = tags.mapped(lambda tag: torch.cat([tag] * number))
    ids = tags.ids if given else kept(_numbers, rows, number, device=views[0].device)
    batch = Keys(torch.cat(list(views)), ids, tags.labels, tags.clusters, source="batch")
    if isinstance(temperature, Tensor) and temperature.shape == (rows, 1):
        temperature = temperature.repeat(number, 1)  # that of an instance is that of each of its views
    own = Keys(batch.vectors)
    return Pairing(batch, own, (batch, *extra), temperature, ids_given=given, num_views=number, **options)


def pair_cross(
    z1: Annotated[Tensor, "b d"],
    z2: Annotated[Tensor, "b d"],
    temperature: float | Tensor,
    tags: Tags = Tags(),
    extra: Sequence[Keys] = (),
    **options: Any,
) -> Pairing:
    """One view against the other; ``options`` are fields of the pairing."""
    check_views("cross_views", [z1, z2])
    anchors = Keys(z1, batch_ids(z1, tags.ids), tags.labels, tags.clusters)
    pools, given = (anchors.changed(vectors=z2, source="batch"), *extra), tags.ids is not None
    return Pairing(anchors, Keys(z2[:, None]), pools, temperature, ids_given=given, num_views=1, **options)


def _numbers(rows: int, number: int, device: torch.device) -> Tensor:
    """0, 1, 2 ... for the rows of each view."""
    return torch.arange(rows, device=device).repeat(number)


def batch_ids(z: Tensor, ids: Tensor | None) -> Tensor:
    """An id for every row: without ids the rows are numbered, and kept apart from the ids of any pool by match_ids.

    A row with a negative id equals no other row, but it equals itself: it gets a number that no data set has.
    """
    rows = z.shape[0]
    if ids is None:
        return kept(torch.arange, rows, device=z.device)
    if ids.shape != (rows,):  # Keys refuses them
        return ids
    return torch.where(ids < 0, kept(torch.arange, NUMBERED, NUMBERED + rows, device=z.device), ids)


def check_views(who: str, views: Sequence[Tensor]) -> None:
    shapes = [view.shape for view in views]
    if len(shapes) < 2 or len(shapes[0]) != 2 or any(shape != shapes[0] for shape in shapes):
        named = " and ".join(f"z{i + 1}={tuple(shape)}" for i, shape in enumerate(shapes))
        raise ArgumentError(who, "two views of the same shape [b, d]", named or "none")
