"""Row statistics of a streamed loss: running sums over tiles, and their gradient by recomputing each tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hardneg.core.pairing import Cut
from hardneg.core.statistics import Mass, Statistic, Weighed, row_max
from hardneg.core.sweep import Bounds, weigh
from hardneg.core.tiles import NEVER, Tile
from hardneg.kernels.leaves import Gradients, Part, without_autocast
from hardneg.kernels.plan import Plan


class RowStatistics(torch.autograd.Function):
    """The statistics of all rows, [b, 1] each."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, bounds: list[list[Bounds]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.bounds = plan, bounds
        ctx.save_for_backward(*tensors)
        plain = tensors[: len(plan.leaves.tensors)]
        ctx.sums = [_sums_of(plan, rows, bounds[i], plain) for i, rows in enumerate(plan.rows)]
        return tuple(torch.cat(parts) for parts in zip(*(each.finished for each in ctx.sums), strict=True))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan, tensors, wanted = ctx.plan, ctx.saved_tensors, list(ctx.needs_input_grad[2:])
        largest = tensors[len(plan.leaves.parts) :]
        parts = [*plan.leaves.parts, *(Part("rows" if value.ndim else "whole") for value in largest)]
        gradients = Gradients(tensors, parts, wanted)
        for i, rows in enumerate(plan.rows):
            of_rows = [grad[rows] for grad in grads]
            for cut in [None, *plan.cuts]:  # None: the anchors' own positives
                with torch.enable_grad():
                    pieces = plan.leaves.cut(rows, cut, tensors, wanted, parts)
                    bounds = _replaced(plan, ctx.bounds[i], pieces[len(plan.leaves.parts) :])
                    outputs, cotangents = _of_tile(plan, rows, cut, pieces, bounds, ctx.sums[i], of_rows)
                gradients.add(outputs, cotangents, pieces, rows, cut)
        return None, None, *gradients.totals


class _Sums(NamedTuple):
    states: list[tuple[Tensor, ...]]
    mass: Mass
    finished: list[Tensor]


def _sums_of(plan: Plan, rows: slice, bounds: Sequence[Bounds], tensors: Sequence[Tensor]) -> _Sums:
    """Running sums over the tiles of these rows, relative to the largest log-weight so far."""
    pieces = plan.leaves.cut(rows, None, tensors, [False] * len(tensors))
    like = plan.positive(rows, pieces)[0].s.new_zeros(rows.stop - rows.start, 1)
    factors, objective = plan.held(pieces)
    statistics = list(plan.statistics(objective).values())
    states = [statistic.start(like) for statistic in statistics]
    largest, mass = torch.full_like(like, NEVER), torch.zeros_like(like)
    positive_tile, real = plan.positive(rows, pieces)
    states = _added(statistics, states, "positives", positive_tile, torch.where(real, 0.0, NEVER).to(like.dtype))
    for cut in plan.cuts:
        met = plan.met(rows, cut, plan.leaves.cut(rows, cut, tensors, [False] * len(tensors)))
        log_w = torch.where(met.valid, weigh(factors, met.tile, bounds), NEVER)
        new = torch.maximum(largest, row_max(log_w))
        by = torch.where(largest == NEVER, 0.0, largest - _finite(new))
        relative = log_w - _finite(new)
        mass = mass * by.exp() + relative.exp().sum(-1, keepdim=True)
        states = [each.shifted(state, by) for each, state in zip(statistics, states, strict=True)]
        states, largest = _added(statistics, states, "candidates", met.tile, relative), new
        if met.promoted is not None:
            promoted = torch.where(met.promoted, 0.0, NEVER).to(like.dtype)
            states = _added(statistics, states, "positives", met.tile, promoted)
    total = Mass(_finite(largest), torch.where(mass == 0, NEVER, mass.log()))
    return _Sums(states, total, [each.finish(state, total) for each, state in zip(statistics, states, strict=True)])


def _added(
    statistics: list[Statistic], states: list[tuple[Tensor, ...]], over: str, tile: Tile, relative: Tensor
) -> list[tuple[Tensor, ...]]:
    weighed = Weighed(tile, relative)
    pairs = zip(statistics, states, strict=True)
    return [each.add(state, each.value(tile), weighed) if each.over == over else state for each, state in pairs]


def _finite(largest: Tensor) -> Tensor:
    return torch.where(largest == NEVER, 0.0, largest)


def _of_tile(
    plan: Plan,
    rows: slice,
    cut: Cut | None,
    pieces: Sequence[Tensor],
    bounds: Sequence[Bounds],
    sums: _Sums,
    grads: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """What a tile adds to the statistics, and the gradients by it."""
    factors, objective = plan.held(pieces[: len(plan.leaves.parts)])
    statistics = list(plan.statistics(objective).values())
    outputs: list[Tensor] = []
    cotangents: list[Tensor] = []

    def add(over: str, tile: Tile, log_w: Tensor, relative: Tensor) -> None:
        for statistic, state, grad in zip(statistics, sums.states, grads, strict=True):
            if statistic.over == over:
                value = statistic.value(tile)
                with torch.no_grad():
                    by_value, by_weight = statistic.cotangents(grad, state, sums.mass, value, relative)
                for output, cotangent in ((value, by_value), (log_w, by_weight)):
                    if cotangent is not None:
                        outputs.append(output)
                        cotangents.append(cotangent)

    if cut is None:
        tile, real = plan.positive(rows, pieces)
        log_w = torch.where(real, 0.0, NEVER).to(tile.s.dtype)
        add("positives", tile, log_w, log_w)
        return outputs, cotangents
    met = plan.met(rows, cut, pieces)
    log_w = torch.where(met.valid, weigh(factors, met.tile, bounds), NEVER)
    add("candidates", met.tile, log_w, log_w.detach() - sums.mass.shift)
    if met.promoted is not None:
        promoted = torch.where(met.promoted, 0.0, NEVER).to(log_w.dtype)
        add("positives", met.tile, promoted, promoted)
    return outputs, cotangents


def _replaced(plan: Plan, bounds: Sequence[Bounds], largest: Sequence[Tensor]) -> list[Bounds]:
    changed = [dict(each) for each in bounds]
    for (place, name), value in zip(plan.largest, largest, strict=True):
        changed[place][name] = value
    return changed  # type: ignore[return-value]
