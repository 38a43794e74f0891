"""Pairings: anchors with their positives and pools of candidates, as vectors with tags, before they are compared.

``hardneg.core.views`` builds pairings from batches and pools, and checks them. Read ``Pairing`` first, then
``TileContext.masked``, which decides which candidates can be negatives. ``Pairing.tile`` computes one block of scores,
and ``matrices`` all of them.

Vectors are used as passed unless ``normalize`` is set. Scores are float32 or wider, also under autocast and for half
precision inputs. An infinite feature becomes NaN, so that it cannot hide in a finite loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.core.tensors import constant, unit, widened
from hardneg.core.tiles import Tags, Tile, other_id
from hardneg.core.types import Guide, Keys, Scores

Rows = slice | Annotated[Tensor, "r"]
"""Some of the anchors: a slice, or their indices."""


class Cut(NamedTuple):
    """A block of columns: ``low`` to ``high - 1`` of one pool, which start at ``offset + low`` among all candidates."""

    pool: int
    low: int
    high: int
    offset: int

    def of(self, vectors: Tensor, rows: Rows) -> Tensor:
        """Return these columns of shared vectors, [c, d], or of vectors private to the given rows, [r, c, d]."""
        if self.low == 0 and self.high == vectors.shape[-2]:  # even a full slice adds an operation to the backward pass
            return some_rows(vectors, rows) if vectors.ndim == 3 else vectors
        return vectors[rows, self.low : self.high] if vectors.ndim == 3 else vectors[self.low : self.high]


class MaskedTile(NamedTuple):
    """A tile with its masks.

    Attributes:
        tile: The scores, [r, c], with tags.
        valid: True for candidates that may be negatives, [r|1, c].
        promoted: True for candidates that are positives by their label; None without ``label_positives``.
    """

    tile: Tile
    valid: Annotated[Tensor, "b n"]
    promoted: Annotated[Tensor, "b n"] | None


@dataclass(eq=False)
class TileContext:
    """The inputs of a tile besides its scores: the tags of a block of anchors and a block of candidates.

    Fields that are not listed are those of ``Tile`` and ``Pairing``. ``masked`` is the only place that decides which
    candidates of a batch or pool are never negatives.

    Attributes:
        guide: Similarities under the second model, [r, c], or None.
        positive_ids: Ids of the first positives, [r], of the second positives, and so on.
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

        Candidates with the anchor's id or the id of one of its positives are never negatives. With ``label_positives``,
        neither are those with the anchor's label (unless ``same_label_negatives``).

        Args:
            s: Scores, [r, c].
            temperature: Number or tensor ([] or [r, 1]) by which similarities were divided.
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
    """Anchors, positives and pools of candidates that are not compared yet.

    Attributes:
        anchors: Keys [b, d].
        positives: Keys [b, d] or [b, p, d]. If ``num_views`` is 2 or more, the batch of all views instead; see ``own``.
        candidates: Pools, each [n, d] shared by all anchors or [b, k, d] private.
        temperature: Number, scalar tensor, or tensor [b, 1] with one temperature per anchor.
        positive_mask: True for real positives, [b, p]; None if all are real.
        ids_given: False if the rows of the batch were only numbered to tell them apart.
        label_positives: Candidates with the anchor's label are positives too, and no longer negatives.
        same_label_negatives: With ``label_positives``, keep those candidates among the negatives as well.
        guide: The same pairs under a second model, or None.
        normalize: Scale vectors to unit norm before they are compared.
        num_views: 2 or more if anchors and ``positives`` consist of that many views of a batch, one after the other,
            so that an anchor's positives are the other views of its row. 1 if the positives are the first rows of the
            first pool. 0 otherwise.
        ready: Vectors are float32 or wider and contain no infinities, so that preparation can be skipped.
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
        """Return a copy with some fields changed.

        Use this instead of dataclasses.replace, which torch 2.6 cannot compile.
        """
        return Pairing(**{name: changes.get(name, getattr(self, name)) for name in _fields_of_pairing})

    @property
    def num_candidates(self) -> int:
        """Number of candidates in all pools."""
        return sum(len(keys) for keys in self.candidates)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the candidate sources, without duplicates, in the order of the pools."""
        return tuple(dict.fromkeys(keys.source or "pool" for keys in self.candidates))

    @property
    def itself(self) -> bool:
        """True if the anchors are the only candidates."""
        return len(self.candidates) == 1 and self.candidates[0] is self.anchors

    def prepared(self) -> Pairing:
        """Return the pairing with vectors that can be compared directly.

        They are float32 or wider, of unit norm if ``normalize`` is set, and have NaN in place of infinities. Positives
        are [b, p, d].
        """
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
        """Return prepared anchors and candidates.

        Keys that are both are prepared once, so that their gradients add up in float32.
        """
        anchors = self.prepare(self.anchors)
        return anchors, tuple(anchors if keys is self.anchors else self.prepare(keys) for keys in self.candidates)

    def prepared_own(self) -> Keys:
        """Return the prepared positives of each anchor, [b, p, d]."""
        return self.prepare(self.own())

    def own(self) -> Keys:
        """Return the positives of each anchor, [b, p, d]."""
        if self.num_views > 1:
            return Keys(other_views(self.positives.vectors, self.num_views))
        return several(self.positives)

    def prepare(self, keys: Keys) -> Keys:
        """Return keys with vectors that can be compared directly."""
        if self.ready:
            return keys
        vectors = unit(keys.vectors) if self.normalize else not_infinite(widened(keys.vectors))
        return Keys(vectors, keys.ids, keys.labels, keys.clusters, keys.source)

    def guided(self, other: Pairing) -> Pairing:
        """Attach a second model's vectors of the same pairs as a guide, without gradient.

        Raises:
            ArgumentError: If the other pairing has other numbers of anchors or candidates.
        """
        mine, theirs = ([len(one), *map(len, one.candidates)] for one in (self, other))
        if mine != theirs:
            raise ArgumentError(
                "guided", f"a second model's vectors of the same anchors and candidates, {mine}", str(theirs)
            )
        plain = other.changed(temperature=1.0, label_positives=False, same_label_negatives=False)
        return self.changed(guide=plain)

    def of_rows(self, rows: slice) -> Pairing:
        """Return the pairing of a block of anchors with the same candidates."""

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
        """Divide the candidates into blocks that do not cross pools; one empty block if there are none.

        Args:
            columns: Largest number of columns of a block.
        """
        cuts, offset = [], 0
        for pool, keys in enumerate(self.candidates):
            cuts += [Cut(pool, low, min(low + columns, len(keys)), offset) for low in range(0, len(keys), columns)]
            offset += len(keys)
        return cuts or [Cut(0, 0, 0, 0)]

    def tile(self, rows: Rows, cut: Cut) -> MaskedTile:
        """Compare a block of anchors with a block of candidates; the pairing must be prepared.

        Args:
            rows: The anchors.
            cut: The candidates, from ``cuts``.
        """
        temperature = of_rows(self.temperature, rows)
        s = self._similarity(rows, cut) / temperature
        return self.context(rows, cut).masked(s, temperature)

    def columns(self, cut: Cut) -> Annotated[Tensor, "c"]:
        """Return the positions of these candidates among all candidates, [c]."""
        device = self.anchors.vectors.device
        return constant(torch.arange, cut.offset + cut.low, cut.offset + cut.high, device=device)

    def context(self, rows: Rows, cut: Cut, columns: Annotated[Tensor, "c"] | None = None) -> TileContext:
        """Return everything about a tile except its scores.

        Args:
            rows: The anchors.
            cut: The candidates.
            columns: Result of ``columns(cut)``, if it is available already.
        """
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
        """Return the similarities of a tile, [r, c], without temperature and gradient."""
        with torch.no_grad():
            return self._similarity(rows, cut)

    def positive_scores(self) -> Annotated[Tensor, "b p"]:
        """Return the scores of the anchors' own positives, [b, p]; the pairing must be prepared."""
        return similarity(self.anchors.vectors, self.positives.vectors) / self.temperature

    def positive_tile(self, rows: Rows, s: Tensor, temperature: float | Tensor) -> tuple[Tile, Tensor]:
        """Return the anchors' own positives as a tile, and a mask of the real ones.

        Args:
            rows: The anchors.
            s: Scores of their positives, [r, p].
            temperature: Their temperature.
        """
        guide = None
        if self.guide is not None:
            guide = similarity(self.guide.anchors.vectors[rows], self.guide.positives.vectors[rows]).detach()
        column = torch.arange(s.shape[1], device=s.device)
        return Tile(s, temperature, self._anchor_tags(rows), Tags(), column, guide=guide), self.real(rows)

    def real(self, rows: Rows) -> Annotated[Tensor, "b p"]:
        """Return a mask of the anchors' real positives, [r, p]; the pairing must be prepared."""
        if self.positive_mask is not None:
            return self.positive_mask[rows]
        own = self.positives.vectors[rows]
        return torch.ones(own.shape[:2], dtype=torch.bool, device=own.device)

    def positive_ids(self, rows: Rows) -> tuple[Annotated[Tensor, "b"], ...]:
        """Return the ids of the first positives, [r], of the second positives, and so on; -1 for padding."""
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
    """Compute the dot products of rows [b, d] with vectors [n, d] or [b, k, d], as [b, n] or [b, k]."""
    if rows.dtype != vectors.dtype:
        wide = torch.promote_types(rows.dtype, vectors.dtype)
        rows, vectors = rows.to(wide), vectors.to(wide)
    if vectors.ndim == 2:
        return rows @ vectors.T
    return (vectors * rows[:, None, :]).sum(-1)


def not_infinite(values: Tensor) -> Tensor:
    """Replace infinities with NaN."""
    return values + values * 0.0  # inf * 0 = NaN; finite values do not change


def other_views(views: Annotated[Tensor, "vb d"], number: int) -> Annotated[Tensor, "vb p d"]:
    """Return, for each row of a batch of views, the same row of every other view.

    Args:
        views: The views, one after the other, [v b, d].
        number: Number of views v.

    Returns:
        Vectors [v b, v - 1, d].

    Example:
        >>> other_views(torch.tensor([[1], [2], [10], [20]]), 2).flatten().tolist()
        [10, 20, 1, 2]
    """
    if number == 2:
        return views.roll(len(views) // 2, 0)[:, None]
    each = views.chunk(number)
    others = [torch.stack([each[j] for j in range(number) if j != i], dim=1) for i in range(number)]
    return torch.cat(others)


def positive_columns(rows: int, number: int, device: torch.device) -> Annotated[Tensor, "b p"]:
    """Return the columns of each anchor's positives among the candidates of a batch of views.

    Args:
        rows: Number of anchors.
        number: Number of views; 1 means that the positive of row i is column i.
        device: Device of the result.

    Returns:
        Columns [rows, p], where p is number - 1, or 1 for a single view.
    """
    own = torch.arange(rows, device=device)[:, None]
    return own if number == 1 else other_views(own, number).squeeze(-1)


def several(keys: Keys) -> Keys:
    """Return positives as [b, p, d], with p = 1 for one positive per anchor."""
    return keys if keys.private else keys.mapped(lambda each: each[:, None])


def num_rows(rows: Rows) -> int:
    """Return the number of anchors that these rows select."""
    return len(rows) if isinstance(rows, Tensor) else rows.stop - rows.start


def some_rows(values: Tensor, rows: Rows) -> Tensor:
    """Return these rows; all of them without slicing, which would add an operation to the backward pass."""
    return values if isinstance(rows, slice) and rows == slice(None) else values[rows]


def of_rows(value: float | Tensor, rows: Rows) -> float | Tensor:
    """Return the temperatures of these rows if there is one per anchor; otherwise the value unchanged."""
    return some_rows(value, rows) if isinstance(value, Tensor) and value.ndim == 2 else value


# Read once: torch.compile cannot trace dataclasses.fields.
_fields_of_pairing = tuple(field.name for field in fields(Pairing))


def matrices(pairing: Pairing) -> Scores:
    """Compare all anchors with all candidates of a checked pairing: one tile per pool, side by side."""
    anchors, pools = pairing.prepared_keys()
    ready = pairing.changed(anchors=anchors, candidates=pools, guide=None)
    blocks = [ready.tile(slice(None), cut) for cut in pairing.cuts(max(1, *map(len, pools)))]
    candidates = _concatenated([block.tile.s for block in blocks])
    positives = _own_scores(pairing, anchors, candidates)
    mask, names = pairing.positive_mask, pairing.source_names
    if mask is None:
        mask = constant(torch.ones, positives.shape, dtype=torch.bool, device=positives.device)
    own, tags = anchors.tags, Tags(*(_side_by_side(blocks, name) for name in ("ids", "labels", "clusters")))
    valid = _concatenated([block.valid.expand(block.tile.s.shape) for block in blocks])
    source = _source_codes(pools, names, candidates)
    scores = Scores(
        positives, candidates, mask, valid, pairing.temperature, own, tags, source, names, ids_given=pairing.ids_given
    )
    if pairing.guide is not None:
        scores = scores.guided(matrices(pairing.guide))
    if not pairing.label_positives:
        return scores
    return with_positives(scores, _concatenated([_promoted(block) for block in blocks]))


def with_positives(scores: Scores, added: Annotated[Tensor, "b n"]) -> Scores:
    """Append every candidate to the positives; ``added`` marks the real ones."""
    guide = scores.guide
    return scores.changed(
        positives=torch.cat([scores.positives, scores.candidates], dim=1),
        positive_valid=torch.cat([scores.positive_valid, added], dim=1),
        guide=guide and Guide(torch.cat([guide.positives, guide.candidates], dim=1), guide.candidates),
    )


def _promoted(block: MaskedTile) -> Annotated[Tensor, "b n"]:
    assert block.promoted is not None
    return block.promoted.expand(block.tile.s.shape)


def _own_scores(pairing: Pairing, anchors: Keys, candidates: Annotated[Tensor, "b n"]) -> Annotated[Tensor, "b p"]:
    """Return the scores of the anchors' own positives, taken from ``candidates`` if they are views of the batch."""
    if pairing.num_views == 1:
        return candidates.diagonal()[:, None]
    if pairing.num_views > 1:
        columns = constant(positive_columns, len(pairing), pairing.num_views, device=candidates.device)
        return candidates.gather(1, columns)
    return similarity(anchors.vectors, pairing.prepared_own().vectors) / pairing.temperature


def _side_by_side(blocks: Sequence[MaskedTile], name: str) -> Tensor | None:
    """Return one tag of all candidates, [b|1, n] or [b|1, n, r]; None unless every pool has it."""
    tags = [getattr(block.tile.candidate_tags, name) for block in blocks]
    if len(tags) == 1 or any(tag is None for tag in tags):
        return tags[0] if len(tags) == 1 else None
    rows = max(len(tag) for tag in tags)
    return _concatenated([tag.expand(rows, *tag.shape[1:]) for tag in tags])


def _source_codes(pool: Sequence[Keys], names: tuple[str, ...], like: Tensor) -> Tensor:
    codes = [
        constant(torch.full, (len(keys),), names.index(keys.source or "pool"), dtype=torch.long, device=like.device)
        for keys in pool
    ]
    return codes[0] if len(codes) == 1 else torch.cat(codes)


def _concatenated(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
