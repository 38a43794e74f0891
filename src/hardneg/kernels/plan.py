"""The plan of a sweep: which vectors are multiplied, in which tiles, and which small tensors may carry a gradient."""

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
"""Rows and columns that fit the caches of a core."""
CHUNK_BYTES = 2**27
"""Of one tile of scores on a GPU: all columns of as many rows as fit, and fewer columns where those are few.

Twice that in a pass that holds nothing else of its size: fewer tiles take less time. Not where a weight may jump at a
bound or an edge: products of tiles of another shape may differ in their last bit, and fall on its other side."""
FEWEST_ROWS = 256
EAGER_TENSORS = 8
"""About so many tensors of a tile's size are held at once where its functions are not compiled."""


class ComparedTile(NamedTuple):
    """A tile before the pointwise functions: the products of its vectors, and its context."""

    product: Tensor
    scale: Tensor | None
    """What makes a product a similarity."""
    context: TileContext

    def similarity(self) -> Tensor:
        return similarity_of(self.product, self.scale)

    def masked(self, similarity: Tensor, temperature: float | Tensor) -> MaskedTile:
        return self.context.masked(tempered(similarity, self.scale, temperature), temperature)


def similarity_of(product: Tensor, scale: Tensor | None) -> Tensor:
    wide = product.to(torch.promote_types(product.dtype, torch.float32))
    return wide if scale is None else wide * scale


def tempered(similarity: Tensor, scale: Tensor | None, temperature: float | Tensor) -> Tensor:
    """Divided as dense scores are, or multiplied, which is faster, where 16 bits rounded the products anyway."""
    if scale is None or isinstance(temperature, Tensor):
        return similarity / temperature
    return similarity * (1.0 / temperature)


def with_gradient(factors: Sequence[Negatives]) -> list[tuple[int, str]]:
    """The bounds through which a gradient flows: factor and name. They are found and pulled back uncompiled."""
    return [(i, name) for i, factor in enumerate(factors) for name, bound in factor.bounds().items() if bound.grad]


class SweepPlan:
    """What a prepared pairing, with the scores of its own positives, is swept by, and in which tiles.

    It holds the vectors of the pairing as they are multiplied, and no others.
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
        """Whether scores may stand alone in tiles of twice the size. The similarities of a guide stand beside them."""
        bounded = any(factor.removes or factor.bounds() for factor in self.factors)
        return self.runner.compiles and self.pairing.guide is None and not bounded

    def _tile(self) -> tuple[int, int]:
        if self.own.device.type == "cpu":
            return CPU_TILE
        numbers = CHUNK_BYTES // self.products.anchors.vectors.element_size()
        numbers //= 1 if self.runner.compiles and not with_gradient(self.factors) else EAGER_TENSORS
        columns = max(1, *(len(keys) for keys in self.pairing.candidates))
        rows = max(numbers // columns, min(FEWEST_ROWS, numbers))
        parts = -(-len(self.pairing) // rows)  # of equal size: one shape to compile
        return -(-len(self.pairing) // parts), max(numbers // rows, 1)

    def _blocks(self, size: int) -> list[Rows]:
        """Compiled functions are given the numbers of rows: a slice would be a part of what is compiled."""
        if self.runner.compiles and len(self.pairing):
            return list(torch.arange(len(self.pairing), device=self.own.device).split(size))  # type: ignore[no-untyped-call]
        return [slice(low, min(low + size, len(self.pairing))) for low in range(0, len(self.pairing), size)]

    def each(self, step: Callable[[Rows], None], alone: bool = False) -> None:
        """Calls ``step``, which stores what it finds, with every block of rows.

        ``alone``: besides the scores of a tile it holds nothing of their size.
        """
        over_blocks(step, self.rows_alone if alone else self.rows, lambda: self.runner.compiles)

    def shape(self, rows: Rows, cut: Cut) -> TileShape:
        """Of a tile; pools have tags of other shapes."""
        return num_rows(rows), cut.high - cut.low, cut.pool

    def compared(self, rows: Rows, cut: Cut) -> ComparedTile:
        product, scale = self.products.of_tile(rows, cut)
        return ComparedTile(product, scale, self.pairing.context(rows, cut, self.columns[cut]))

    def own_tile(self, own: Tensor, temperature: float | Tensor) -> TileAndMask:
        """The own positives of all anchors, and which of them are real."""
        return self.pairing.positive_tile(slice(0, len(self.pairing)), own, temperature)

    def blocks(self) -> list[PlannedRows]:
        return [PlannedRows(self, rows) for rows in self.rows]


def _with_short_ids(pairing: Pairing, given: Pairing) -> Pairing:
    """The numbers of rows that are their own candidates have 32 bits: a kernel reads one for every pair."""
    if given.ids_given or not given.itself or given.anchors.ids is None:
        return pairing
    (candidates,), ids = pairing.candidates, given.anchors.ids.int()
    return pairing.changed(anchors=pairing.anchors.changed(ids=ids), candidates=(candidates.changed(ids=ids),))


@dataclass(eq=False)
class PlannedRows:
    """Some anchors, for the sweep of the bounds."""

    plan: SweepPlan
    rows: Rows

    def masked(self) -> Iterator[MaskedTile]:
        temperature = of_rows(self.plan.pairing.temperature, self.rows)
        for cut in self.plan.cuts:
            compared = self.plan.compared(self.rows, cut)
            yield compared.masked(compared.similarity(), temperature)

    def tiles(self) -> Iterator[TileAndMask]:
        for masked in self.masked():
            yield masked.tile, masked.valid

    def positives(self) -> Iterator[TileAndMask]:
        temperature = of_rows(self.plan.pairing.temperature, self.rows)
        yield self.plan.pairing.positive_tile(self.rows, self.plan.own[self.rows], temperature)
        if self.plan.pairing.label_positives:
            for masked in self.masked():
                assert masked.promoted is not None
                yield masked.tile, masked.promoted


# The temperature, and tensors that are fields of a distribution or objective (a learnable beta or bias), are cut with
# the tiles and put back together. What a lambda closes over cannot be seen, and gets no gradient: make it a field.

Holder = TypeVar("Holder")
_field_names: dict[type, tuple[str, ...]] = {}
PER_ANCHOR = ("num_negatives", "log_norm")
"""Fields that hold a number for each anchor as [b]; any other field does as [b, 1]."""


def tensor_fields(holder: Any) -> dict[str, Tensor]:
    kind = holder.__class__
    if kind not in _field_names:
        _field_names[kind] = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
    values = {name: getattr(holder, name) for name in _field_names[kind]}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def is_per_anchor(tensor: Tensor, name: str, rows: int) -> bool:
    """Whether a field holds a number for each anchor, and not a table of as many entries."""
    return tensor.shape == ((rows,) if name in PER_ANCHOR else (rows, 1))


def with_fields(holder: Holder, tensors: dict[str, Tensor]) -> Holder:
    return replace(holder, **tensors) if tensors else holder  # type: ignore[type-var]


def fields_of_rows(holder: Holder, rows: slice, number: int) -> Holder:
    """With the fields that hold a number for each of ``number`` anchors cut to these rows."""
    tensors = tensor_fields(holder).items()
    return with_fields(holder, {name: each[rows] for name, each in tensors if is_per_anchor(each, name, number)})


class Pointwise(NamedTuple):
    factors: tuple[Negatives, ...]
    objective: Objective
    temperature: float | Tensor


@dataclass(frozen=True, eq=False)
class Functions:
    """The distributions, the objective and the temperature, and which of the leaves are tensors of theirs."""

    factors: tuple[Negatives, ...]
    objective: Objective
    temperature: float | None  # None: the first of the leaves
    fields: tuple[tuple[int, str, int], ...]  # of which holder, which field, and its place among the leaves
    largest: tuple[tuple[int, str, int], ...] = ()  # bounds with a gradient: of which factor, which one, and its place

    def with_leaves(self, leaves: Sequence[Tensor]) -> Pointwise:
        """With these leaves instead of their tensors."""
        changes: list[dict[str, Tensor]] = [{} for _ in (*self.factors, self.objective)]
        for holder, name, place in self.fields:
            changes[holder][name] = leaves[place]
        factors = tuple(with_fields(factor, change) for factor, change in zip(self.factors, changes[:-1], strict=True))
        temperature = leaves[0] if self.temperature is None else self.temperature
        return Pointwise(factors, with_fields(self.objective, changes[-1]), temperature)

    def replaced(self, bounds: Sequence[Bounds], leaves: Sequence[Tensor]) -> list[Bounds]:
        """The bounds with these leaves instead of those that have a gradient."""
        changed = [dict(each) for each in bounds]
        for factor, name, place in self.largest:
            changed[factor][name] = leaves[place]
        return list(changed)


class Leaf(NamedTuple):
    """A tensor, and whether its first dimension is that of the anchors."""

    tensor: Tensor
    per_anchor: bool

    def of(self, rows: Rows) -> Tensor:
        return self.tensor[rows] if self.per_anchor else self.tensor


def collect(pairing: Pairing, factors: tuple[Negatives, ...], objective: Objective) -> tuple[Functions, list[Leaf]]:
    """The tensors of the temperature and the fields, in one order."""
    leaves, places = [], []
    plain = None if isinstance(pairing.temperature, Tensor) else pairing.temperature
    if isinstance(pairing.temperature, Tensor):
        leaves.append(Leaf(pairing.temperature, pairing.temperature.ndim == 2))
    for i, holder in enumerate((*factors, objective)):
        for name, tensor in tensor_fields(holder).items():
            places.append((i, name, len(leaves)))
            leaves.append(Leaf(tensor, is_per_anchor(tensor, name, len(pairing))))
    return Functions(factors, objective, plain, tuple(places)), leaves
