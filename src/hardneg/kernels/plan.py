"""How a sweep is cut into tiles, in which precision it multiplies, and which small tensors have gradients.

``SweepPlan`` holds the prepared pairing and cuts it into tiles. ``Products`` multiplies the vectors of a tile, and adds
its contribution to their gradients. ``Functions`` and ``Leaf`` separate the distribution from the tensors in its fields
(a learnable beta, a temperature), so that these can be cut with the tiles and get a gradient. ``engine.Tiles``
builds the plan; ``sweep`` and ``passes`` run over it.

float32 and float64 are multiplied as they are. 16-bit inputs on a GPU use its tensor cores: similarities in float16,
after a division by the largest norm, so that none overflows and each carries 11 bits; gradients, whose range is large,
in bfloat16. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from hardneg.core.bounds import Bounds, TileAndMask
from hardneg.core.objectives.base import Objective
from hardneg.core.pairing import Cut, MaskedTile, Pairing, Rows, TileContext, num_rows, of_rows, similarity
from hardneg.core.tensors import is_per_anchor, tensor_fields, with_fields
from hardneg.kernels.cuda_graphs import Runner, TileShape, over_blocks
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
TENSOR_CORES = ("cuda",)
"""Devices on which 16-bit inputs are multiplied in 16 bits."""
HALF = (torch.float16, torch.bfloat16)
"""The 16-bit types."""


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


def bounds_with_gradient(factors: Sequence[Negatives]) -> list[tuple[int, str]]:
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
        numbers //= 1 if self.runner.compiles and not bounds_with_gradient(self.factors) else EAGER_TENSORS
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
        """Return the bounds; those with a gradient are replaced by their leaves."""
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


class Multiplicand(NamedTuple):
    """The vectors of the anchors or of a pool as they are multiplied."""

    vectors: Tensor
    norm: Tensor | None
    """The norm by which they were divided; None if they were not."""
    of_gradient: Tensor
    """The vectors for products with gradients: in bfloat16 for 16-bit inputs, otherwise the same."""


class Products:
    """The products of a prepared pairing.

    It keeps none of the pairing's own vectors if it uses converted ones.

    Args:
        pairing: The prepared pairing.
        half: Whether to multiply in 16 bits.
    """

    def __init__(self, pairing: Pairing, half: bool = False) -> None:
        self.half = half
        own = pairing.anchors.vectors
        self.anchors = _factor(own.detach(), half)
        self.pools = [
            self.anchors if keys.vectors is own else _factor(keys.vectors.detach(), half) for keys in pairing.candidates
        ]
        self.scales = [_product_of(self.anchors.norm, pool.norm) for pool in self.pools]
        self.dtype = pairing.anchors.vectors.dtype

    def of_pairing(self, pairing: Pairing) -> Pairing:
        """Return the pairing with the converted vectors, and without the vectors of its positives."""
        positives = self.anchors.vectors.new_empty(*pairing.positives.vectors.shape[:2], 0)
        pools = zip(pairing.candidates, self.pools, strict=True)
        return pairing.changed(
            anchors=pairing.anchors.changed(vectors=self.anchors.vectors),
            positives=pairing.positives.changed(vectors=positives),
            candidates=tuple(keys.changed(vectors=pool.vectors) for keys, pool in pools),
        )

    @property
    def dtype_of_gradient(self) -> torch.dtype:
        """Type of the gradients by the similarities."""
        return torch.bfloat16 if self.half else self.dtype

    def of_tile(self, rows: Rows, cut: Cut) -> tuple[Tensor, Tensor | None]:
        """Compute the products of a tile.

        Returns:
            The products [r, c], and the number that turns them into similarities (None for 1).
        """
        product = similarity(self.anchors.vectors[rows], cut.of(self.pools[cut.pool].vectors, rows))
        return product, self.scales[cut.pool]

    def add_gradient(self, grad: Tensor, rows: Rows, cut: Cut, anchors: Tensor | None, pool: Tensor | None) -> None:
        """Add the contribution of a tile to the gradients of the anchors and of the pool.

        Args:
            grad: Gradient by the similarities of the tile, [r, c].
            rows: The anchors of the tile.
            cut: The candidates of the tile.
            anchors: Sum of the gradients of the anchors; None if not needed.
            pool: Sum of the gradients of the pool; None if not needed.
        """
        candidates = cut.of(self.pools[cut.pool].of_gradient, rows)
        if anchors is not None:
            if candidates.ndim == 2:
                product = multiplied(grad, candidates)
            else:
                product = torch.bmm(grad[:, None].to(candidates.dtype), candidates)[:, 0]
            add_rows(anchors, rows, product)
        if pool is None:
            return
        own = self.anchors.of_gradient[rows]
        if pool.ndim == 2:
            add_product(pool[cut.low : cut.high], grad.T, own)
        else:
            add_rows(pool[:, cut.low : cut.high], rows, grad[:, :, None] * own[:, None])


def add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add a product of matrices to ``total``, without a temporary tensor where torch supports that.

    Args:
        total: Sum of products [m, n] in float32 or wider, changed in place.
        first: Matrix [m, k].
        second: Matrix [k, n].
    """
    if total.is_cuda and first.dtype in HALF and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(total, first, second, total.dtype, out=total)
    else:
        total.add_(multiplied(first, second))


def write_product(out: Tensor, first: Tensor, second: Tensor) -> None:
    """Write a product of matrices to ``out``, without a temporary tensor where torch supports that."""
    if out.is_cuda and first.dtype in HALF and hasattr(torch.ops.aten.mm, "dtype_out"):
        torch.ops.aten.mm.dtype_out(first, second, out.dtype, out=out)
    else:
        out.copy_(multiplied(first, second))


def add_rows(total: Tensor, rows: Rows, values: Tensor) -> None:
    """Add values to these rows, which are distinct: the result has the same bits in every run.

    Args:
        total: Tensor to change in place; all of a scalar.
        rows: The rows, as a slice or as numbers.
        values: One entry per row.
    """
    if isinstance(rows, Tensor) and total.ndim:
        total.index_add_(0, rows, values.to(total.dtype))
    else:
        (total[rows] if total.ndim else total).add_(values)


def narrows(vectors: Tensor) -> bool:
    """True if such inputs are multiplied in 16 bits."""
    return vectors.device.type in TENSOR_CORES and vectors.dtype in HALF


def _factor(vectors: Tensor, half: bool) -> Multiplicand:
    """Convert vectors for the products: with ``half``, to float16 after a division by their largest norm."""
    if not half or vectors.ndim == 3:
        return Multiplicand(vectors, None, vectors)
    norms = vectors.norm(dim=-1)
    largest = torch.where(norms.isfinite() & (norms > 0), norms, 0.0).amax() if len(norms) else norms.new_zeros(())
    largest = torch.where(largest > 0, largest, 1.0)
    return Multiplicand((vectors / largest).half(), largest, vectors.bfloat16())


def _product_of(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return first if second is None else second
    return first * second


def multiplied(first: Tensor, second: Tensor) -> Tensor:
    """Multiply matrices; 16-bit factors are summed and returned in float32."""
    if first.dtype not in HALF:
        dtype = torch.promote_types(first.dtype, second.dtype)  # anchors and a queue may differ
        return first.to(dtype) @ second.to(dtype)
    if first.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(first, second, out_dtype=torch.float32)
    return (first @ second).float()
