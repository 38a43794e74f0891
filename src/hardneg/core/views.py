"""Builders of pairings: views of a batch (SimCLR, SimCSE) and pools of candidates (MoCo); and the checks of pairings.

``pair_views``, ``pair_cross`` and ``pair_pool`` build a ``Pairing``, with ids for every row of a batch. The public
functions of ``hardneg.core.scoring`` call them for dense scores; ``ViewOptions`` calls them with the options of
``ContrastiveLoss``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, NotFinite, argument_error, check_kind
from hardneg.core.pairing import Pairing
from hardneg.core.tensors import constant
from hardneg.core.types import Keys, Tags

NUMBERED = 2**62
"""First of the ids assigned to rows that have no id; larger than the ids of any data set."""


class HasKeys(Protocol):
    """A queue, a bank, or any other object that provides candidates as Keys."""

    def keys(self) -> Keys:
        """Return the current candidates."""
        ...


Views = Literal["two", "cross", "pool"]
"""How the views of a batch are compared."""
PositivesBy = Literal["view", "label"]
"""What makes a candidate a positive, besides the other views of the instance."""
Pool = Keys | HasKeys | Tensor
"""One pool of candidates."""
Pools = Pool | Sequence[Pool]
"""One or several pools of candidates."""


def pair_views(
    views: Sequence[Annotated[Tensor, "b d"]],
    temperature: float | Tensor,
    tags: Tags = Tags(),
    extra: Sequence[Keys] = (),
    **options: Any,
) -> Pairing:
    """Pair two or more views of a batch: the other views of a row are its positives.

    All rows of all views are anchors and candidates.

    Args:
        views: v views, [b, d] each.
        temperature: Number or tensor; [b, 1] is repeated for each view.
        tags: Ids, labels and clusters of the instances, [b].
        extra: More candidates.
        options: Other fields of the pairing.

    Returns:
        A pairing of v b anchors.
    """
    check_views("two_views", views)
    number, given, rows = len(views), tags.ids is not None, views[0].shape[0]
    if given or tags.labels is not None or tags.clusters is not None or not views[0].is_floating_point():
        one = Keys(views[0], tags.ids, tags.labels, tags.clusters)  # checked here, so errors show the caller's shapes
        tags = Tags(batch_ids(views[0], one.ids) if given else None, one.labels, one.clusters)
        tags = tags.mapped(lambda tag: torch.cat([tag] * number))
    ids = tags.ids if given else constant(_numbers, rows, number, device=views[0].device)
    batch = Keys(torch.cat(list(views)), ids, tags.labels, tags.clusters, source="batch")
    if isinstance(temperature, Tensor) and temperature.shape == (rows, 1):
        temperature = temperature.repeat(number, 1)  # every view has the temperature of its instance
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
    """Pair one view with the other: anchors ``z1``, candidates ``z2``, and the positive of row i is row i.

    Args:
        z1: Vectors of the anchors, [b, d].
        z2: Vectors of the candidates, [b, d].
        temperature: Number or tensor, [] or [b, 1].
        tags: Ids, labels and clusters of the instances, [b].
        extra: More candidates.
        options: Other fields of the pairing.
    """
    check_views("cross_views", [z1, z2])
    anchors = Keys(z1, batch_ids(z1, tags.ids), tags.labels, tags.clusters)
    pools, given = (anchors.changed(vectors=z2, source="batch"), *extra), tags.ids is not None
    return Pairing(anchors, Keys(z2[:, None]), pools, temperature, ids_given=given, num_views=1, **options)


def _numbers(rows: int, number: int, device: torch.device) -> Tensor:
    """Number the rows of each view: 0, 1, 2, ..., repeated for every view."""
    return torch.arange(rows, device=device).repeat(number)


def batch_ids(z: Tensor, ids: Tensor | None) -> Tensor:
    """Return an id for every row of a batch.

    Rows are numbered if there are no ids; ``as_keys(match_ids=False)`` keeps these numbers apart from the ids of any
    pool. A row with a negative id matches no other row but must still match itself, so it gets a unique id from
    ``NUMBERED`` on.

    Args:
        z: Vectors of the batch, [b, d].
        ids: Ids of the caller, [b], or None.
    """
    rows = z.shape[0]
    if ids is None:
        return constant(torch.arange, rows, device=z.device)
    if ids.shape != (rows,):  # Keys raises the error
        return ids
    return torch.where(ids < 0, constant(torch.arange, NUMBERED, NUMBERED + rows, device=z.device), ids)


def check_views(who: str, views: Sequence[Tensor]) -> None:
    """Raise ArgumentError unless there are at least two views of the same shape [b, d]."""
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
    """Pair anchors with a pool of candidates.

    Args:
        anchors: Keys or vectors, [b, d].
        positives: Keys or vectors, [b, d] or [b, p, d].
        pool: One or several pools, [n, d] or [b, k, d].
        temperature: Number or tensor, [] or [b, 1].
        positive_mask: True for real positives, [b, p].
        options: Other fields of the pairing.
    """
    anchors = anchors if isinstance(anchors, Keys) else Keys(anchors)
    own = positives if isinstance(positives, Keys) else Keys(positives)
    return Pairing(anchors, own, tuple(as_keys(pool)), temperature, positive_mask, **options)


def as_keys(pool: Pools, match_ids: bool = True) -> list[Keys]:
    """Return the candidates of one or several pools as a list of Keys.

    Args:
        pool: Keys, a tensor, an object with ``keys()``, or a list of these.
        match_ids: False drops the ids, so that they match nothing.
    """
    if isinstance(pool, (list, tuple)):
        return [keys for part in pool for keys in as_keys(part, match_ids)]
    if isinstance(pool, Tensor) or not (isinstance(pool, Keys) or hasattr(pool, "keys")):
        return [Keys(pool)]
    keys = pool if isinstance(pool, Keys) else pool.keys()  # type: ignore[union-attr]
    return [keys if match_ids else keys.changed(ids=None)]


Guides = Sequence[Any]
"""A second model's vectors: its views in the same order and, with a pool, one tensor for each part of the pool."""


@dataclass(frozen=True)
class ViewOptions:
    """The options of ContrastiveLoss that determine how the views of a batch are compared.

    Attributes:
        kind: ``"two"`` (all views against all), ``"cross"`` (one view against the other) or ``"pool"``.
        positives: ``"view"``, or ``"label"`` to make candidates with the anchor's label positives too.
        same_label_negatives: With ``positives="label"``, keep those candidates among the negatives as well.
        normalize: Scale vectors to unit norm.
        detach_keys: Stop the gradient through all views but the first.
    """

    kind: Views = "two"
    positives: PositivesBy = "view"
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
        """Build the pairing of a batch.

        Args:
            views: The views, [b, d] each.
            temperature: Number or tensor, [], [b] or [b, 1].
            ids: Ids of the instances, [b], or None.
            labels: Labels of the instances, [b], or None.
            pool: Candidates, required for ``kind="pool"``.
            clusters: Clusters of the instances, [b] or [b, r], or None.
            guide: The same views, and vectors of the pool, under a second model.

        Raises:
            ArgumentError: If the pool is missing, or the number of views does not fit.
        """
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


_checking = False  # inside ``checks()``


@contextmanager
def checks(enabled: bool = True) -> Iterator[None]:
    """Check input vectors in the block: raise if they are not finite or not of unit norm.

    This costs one synchronisation per call on a GPU, so it is off by default.

    Args:
        enabled: False switches checks off inside an outer block.

    Example:
        >>> import torch
        >>> from hardneg import two_views
        >>> with checks():
        ...     two_views(torch.ones(2, 4), torch.ones(2, 4), temperature=0.5)
        Traceback (most recent call last):
        ...
        hardneg.core.errors.ArgumentError: score needs unit vectors, got norms from 2 to 2; use ...
    """
    global _checking
    before, _checking = _checking, enabled
    try:
        yield
    finally:
        _checking = before


def check_parts(pairing: Pairing, who: str = "score") -> None:
    """Raise ArgumentError unless the shapes of anchors, positives and candidates fit together.

    Args:
        pairing: The pairing.
        who: The function or class that the user called, for the error.
    """
    anchors, pool = pairing.anchors, pairing.candidates
    if anchors.private:
        raise ArgumentError(who, "anchors [b, d]", f"vectors={tuple(anchors.vectors.shape)}")
    if not len(anchors):
        raise ArgumentError(who, "at least one anchor", f"vectors={tuple(anchors.vectors.shape)}")
    check_temperature(who, pairing.temperature, len(anchors))
    own = pairing.positives.vectors
    if own.shape[0] != len(anchors):
        raise ArgumentError(who, f"positives of {len(anchors)} anchors", f"positives={tuple(own.shape)}")
    mask, pairs = pairing.positive_mask, (len(anchors), own.shape[1] if pairing.positives.private else 1)
    if mask is not None and (mask.shape != pairs or mask.dtype != torch.bool):
        got = f"positive_mask={tuple(mask.shape)} of {mask.dtype}"
        raise ArgumentError(who, f"a bool positive_mask {pairs}", got)
    if not pool:
        raise ArgumentError(who, "at least one pool of candidates", "pool=()")
    for name, keys in [("positives", pairing.positives), *(("candidates", keys) for keys in pool)]:
        if keys.dim != anchors.dim:
            what = f"vectors of {anchors.dim} features, as the anchors have"
            raise ArgumentError(who, what, f"{name}={tuple(keys.vectors.shape)}")
    for keys in pool:
        if keys.private and keys.vectors.shape[0] != len(anchors):
            what = f"private candidates of {len(anchors)} anchors"
            raise ArgumentError(who, what, f"candidates={tuple(keys.vectors.shape)}")
    if _checking and not torch.compiler.is_compiling():
        ready = pairing.prepared()
        for keys in [ready.anchors, ready.positives, *ready.candidates]:
            check_vectors(keys.vectors)
    if pairing.guide is not None:
        check_parts(pairing.guide, who)


def check_temperature(who: str, temperature: float | Tensor, rows: int | None = None) -> None:
    """Raise ArgumentError unless every temperature is positive.

    Args:
        who: Name of the caller.
        temperature: Number or tensor. The values of a tensor on a GPU are read only inside ``checks()``.
        rows: Number of anchors, to check the shape of a tensor.
    """
    if isinstance(temperature, Tensor):
        if temperature.ndim and rows is not None and temperature.shape not in ((1,), (rows, 1)):
            what = f"a temperature of shape [] or [{rows}, 1], one per anchor"
            raise ArgumentError(who, what, f"temperature={tuple(temperature.shape)}", "use temperature[:, None]")
        if torch.compiler.is_compiling() or (temperature.is_cuda and not _checking):
            return
        if bool((temperature.detach() > 0).all()):
            return
        fix = "learn its logarithm, and pass temperature=log_t.exp() at each call"
        lowest = float(temperature.detach().min())
        raise argument_error(who, "a temperature above 0", "temperature", lowest, fix)
    if temperature is None or isinstance(temperature, (bool, str)):
        raise argument_error(who, "a temperature that is a number, tensor or schedule", "temperature", temperature)
    if not 0 < temperature < math.inf:
        raise argument_error(who, "a temperature above 0", "temperature", temperature)


def check_vectors(vectors: Tensor) -> None:
    """Raise for vectors that are not finite (NotFinite) or not of unit norm within 1 % (ArgumentError)."""
    if not vectors.numel():
        return
    if not bool(torch.isfinite(vectors).all()):
        raise NotFinite("score", "finite vectors", "NaN or inf", "check the encoder's output before the loss")
    norms = vectors.detach().norm(dim=-1)
    low, high = norms.min().item(), norms.max().item()
    if max(abs(low - 1.0), abs(high - 1.0)) > 1e-2:
        got = f"norms from {low:.4g} to {high:.4g}"
        raise ArgumentError("score", "unit vectors", got, "use torch.nn.functional.normalize(vectors, dim=-1)")
