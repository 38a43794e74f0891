"""The plan of a sweep: which vectors are multiplied, in which tiles, and which small tensors may have a gradient.

``SweepPlan`` holds the prepared pairing and cuts it into tiles. ``Functions`` and ``Leaf`` separate the distribution
from the tensors in its fields (a learnable beta, a temperature), so that these can be cut with the tiles and get a
gradient. ``backends/tiles.py`` builds the plan; ``sweep`` and ``passes`` run over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hardneg.core.bounds import Bounds, TileAndMask
from hardneg.core.objectives.base import Objective
from hardneg.core.pairing import Cut, MaskedTile, Pairing, Rows, TileContext, num_rows, of_rows
from hardneg.kernels.cuda_graphs import Runner, TileShape, over_blocks
from hardneg.kernels.products import Products
from hardneg.negatives.base import Negatives

CPU_TILE = (256, 2048)
"""Rows and columns of a tile that fits the caches of a core."""
CHUNK_BYTES = 2**27
"""Size of one tile of scores on a GPU: all columns of as many rows as fit; fewer columns if those rows would be few.

A pass that holds nothing else of this size uses tiles of twice the size, which takes less time. Not where a weight may
jump at a bound or an edge: products of tiles of another shape may differ in their last bit, and fall on its other side.
"""
MIN_TILE_ROWS = 256
"""Smallest number of rows of a tile on a GPU."""
EAGER_TENSORS = 8
"""Approximate number of tensors of a tile's size that are held at once if its functions are not compiled."""


class ComparedTile(NamedTuple):
    """A tile before the pointwise functions: the products of its vectors, and its context (tags and masks)."""

    product: Tensor
    scale: Tensor | None
    """Factor that turns a product into a similarity; None for 1."""
    context: TileContext

    def similarity(self) -> Tensor:
        """Return the similarities of the tile."""
        return similarity_of(self.product, self.scale)

    def masked(self, similarity: Tensor, temperature: float | Tensor) -> MaskedTile:
        """Return the tile of scores with its masks, from its similarities."""
        return self.context.masked(tempered(similarity, self.scale, temperature), temperature)


def similarity_of(product: Tensor, scale: Tensor | None) -> Tensor:
    """Convert products to similarities, in float32 or wider."""
    wide = product.to(torch.promote_types(product.dtype, torch.float32))
    return wide if scale is None else wide * scale


def tempered(similarity: Tensor, scale: Tensor | None, temperature: float | Tensor) -> Tensor:
    """Divide similarities by the temperature, exactly as dense scores are divided.

    Where products were rounded to 16 bits anyway, multiply by the inverse, which is faster.

    Args:
        similarity: Similarities of a tile.
        scale: Scale of the products; None if they were not rounded to 16 bits.
        temperature: The temperature.
    """
    if scale is None or isinstance(temperature, Tensor):
        return similarity / temperature
    return similarity * (1.0 / temperature)


def with_gradient(factors: Sequence[Negatives]) -> list[tuple[int, str]]:
    """Return the bounds through which a gradient flows, as (factor, name).

    They are computed and differentiated without compilation.
    """
    return [(i, name) for i, factor in enumerate(factors) for name, bound in factor.bounds().items() if bound.grad]


class SweepPlan:
    """The plan of a sweep over a prepared pairing: vectors as they are multiplied, and the tiles.

    It holds no other vectors of the pairing.

    Args:
        pairing: The prepared pairing.
        factors: The factors of the distribution.
        objective: The objective.
        own: Scores of the anchors' own positives, [b, p].
        tile: Rows and columns of a tile; None chooses them by device and memory.
        half: Whether to multiply in 16 bits.
    """

    def __init__(
        self,
        pairing: Pairing,
        factors: tuple[Negatives, ...],
        objective: Objective,
        own: Annotated[Tensor, "b p"],
        tile: tuple[int, int] | None = None,
        half: bool = False,
    ) -> None:
        self.factors, self.objective, self.own = factors, objective, own.detach()
        self.runner = Runner(own.device, (*factors, objective))
        self.functions, self.leaves = collect(pairing, factors, objective)
        self.products = Products(pairing, half)
        self.pairing = _with_short_ids(self.products.of_pairing(pairing), pairing)
        rows, columns = tile or self._tile()
        self.cuts = self.pairing.cuts(columns)
        self.columns = {cut: self.pairing.columns(cut) for cut in self.cuts}
        self.rows = self._blocks(rows)
        self.rows_alone = self.rows
        if tile is None and self._twice_fits():
            self.rows_alone = self._blocks(-(-len(self.pairing) // -(-len(self.rows) // 2)))

    def _twice_fits(self) -> bool:
        """True if a pass that holds only scores may use tiles of twice the size, which a guide's similarities prevent.

        Bounds prevent it as well: see ``CHUNK_BYTES``.
        """
        bounded = any(factor.removes or factor.bounds() for factor in self.factors)
        return self.runner.compiles and self.pairing.guide is None and not bounded

    def _tile(self) -> tuple[int, int]:
        """Choose rows and columns of a tile by device and memory."""
        if self.own.device.type == "cpu":
            return CPU_TILE
        numbers = CHUNK_BYTES // self.products.anchors.vectors.element_size()
        numbers //= 1 if self.runner.compiles and not with_gradient(self.factors) else EAGER_TENSORS
        columns = max(1, *(len(keys) for keys in self.pairing.candidates))
        rows = max(numbers // columns, min(MIN_TILE_ROWS, numbers))
        parts = -(-len(self.pairing) // rows)  # of equal size: one shape to compile
        return -(-len(self.pairing) // parts), max(numbers // rows, 1)

    def _blocks(self, size: int) -> list[Rows]:
        """Cut the rows into blocks.

        Compiled functions receive the row numbers as a tensor: a slice would become part of what is compiled.
        """
        if self.runner.compiles and len(self.pairing):
            return list(torch.arange(len(self.pairing), device=self.own.device).split(size))  # type: ignore[no-untyped-call]
        return [slice(low, min(low + size, len(self.pairing))) for low in range(0, len(self.pairing), size)]

    def each(self, step: Callable[[Rows], None], alone: bool = False) -> None:
        """Call ``step``, which stores its results itself, with every block of rows.

        Args:
            step: Function of a block of rows.
            alone: Whether ``step`` holds nothing of a tile's size besides its scores.
        """
        over_blocks(step, self.rows_alone if alone else self.rows, lambda: self.runner.compiles)

    def shape(self, rows: Rows, cut: Cut) -> TileShape:
        """Return the shape of a tile, including its pool: tags of pools differ in shape."""
        return num_rows(rows), cut.high - cut.low, cut.pool

    def compared(self, rows: Rows, cut: Cut) -> ComparedTile:
        """Compute the products of a tile."""
        product, scale = self.products.of_tile(rows, cut)
        return ComparedTile(product, scale, self.pairing.context(rows, cut, self.columns[cut]))

    def own_tile(self, own: Tensor, temperature: float | Tensor) -> TileAndMask:
        """Return the own positives of all anchors as a tile, and which of them are real."""
        return self.pairing.positive_tile(slice(0, len(self.pairing)), own, temperature)

    def blocks(self) -> list[PlannedRows]:
        """Return the blocks of rows for the search for bounds."""
        return [PlannedRows(self, rows) for rows in self.rows]


def _with_short_ids(pairing: Pairing, given: Pairing) -> Pairing:
    """Store the numbers of rows that are their own candidates in 32 bits: a kernel reads one for every pair."""
    if given.ids_given or not given.itself or given.anchors.ids is None:
        return pairing
    (candidates,), ids = pairing.candidates, given.anchors.ids.int()
    return pairing.changed(anchors=pairing.anchors.changed(ids=ids), candidates=(candidates.changed(ids=ids),))


@dataclass(eq=False)
class PlannedRows:
    """Some anchors of a plan, for the search for bounds (``core.bounds.find_bounds``)."""

    plan: SweepPlan
    rows: Rows

    def masked(self) -> Iterator[MaskedTile]:
        """Iterate over the tiles of these anchors, with all masks."""
        temperature = of_rows(self.plan.pairing.temperature, self.rows)
        for cut in self.plan.cuts:
            compared = self.plan.compared(self.rows, cut)
            yield compared.masked(compared.similarity(), temperature)

    def tiles(self) -> Iterator[TileAndMask]:
        """Iterate over the tiles of these anchors, with the mask of valid candidates."""
        for masked in self.masked():
            yield masked.tile, masked.valid

    def positives(self) -> Iterator[TileAndMask]:
        """Iterate over tiles that hold positives: the own ones, then those by label."""
        temperature = of_rows(self.plan.pairing.temperature, self.rows)
        yield self.plan.pairing.positive_tile(self.rows, self.plan.own[self.rows], temperature)
        if self.plan.pairing.label_positives:
            for masked in self.masked():
                assert masked.promoted is not None
                yield masked.tile, masked.promoted


# The temperature, and tensors that are fields of a distribution or objective (a learnable beta or bias), are cut with
# the tiles and put back together. A tensor in the closure of a lambda gets no gradient: make it a field.

Holder = TypeVar("Holder")
_field_names: dict[type, tuple[str, ...]] = {}
PER_ANCHOR = ("num_negatives", "log_norm")
"""Fields that hold one number per anchor as [b]; any other field has the shape [b, 1] for that."""


def tensor_fields(holder: Any) -> dict[str, Tensor]:
    """Return the fields of a distribution or objective that are tensors."""
    kind = holder.__class__
    if kind not in _field_names:
        _field_names[kind] = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
    values = {name: getattr(holder, name) for name in _field_names[kind]}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def is_per_anchor(tensor: Tensor, name: str, rows: int) -> bool:
    """True if a field holds one number per anchor, and is not a table that happens to have as many entries.

    Args:
        tensor: The field.
        name: Its name, which decides about the shape: see ``PER_ANCHOR``.
        rows: Number of anchors.
    """
    return tensor.shape == ((rows,) if name in PER_ANCHOR else (rows, 1))


def with_fields(holder: Holder, tensors: dict[str, Tensor]) -> Holder:
    """Return the holder with these tensors in its fields."""
    return replace(holder, **tensors) if tensors else holder  # type: ignore[type-var]


def fields_of_rows(holder: Holder, rows: slice, number: int) -> Holder:
    """Return the holder with its per-anchor fields cut to some rows.

    Args:
        holder: A distribution, objective or mask.
        rows: The rows.
        number: Number of anchors.
    """
    tensors = tensor_fields(holder).items()
    return with_fields(holder, {name: each[rows] for name, each in tensors if is_per_anchor(each, name, number)})


class Pointwise(NamedTuple):
    """The distribution, the objective and the temperature with the tensors of one tile."""

    factors: tuple[Negatives, ...]
    objective: Objective
    temperature: float | Tensor


@dataclass(frozen=True, eq=False)
class Functions:
    """The distributions, the objective and the temperature, separated from their tensors (the leaves).

    Attributes:
        factors: The factors of the distribution.
        objective: The objective.
        temperature: The temperature; None if it is the first leaf.
        fields: For each leaf that is a field: its holder, its name and its place among the leaves.
        largest: For each bound with a gradient: its factor, its name and its place among the leaves.
    """

    factors: tuple[Negatives, ...]
    objective: Objective
    temperature: float | None
    fields: tuple[tuple[int, str, int], ...]
    largest: tuple[tuple[int, str, int], ...] = ()

    def with_leaves(self, leaves: Sequence[Tensor]) -> Pointwise:
        """Put these leaves in place of the tensors."""
        changes: list[dict[str, Tensor]] = [{} for _ in (*self.factors, self.objective)]
        for holder, name, place in self.fields:
            changes[holder][name] = leaves[place]
        factors = tuple(with_fields(factor, change) for factor, change in zip(self.factors, changes[:-1], strict=True))
        temperature = leaves[0] if self.temperature is None else self.temperature
        return Pointwise(factors, with_fields(self.objective, changes[-1]), temperature)

    def replaced(self, bounds: Sequence[Bounds], leaves: Sequence[Tensor]) -> list[Bounds]:
        """Return the bounds with these leaves in place of those that have a gradient."""
        changed = [dict(each) for each in bounds]
        for factor, name, place in self.largest:
            changed[factor][name] = leaves[place]
        return list(changed)


class Leaf(NamedTuple):
    """A tensor, and whether its first dimension is that of the anchors."""

    tensor: Tensor
    per_anchor: bool

    def of(self, rows: Rows) -> Tensor:
        """Return the part of the tensor for these rows."""
        return self.tensor[rows] if self.per_anchor else self.tensor


def collect(pairing: Pairing, factors: tuple[Negatives, ...], objective: Objective) -> tuple[Functions, list[Leaf]]:
    """Collect the tensors of the temperature and of all fields, in one order.

    Args:
        pairing: The pairing, for its temperature and the number of anchors.
        factors: The factors of the distribution.
        objective: The objective.

    Returns:
        The functions without their tensors, and the leaves.
    """
    leaves, places = [], []
    plain = None if isinstance(pairing.temperature, Tensor) else pairing.temperature
    if isinstance(pairing.temperature, Tensor):
        leaves.append(Leaf(pairing.temperature, pairing.temperature.ndim == 2))
    for i, holder in enumerate((*factors, objective)):
        for name, tensor in tensor_fields(holder).items():
            places.append((i, name, len(leaves)))
            leaves.append(Leaf(tensor, is_per_anchor(tensor, name, len(pairing))))
    return Functions(factors, objective, plain, tuple(places)), leaves
