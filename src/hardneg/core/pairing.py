"""Who meets whom: anchors, their positives and their candidates as vectors with tags. No [b, n] is made here.

``scores()`` gives the dense matrices; ``tile()`` a block of them. Vectors are taken as given unless ``normalize``;
scores are float32 or wider, also under autocast and for half precision inputs. An infinite feature is treated as NaN,
so that it cannot hide in a finite loss.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.core.tiles import Tags, Tile, other_id
from hardneg.core.types import Keys
from hardneg.core.vectors import unit, widened

Rows = slice | Annotated[Tensor, "r"]
"""Some anchors: neighbours, or their numbers."""


class Cut(NamedTuple):
    """Columns ``low`` to ``high - 1`` of one pool, which are ``offset + low`` ... of all candidates."""

    pool: int
    low: int
    high: int
    offset: int

    def of(self, vectors: Tensor, rows: Rows) -> Tensor:
        """These columns of vectors that all anchors share, or that are private to each, of these rows."""
        return vectors[rows, self.low : self.high] if vectors.ndim == 3 else vectors[self.low : self.high]


class Met(NamedTuple):
    """A tile, which of its candidates may be negatives, and which were promoted to positives."""

    tile: Tile
    valid: Annotated[Tensor, "b n"]
    promoted: Annotated[Tensor, "b n"] | None


@dataclass(eq=False)
class Sides:
    """Some anchors and some candidates that are not compared yet: what a tile of them holds beside its scores."""

    anchor_tags: Tags
    candidate_tags: Tags
    column: Annotated[Tensor, "n"]
    source: str
    source_names: tuple[str, ...]
    guide: Annotated[Tensor, "b n"] | None
    ids_given: bool
    positive_ids: tuple[Annotated[Tensor, "b"], ...]
    label_positives: bool
    same_label_negatives: bool

    def met(self, s: Annotated[Tensor, "b n"], temperature: float | Tensor) -> Met:
        tags, ids = self.anchor_tags, self.candidate_tags.ids
        tile = Tile(
            s,
            temperature,
            tags,
            self.candidate_tags,
            self.column,
            self.source,
            self.source_names,
            self.guide,
            self.ids_given,
        )
        if ids is not None and tags.ids is not None:
            valid = other_id(tags.ids, ids, self.ids_given)
        else:
            valid = torch.ones_like(s, dtype=torch.bool)
        if ids is not None:
            for column in self.positive_ids:
                valid = valid & other_id(column, ids)
        if not self.label_positives:
            return Met(tile, valid, None)
        promoted = valid & tile.same_label("same_label_positives")
        return Met(tile, valid if self.same_label_negatives else valid & ~promoted, promoted)


@dataclass(frozen=True, eq=False)
class Pairing:
    """Anchors [b, d], positives [b, p, d], and pools of candidates, shared [n, d] or private [b, k, d].

    ``label_positives``: candidates of the anchor's label are positives too, and no longer negatives unless
    ``same_label_negatives``. ``guide``: the same pairs under another model. ``normalize``: vectors are brought to unit
    norm before they are compared. ``num_views``: 2 or more where anchors and ``positives`` are so many views of a
    batch, one after the other, and an anchor's positives the other views of its row (see ``own``); 1 where the
    positives are the first rows of the first pool. ``ready``: vectors are float32 or wider and hold no infinities.
    """

    anchors: Keys
    positives: Keys
    candidates: tuple[Keys, ...]
    temperature: float | Tensor
    positive_mask: Annotated[Tensor, "b p"] | None = None
    ids_given: bool = True
    label_positives: bool = False
    same_label_negatives: bool = False
    guide: Pairing | None = None
    normalize: bool = False
    num_views: int = 0
    ready: bool = False

    def __len__(self) -> int:
        return len(self.anchors)

    def changed(self, **changes: Any) -> Pairing:
        """A copy with some fields changed; dataclasses.replace, which torch 2.6 does not compile."""
        return Pairing(**{name: changes.get(name, getattr(self, name)) for name in _fields_of_pairing})

    @property
    def num_candidates(self) -> int:
        return sum(len(keys) for keys in self.candidates)

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(keys.source or "pool" for keys in self.candidates))

    @property
    def itself(self) -> bool:
        """Whether the anchors are their own candidates, and have no others."""
        return len(self.candidates) == 1 and self.candidates[0] is self.anchors

    def prepared(self) -> Pairing:
        """Vectors in float32 or wider, of unit norm if they are to be, infinities as NaN, positives as [b, p, d]."""
        anchors, pools = self.prepared_keys()
        if self.num_views > 1:
            own = Keys(other_views(anchors.vectors, self.num_views))
        elif self.num_views == 1:
            own = several(self.positives).changed(vectors=pools[0].vectors[: len(self), None])
        else:
            own = self.prepared_own()
        guide = None if self.guide is None else self.guide.prepared()
        return self.changed(anchors=anchors, positives=own, candidates=pools, guide=guide, normalize=False, num_views=0)

    def prepared_keys(self) -> tuple[Keys, tuple[Keys, ...]]:
        """Anchors and candidates, prepared. What is there twice is prepared once: gradients add up in float32."""
        anchors = self._ready(self.anchors)
        return anchors, tuple(anchors if keys is self.anchors else self._ready(keys) for keys in self.candidates)

    def prepared_own(self) -> Keys:
        return self._ready(self.own())

    def own(self) -> Keys:
        """The anchors' own positives, [b, p, d]."""
        if self.num_views > 1:
            return Keys(other_views(self.positives.vectors, self.num_views))
        return several(self.positives)

    def _ready(self, keys: Keys) -> Keys:
        if self.ready:
            return keys
        vectors = unit(keys.vectors) if self.normalize else not_infinite(widened(keys.vectors))
        return Keys(vectors, keys.ids, keys.labels, keys.clusters, keys.source)

    def guided(self, other: Pairing) -> Pairing:
        """With another model's vectors of the same pairs as a second channel, without gradient."""
        mine, theirs = ([len(one), *map(len, one.candidates)] for one in (self, other))
        if mine != theirs:
            raise ArgumentError("guided", f"the same anchors and candidates, {mine}", str(theirs))
        return self.changed(guide=other.changed(temperature=1.0))

    def of_rows(self, rows: slice) -> Pairing:
        """Some of the anchors, against the same candidates."""

        def part(each: Tensor) -> Tensor:
            return each[rows]

        return self.changed(
            anchors=self.anchors.mapped(part),
            positives=self.own().mapped(part),
            candidates=tuple(keys.mapped(part) if keys.private else keys for keys in self.candidates),
            temperature=of_rows(self.temperature, rows),
            positive_mask=None if self.positive_mask is None else self.positive_mask[rows],
            guide=None if self.guide is None else self.guide.of_rows(rows),
            num_views=0,
        )

    def cuts(self, columns: int) -> list[Cut]:
        """The candidates in blocks of at most so many columns; one empty block if there are none."""
        cuts, offset = [], 0
        for pool, keys in enumerate(self.candidates):
            cuts += [Cut(pool, low, min(low + columns, len(keys)), offset) for low in range(0, len(keys), columns)]
            offset += len(keys)
        return cuts or [Cut(0, 0, 0, 0)]

    def tile(self, rows: Rows, cut: Cut) -> Met:
        """These anchors against these candidates."""
        temperature = of_rows(self.temperature, rows)
        s = self._similarity(rows, cut) / temperature
        return self.sides(rows, cut).met(s, temperature)

    def columns(self, cut: Cut) -> Annotated[Tensor, "c"]:
        return torch.arange(cut.offset + cut.low, cut.offset + cut.high, device=self.anchors.vectors.device)

    def sides(self, rows: Rows, cut: Cut, columns: Annotated[Tensor, "c"] | None = None) -> Sides:
        """What is known of these anchors and candidates beside their scores; ``columns``, if they are there already."""
        return Sides(
            self._anchor_tags(rows),
            self._tags(rows, cut),
            self.columns(cut) if columns is None else columns,
            self.candidates[cut.pool].source or "pool",
            self.source_names,
            None if self.guide is None else self.guide.plain(rows, cut),
            self.ids_given,
            self.positive_ids(rows),
            self.label_positives,
            self.same_label_negatives,
        )

    def plain(self, rows: Rows, cut: Cut) -> Annotated[Tensor, "b n"]:
        """Similarities without gradient."""
        with torch.no_grad():
            return self._similarity(rows, cut)

    def positive_scores(self) -> Annotated[Tensor, "b p"]:
        """The scores of the anchors' own positives; of a prepared pairing."""
        return similarity(self.anchors.vectors, self.positives.vectors) / self.temperature

    def positive_tile(self, rows: Rows, s: Tensor, temperature: float | Tensor) -> tuple[Tile, Tensor]:
        """The anchors' own positives, of these scores, as a private block, and which of them are real."""
        guide = None
        if self.guide is not None:
            guide = similarity(self.guide.anchors.vectors[rows], self.guide.positives.vectors[rows]).detach()
        column = torch.arange(s.shape[1], device=s.device)
        return Tile(s, temperature, self._anchor_tags(rows), Tags(), column, guide=guide), self.real(rows)

    def real(self, rows: Rows) -> Annotated[Tensor, "b p"]:
        """Which of the anchors' own positives are real; of a prepared pairing."""
        if self.positive_mask is not None:
            return self.positive_mask[rows]
        own = self.positives.vectors[rows]
        return torch.ones(own.shape[:2], dtype=torch.bool, device=own.device)

    def positive_ids(self, rows: Rows) -> tuple[Annotated[Tensor, "b"], ...]:
        """The ids of the first positives, of the second, ...; -1 where the positive is not real."""
        ids = self.positives.ids
        if ids is None:
            return ()
        ids = ids[rows] if self.positives.private else ids[rows, None]
        return (ids if self.positive_mask is None else torch.where(self.positive_mask[rows], ids, -1)).unbind(1)

    def _similarity(self, rows: Rows, cut: Cut) -> Annotated[Tensor, "b n"]:
        return similarity(self.anchors.vectors[rows], cut.of(self.candidates[cut.pool].vectors, rows))

    def _anchor_tags(self, rows: Rows) -> Tags:
        return self.anchors.tags.mapped(lambda tag: tag[rows])

    def _tags(self, rows: Rows, cut: Cut) -> Tags:
        keys, columns = self.candidates[cut.pool], slice(cut.low, cut.high)
        tags = keys.tags.mapped(lambda tag: tag[rows, columns] if keys.private else tag[None, columns])
        if tags.ids is None and any(other.ids is not None for other in self.candidates):
            nobody = torch.full((1, cut.high - cut.low), -1, device=keys.vectors.device)
            return Tags(nobody, tags.labels, tags.clusters)
        return tags


def similarity(rows: Annotated[Tensor, "b d"], vectors: Tensor) -> Annotated[Tensor, "b n"]:
    """[b, d] with [n, d] or [b, k, d] -> [b, n] or [b, k]."""
    if rows.dtype != vectors.dtype:
        wide = torch.promote_types(rows.dtype, vectors.dtype)
        rows, vectors = rows.to(wide), vectors.to(wide)
    if vectors.ndim == 2:
        return rows @ vectors.T
    return (vectors * rows[:, None, :]).sum(-1)


def not_infinite(values: Tensor) -> Tensor:
    return values + values * 0.0  # inf * 0 = NaN; a finite value stays what it is


def other_views(views: Annotated[Tensor, "vb d"], number: int) -> Annotated[Tensor, "vb p d"]:
    """For each row of so many views, one after the other, the same row of every other view."""
    if number == 2:
        return views.roll(len(views) // 2, 0)[:, None]
    each = views.chunk(number)
    others = [torch.stack([each[j] for j in range(number) if j != i], dim=1) for i in range(number)]
    return torch.cat(others)


def positive_columns(rows: int, number: int, device: torch.device) -> Annotated[Tensor, "b p"]:
    """The candidates that are an anchor's positives: the same row of every other view, or of the only one."""
    own = torch.arange(rows, device=device)[:, None]
    return own if number == 1 else other_views(own, number).squeeze(-1)


def several(keys: Keys) -> Keys:
    """Positives as [b, p, d]."""
    return keys if keys.private else keys.mapped(lambda each: each[:, None])


def number_of(rows: Rows) -> int:
    return len(rows) if isinstance(rows, Tensor) else rows.stop - rows.start


def of_rows(value: float | Tensor, rows: Rows) -> float | Tensor:
    """A number per anchor is cut with the anchors; one number is everybody's."""
    return value[rows] if isinstance(value, Tensor) and value.ndim == 2 else value


_fields_of_pairing = tuple(field.name for field in fields(Pairing))
