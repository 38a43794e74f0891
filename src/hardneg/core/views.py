"""Views of a batch as pairings: SimCLR's, with any number of views, and one view against the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

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
) -> Pairing:
    """All views are anchors and candidates; every other view of the same row is a positive."""
    check_views("two_views", views)
    number, given = len(views), tags.ids is not None
    one = Keys(views[0], tags.ids, tags.labels, tags.clusters)  # an error about its tags has the numbers of the caller
    ids = batch_ids(views[0], one.ids) if given else None
    every = Tags(ids, one.labels, one.clusters).mapped(lambda tag: torch.cat([tag] * number))
    numbers = every.ids if given else kept(_numbers, len(views[0]), number, device=views[0].device)
    batch = Keys(torch.cat(list(views)), numbers, every.labels, every.clusters, source="batch")
    if isinstance(temperature, Tensor) and temperature.shape == (len(views[0]), 1):
        temperature = temperature.repeat(number, 1)  # that of an instance is that of each of its views
    return Pairing(batch, Keys(batch.vectors), (batch, *extra), temperature, ids_given=given, num_views=number)


def pair_cross(
    z1: Annotated[Tensor, "b d"],
    z2: Annotated[Tensor, "b d"],
    temperature: float | Tensor,
    tags: Tags = Tags(),
    extra: Sequence[Keys] = (),
) -> Pairing:
    """One view against the other."""
    check_views("cross_views", [z1, z2])
    anchors = Keys(z1, batch_ids(z1, tags.ids), tags.labels, tags.clusters)
    pools, given = (anchors.changed(vectors=z2, source="batch"), *extra), tags.ids is not None
    return Pairing(anchors, Keys(z2[:, None]), pools, temperature, ids_given=given, num_views=1)


def _numbers(rows: int, number: int, device: torch.device) -> Tensor:
    """0, 1, 2 ... for the rows of each view."""
    return torch.arange(rows, device=device).repeat(number)


def batch_ids(z: Tensor, ids: Tensor | None) -> Tensor:
    """An id for every row: without ids the rows are numbered, and kept apart from the ids of any pool by match_ids.

    A row with a negative id equals no other row, but it equals itself: it gets a number that no data set has.
    """
    rows = kept(torch.arange, z.shape[0], device=z.device)
    if ids is None:
        return rows
    return torch.where(ids < 0, rows | NUMBERED, ids) if ids.shape == rows.shape else ids  # Keys refuses other shapes


def check_views(who: str, views: Sequence[Tensor]) -> None:
    shapes = [tuple(view.shape) for view in views]
    if len(views) < 2 or views[0].ndim != 2 or len(set(shapes)) > 1:
        named = " and ".join(f"z{i + 1}={shape}" for i, shape in enumerate(shapes))
        raise ArgumentError(who, "two views of the same shape [b, d]", named or "none")
