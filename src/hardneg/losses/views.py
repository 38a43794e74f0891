"""Views, pools and guides as a pairing: who meets whom in a ContrastiveLoss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, check_kind
from hardneg.core.pairing import Pairing
from hardneg.core.scoring import Pools, as_keys, pair_pool
from hardneg.core.types import Keys, Tags
from hardneg.core.views import pair_cross, pair_views
from hardneg.kernels.leaves import is_per_anchor, tensor_fields

View = Annotated[Tensor, "b d"]
Guides = Sequence[Any]
"""Another model's views in the order of the views, and with a pool its vectors of that, a tensor for each part."""


@dataclass(frozen=True)
class Views:
    """How the views of a batch meet; the options are those of ContrastiveLoss."""

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
        views: Sequence[View],
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
        self, views: Sequence[View], temperature: float | Tensor, tags: Tags, parts: list[Keys] | None, **options: Any
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


def check_per_anchor(holders: Iterable[Any], instances: int, anchors: int) -> None:
    """Raises where a field has a number for each instance and each view of one is an anchor."""
    if instances == anchors or instances == 1:
        return
    for holder in holders:
        for name, tensor in tensor_fields(holder).items():
            if is_per_anchor(tensor, name, instances):
                what = f"a number for each of the {anchors} anchors, which are the views one after the other"
                fix = f"use torch.cat([{name}] * {anchors // instances})"
                raise ArgumentError("ContrastiveLoss", what, f"{name}={tuple(tensor.shape)}", fix)


def _listed(pools: Sequence[Any]) -> list[Tensor]:
    return [vectors for pool in pools for vectors in (pool if isinstance(pool, (list, tuple)) else [pool])]
