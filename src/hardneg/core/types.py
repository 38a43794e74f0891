"""The vocabulary: keys (vectors with ids), scores, and log-weights.

Shape letters, used in every signature and checked in the tests:

    b anchors    p positives of an anchor    n candidates    d features
    k private candidates or draws            r clusterings

A shape like ``"b|1 n"`` means that the first axis is b, or 1 where all anchors share the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from torch import Tensor

NEVER = float("-inf")
"""The log-weight of a candidate that is not a negative."""

LogWeights = Annotated[Tensor, "b n"]
PairLosses = Annotated[Tensor, "b p"]


def with_support(log_w: LogWeights) -> tuple[Annotated[Tensor, "b 1"], LogWeights]:
    """Which rows have a negative, and the weights with zeros in the other rows, where a softmax would be NaN."""
    some = (log_w != NEVER).any(-1, keepdim=True)
    return some, torch.where(some, log_w, 0.0)


AnyKeys = Annotated[Tensor, "n d | b k d"]


@dataclass(frozen=True, eq=False)
class Tags:
    """What is known of rows besides their vectors; None where nothing is known.

    Rows with the same id are the same instance. A negative id matches nothing.
    """

    ids: Tensor | None = None  # [n] or [b, k]
    labels: Tensor | None = None  # [n] or [b, k]
    clusters: Tensor | None = None  # [n], [n, r], [b, k] or [b, k, r]


@dataclass(frozen=True, eq=False)
class Keys:
    """Vectors with their ids: the anchors, or candidates from anywhere.

    ``vectors`` is [n, d], or [b, k, d] for candidates private to each anchor. ``ids=None`` means distinct rows that
    match nothing anywhere; the same id means the same instance, which is never its own negative.

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

    def __post_init__(self) -> None:
        if self.vectors.ndim not in (2, 3) or not self.vectors.is_floating_point():
            raise ValueError(
                "Keys needs floating point vectors [n, d] or [b, k, d], got "
                f"vectors={tuple(self.vectors.shape)} of {self.vectors.dtype}."
            )
        rows = self.vectors.shape[:-1]
        for name in ("ids", "labels", "clusters"):
            value = getattr(self, name)
            if value is None:
                continue
            shape = value.shape[: len(rows)] if name == "clusters" else value.shape
            if shape != rows:
                raise ValueError(
                    f"Keys needs one of {name} per vector, shape {tuple(rows)}, got {name}={tuple(value.shape)}."
                )
            if value.is_floating_point():
                raise ValueError(f"Keys needs whole numbers as {name}, got {name} of {value.dtype}; use {name}.long().")

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
    source: Annotated[Tensor, "n"]  # index into source_names
    source_names: tuple[str, ...]
    guide: Guide | None = None
    ids_given: bool = True  # False: rows were numbered to tell them apart, and mean nothing outside the batch

    def changed(self, **changes: Any) -> Scores:
        """A copy with some fields changed; dataclasses.replace, which torch 2.6 does not compile."""
        return Scores(**{name: changes.get(name, getattr(self, name)) for name in _fields_of_scores})

    def narrowed(self, mask: Annotated[Tensor, "b|1 n"]) -> Scores:
        """The same scores with fewer candidates."""
        return self.changed(valid=self.valid & mask)

    def guided(self, other: Scores) -> Scores:
        """With the similarities of another model as a second channel: the same call with that model's vectors."""
        if other.candidates.shape != self.candidates.shape or other.positives.shape != self.positives.shape:
            raise ValueError(
                f"guided needs scores of the same pairs, {tuple(self.candidates.shape)} candidates and "
                f"{tuple(self.positives.shape)} positives, got {tuple(other.candidates.shape)} and "
                f"{tuple(other.positives.shape)}."
            )
        plain = Guide(other.positives * other.temperature, other.candidates * other.temperature)
        return self.changed(guide=Guide(plain.positives.detach(), plain.candidates.detach()))

    def tempered(self, similarity: Any) -> Tensor:
        """A plain similarity on the scale of the scores, divided exactly as they were."""
        scaled: Tensor = self.candidates.new_ones(()) * similarity / self.temperature
        return scaled

    def num_valid(self) -> Annotated[Tensor, "b"]:
        return self.valid.sum(-1)

    def other_instance(self) -> Annotated[Tensor, "b n"]:
        """True where a candidate does not carry the anchor's id."""
        if self.anchor_tags.ids is None or self.candidate_tags.ids is None:
            return torch.ones_like(self.valid)
        return ~same_id(self.anchor_tags.ids, self.candidate_tags.ids)

    def same_label(self, who: str) -> Annotated[Tensor, "b n"]:
        anchor, candidate = self._pair(who, "labels")
        return (anchor[:, None] == candidate).expand_as(self.valid)

    def same_cluster(self, who: str) -> Annotated[Tensor, "b n"]:
        """True where anchor and candidate share a cluster in at least one of the clusterings."""
        anchor, candidate = self._pair(who, "clusters")
        anchor = anchor[:, None] if anchor.ndim == 1 else anchor  # [b, r]
        candidate = candidate[..., None] if candidate.ndim == 2 else candidate  # [b|1, n, r]
        if anchor.shape[-1] != candidate.shape[-1]:
            counts = f"{anchor.shape[-1]} of the anchors and {candidate.shape[-1]} of the candidates"
            raise ValueError(f"{who} needs the same number of clusterings on both sides, got {counts}.")
        return (anchor[:, None, :] == candidate).any(-1).expand_as(self.valid)

    def of_source(self, who: str, source: str) -> Annotated[Tensor, "n"]:
        if source not in self.source_names:
            raise ValueError(
                f"{who} needs a source among {self.source_names}, got source={source!r}; "
                "name it where the candidates come in: Keys(..., source=...)."
            )
        return self.source == self.source_names.index(source)

    def take(self, index: Annotated[Tensor, "b k"]) -> Scores:
        """The drawn candidates only, one row of indices per anchor; -1 takes nothing.

        A candidate drawn twice counts twice.
        """
        if not self.candidates.shape[1]:
            return self._one_nobody().take(index)
        drawn, slot = index >= 0, index.clamp(min=0)

        def pick(tag: Tensor | None) -> Tensor | None:
            if tag is None:
                return None
            rows = tag.expand(index.shape[0], *tag.shape[1:])
            if rows.ndim == 3:
                return rows.gather(1, slot[:, :, None].expand(-1, -1, rows.shape[2]))
            return rows.gather(1, slot)

        tags = self.candidate_tags
        return self.changed(
            candidates=self.candidates.gather(1, slot),
            valid=self.valid.gather(1, slot) & drawn,
            candidate_tags=Tags(pick(tags.ids), pick(tags.labels), pick(tags.clusters)),
            source=self.source.new_zeros(index.shape[1]),
            source_names=("drawn",),
            guide=self.guide and Guide(self.guide.positives, self.guide.candidates.gather(1, slot)),
        )

    def _one_nobody(self) -> Scores:
        """A single invalid candidate in place of none, so that there is a column to point at."""
        rows = self.candidates.shape[0]
        return self.changed(
            candidates=self.candidates.new_zeros(rows, 1),
            valid=self.valid.new_zeros(rows, 1),
            candidate_tags=Tags(),
            source=self.source.new_zeros(1),
            source_names=("drawn",),
            guide=self.guide and Guide(self.guide.positives, self.guide.candidates.new_zeros(rows, 1)),
        )

    def _pair(self, who: str, name: str) -> tuple[Tensor, Tensor]:
        anchor, candidate = getattr(self.anchor_tags, name), getattr(self.candidate_tags, name)
        if anchor is None or candidate is None:
            side = "the anchors" if anchor is None else "every candidate"
            raise ValueError(f"{who} needs {name} of {side}, got None; pass {name}=... with the vectors.")
        return anchor, candidate


_fields_of_scores = tuple(field.name for field in fields(Scores))


def same_id(anchor: Annotated[Tensor, "b"], candidate: Annotated[Tensor, "b|1 n"]) -> Annotated[Tensor, "b n"]:
    """True where both carry the same id; a negative id is nobody's."""
    return (anchor[:, None] == candidate) & (anchor >= 0)[:, None]
