"""Who meets whom: anchors, their positives and their candidates as vectors with tags. No [b, n] is made here.

``scores()`` gives the dense matrices; ``tile()`` a block of them. Vectors are taken as given unless ``normalize``;
scores are float32 or wider, also under autocast and for half precision inputs. An infinite feature is treated as NaN,
so that it cannot hide in a finite loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, NotFinite, argument_error
from hardneg.core.tensors import constant, unit, widened
from hardneg.core.tiles import Tags, Tile, other_id
from hardneg.core.types import Keys

Rows = slice | Annotated[Tensor, "r"]
"""Some anchors: neighbours, or their numbers."""


class Cut(NamedTuple):
    """Columns ``low`` to ``high - 1`` of one pool, which are ``offset + low`` ... of all candidates."""

    pool: int
    low: int
    high: int
    offset: int

    def of(self, vectors: Tensor, rows: Rows) -> Tensor:
        """Return these columns of vectors that all anchors share, or that are private to each, of these rows."""
        if self.low == 0 and self.high == vectors.shape[-2]:  # a slice, even of everything, has a backward operation
            return some_rows(vectors, rows) if vectors.ndim == 3 else vectors
        return vectors[rows, self.low : self.high] if vectors.ndim == 3 else vectors[self.low : self.high]


class MaskedTile(NamedTuple):
    """A tile, which of its candidates may be negatives, and which were promoted to positives by their label."""

    tile: Tile
    valid: Annotated[Tensor, "b n"]
    promoted: Annotated[Tensor, "b n"] | None


@dataclass(eq=False)
class TileContext:
    """Everything about a tile except its scores: the tags of some anchors and some candidates.

    ``masked`` is the one place that decides which candidates of a batch or pool are never negatives.
    """

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

    def masked(self, s: Annotated[Tensor, "b n"], temperature: float | Tensor) -> MaskedTile:
        """Return the tile of these scores with its masks.

        Never negatives: candidates with the anchor's id or the id of one of its positives, and, with
        ``label_positives``, those with the anchor's label (unless ``same_label_negatives``).
        """
        tile = Tile(
            s,
            temperature,
            self.anchor_tags,
            self.candidate_tags,
            self.column,
            self.source,
            self.source_names,
            self.guide,
            self.ids_given,
        )
        ids = self.candidate_tags.ids
        valid = tile.other_instance()
        if ids is not None:
            for own in self.positive_ids:
                valid = valid & other_id(own, ids)
        if not self.label_positives:
            return MaskedTile(tile, valid, None)
        promoted = valid & tile.same_label("same_label_positives")
        return MaskedTile(tile, valid if self.same_label_negatives else valid & ~promoted, promoted)


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

    def tile(self, rows: Rows, cut: Cut) -> MaskedTile:
        """Compare these anchors with these candidates; of a prepared pairing."""
        temperature = of_rows(self.temperature, rows)
        s = self._similarity(rows, cut) / temperature
        return self.context(rows, cut).masked(s, temperature)

    def columns(self, cut: Cut) -> Annotated[Tensor, "c"]:
        device = self.anchors.vectors.device
        return constant(torch.arange, cut.offset + cut.low, cut.offset + cut.high, device=device)

    def context(self, rows: Rows, cut: Cut, columns: Annotated[Tensor, "c"] | None = None) -> TileContext:
        """Return everything about a tile except its scores; ``columns`` saves making the column numbers again."""
        return TileContext(
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
        return similarity(some_rows(self.anchors.vectors, rows), cut.of(self.candidates[cut.pool].vectors, rows))

    def _anchor_tags(self, rows: Rows) -> Tags:
        return self.anchors.tags.mapped(lambda tag: some_rows(tag, rows))

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


def some_rows(values: Tensor, rows: Rows) -> Tensor:
    """Return these rows; all of them as they are, since a slice has a backward operation."""
    return values if isinstance(rows, slice) and rows == slice(None) else values[rows]


def of_rows(value: float | Tensor, rows: Rows) -> float | Tensor:
    """A number per anchor is cut with the anchors; one number is everybody's."""
    return some_rows(value, rows) if isinstance(value, Tensor) and value.ndim == 2 else value


_fields_of_pairing = tuple(field.name for field in fields(Pairing))

_checking = False


@contextmanager
def checks(enabled: bool = True) -> Iterator[None]:
    """Checks input vectors: inside, vectors that are not finite or not of unit norm raise.

    Costs one synchronisation per call on a GPU, so it is off by default.

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


def check_parts(pairing: Pairing) -> None:
    """Raises unless the parts fit together."""
    anchors, pool = pairing.anchors, pairing.candidates
    if anchors.private:
        raise ArgumentError("score", "anchors [b, d]", f"vectors={tuple(anchors.vectors.shape)}")
    if not len(anchors):
        raise ArgumentError("score", "at least one anchor", f"vectors={tuple(anchors.vectors.shape)}")
    check_temperature("score", pairing.temperature, len(anchors))
    own = pairing.positives.vectors
    if own.shape[0] != len(anchors):
        raise ArgumentError("score", f"positives of {len(anchors)} anchors", f"positives={tuple(own.shape)}")
    mask, pairs = pairing.positive_mask, (len(anchors), own.shape[1] if pairing.positives.private else 1)
    if mask is not None and (mask.shape != pairs or mask.dtype != torch.bool):
        got = f"positive_mask={tuple(mask.shape)} of {mask.dtype}"
        raise ArgumentError("score", f"a bool positive_mask {pairs}", got)
    if not pool:
        raise ArgumentError("score", "at least one pool of candidates", "pool=()")
    for keys in [pairing.positives, *pool]:
        if keys.dim != anchors.dim:
            raise ArgumentError("score", f"vectors of {anchors.dim} features", str(tuple(keys.vectors.shape)))
    for keys in pool:
        if keys.private and keys.vectors.shape[0] != len(anchors):
            what = f"private candidates of {len(anchors)} anchors"
            raise ArgumentError("score", what, str(tuple(keys.vectors.shape)))
    if _checking and not torch.compiler.is_compiling():
        ready = pairing.prepared()
        for keys in [ready.anchors, ready.positives, *ready.candidates]:
            check_vectors(keys.vectors)


def check_temperature(who: str, temperature: float | Tensor, rows: int | None = None) -> None:
    """Raises unless every temperature is above 0. On a GPU a tensor is looked at inside ``checks()`` only."""
    if isinstance(temperature, Tensor):
        if temperature.ndim and rows is not None and temperature.shape not in ((1,), (rows, 1)):
            what = f"a temperature of shape [] or [{rows}, 1], one per anchor"
            raise ArgumentError(who, what, f"temperature={tuple(temperature.shape)}", "use temperature[:, None]")
        if torch.compiler.is_compiling() or (temperature.is_cuda and not _checking):
            return
        if bool((temperature.detach() > 0).all()):
            return
        fix = "learn its logarithm, and give temperature=log_t.exp() at each call"
        lowest = float(temperature.detach().min())
        raise argument_error(who, "a temperature above 0", "temperature", lowest, fix)
    if temperature is None or isinstance(temperature, (bool, str)):
        raise argument_error(who, "a temperature that is a number, tensor or schedule", "temperature", temperature)
    if not 0 < temperature < math.inf:
        raise argument_error(who, "a temperature above 0", "temperature", temperature)


def check_vectors(vectors: Tensor) -> None:
    """Raises for vectors that are not finite or not of unit norm."""
    if not vectors.numel():
        return
    if not bool(torch.isfinite(vectors).all()):
        raise NotFinite("score", "finite vectors", "NaN or inf", "look at the encoder's output before the loss")
    norms = vectors.detach().norm(dim=-1)
    low, high = norms.min().item(), norms.max().item()
    if max(abs(low - 1.0), abs(high - 1.0)) > 1e-2:
        got = f"norms from {low:.4g} to {high:.4g}"
        raise ArgumentError("score", "unit vectors", got, "use torch.nn.functional.normalize(vectors, dim=-1)")
