"""Builders of pairings: views of a batch (SimCLR, SimCSE), pools of candidates (MoCo), and the options of a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, check_kind
from hardneg.core.pairing import Pairing
from hardneg.core.tensors import constant
from hardneg.core.types import Keys, Tags

NUMBERED = 2**62
"""From here on, ids are numbers of rows that have no id of their own: no data set has so many."""


class HasKeys(Protocol):
    """A queue, a bank: anything that gives its candidates as Keys."""

    def keys(self) -> Keys: ...


Pool = Keys | HasKeys | Tensor
Pools = Pool | Sequence[Pool]


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
    ids = tags.ids if given else constant(_numbers, rows, number, device=views[0].device)
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
        return constant(torch.arange, rows, device=z.device)
    if ids.shape != (rows,):  # Keys refuses them
        return ids
    return torch.where(ids < 0, constant(torch.arange, NUMBERED, NUMBERED + rows, device=z.device), ids)


def check_views(who: str, views: Sequence[Tensor]) -> None:
    shapes = [view.shape for view in views]
    if len(shapes) < 2 or len(shapes[0]) != 2 or any(shape != shapes[0] for shape in shapes):
        named = " and ".join(f"z{i + 1}={tuple(shape)}" for i, shape in enumerate(shapes))
        raise ArgumentError(who, "two views of the same shape [b, d]", named or "none")


def pair_pool(
    anchors: Keys | Tensor,
    positives: Keys | Tensor,
    pool: Pools,
    temperature: float | Tensor,
    positive_mask: Tensor | None = None,
    **options: Any,
) -> Pairing:
    """Anchors against a pool, not yet compared; ``options`` are fields of the pairing."""
    anchors = anchors if isinstance(anchors, Keys) else Keys(anchors)
    own = positives if isinstance(positives, Keys) else Keys(positives)
    return Pairing(anchors, own, tuple(as_keys(pool)), temperature, positive_mask, **options)


def as_keys(pool: Pools, match_ids: bool = True) -> list[Keys]:
    """The candidates of one or several pools; without ``match_ids``, their ids match nothing."""
    if isinstance(pool, (list, tuple)):
        return [keys for part in pool for keys in as_keys(part, match_ids)]
    if isinstance(pool, Tensor) or not (isinstance(pool, Keys) or hasattr(pool, "keys")):
        return [Keys(pool)]
    keys = pool if isinstance(pool, Keys) else pool.keys()  # type: ignore[union-attr]
    return [keys if match_ids else keys.changed(ids=None)]


Guides = Sequence[Any]
"""Another model's views in the order of the views, and with a pool its vectors of that, a tensor for each part."""


@dataclass(frozen=True)
class ViewOptions:
    """How the views of a batch are compared; the options are those of ContrastiveLoss."""

    kind: str = "two"
    positives: str = "view"
    same_label_negatives: bool = False
    normalize: bool = True
    detach_keys: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("views", self.kind, ("two", "cross", "pool")),
            ("positives", self.positives, ("view", "label")),
        ):
            if value not in known:
                raise argument_error("ContrastiveLoss", f"{name} in {known}", name, value)
        check_kind("ContrastiveLoss", "same_label_negatives", self.same_label_negatives, bool, "True or False")
        if self.same_label_negatives and self.positives != "label":
            what = "positives='label' for same_label_negatives"
            raise argument_error("ContrastiveLoss", what, "positives", self.positives)

    def pairing(
        self,
        views: Sequence[Annotated[Tensor, "b d"]],
        temperature: float | Tensor,
        ids: Tensor | None,
        labels: Tensor | None,
        pool: Pools | None,
        clusters: Tensor | None,
        guide: Guides | None,
    ) -> Pairing:
        if self.kind == "pool" and pool is None:
            raise ArgumentError("ContrastiveLoss", "a pool of candidates", "pool=None", "pass pool=queue")
        if isinstance(temperature, Tensor) and temperature.ndim == 1 and len(temperature) == len(views[0]) > 1:
            temperature = temperature[:, None]
        if len(views) != 2 and (self.kind != "two" or pool is not None):
            raise ArgumentError("ContrastiveLoss", "two views for views='cross' or a pool", f"{len(views)} views")
        parts = None if pool is None else as_keys(pool)
        by_label = {"label_positives": self.positives == "label", "same_label_negatives": self.same_label_negatives}
        made = self._of(views, temperature, Tags(ids, labels, clusters), parts, **by_label)
        if guide is not None:
            pools = None if parts is None else [Keys(vectors) for vectors in _listed(guide[len(views) :])]
            made = made.guided(self._of(guide[: len(views)], 1.0, Tags(ids), pools))
        return made

    def _of(
        self,
        views: Sequence[Annotated[Tensor, "b d"]],
        temperature: float | Tensor,
        tags: Tags,
        parts: list[Keys] | None,
        **options: Any,
    ) -> Pairing:
        options["normalize"] = self.normalize
        first, *others = views
        if self.detach_keys:
            others = [view.detach() for view in others]
        if parts is not None:
            anchors = Keys(first, tags.ids, tags.labels, tags.clusters)
            return pair_pool(anchors, others[0], parts, temperature, **options)
        if self.kind == "two":
            return pair_views([first, *others], temperature, tags, **options)
        return pair_cross(first, others[0], temperature, tags, **options)


def _listed(pools: Sequence[Any]) -> list[Tensor]:
    return [vectors for pool in pools for vectors in (pool if isinstance(pool, (list, tuple)) else [pool])]
