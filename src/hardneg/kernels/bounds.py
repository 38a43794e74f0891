"""The bounds of a streamed loss on a GPU: compiled functions of tiles, and edges of windows by counting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hardneg.core.bounds import Bound, Edge, State, Window
from hardneg.core.pairing import Rows, of_rows
from hardneg.core.sweep import Bounds, Factor, Reducer, find_bounds, finish, left_by, reduce_rows
from hardneg.core.tiles import NEVER
from hardneg.kernels.leaves import Holders
from hardneg.kernels.plan import Block, Compared, Plan, similarity_of, tempered, with_gradient
from hardneg.kernels.whole import Whole, cut_rows


def bounds_of(plan: Plan) -> list[Bounds]:
    """The bounds of every factor, of all rows.

    One through which a gradient flows is found as it is used by its gradient, not compiled: to the same bits.
    """
    compiles = plan.runner.compiles and not with_gradient(plan.factors)
    if compiles and not any(factor.batch_scope for factor in plan.factors):
        return _in_graphs(plan)
    found: Whole[list[Bounds]] = Whole(len(plan.pairing))
    blocks = find_bounds(plan.factors, plan.blocks(), _Compiled(plan) if compiles else Reducer())
    for rows, each in zip(plan.rows, blocks, strict=True):
        found.put(rows, each)
    return found.value


def _in_graphs(plan: Plan) -> list[Bounds]:
    """As ``find_bounds``: one pass for each factor that has bounds."""
    found: list[Bounds] = []
    for i, factor in enumerate(plan.factors):
        if not factor.bounds():
            found.append({})
            continue
        whole: Whole[Bounds] = Whole(len(plan.pairing))
        plan.each(partial(_put_bounds, plan, i, found, whole))
        found.append(whole.value)
    return found


@torch.no_grad()
def _put_bounds(plan: Plan, i: int, before: list[Bounds], whole: Whole[Bounds], rows: Rows) -> None:
    reducer, block = _Compiled(plan), Block(plan, rows)
    states = reducer.states(plan.factors, i, block, cut_rows(before, rows))
    whole.put(rows, reducer.finish(plan.factors[i].bounds(), states, block))


@dataclass
class _Compiled(Reducer):
    plan: Plan

    def states(self, factors: Sequence[Factor], i: int, rows: Block, before: Sequence[Bounds]) -> dict[str, State]:
        plan, declared = self.plan, factors[i].bounds()
        positives = {name: bound for name, bound in declared.items() if bound.over == "positives"}
        states = reduce_rows(positives, rows, left_by((), ()))
        if len(positives) == len(declared):
            return states
        pieces, raw = [piece.of(rows.rows) for piece in plan.pieces], self._raw
        for cut in plan.cuts:
            compared = plan.compared(rows.rows, cut)
            args = plan.holders, i, compared, pieces, before, raw
            found = plan.runner(states_of_tile, (*plan.shape(rows.rows, cut), i), *args)
            for name, state in found.items():
                states[name] = declared[name].merge(states[name], state) if name in states else state
        return states

    def finish(self, declared: Mapping[str, Bound], states: Mapping[str, State], rows: Block) -> Bounds:
        found = dict(finish({name: each for name, each in declared.items() if not isinstance(each, Window)}, states))
        for name, bound in declared.items():
            if isinstance(bound, Window):
                found[name] = self._window(bound, states[name], found, rows)
        return found

    @property
    def _raw(self) -> bool:
        """Whether windows rank products instead of scores: in the same order, and in half the bytes."""
        from hardneg.kernels.triton.edges import serves

        return len(self.plan.cuts) == 1 and serves(self.plan.products.anchors.vectors)

    def _window(self, bound: Window, state: State, earlier: Bounds, rows: Block) -> tuple[Edge | None, Edge | None]:
        value, column = state
        from hardneg.kernels.triton.edges import edges, serves

        if not serves(value):
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
    holders: Holders, i: int, compared: Compared, pieces: Sequence[Tensor], before: Sequence[Bounds], raw: bool
) -> dict[str, State]:
    """The states of the bounds over candidates of factor i."""
    held = holders.held(pieces)
    met = compared.met(compared.similarity(), held.temperature)
    left = left_by(held.factors[:i], before)(met.tile, met.valid)
    states: dict[str, State] = {}
    for name, bound in held.factors[i].bounds().items():
        if bound.over == "positives":
            continue
        if isinstance(bound, Window):
            value = compared.product if raw and bound.by == "score" else bound.value(met.tile)
            states[name] = torch.where(left, value, NEVER), met.tile.column[None]
        else:
            states[name] = bound.of(met.tile, left)
    return states


def scores_of(product: Tensor, scale: Tensor | None, temperature: float | Tensor) -> Tensor:
    """As the scores of a tile come from its products, by the same operations."""
    return tempered(similarity_of(product, scale), scale, temperature)
