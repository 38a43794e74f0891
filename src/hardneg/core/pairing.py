"""Pairings: anchors with their positives and pools of candidates, as vectors with tags, before they are compared.

No [b, n] matrix is created here. ``Pairing.tile`` computes one block of scores; ``scoring.dense`` computes all of them.
``hardneg.core.views`` builds pairings from batches and pools. Read ``Pairing`` first, then ``TileContext.masked``,
which decides which candidates can be negatives, and the ``check_*`` functions at the end.

Vectors are used as passed unless ``normalize`` is set. Scores are float32 or wider, also under autocast and for half
precision inputs. An infinite feature becomes NaN, so that it cannot hide in a finite loss.
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
        anchors = self._ready(self.anchors)
        return anchors, tuple(anchors if keys is self.anchors else self._ready(keys) for keys in self.candidates)

    def prepared_own(self) -> Keys:
        """Return the prepared positives of each anchor, [b, p, d]."""
        return self._ready(self.own())

    def own(self) -> Keys:
        """Return the positives of each anchor, [b, p, d]."""
        if self.num_views > 1:
            return Keys(other_views(self.positives.vectors, self.num_views))
        return several(self.positives)

    def _ready(self, keys: Keys) -> Keys:
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


def check_parts(pairing: Pairing) -> None:
    """Raise ArgumentError unless the shapes of anchors, positives and candidates fit together."""
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
