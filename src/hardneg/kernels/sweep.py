"""Sweeps over the tiles of a plan: the bounds of the distributions first, then differentiable passes.

A pass is one autograd function (``sweep``): its forward sums over the tiles, and its backward recomputes each tile. The
gradient by a tile's similarities is the vector-Jacobian product of pointwise functions, and products carry it to the
vectors, so memory is that of one tile: ``pull_back`` is the backward pass of a tile. ``passes`` has the subclasses of
``Sweep``; ``bounds_of`` computes the bounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from hardneg.core.bounds import (
    Bound,
    Bounds,
    Edge,
    Factor,
    Reducer,
    State,
    Window,
    find_bounds,
    finish,
    left_by,
    reduce_rows,
)
from hardneg.core.pairing import Cut, Pairing, Rows, num_rows, of_rows
from hardneg.core.tensors import first_derivative_only
from hardneg.core.tiles import NEVER
from hardneg.kernels.plan import (
    ComparedTile,
    Functions,
    Leaf,
    PlannedRows,
    SweepPlan,
    add_rows,
    bounds_with_gradient,
    similarity_of,
    tempered,
)

Grads = Sequence[Tensor]
"""Gradients by the outputs of a sweep."""
Outputs = list[tuple[Tensor, Tensor]]
"""Outputs to differentiate, each with the gradient by it."""
OutputsOf = Callable[[Sequence[Tensor]], Outputs]


class At(NamedTuple):
    """A tile: its anchors, its candidates, and their products."""

    rows: Rows
    cut: Cut
    compared: ComparedTile


class Sweep(ABC):
    """A pass over the tiles of a plan: what it sums, and how each tile contributes to the gradients.

    Args:
        plan: The plan.
        leaves: Tensors other than the vectors that may have a gradient.
    """

    def __init__(self, plan: SweepPlan, leaves: Sequence[Leaf]) -> None:
        self.plan, self.per_anchor = plan, [leaf.per_anchor for leaf in leaves]

    @abstractmethod
    def forward(self, leaves: list[Leaf]) -> tuple[Tensor, ...]:
        """Compute the outputs of the pass, with one row per anchor each."""

    def prepare(self, leaves: list[Leaf], grads: Grads) -> None:  # noqa: B027
        """Compute what the backward pass needs of all rows before the first tile."""

    def pull_own(self, leaves: list[Leaf], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        """Compute the gradients by the leaves that come from the anchors' own positives."""
        return [None] * len(leaves)

    @abstractmethod
    def pull(self, at: At, leaves: list[Leaf], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        """Compute the gradients by the similarities of a tile and by the leaves.

        Args:
            at: The tile.
            leaves: All leaves.
            wanted: Whether each gradient is needed: the similarities, then the leaves.
            grads: Gradients by the outputs.
        """


def sweep(task: Sweep, pairing: Pairing, leaves: Sequence[Leaf]) -> tuple[Tensor, ...]:
    """Run a pass, with gradients to the vectors of the planned pairing and to the leaves.

    Args:
        task: The pass, with its plan.
        pairing: The prepared pairing that was planned, whose vectors get the gradient.
        leaves: Further tensors that may get a gradient, in the order in which the pass expects them.

    Returns:
        The outputs of the pass.
    """
    vectors = [pairing.anchors.vectors, *(keys.vectors for keys in pairing.candidates)]
    found: tuple[Tensor, ...] = _Swept.apply(task, *vectors, *(leaf.tensor for leaf in leaves))  # type: ignore[no-untyped-call]
    return found


class _Swept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, task: Sweep, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.task, ctx.number = task, len(tensors) - len(task.per_anchor)
        ctx.shapes = [each.shape for each in tensors[: ctx.number]]
        ctx.save_for_backward(*(tensors[ctx.number :] if task.plan.products.half else tensors))
        return task.forward(_leaves(task, tensors))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.autocast(grads[0].device.type, enabled=False):
            task, wanted = ctx.task, list(ctx.needs_input_grad[1:])
            leaves = _leaves(task, ctx.saved_tensors)
            totals = _Totals(task, leaves, wanted, ctx.shapes, grads[0].device)
            task.prepare(leaves, grads)
            totals.add_leaves(slice(0, len(task.plan.pairing)), task.pull_own(leaves, totals.wanted_leaves, grads))
            if any(wanted):
                task.plan.each(lambda rows: totals.pull(rows, leaves, grads))
            return None, *totals.vectors, *totals.leaves


def _leaves(task: Sweep, tensors: Sequence[Tensor]) -> list[Leaf]:
    some = tensors[len(tensors) - len(task.per_anchor) :]
    return [Leaf(tensor.detach(), per_anchor) for tensor, per_anchor in zip(some, task.per_anchor, strict=True)]


class _Totals:
    """The sums of the gradients over all tiles; None where none is needed."""

    def __init__(
        self, task: Sweep, leaves: list[Leaf], wanted: list[bool], shapes: list[torch.Size], device: torch.device
    ) -> None:
        self.task, number = task, len(shapes)
        self.wanted_leaves = wanted[number:]
        products = task.plan.products
        again = [False, *(pool is products.anchors and wanted[0] for pool in products.pools)]  # add to the anchors'
        self.vectors = [
            torch.zeros(shape, dtype=products.dtype, device=device) if want and not twice else None
            for shape, want, twice in zip(shapes, wanted[:number], again, strict=True)
        ]
        self.leaves = [
            torch.zeros_like(leaf.tensor) if want else None
            for leaf, want in zip(leaves, self.wanted_leaves, strict=True)
        ]

    def pull(self, rows: Rows, leaves: list[Leaf], grads: Grads) -> None:
        """Add the gradients of all tiles of a block of rows."""
        plan, products, (anchors, *pools) = self.task.plan, self.task.plan.products, self.vectors
        for cut in plan.cuts:
            own = anchors is not None and products.pools[cut.pool] is products.anchors
            pool = anchors if own else pools[cut.pool]
            wanted = [anchors is not None or pool is not None, *self.wanted_leaves]
            grad, *of_leaves = self.task.pull(At(rows, cut, plan.compared(rows, cut)), leaves, wanted, grads)
            if grad is not None:
                products.add_gradient(grad.to(products.dtype_of_gradient), rows, cut, anchors, pool)
            self.add_leaves(rows, of_leaves)

    def add_leaves(self, rows: Rows, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients by the leaves, of these rows where a leaf has one entry per anchor."""
        for total, gradient, per_anchor in zip(self.leaves, gradients, self.task.per_anchor, strict=True):
            if total is not None and gradient is not None:
                add_rows(total, rows if per_anchor else slice(None), gradient)


def pull_back(outputs_of: OutputsOf, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Compute the vector-Jacobian product of a function by its inputs.

    Args:
        outputs_of: Function of the inputs that returns outputs with their cotangents.
        inputs: The inputs.
        wanted: Whether the gradient by each input is needed.

    Returns:
        One gradient per input; None where it is not wanted or zero.
    """
    if torch.compiler.is_compiling():
        return _pull_back_traced(outputs_of, inputs, wanted)
    leaves = [each.detach().requires_grad_(want) for each, want in zip(inputs, wanted, strict=True)]
    with torch.enable_grad():
        some = [(out, grad) for out, grad in outputs_of(leaves) if out.requires_grad]
    if not some or not any(wanted):
        return [None] * len(inputs)
    chosen = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad([out for out, _ in some], chosen, [grad for _, grad in some], allow_unused=True))
    return [next(found) if want else None for want in wanted]


def _pull_back_traced(outputs_of: OutputsOf, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Compute the same through torch.func, which torch.compile can trace."""

    def of_wanted(*leaves: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        left = list(leaves)
        every = [left.pop(0) if want else each for each, want in zip(inputs, wanted, strict=True)]
        pairs = outputs_of(every)
        return tuple(out for out, _ in pairs), tuple(grad for _, grad in pairs)

    chosen = [each for each, want in zip(inputs, wanted, strict=True) if want]
    _, back, cotangents = torch.func.vjp(of_wanted, *chosen, has_aux=True)  # type: ignore[misc]
    found = list(back(cotangents))
    return [found.pop(0) if want else None for want in wanted]


Collected = TypeVar("Collected")


class RowCollector(Generic[Collected]):
    """Collects per-block results into full-length tensors.

    Args:
        number: Number of rows in total.
    """

    value: Collected

    def __init__(self, number: int) -> None:
        self.number, self.filled = number, False

    def put(self, rows: Rows, found: Collected) -> None:
        """Store the result of a block of rows.

        The tensors for all rows are allocated at the first block, unless that block has all rows.
        """
        if num_rows(rows) == self.number:
            self.value = found
            return
        if not self.filled:
            self.value = _changed(lambda part: part.new_empty(self.number, *part.shape[1:]), found)
            self.filled = True

        def written(whole: Tensor, part: Tensor) -> Tensor:
            whole[rows] = part
            return whole

        self.value = _changed(written, self.value, found)


def rows_of(value: Collected, rows: Rows) -> Collected:
    """Return these rows of all tensors in a nested structure."""
    cut: Collected = _changed(lambda whole: whole[rows], value)
    return cut


def _changed(change: Callable[..., Tensor], value: Any, *others: Any) -> Any:
    """Apply a function to each tensor with rows in nested tuples, lists and dicts, with those of the others."""
    if isinstance(value, Tensor):
        return change(value, *others) if value.ndim >= 2 else value
    if isinstance(value, dict):
        return {name: _changed(change, value[name], *(other[name] for other in others)) for name in value}
    if isinstance(value, (tuple, list)):
        parts = [_changed(change, *each) for each in zip(value, *others, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def bounds_of(plan: SweepPlan) -> list[Bounds]:
    """Compute the bounds of every factor for all rows.

    A bound through which a gradient flows is computed as its gradient is, without compilation, so that both have the
    same bits.
    """
    compiles = plan.runner.compiles and not bounds_with_gradient(plan.factors)
    if compiles and not any(factor.batch_scope for factor in plan.factors):
        return _in_graphs(plan)
    found: RowCollector[list[Bounds]] = RowCollector(len(plan.pairing))
    blocks = find_bounds(plan.factors, plan.blocks(), _Compiled(plan) if compiles else Reducer())
    for rows, each in zip(plan.rows, blocks, strict=True):
        found.put(rows, each)
    return found.value


def _in_graphs(plan: SweepPlan) -> list[Bounds]:
    """Compute the bounds as ``find_bounds`` does, one pass for each factor that has bounds."""
    found: list[Bounds] = []
    for i, factor in enumerate(plan.factors):
        if not factor.bounds():
            found.append({})
            continue
        whole: RowCollector[Bounds] = RowCollector(len(plan.pairing))
        plan.each(partial(_put_bounds, plan, i, found, whole))
        found.append(whole.value)
    return found


@torch.no_grad()
def _put_bounds(plan: SweepPlan, i: int, before: list[Bounds], whole: RowCollector[Bounds], rows: Rows) -> None:
    """Compute the bounds of factor i for a block of rows and store them."""
    reducer, block = _Compiled(plan), PlannedRows(plan, rows)
    states = reducer.states(plan.factors, i, block, rows_of(before, rows))
    whole.put(rows, reducer.finish(plan.factors[i].bounds(), states, block))


@dataclass
class _Compiled(Reducer):
    """Reduces the tiles to bounds with compiled functions."""

    plan: SweepPlan

    def states(
        self, factors: Sequence[Factor], i: int, rows: PlannedRows, before: Sequence[Bounds]
    ) -> dict[str, State]:
        """Reduce all tiles of these rows to the states of factor i's bounds."""
        plan, declared = self.plan, factors[i].bounds()
        positives = {name: bound for name, bound in declared.items() if bound.over == "positives"}
        states = reduce_rows(positives, rows, left_by((), ()))
        if len(positives) == len(declared):
            return states
        leaves, raw = [leaf.of(rows.rows) for leaf in plan.leaves], self._raw
        for cut in plan.cuts:
            compared = plan.compared(rows.rows, cut)
            args = plan.functions, i, compared, leaves, before, raw
            found = plan.runner(states_of_tile, (*plan.shape(rows.rows, cut), i), *args)
            for name, state in found.items():
                states[name] = declared[name].merge(states[name], state) if name in states else state
        return states

    def finish(self, declared: Mapping[str, Bound], states: Mapping[str, State], rows: PlannedRows) -> Bounds:
        """Compute the bounds from their states; windows through the edge kernel where it runs."""
        found = dict(finish({name: each for name, each in declared.items() if not isinstance(each, Window)}, states))
        for name, bound in declared.items():
            if isinstance(bound, Window):
                found[name] = self._window(bound, states[name], found, rows)
        return found

    @property
    def _raw(self) -> bool:
        """True if windows rank products instead of scores: in the same order, and in half the bytes."""
        from hardneg.kernels.triton.edges import can_rank

        return len(self.plan.cuts) == 1 and can_rank(self.plan.products.anchors.vectors)

    def _window(
        self, bound: Window, state: State, earlier: Bounds, rows: PlannedRows
    ) -> tuple[Edge | None, Edge | None]:
        """Find the edges of a window by the kernel that counts, or by sorting where that kernel does not run."""
        value, column = state
        from hardneg.kernels.triton.edges import can_rank, edges

        if not can_rank(value):
            return bound.finish(state, earlier)
        start, stop = bound.places(earlier)
        found = edges(value, column, (start, stop), earlier["count"], bound.slack)
        if self._raw and bound.by == "score":
            plan, cut = self.plan, self.plan.cuts[0]
            args = plan.products.scales[cut.pool], of_rows(plan.pairing.temperature, rows.rows)
            shape = plan.shape(rows.rows, cut)
            found = [(plan.runner(scores_of, shape, edge, *args), place) for edge, place in found]
        n = value.shape[1]
        return (found[0] if bound.skipped(n) else None), (found[1] if n and bound.farthest(n) else None)


def states_of_tile(
    functions: Functions, i: int, compared: ComparedTile, leaves: Sequence[Tensor], before: Sequence[Bounds], raw: bool
) -> dict[str, State]:
    """Compute the states of the bounds over candidates of one factor, for one tile.

    Args:
        functions: The distributions and the objective, without their tensors.
        i: Index of the factor.
        compared: The products of the tile.
        leaves: The tensors of the functions, cut to the rows of the tile.
        before: Bounds of the earlier factors, which decide which candidates are left.
        raw: Whether windows rank products instead of scores.
    """
    pointwise = functions.with_leaves(leaves)
    masked = compared.masked(compared.similarity(), pointwise.temperature)
    left = left_by(pointwise.factors[:i], before)(masked.tile, masked.valid)
    states: dict[str, State] = {}
    for name, bound in pointwise.factors[i].bounds().items():
        if bound.over == "positives":
            continue
        if isinstance(bound, Window):
            value = compared.product if raw and bound.by == "score" else bound.value(masked.tile)
            states[name] = torch.where(left, value, NEVER), masked.tile.column[None]
        else:
            states[name] = bound.of(masked.tile, left)
    return states


def scores_of(product: Tensor, scale: Tensor | None, temperature: float | Tensor) -> Tensor:
    """Convert products to scores by the same operations as those of a tile."""
    return tempered(similarity_of(product, scale), scale, temperature)
