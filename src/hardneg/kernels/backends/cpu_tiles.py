"""The tiles of a loss on a CPU: which candidates count, and their exponentials, in few passes over each tile.

``Sides`` has the vectors as they are multiplied, and ``ClosedFormTiles`` computes the tiles of ``cpu``, whose docstring
defines u, w and R. Nothing is selected pair by pair: masks are numbers, 0 or 1, and a candidate that does not count
gets a similarity so low that its exponential is 0.

The edges of a window of ranks are those of sorted rows: numpy sorts a row in less time than a product of the tile takes
(torch.topk: ten times as long). Ranks and masks refer to the same bits, because the forward and the backward pass
compute the same tiles by the same kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hardneg.core.bounds import edge_of
from hardneg.core.pairing import Cut, Pairing, of_rows
from hardneg.core.private_apis import times_transposed
from hardneg.core.statistics import PerRow
from hardneg.core.tensors import in_range
from hardneg.core.types import Keys
from hardneg.negatives.closed import ClosedForm

TILE = 2**20
"""Scores of a tile (4 MiB in float32), as long as that is at least MIN_ROWS rows."""
COLUMNS = 4096
"""Largest number of columns of a tile."""
MIN_ROWS = 64
"""Smallest number of rows of a tile."""
OUT = 1e30
"""Subtracted from the similarity of a candidate that does not count."""
MAX_BITS = 96.0
"""Largest ratio, in bits, of the terms of sums with one shift for all rows.

A coefficient may be as large, so that upstream gradients may be up to 2^31.
"""
LN_2 = math.log(2.0)


class Sides(NamedTuple):
    """The prepared vectors of a pairing.

    Attributes:
        anchors: The anchors.
        pools: The pools of candidates; one of them may be the anchors.
        inverse: For each pool, 1 / norm of its vectors, [n], if they are used as they were given; otherwise None.
        bound: No similarity is larger.
        ahead: Whether the forward pass sums the gradient by the anchors.
    """

    anchors: Keys
    pools: tuple[Keys, ...]
    inverse: tuple[Tensor | None, ...]
    bound: float
    ahead: bool

    @property
    def keys(self) -> list[Keys]:
        """The anchors, followed by the pools that are not the anchors."""
        return [self.anchors, *(keys for keys in self.pools if keys is not self.anchors)]

    @property
    def as_given(self) -> list[bool]:
        """For each of ``keys``, whether its vectors are those of the caller, who may change them after the loss."""
        given = [
            each is not None for keys, each in zip(self.pools, self.inverse, strict=True) if keys is not self.anchors
        ]
        return [False, *given]

    @classmethod
    def of(cls, pairing: Pairing, form: ClosedForm) -> Sides | None:
        """Prepare the vectors; return None unless they are finite.

        A queue that is normalised again is neither copied nor kept for the backward pass.
        """
        learnt = any(keys.vectors.requires_grad for keys in pairing.candidates)
        ahead = not (learnt or pairing.label_positives or (form.beta and not form.detach))
        unit, anchors = pairing.normalize and not pairing.ready, pairing.prepare(pairing.anchors)
        norms, pools = [_largest_norm(anchors.vectors, unit)], []
        inverse: list[Tensor | None] = []
        for place, keys in enumerate(pairing.candidates):
            others = keys is not pairing.anchors and not (place == 0 and pairing.num_views)  # no own positives
            as_given = ahead and unit and others and keys.vectors.dtype == anchors.vectors.dtype
            squares = _squares(keys.vectors) if as_given else None
            if squares is not None and in_range(squares):
                ready, largest = keys, 1.0
                inverse.append(squares.rsqrt_())
            else:
                ready = anchors if keys is pairing.anchors else pairing.prepare(keys)
                largest = norms[0] if ready is anchors else _largest_norm(ready.vectors, unit)
                inverse.append(None)
            pools.append(ready)
            norms.append(largest)
        bound = norms[0] * max(norms[1:])
        return cls(anchors, tuple(pools), tuple(inverse), bound, ahead) if bound < math.inf else None


def _squares(vectors: Tensor) -> Annotated[Tensor, "n"]:
    """Return the sum of squares of each row; in blocks, because memory that is new to a process takes long."""
    vectors = vectors.detach()
    squares, room = vectors.new_empty(len(vectors)), torch.empty_like(vectors[:COLUMNS])
    for low in range(0, len(vectors), COLUMNS):
        some = vectors[low : low + COLUMNS]
        torch.sum(torch.mul(some, some, out=room[: len(some)]), -1, out=squares[low : low + COLUMNS])
    return squares


def _largest_norm(vectors: Tensor, unit: bool) -> float:
    """Return the largest norm, 1 for unit vectors; NaN or infinity if a number is not finite."""
    if unit:
        return 1.0 if math.isfinite(vectors.detach().sum()) else math.nan
    return math.sqrt(_squares(vectors).max())


class RowSums(dict[str, PerRow]):
    """Sums of all rows by name, [b, 1] each.

    Args:
        like: Tensor of b rows, for its length and type.
    """

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.like = like

    def add(self, name: str, rows: slice, part: PerRow) -> None:
        """Add the part of a tile to the sums of its rows."""
        if name not in self:
            if len(part) == len(self.like):
                self[name] = part
                return
            self[name] = self.like.new_zeros(len(self.like), 1)
        self[name][rows].add_(part)

    def of(self, name: str, rows: slice) -> PerRow:
        """Return the sums of the given rows."""
        return part_of(self[name], rows)


def part_of(values: Tensor, rows: slice) -> Tensor:
    """Return these rows; all of them without slicing, which would be one more operation."""
    return values if rows.stop - rows.start == len(values) else values[rows]


class SimilarityTile(NamedTuple):
    """The similarities of a tile; those with the anchor's own instance are reduced by OUT."""

    cut: Cut
    value: Tensor
    promoted: Tensor | None
    """1 for candidates of the anchor's label, 0 for others; None if labels do not matter."""
    negative: Tensor
    """Similarities of the negatives, reduced by OUT for other candidates; may be the same tensor."""


class ExpTile(NamedTuple):
    """The exponentials u of the negatives and of the positives by label, each 0 for other candidates."""

    cut: Cut
    negative: Tensor
    weight: Tensor | None
    """w of the negatives; None for beta = 0."""
    positive: Tensor | None
    promoted: Tensor | None


class Place(NamedTuple):
    """The lowest similarity of a set of closest candidates, [r, 1], and the last column of those that are as close."""

    value: Tensor
    column: Tensor
    tied: bool
    """False if all candidates that are as close belong to the set."""


class ClosedFormTiles:
    """Computes the tiles of one loss.

    Args:
        pairing: The pairing.
        form: The distribution.
        sides: The prepared vectors.
        keep: Whether the tiles of the forward pass are kept.
        twice: Whether the forward pass reads the tiles of a row twice.
    """

    def __init__(self, pairing: Pairing, form: ClosedForm, sides: Sides, keep: bool, twice: bool) -> None:
        self.pairing, self.form, self.sides, self.keep = pairing, form, sides, keep
        self.anchors = sides.anchors.vectors.detach()
        self.pools = [keys.vectors.detach() for keys in sides.pools]
        self.beta = form.beta if form.beta > 1e-30 else 0.0  # float32 may round smaller values to 0
        self.scale = _scale_of(pairing.temperature, self.anchors.dtype)
        bits = sides.bound * float(self.scale if isinstance(self.scale, float) else self.scale.max())
        self.finite = bits < OUT / 1e6
        self.shift = bits if 2.0 * (1.0 + self.beta) * bits < MAX_BITS else None
        self.shifts = None if self.shift is not None else self.anchors.new_zeros(len(self.anchors), 1)
        self.minus_shift = self.anchors.new_tensor(-(self.shift or 0.0))
        self._set_tags()
        self.whole = twice or self.shift is None or form.window is not None
        self._cut()
        self._places: dict[int, tuple[Place | None, Place | None]] = {}
        self._rooms: dict[str, Tensor] = {}

    def _set_tags(self) -> None:
        """Convert ids and labels to numbers of the type of the scores, and read from which similarity on to keep."""
        pairing, form, dtype = self.pairing, self.form, self.anchors.dtype
        self.numbered = bool(pairing.num_views) and not pairing.ids_given
        sides = [pairing.anchors, *pairing.candidates]
        known = [None if self.numbered or pairing.anchors.ids is None else keys.ids for keys in sides]
        own = [] if known[0] is None else [known[0], *pairing.positive_ids(slice(None))]
        self.ids = _codes(own, known[1:], dtype, pairing.ids_given)
        self.promotes = pairing.label_positives
        self.labelled = form.other_labels or self.promotes
        self.excludes = form.other_labels or (self.promotes and not pairing.same_label_negatives)
        known = [keys.labels if self.labelled else None for keys in sides]
        self.labels = _codes([each for each in known[:1] if each is not None], known[1:], dtype, False)
        self.counted = form.window is None and (form.banded or len(self.ids[0]) > 1)
        self.selects = form.banded or form.window is not None
        views = pairing.num_views
        self.joined = self.promotes and self.excludes and self.numbered and not self.selects
        self.filled = [0] * (views > 1) if self.joined else [*range(min(0, 1 - views), max(1, views))]
        self.floor: float | None = None
        if form.banded:  # threshold_ keeps the numbers above another one
            kind = np.float64 if dtype == torch.float64 else np.float32
            self.floor = float(np.nextafter(kind(form.lowest(dtype)), kind(-np.inf)))

    def _cut(self) -> None:
        """Cut candidates and anchors into blocks of equal size."""
        b, n, longest = len(self.anchors), self.pairing.num_candidates, max(map(len, self.pools))
        self.cuts = self.pairing.cuts(-(-longest // -(-longest // COLUMNS)))
        size = max(MIN_ROWS, TILE // (n if self.whole else min(n, COLUMNS)))
        size = size if self.keep else min(size, -(-b // 2))  # without ``keep``, never all pairs at once
        size = -(-b // -(-b // size))
        self.blocks = [slice(low, min(low + size, b)) for low in range(0, b, size)]

    def room(self, name: str, like: Tensor) -> Tensor:
        """Return memory for a tensor of this shape, the same for each tile."""
        room = self._rooms.get(name)
        if room is not None and room.shape == like.shape:
            return room
        if room is None or room.numel() < like.numel():
            room = self._rooms[name] = torch.empty_like(like)
            return room
        return room.view(-1)[: like.numel()].view(like.shape)

    def first(self, rows: slice, sums: RowSums) -> Iterator[ExpTile]:
        """Compute the tiles of a block of rows, and before them what they depend on: edges and shift.

        Args:
            rows: The block of rows.
            sums: Receives the number of candidates with the anchor's id ("same_id") and label ("same_label"), of those
                that are left ("support", unless it follows from these), and the similarities of positives ("similar").
        """
        tiles: Iterator[SimilarityTile] = (self._similarities(rows, cut, sums) for cut in self.cuts)
        if self.whole:
            held = list(tiles)
            if self.form.window is not None:
                self._find_places(rows, held, sums)
            if self.shift is None:
                largest = torch.cat([each.negative.amax(-1, keepdim=True) for each in held], dim=1)
                top = largest.amax(-1, keepdim=True)
                assert self.shifts is not None
                self.shifts[rows] = torch.where(top > -OUT / 2, top, 0.0) * of_rows(self.scale, rows)
            tiles = iter(held)
        return (self._exponentials(each, rows) for each in tiles)

    def again(self) -> Iterator[tuple[slice, ExpTile]]:
        """Compute all tiles again, each with its rows."""
        for rows in self.blocks:
            for cut in self.cuts:
                found = self._similarities(rows, cut, None)
                if self.form.window is not None:
                    self._leave_window(found, rows)
                yield rows, self._exponentials(found, rows)

    def stored(self, tensors: Sequence[Tensor | None]) -> Iterator[tuple[slice, ExpTile]]:
        """Return the tiles that were kept, each with its rows; ``tensors`` are those of all tiles in order."""
        places = ((rows, cut) for rows in self.blocks for cut in self.cuts)
        for i, (rows, cut) in enumerate(places):
            yield rows, ExpTile(cut, *tensors[4 * i : 4 * i + 4])  # type: ignore[arg-type]

    def mirrored(self, pool: int) -> bool:
        """True if the tiles of this pool are symmetric: the exponential of a pair is that of its mirror image."""
        learnt = isinstance(self.pairing.temperature, Tensor) and self.pairing.temperature.requires_grad
        plain = isinstance(self.scale, float) and not learnt and self.shift is not None and self.form.window is None
        return plain and len(self.ids[0]) < 2 and self.sides.pools[pool] is self.sides.anchors

    def times_pool(self, tile: Tensor, cut: Cut) -> Annotated[Tensor, "r d"]:
        """Multiply numbers of the pairs of a tile with its candidates."""
        if (inverse := self.sides.inverse[cut.pool]) is not None:
            tile = torch.mul(tile, inverse[cut.low : cut.high], out=self.room("u", tile))
        return times_transposed(tile, cut.of(self.pools[cut.pool], slice(None)).T)

    def _similarities(self, rows: slice, cut: Cut, sums: RowSums | None) -> SimilarityTile:
        """Multiply the vectors of a tile and mark the candidates that do not count."""
        value = times_transposed(part_of(self.anchors, rows), cut.of(self.pools[cut.pool], rows))
        if (inverse := self.sides.inverse[cut.pool]) is not None:
            value.mul_(inverse[cut.low : cut.high])
        same = self._leave_instance(value, rows, cut, sums)
        promoted = self._same_label(value, rows, cut, same) if self.labelled else None
        if promoted is not None and sums is not None:
            sums.add("same_label", rows, promoted.sum(-1, keepdim=True))
            if self.promotes:
                sums.add("similar", rows, torch.mul(promoted, value, out=self.room("u", value)).sum(-1, keepdim=True))
        negative = value
        if self.promotes and self.selects:
            negative = value.clone()  # the positives are not selected
        if promoted is not None and self.excludes and not (self.promotes and not self.selects):
            negative.sub_(promoted, alpha=OUT)
        if self.floor is not None:
            torch.threshold_(negative, self.floor, -OUT)
        if self.counted and sums is not None:
            left = torch.gt(negative, -OUT / 2, out=self.room("u", value))
            sums.add("support", rows, left.sum(-1, keepdim=True))
        return SimilarityTile(cut, value, promoted, negative)

    def _leave_instance(self, value: Tensor, rows: slice, cut: Cut, sums: RowSums | None) -> Tensor | None:
        """Reduce the similarities with the anchor's own instance; return where ids are equal, if they were compared."""
        if self.numbered:
            self._fill_own(value, rows, cut, -OUT)
            return None
        own, theirs = self.ids[0], self.ids[1][cut.pool]
        if theirs is None or not own:
            return None
        theirs = theirs[:, cut.low : cut.high]
        same = torch.eq(part_of(own[0], rows), theirs, out=self.room("same", value))
        if sums is not None:
            sums.add("same_id", rows, same.sum(-1, keepdim=True))
        for other in own[1:]:
            found = torch.eq(part_of(other, rows), theirs, out=self.room("u", value))
            torch.maximum(same, found, out=same)
        value.sub_(same, alpha=OUT)
        return same

    def _fill_own(self, tile: Tensor, rows: slice, cut: Cut, value: float) -> None:
        """Fill the columns of the anchor's own instance, where the rows of the views are numbered.

        Row i of a view has the columns i, i + b, i - b and so on, with b rows in each view: diagonals of the tile.
        """
        if cut.pool:
            return
        views = self.pairing.num_views
        step = len(self.anchors) // views
        for view in self.filled:
            place = rows.start + view * step - cut.low
            if -tile.shape[0] < place < tile.shape[1]:
                tile.diagonal(place).fill_(value)

    def _same_label(self, value: Tensor, rows: slice, cut: Cut, same: Tensor | None) -> Tensor:
        """Return 1 for candidates of the anchor's label that are not its own instance, 0 for others."""
        (own,), theirs = self.labels[0], self.labels[1][cut.pool]
        assert theirs is not None
        room = self._new("label", value) if self.promotes else self.room("label", value)
        found = torch.eq(part_of(own, rows), theirs[:, cut.low : cut.high], out=room)
        if self.numbered:
            self._fill_own(found, rows, cut, 0.0)
        elif same is not None:
            torch.gt(found, same, out=found)
        return found

    def _exponentials(self, found: SimilarityTile, rows: slice) -> ExpTile:
        """Replace the similarities of a tile by exponentials, in the same memory."""
        positive, weight, promoted = None, None, found.promoted if self.promotes else None
        if promoted is not None and self.selects:
            positive = self._in_bits(found.value, rows).exp2_().mul_(promoted)
        x = self._in_bits(found.negative, rows)
        if self.beta not in (0.0, 1.0):
            weight = torch.mul(x, self.beta, out=self._new("weight", x)).exp2_()
        negative = x.exp2_()
        if promoted is not None and positive is None:
            positive = torch.mul(negative, promoted, out=self._new("positive", x))
            if self.excludes:
                negative.sub_(positive)
                weight = None if weight is None else weight.addcmul_(weight, promoted, value=-1.0)
        return ExpTile(found.cut, negative, negative if self.beta == 1.0 else weight, positive, promoted)

    def _new(self, name: str, like: Tensor) -> Tensor:
        """Return memory for a part of a tile, new if several tiles are held."""
        return torch.empty_like(like) if self.keep or self.whole else self.room(name, like)

    def _in_bits(self, similarity: Tensor, rows: slice) -> Tensor:
        """Turn similarities into x - R."""
        minus = self.minus_shift if self.shifts is None else part_of(self.shifts, rows).neg()
        if isinstance(self.scale, float):
            return torch.add(minus, similarity, alpha=self.scale, out=similarity)
        return torch.addcmul(minus, similarity, self.scale[rows], out=similarity)

    def add_shift(self, x: Tensor, rows: slice, factor: float) -> Tensor:
        """Add R to a tensor with one row per anchor, multiplied by a factor, in place."""
        if self.shifts is None:
            return x.add_((self.shift or 0.0) * factor)
        return x.add_(part_of(self.shifts, rows), alpha=factor)

    def _find_places(self, rows: slice, tiles: list[SimilarityTile], sums: RowSums) -> None:
        """Find the edges of the window of ranks in whole rows, and mask what lies outside."""
        window = self.form.window
        assert window is not None
        values = [each.negative for each in tiles]
        value = values[0] if len(values) == 1 else torch.cat(values, dim=1)
        count = torch.gt(value, -OUT / 2, out=self.room("u", value)).sum(-1, keepdim=True, dtype=value.dtype).long()
        start, stop = window.places({"count": count})
        ordered = torch.from_numpy(np.sort(value.numpy(), axis=1))
        n = value.shape[1]
        before = _place(value, ordered, start) if window.skipped(n) else None
        after = _place(value, ordered, stop) if window.farthest(n) else None
        self._places[rows.start] = before, after
        sums.add("support", rows, (stop - start).to(value.dtype))
        for each in tiles:
            self._leave_window(each, rows)

    def _leave_window(self, found: SimilarityTile, rows: slice) -> None:
        """Reduce the similarities of candidates outside the window of ranks."""
        value, (before, after) = found.negative, self._places[rows.start]
        column, room = self.pairing.columns(found.cut), self.room("u", value)
        if after is not None:
            outside = torch.lt(value, after.value, out=room)
            if after.tied:
                outside.add_((value == after.value) & (column > after.column))
            value.sub_(outside, alpha=OUT)
        if before is not None:
            compare = torch.gt if before.tied else torch.ge
            outside = compare(value, before.value, out=room)
            if before.tied:
                outside.add_((value == before.value) & (column <= before.column))
            value.sub_(outside, alpha=OUT)


def _place(value: Tensor, ordered: Tensor, size: Annotated[Tensor, "r 1"]) -> Place:
    """Return the edge of the ``size`` closest candidates, given the same rows in ascending order."""
    n = value.shape[1]
    place = n - size
    last = ordered.gather(1, place.clamp(max=n - 1))
    tied = (ordered.gather(1, (place - 1).clamp(min=0)) == last) & (size > 0) & (place > 0)
    last.masked_fill_(size == 0, math.inf)
    column = torch.full_like(size, n)
    some = tied[:, 0].nonzero()[:, 0]
    if len(some):
        columns = torch.arange(n).expand(len(some), n)
        column[some] = edge_of(value[some], columns, size[some], last[some])[1]
    return Place(last, column, bool(len(some)))


def _scale_of(temperature: float | Tensor, dtype: torch.dtype) -> float | Annotated[Tensor, "b 1"]:
    """Return the factor that turns similarities into scores in bits: a number, or one for each anchor."""
    if isinstance(temperature, Tensor) and temperature.ndim == 2 and len(temperature) > 1:
        return 1.0 / (LN_2 * temperature.detach().to(dtype))
    return 1.0 / (LN_2 * float(temperature.detach() if isinstance(temperature, Tensor) else temperature))


def _codes(
    own: list[Annotated[Tensor, "b"]], theirs: list[Annotated[Tensor, "n"] | None], dtype: torch.dtype, given: bool
) -> tuple[list[Annotated[Tensor, "b 1"]], list[Annotated[Tensor, "1 n"] | None]]:
    """Convert tags to floating point numbers that are equal where the tags are: they are compared in half the time.

    Args:
        own: Tags of the anchors.
        theirs: Tags of the candidates of each pool, or None.
        dtype: Type of the result.
        given: Whether a negative tag matches nothing.
    """
    tags = {id(each): each.detach() for each in [*own, *theirs] if each is not None}
    ends = [int(end) for each in tags.values() for end in torch.aminmax(each)]
    lowest, largest = min(ends, default=0), max(ends, default=0)
    if max(-lowest, largest) >= 2**53:  # not all of them are exact numbers of the type: count them through
        every = torch.unique(torch.cat(list(tags.values())), return_inverse=True)[1]
        exact = dict(zip(tags, every.split([len(each) for each in tags.values()]), strict=True))
    else:
        exact = tags
    kind = dtype if max(-lowest, largest) < 2**24 else torch.float64
    numbers = {key: each.to(kind) for key, each in exact.items()}
    mine = [numbers[id(each)] for each in own]
    if given and lowest < 0:
        mine = [each.masked_fill(tag < 0, math.nan) for each, tag in zip(mine, own, strict=True)]
    return [each[:, None] for each in mine], [None if each is None else numbers[id(each)][None] for each in theirs]
