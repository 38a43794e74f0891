"""The interface of candidate generators, which synthesise candidates that are not in the data.

A loss calls its generator before scores and weights are computed. ``Generator`` is the base class; ``hardest`` finds
the closest negatives to synthesise from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from hardneg.core.pairing import Pairing
from hardneg.core.schedules import short_repr
from hardneg.core.tiles import NEVER
from hardneg.core.types import Keys, Tags
from hardneg.core.views import batch_ids

GeneratedVectors = Annotated[Tensor, "b k d"] | tuple[Annotated[Tensor, "b k d"], Annotated[Tensor, "b k"]]
"""Vectors, or vectors and a mask of the real ones."""
_registry: dict[str, type[Generator]] = {}


class Generator(ABC):
    """A method that synthesises private candidates; the base class of all generators.

    Subclasses are frozen dataclasses that implement ``make(pairing, step)``. Defining one registers it for the grammar
    by its ``name``. The new candidates have the source "synthetic", and an id, label and cluster that equal no other.

    Random draws must depend only on ``step``, which counts the calls of the loss, and on a seed; never on global state.
    """

    name: ClassVar[str]
    examples: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__dict__.get("name", cls.__name__)
        _registry[cls.name] = cls

    @abstractmethod
    def make(self, pairing: Pairing, step: int) -> GeneratedVectors:
        """Return the synthetic candidates of each anchor.

        Args:
            pairing: Anchors and candidates that are not compared yet.
            step: Number of earlier calls of the loss.

        Returns:
            Vectors [b, k, d], or vectors and a mask [b, k] that is False for anchors without negatives to synthesise
            from.
        """

    def __call__(self, pairing: Pairing, step: int) -> Pairing:
        """Return the pairing with the synthetic candidates added."""
        made = self.make(pairing, step)
        vectors, real = made if isinstance(made, tuple) else (made, None)
        ids = None
        if real is not None and not bool(real.all()):
            pairing = _numbered(pairing)
            assert pairing.anchors.ids is not None
            ids = torch.where(real, -1, pairing.anchors.ids[:, None])  # padding gets the anchor's id: never a negative
        anchors, nobody = pairing.anchors, torch.iinfo(torch.int64).min  # a label and cluster that no data set has
        tags = Tags(None, anchors.labels, anchors.clusters).mapped(
            lambda tag: torch.full((*vectors.shape[:2], *tag.shape[1:]), nobody, device=vectors.device)
        )
        synthetic = Keys(vectors, ids, tags.labels, tags.clusters, source="synthetic")
        return pairing.changed(candidates=(*pairing.candidates, synthetic))

    def __repr__(self) -> str:
        return short_repr(self).replace(type(self).__name__, self.name, 1)


def _numbered(pairing: Pairing) -> Pairing:
    """Return the pairing with an id for every anchor; anchors without one get a number that no data set has."""
    anchors = pairing.anchors
    nobody = torch.full((len(anchors),), -1, device=anchors.vectors.device)
    ids = batch_ids(anchors.vectors, nobody if anchors.ids is None else anchors.ids)
    return pairing.changed(anchors=anchors.changed(ids=ids), ids_given=pairing.ids_given and anchors.ids is not None)


def registered_generators() -> dict[str, type[Generator]]:
    """Return every generator that the grammar accepts, by name."""
    return dict(_registry)


@torch.no_grad()
def hardest(pairing: Pairing, num: int) -> tuple[Annotated[Tensor, "b k d"], Tensor]:
    """Find the closest valid candidates of each anchor, without gradient and in tiles.

    Args:
        pairing: Anchors and candidates.
        num: Number of candidates per anchor; fewer if there are fewer candidates.

    Returns:
        Their vectors, [b, k, d], and a mask [b, k] of the real ones.
    """
    best: list[Tensor] = []  # values and columns
    for cut in pairing.cuts(columns=4096):
        tile, valid, _ = pairing.tile(slice(0, len(pairing)), cut)
        found = [torch.where(valid, tile.s, NEVER), tile.column.expand(tile.s.shape)]
        if best:
            found = [torch.cat(both, dim=1) for both in zip(best, found, strict=True)]
        value, place = found[0].topk(min(num, found[0].shape[1]), dim=1)
        best = [value, found[1].gather(1, place)]
    return _take(pairing, best[1]), best[0] != NEVER


def picked(hard: Annotated[Tensor, "b n d"], index: Annotated[Tensor, "b k"]) -> Annotated[Tensor, "b k d"]:
    """Return vectors of ``hardest`` by their places, [b, k, d].

    Args:
        hard: Vectors of each anchor, [b, n, d].
        index: Places of the vectors, [b, k]; those beyond the last one mean the last one.
    """
    return hard.gather(1, index.clamp(max=hard.shape[1] - 1)[:, :, None].expand(-1, -1, hard.shape[2]))


def _take(pairing: Pairing, index: Annotated[Tensor, "b k"]) -> Annotated[Tensor, "b k d"]:
    """Return the vectors of candidates by their column, [b, k, d]."""
    vectors = pairing.anchors.vectors.new_zeros(*index.shape, pairing.anchors.dim)
    offset = 0
    for keys in pairing.candidates:
        inside = (index >= offset) & (index < offset + len(keys))
        row, slot = inside.nonzero().unbind(1)
        place = index[row, slot] - offset
        vectors[row, slot] = (keys.vectors[row, place] if keys.private else keys.vectors[place]).to(vectors)
        offset += len(keys)
    return vectors
