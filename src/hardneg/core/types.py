"""The vocabulary: keys (vectors with ids), scores, and log-weights.

Shape letters, used in every signature and checked in the tests:

    b anchors    p positives of an anchor    n candidates    d features
    k private candidates or draws            r clusterings

A shape like ``"b|1 n"`` means that the first axis is b, or 1 where all anchors share the candidates.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.core.tensors import constant
from hardneg.core.tiles import NEVER as NEVER
from hardneg.core.tiles import Tags as Tags
from hardneg.core.tiles import Tile
from hardneg.core.tiles import other_id as other_id

Names = NDArray[np.object_]
Given = Tensor | NDArray[Any] | Sequence[Any] | None
PerAnchor = Annotated[Tensor, "b"]
View = Annotated[Tensor, "b d"]
LogWeights = Annotated[Tensor, "b n"]
PairLosses = Annotated[Tensor, "b p"]


def with_support(log_w: LogWeights) -> tuple[Annotated[Tensor, "b 1"], LogWeights]:
    """Which rows have a negative, and the weights with zeros in the other rows, where a softmax would be NaN."""
    none = (log_w == NEVER).all(-1, keepdim=True)
    return ~none, log_w.masked_fill(none, 0.0)


AnyKeys = Annotated[Tensor, "n d | b k d"]


@dataclass(frozen=True, eq=False)
class Keys:
    """Vectors with their ids: the anchors, or candidates from anywhere.

    ``vectors`` is [n, d], or [b, k, d] for candidates private to each anchor. ``ids=None`` means distinct rows that
    match nothing anywhere; the same id means the same instance, which is never its own negative. Arrays and lists are
    taken as tensors. Ids that are texts become numbers, the same for the same text; ``names`` keeps the texts.

    >>> import torch
    >>> keys = Keys(torch.eye(3), ids=torch.tensor([7, 8, 9]), source="queue")
    >>> len(keys), keys.dim
    (3, 3)
    """

    vectors: AnyKeys
    ids: Tensor | None = None
    labels: Tensor | None = None
    clusters: Tensor | None = None
    source: str | None = None
    names: Names | None = field(default=None, init=False, repr=False)

    if TYPE_CHECKING:  # what is given may be an array or a list; what is kept is a tensor

        def __init__(
            self, vectors: Given, ids: Given = ..., labels: Given = ..., clusters: Given = ..., source: str | None = ...
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.vectors, Tensor):
            object.__setattr__(self, "vectors", as_vectors(self.vectors))
        if self.vectors.ndim not in (2, 3) or not self.vectors.is_floating_point():
            got = f"vectors={tuple(self.vectors.shape)} of {self.vectors.dtype}"
            raise ArgumentError("Keys", "floating point vectors [n, d] or [b, k, d]", got)
        rows = self.vectors.shape[:-1]
        for name in ("ids", "labels", "clusters"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, Tensor):
                value, texts = as_numbers(name, value)
                object.__setattr__(self, name, value.to(self.vectors.device))
                if name == "ids":
                    object.__setattr__(self, "names", texts)
            if (value.shape[: len(rows)] if name == "clusters" else value.shape) != rows:
                what = f"one of {name} per vector, shape {tuple(rows)}"
                raise ArgumentError("Keys", what, f"{name}={tuple(value.shape)}")
            if value.is_floating_point():
                got = f"{name} of {value.dtype}"
                raise ArgumentError("Keys", f"whole numbers as {name}", got, f"use {name}.long()")

    def changed(self, **changes: Any) -> Keys:
        """A copy with some fields changed; dataclasses.replace, which torch 2.6 does not compile."""
        return Keys(**{name: changes.get(name, getattr(self, name)) for name in _fields_of_keys})

    def __len__(self) -> int:
        return self.vectors.shape[-2]

    @property
    def dim(self) -> int:
        return self.vectors.shape[-1]

    @property
    def private(self) -> bool:
        """Whether each anchor has its own candidates."""
        return self.vectors.ndim == 3

    @property
    def tags(self) -> Tags:
        return Tags(self.ids, self.labels, self.clusters)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Keys:
        """The vectors and each tag that there is, changed."""
        tags = self.tags.mapped(change)
        return Keys(change(self.vectors), tags.ids, tags.labels, tags.clusters, self.source)


@dataclass(frozen=True, eq=False)
class Guide:
    """The plain similarities of the same pairs under another model, which judges who is a false negative."""

    positives: Annotated[Tensor, "b p"]
    candidates: Annotated[Tensor, "b n"]


@dataclass(frozen=True, eq=False)
class Scores:
    """Similarity / temperature of each anchor with its positives and its candidates; higher is closer.

    ``valid`` says which candidates may be negatives at all. A distribution gives log-weights over the valid ones.
    """

    positives: Annotated[Tensor, "b p"]
    candidates: Annotated[Tensor, "b n"]
    positive_valid: Annotated[Tensor, "b p"]
    valid: Annotated[Tensor, "b n"]
    temperature: float | Tensor
    anchor_tags: Tags
    candidate_tags: Tags  # its tensors are [b|1, n] or, for clusters, [b|1, n, r]
    source: Annotated[Tensor, "n"]  # index into source_names; [b, n] where each row has a list of its own
    source_names: tuple[str, ...]
    guide: Guide | None = None
    ids_given: bool = True  # False: rows were numbered to distinguish them; the numbers mean nothing outside the batch

    def changed(self, **changes: Any) -> Scores:
        """A copy with some fields changed; dataclasses.replace, which torch 2.6 does not compile."""
        return Scores(**{name: changes.get(name, getattr(self, name)) for name in _fields_of_scores})

    def narrowed(self, mask: Annotated[Tensor, "b|1 n"]) -> Scores:
        """The same scores with fewer candidates."""
        return self.changed(valid=self.valid & mask)

    def guided(self, other: Scores) -> Scores:
        """With the similarities of another model as a second channel: the same call with that model's vectors."""
        mine, theirs = ((tuple(one.candidates.shape), tuple(one.positives.shape)) for one in (self, other))
        if mine != theirs:
            what = f"scores of the same pairs, {mine[0]} candidates and {mine[1]} positives"
            raise ArgumentError("guided", what, f"{theirs[0]} and {theirs[1]}")
        plain = ((each * other.temperature).detach() for each in (other.positives, other.candidates))
        return self.changed(guide=Guide(*plain))

    def tempered(self, similarity: Any) -> Tensor:
        """A plain similarity on the scale of the scores, divided exactly as they were."""
        return self.tile().tempered(similarity)

    def num_valid(self) -> Annotated[Tensor, "b"]:
        return self.valid.sum(-1)

    def other_instance(self) -> Annotated[Tensor, "b n"]:
        """True where a candidate does not carry the anchor's id."""
        return self.tile().other_instance().expand_as(self.valid)

    def same_label(self, who: str) -> Annotated[Tensor, "b n"]:
        return self.tile().same_label(who).expand_as(self.valid)

    def same_cluster(self, who: str) -> Annotated[Tensor, "b n"]:
        """True where anchor and candidate share a cluster in at least one of the clusterings."""
        return self.tile().same_cluster(who).expand_as(self.valid)

    def of_source(self, who: str, source: str) -> Annotated[Tensor, "n"]:
        return self.tile().of_source(who, source)

    def tile(self) -> Tile:
        """All candidates as one tile."""
        return Tile(
            self.candidates,
            self.temperature,
            self.anchor_tags,
            self.candidate_tags,
            constant(torch.arange, self.candidates.shape[1], device=self.candidates.device),
            self.source,
            self.source_names,
            None if self.guide is None else self.guide.candidates,
            self.ids_given,
        )

    def positive_tile(self) -> Tile:
        """The positives as a tile of candidates of which only the scores are known."""
        column = constant(torch.arange, self.positives.shape[1], device=self.positives.device)
        guide = None if self.guide is None else self.guide.positives
        return Tile(self.positives, self.temperature, self.anchor_tags, Tags(), column, guide=guide)

    def take(self, index: Annotated[Tensor, "b k"]) -> Scores:
        """The drawn candidates only, one row of indices per anchor; -1 takes nothing.

        A candidate drawn twice counts twice.
        """
        slot = index.clamp(min=0)

        def pick(pairs: Tensor) -> Tensor:
            if not pairs.shape[1]:  # no column to point at
                return pairs.new_zeros(*index.shape, *pairs.shape[2:])
            at = slot if pairs.ndim == 2 else slot[:, :, None].expand(-1, -1, pairs.shape[2])
            return pairs.expand(len(index), *pairs.shape[1:]).gather(1, at)

        return self.changed(
            candidates=pick(self.candidates),
            valid=pick(self.valid) & (index >= 0),
            candidate_tags=self.candidate_tags.mapped(pick),
            source=self.source.new_zeros(index.shape[1]),
            source_names=("drawn",),
            guide=self.guide and Guide(self.guide.positives, pick(self.guide.candidates)),
        )


_fields_of_scores = tuple(each.name for each in fields(Scores))
_fields_of_keys = tuple(each.name for each in fields(Keys) if each.init)


def number_of(text: str) -> int:
    """The same number, 0 or more, for the same text, anywhere: 63 bits of its hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def int_if_whole(value: Any) -> Any:
    """3.0 as 3, since pandas turns whole numbers beside missing ones into floats; anything else as it is."""
    return int(value) if isinstance(value, (float, np.floating)) and float(value).is_integer() else value


def as_vectors(value: Any) -> Tensor:
    """Vectors as a tensor; a list of vectors becomes float32. A DataFrame of numbers is an array."""
    value = value.to_numpy() if hasattr(value, "to_numpy") else value
    if isinstance(value, (list, tuple)):
        value = [one.detach().cpu().numpy() if isinstance(one, Tensor) else one for one in value]
        try:
            value = np.asarray(value, dtype=np.float32)
        except (TypeError, ValueError):
            raise ArgumentError("Keys", "vectors of one length", "a list of others") from None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu":
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        fix = "read the file first, such as by numpy.load" if isinstance(value, str | Path) else None
        raise ArgumentError("Keys", "vectors as a tensor, an array or a list", kind, fix)
    if not value.dtype.isnative or any(step < 0 for step in value.strides):
        value = value.astype(value.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        # Vectors are only read, and a copy would bring a memory-mapped file into memory.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(value)


def as_numbers(name: str, value: Any) -> tuple[Tensor, Names | None]:
    """Whole numbers as a tensor; texts by number_of, and the texts themselves."""
    array = np.asarray(value.tolist() if hasattr(value, "tolist") else value, dtype=object)
    flat = array.reshape(-1)
    flat[:] = [int_if_whole(one) for one in flat]
    if len(flat) and all(isinstance(one, str) for one in flat):
        numbers = torch.tensor([number_of(one) for one in flat], dtype=torch.long)
        if len(torch.unique(numbers)) < len(set(flat.tolist())):
            raise ArgumentError("Keys", f"texts as {name} with different hashes", "two that share one", "use numbers")
        return numbers.view(array.shape), array
    if any(isinstance(one, bool) or not isinstance(one, (int, np.integer)) for one in flat):
        kinds = sorted({type(one).__name__ for one in flat})
        raise ArgumentError("Keys", f"whole numbers or texts as {name}", f"{name} of {', '.join(kinds)}")
    return torch.tensor(array.astype(np.int64)), None
