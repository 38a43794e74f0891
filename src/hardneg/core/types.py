"""The vocabulary of the library: keys (vectors with ids), scores and log-weights.

Read ``Keys`` first, then ``Scores``; ``hardneg.core.scoring`` turns the first into the second, a distribution
(``hardneg.negatives``) turns scores into log-weights [b, n], and an objective turns both into losses [b, p].

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
"""The text ids of keys, before they were hashed to integers."""
Given = Tensor | NDArray[Any] | Sequence[Any] | None
"""An optional array argument: a tensor, a numpy array or a list."""
PerAnchor = Annotated[Tensor, "b"]
View = Annotated[Tensor, "b d"]
LogWeights = Annotated[Tensor, "b n"]
PairLosses = Annotated[Tensor, "b p"]


def with_support(log_w: LogWeights) -> tuple[Annotated[Tensor, "b 1"], LogWeights]:
    """Separate the rows without any negative, whose softmax would be NaN.

    Returns:
        A mask [b, 1] that is True for rows with at least one negative, and the log-weights [b, n] with zeros in all
        other rows.
    """
    none = (log_w == NEVER).all(-1, keepdim=True)
    return ~none, log_w.masked_fill(none, 0.0)


@dataclass(frozen=True, eq=False)
class Keys:
    """Vectors with optional ids, labels and clusters: anchors, positives or candidates from any source.

    Arrays, lists and DataFrames are converted to tensors. Text ids, labels and clusters are hashed to integers (the
    same text always gives the same number); the original text ids stay available as ``names``.

    Attributes:
        vectors: Floating point vectors, [n, d], or [b, k, d] for candidates private to each anchor.
        ids: Integer or text id of each vector, [n] or [b, k]. Rows with the same id are the same instance and never
            each other's negatives. None means that all rows are distinct and match nothing; so does a negative id.
        labels: Class of each vector, [n] or [b, k], for label-based positives and negatives.
        clusters: Cluster of each vector, [n] or [b, k]; [n, r] or [b, k, r] for r clusterings.
        source: Name of the origin, such as "batch" or "queue", which distributions can select by.
        names: The text ids, if ids were given as text; otherwise None.

    Raises:
        ArgumentError: If shapes do not agree, vectors are not floating point, or ids are not whole numbers or text.

    Example:
        >>> import torch
        >>> keys = Keys(torch.eye(3), ids=torch.tensor([7, 8, 9]), source="queue")
        >>> len(keys), keys.dim
        (3, 3)
    """

    vectors: Annotated[Tensor, "n d | b k d"]
    ids: Tensor | None = None
    labels: Tensor | None = None
    clusters: Tensor | None = None
    source: str | None = None
    names: Names | None = field(default=None, init=False, repr=False)

    if TYPE_CHECKING:  # the constructor accepts arrays and lists too; the fields always hold tensors

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
                what = f"one value of {name} for each vector, shape {tuple(rows)}"
                raise ArgumentError("Keys", what, f"{name}={tuple(value.shape)}")
            if value.is_floating_point():
                got = f"{name} of {value.dtype}"
                raise ArgumentError("Keys", f"whole numbers as {name}", got, f"use {name}.long()")

    def changed(self, **changes: Any) -> Keys:
        """Return a copy with some fields changed.

        Use this instead of dataclasses.replace, which torch 2.6 cannot compile.
        """
        return Keys(**{name: changes.get(name, getattr(self, name)) for name in _fields_of_keys})

    def __len__(self) -> int:
        return self.vectors.shape[-2]

    @property
    def dim(self) -> int:
        """Number of features d."""
        return self.vectors.shape[-1]

    @property
    def private(self) -> bool:
        """True if each anchor has its own candidates, [b, k, d]."""
        return self.vectors.ndim == 3

    @property
    def tags(self) -> Tags:
        """The ids, labels and clusters without the vectors."""
        return Tags(self.ids, self.labels, self.clusters)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Keys:
        """Return keys with ``change`` applied to the vectors and to every tag that is present.

        Args:
            change: Function that selects or reorders rows; it must accept [n], [n, d] and [n, r] tensors alike.
        """
        tags = self.tags.mapped(change)
        return Keys(change(self.vectors), tags.ids, tags.labels, tags.clusters, self.source)


@dataclass(frozen=True, eq=False)
class Guide:
    """Similarities of the same pairs under a second model, used to detect false negatives.

    Attributes:
        positives: Similarities of anchors and positives, [b, p], without temperature and without gradient.
        candidates: Similarities of anchors and candidates, [b, n], likewise.
    """

    positives: Annotated[Tensor, "b p"]
    candidates: Annotated[Tensor, "b n"]


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores (similarity / temperature) of each anchor with its positives and its candidates; higher is closer.

    Build it with ``two_views``, ``cross_views``, ``score`` or ``from_matrix``.

    Attributes:
        positives: Scores of anchors and their positives, [b, p].
        candidates: Scores of anchors and candidates, [b, n].
        positive_valid: True for real positives, [b, p]; False marks padding.
        valid: True for candidates that may be negatives, [b, n]. A distribution assigns log-weights to these only.
        temperature: The number or tensor ([] or [b, 1]) by which similarities were divided.
        anchor_tags: Ids, labels and clusters of the anchors, [b].
        candidate_tags: Ids and labels of the candidates, [b|1, n], and clusters, [b|1, n] or [b|1, n, r].
        source: Index into ``source_names`` for each candidate, [n], or [b, n] where rows have separate candidate lists.
        source_names: Names of the candidate sources, such as ("batch", "queue").
        guide: Similarities of the same pairs under a second model, or None.
        ids_given: False if the rows were only numbered to tell them apart; such ids mean nothing outside the batch.
    """

    positives: Annotated[Tensor, "b p"]
    candidates: Annotated[Tensor, "b n"]
    positive_valid: Annotated[Tensor, "b p"]
    valid: Annotated[Tensor, "b n"]
    temperature: float | Tensor
    anchor_tags: Tags
    candidate_tags: Tags
    source: Annotated[Tensor, "n"]
    source_names: tuple[str, ...]
    guide: Guide | None = None
    ids_given: bool = True

    def changed(self, **changes: Any) -> Scores:
        """Return a copy with some fields changed.

        Use this instead of dataclasses.replace, which torch 2.6 cannot compile.
        """
        return Scores(**{name: changes.get(name, getattr(self, name)) for name in _fields_of_scores})

    def narrowed(self, mask: Annotated[Tensor, "b|1 n"]) -> Scores:
        """Return the same scores with only the candidates in ``mask`` [b|1, n] left valid."""
        return self.changed(valid=self.valid & mask)

    def guided(self, other: Scores) -> Scores:
        """Attach the similarities of a second model as a guide.

        Args:
            other: Scores from the same call with that model's vectors: same rows, same columns.

        Raises:
            ArgumentError: If the two scores have different shapes.
        """
        mine, theirs = ((tuple(one.candidates.shape), tuple(one.positives.shape)) for one in (self, other))
        if mine != theirs:
            what = f"scores of the same pairs, {mine[0]} candidates and {mine[1]} positives"
            raise ArgumentError("guided", what, f"{theirs[0]} and {theirs[1]}")
        plain = ((each * other.temperature).detach() for each in (other.positives, other.candidates))
        return self.changed(guide=Guide(*plain))

    def tempered(self, similarity: Any) -> Tensor:
        """Convert a plain similarity to the scale of the scores, with exactly the same division."""
        return self.tile().tempered(similarity)

    def num_valid(self) -> Annotated[Tensor, "b"]:
        """Return the number of valid candidates of each anchor, [b]."""
        return self.valid.sum(-1)

    def other_instance(self) -> Annotated[Tensor, "b n"]:
        """Return a mask [b, n] that is True where a candidate does not have the anchor's id."""
        return self.tile().other_instance().expand_as(self.valid)

    def same_label(self, who: str) -> Annotated[Tensor, "b n"]:
        """Return a mask [b, n] that is True where anchor and candidate have the same label.

        Args:
            who: Name of the caller, for the error message if labels are missing.
        """
        return self.tile().same_label(who).expand_as(self.valid)

    def same_cluster(self, who: str) -> Annotated[Tensor, "b n"]:
        """Return a mask [b, n] that is True where anchor and candidate share a cluster in at least one clustering.

        Args:
            who: Name of the caller, for the error message if clusters are missing.
        """
        return self.tile().same_cluster(who).expand_as(self.valid)

    def of_source(self, who: str, source: str) -> Annotated[Tensor, "n"]:
        """Return a mask [n] that is True for candidates of the named source.

        Args:
            who: Name of the caller, for the error message if the source does not exist.
            source: One of ``source_names``.
        """
        return self.tile().of_source(who, source)

    def tile(self) -> Tile:
        """Return all candidates as one tile."""
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
        """Return the positives as a tile of candidates without tags."""
        column = constant(torch.arange, self.positives.shape[1], device=self.positives.device)
        guide = None if self.guide is None else self.guide.positives
        return Tile(self.positives, self.temperature, self.anchor_tags, Tags(), column, guide=guide)

    def take(self, index: Annotated[Tensor, "b k"]) -> Scores:
        """Select candidates by index, for example those that were drawn.

        Args:
            index: Columns of the chosen candidates, [b, k]; -1 leaves the slot empty (not valid). A candidate that
                appears twice counts twice.

        Returns:
            Scores with k candidates per anchor, of the single source "drawn".
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


# Read once: torch.compile cannot trace dataclasses.fields.
_fields_of_scores = tuple(each.name for each in fields(Scores))
_fields_of_keys = tuple(each.name for each in fields(Keys) if each.init)


def hash_text(text: str) -> int:
    """Hash a text to an integer of 63 bits: never negative, and the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def int_if_whole(value: Any) -> Any:
    """Convert a float such as 3.0 to an int; return anything else unchanged.

    pandas stores integers as floats in columns with missing values.
    """
    return int(value) if isinstance(value, (float, np.floating)) and float(value).is_integer() else value


def as_vectors(value: Any) -> Tensor:
    """Convert an array, DataFrame or list of vectors to a tensor; lists become float32.

    Raises:
        ArgumentError: If the value is not numeric, or its vectors differ in length.
    """
    value = value.to_numpy() if hasattr(value, "to_numpy") else value
    if isinstance(value, (list, tuple)):
        value = [one.detach().cpu().numpy() if isinstance(one, Tensor) else one for one in value]
        try:
            value = np.asarray(value, dtype=np.float32)
        except (TypeError, ValueError):
            what = "lists of numbers of equal length as vectors"
            raise ArgumentError("Keys", what, "lists of unequal length or other values") from None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu":
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        fix = "load the file first, for example with numpy.load" if isinstance(value, str | Path) else None
        raise ArgumentError("Keys", "vectors as a tensor, an array or a list", kind, fix)
    if not value.dtype.isnative or any(step < 0 for step in value.strides):
        value = value.astype(value.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        # Vectors are only read, and a copy would bring a memory-mapped file into memory.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(value)


def as_numbers(name: str, value: Any) -> tuple[Tensor, Names | None]:
    """Convert ids, labels or clusters to a tensor of integers.

    Args:
        name: Field name for error messages: ids, labels or clusters.
        value: Integers, or texts, which are hashed with ``hash_text``.

    Returns:
        The integers, and the original texts (None if integers were passed).

    Raises:
        ArgumentError: If values are neither whole numbers nor texts, or two texts have the same hash.
    """
    array = np.asarray(value.tolist() if hasattr(value, "tolist") else value, dtype=object)
    flat = array.reshape(-1)
    flat[:] = [int_if_whole(one) for one in flat]
    if len(flat) and all(isinstance(one, str) for one in flat):
        numbers = torch.tensor([hash_text(one) for one in flat], dtype=torch.long)
        if len(torch.unique(numbers)) < len(set(flat.tolist())):
            what = f"texts as {name} with different hashes"
            raise ArgumentError("Keys", what, "two texts with the same hash", "use whole numbers")
        return numbers.view(array.shape), array
    if any(isinstance(one, bool) or not isinstance(one, (int, np.integer)) for one in flat):
        kinds = sorted({type(one).__name__ for one in flat})
        raise ArgumentError("Keys", f"whole numbers or texts as {name}", f"{name} of {', '.join(kinds)}")
    return torch.tensor(array.astype(np.int64)), None
