"""Row statistics of a streamed loss: parts of blocks of candidates, merged, and their gradient by recomputing tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hardneg.core.objectives import Objective
from hardneg.core.pairing import Met, Rows
from hardneg.core.statistics import Mass, Statistic, Support, row_max
from hardneg.core.sweep import Bounds, weigh
from hardneg.core.tiles import NEVER, Tile
from hardneg.kernels.compiled import Outputs, pull_back
from hardneg.kernels.leaves import Held, Holders, Piece
from hardneg.kernels.plan import Compared, Plan
from hardneg.kernels.swept import At, Grads, Sweep
from hardneg.kernels.whole import Whole, cut_rows


class Sums(NamedTuple):
    """Of whole rows, [b, 1] each: shift and mass of the weights, and the totals of the statistics."""

    mass: Mass
    totals: list[Tensor]


class Parts(NamedTuple):
    """Of k blocks of candidates, [b, k] each: largest log-weight, mass relative to it, and parts of the statistics."""

    shift: Tensor
    mass: Tensor
    candidates: list[Tensor]
    positives: list[Tensor]

    @classmethod
    def of(cls, packed: Annotated[Tensor, "b m k"], statistics: Sequence[Statistic]) -> Parts:
        """From one tensor: to store the parts of a tile one by one would take a GPU longer."""
        shift, mass, *rest = packed.unbind(1)
        number = sum(each.over == "candidates" for each in statistics)
        return cls(shift, mass, rest[:number], rest[number:])

    def packed(self) -> Annotated[Tensor, "b m k"]:
        return torch.stack([self.shift, self.mass, *self.candidates, *self.positives], dim=1)


def statistics_of(objective: Objective) -> dict[str, Statistic]:
    return {"support": Support(), **objective.statistics()}


class RowStatistics(Sweep):
    """The statistics of all rows, [b, 1] each. The last of the pieces are the scores of the anchors' own positives."""

    sums: Sums
    known: Tensor
    """The sums and the gradients by the statistics, side by side."""

    def __init__(self, plan: Plan, pieces: Sequence[Piece], bounds: list[Bounds]) -> None:
        super().__init__(plan, pieces)
        self.bounds = bounds

    def forward(self, pieces: list[Piece]) -> tuple[Tensor, ...]:
        plan, tensors = self.plan, [piece.tensor for piece in pieces]
        found: Whole[Tensor] = Whole(len(plan.pairing))
        plan.each(lambda rows: found.put(rows, self._parts(rows, pieces)), alone=True)
        held = plan.holders.held(tensors)
        statistics = list(statistics_of(held.objective).values())
        own, real = plan.own_tile(tensors[-1], held.temperature)
        parts = Parts.of(found.value, statistics)
        self.sums = _merged(statistics, parts, _parts_of_positives(statistics, own, real, None))
        pairs = zip(statistics, self.sums.totals, strict=True)
        return tuple(statistic.finish(total, self.sums.mass) for statistic, total in pairs)

    def _parts(self, rows: Rows, pieces: list[Piece]) -> Annotated[Tensor, "r m k"]:
        """The parts of a block of the rows, of each tile."""
        plan, tiles = self.plan, []
        known = [piece.of(rows) for piece in pieces[:-1]], cut_rows(self.bounds, rows)
        for cut in plan.cuts:
            args = plan.holders, plan.compared(rows, cut), *known, plan.runner.block
            parts = plan.runner(parts_of_tile, plan.shape(rows, cut), *args)
            tiles.append(plan.runner(packed_parts, plan.shape(rows, cut), plan.holders, known[0], parts))
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=2)

    def prepare(self, pieces: list[Piece], grads: Grads) -> None:
        self.known = torch.cat([*self.sums.mass, *self.sums.totals, *grads], dim=1)

    def pull_own(self, pieces: list[Piece], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        def outputs_of(inputs: Sequence[Tensor]) -> Outputs:
            held = self.plan.holders.held(inputs)
            own, real = self.plan.own_tile(inputs[-1], held.temperature)
            return _cotangents(held.objective, own, torch.where(real, 0.0, NEVER), None, self.sums, grads)

        return pull_back(outputs_of, [piece.tensor for piece in pieces], wanted)

    def pull(self, at: At, pieces: list[Piece], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        plan, some = self.plan, [piece.of(at.rows) for piece in pieces[:-1]]
        known = cut_rows(self.bounds, at.rows), self.known[at.rows], plan.products.dtype_of_gradient
        args = plan.holders, at.compared, some, tuple(wanted[:-1]), *known
        return [*plan.runner(pull_tile, plan.shape(at.rows, at.cut), *args), None]


def parts_of_tile(
    holders: Holders,
    compared: Compared,
    pieces: Sequence[Tensor],
    bounds: Sequence[Bounds],
    block: int | None,
) -> Parts:
    """The parts of a tile, in blocks of so many candidates, or in one."""
    held = holders.held(pieces)
    statistics = list(statistics_of(held.objective).values())
    met = compared.met(compared.similarity(), held.temperature)
    log_w = torch.where(met.valid, weigh(held.factors, met.tile, holders.replaced(bounds, pieces)), NEVER)
    blocks = _blocks(log_w, block, NEVER)
    shift = row_max(blocks)
    relative = blocks - torch.where(shift == NEVER, 0.0, shift)
    some = [each for each in statistics if each.over == "candidates"]
    candidates = [each.part(_blocks(each.value(met.tile), block, 0.0), relative) for each in some]
    positives = [] if met.promoted is None else _parts_of_positives(statistics, met.tile, met.promoted, block)
    return Parts(shift[..., 0], relative.exp().sum(-1), candidates, positives)


def _parts_of_positives(statistics: Sequence[Statistic], tile: Tile, real: Tensor, block: int | None) -> list[Tensor]:
    relative = _blocks(torch.where(real, 0.0, NEVER).to(tile.s.dtype), block, NEVER)
    some = [each for each in statistics if each.over == "positives"]
    return [each.part(_blocks(each.value(tile), block, 0.0), relative) for each in some]


def _blocks(x: Annotated[Tensor, "b n"], block: int | None, fill: float) -> Annotated[Tensor, "b k m"]:
    """The columns in blocks of so many, filled up; without a number, in one block."""
    if block is None:
        return x[:, None]
    number = max(1, -(-x.shape[1] // block))
    return pad(x, (0, number * block - x.shape[1]), value=fill).reshape(len(x), number, block)


def packed_parts(holders: Holders, pieces: Sequence[Tensor], parts: Parts) -> Annotated[Tensor, "r m 1"]:
    """Those of all blocks of a tile as one. Not compiled with ``parts_of_tile``, which would read the tile twice."""
    if parts.shift.shape[1] > 1:
        parts = _joined(list(statistics_of(holders.held(pieces).objective).values()), parts)
    return parts.packed()


def _joined(statistics: Sequence[Statistic], parts: Parts) -> Parts:
    largest = row_max(parts.shift)
    by = parts.shift - torch.where(largest == NEVER, 0.0, largest)
    some, others = ([each for each in statistics if each.over == over] for over in ("candidates", "positives"))
    return Parts(
        largest,
        (parts.mass * by.exp()).sum(-1, keepdim=True),
        [each.merge(part, by) for each, part in zip(some, parts.candidates, strict=True)],
        [each.merge(part, torch.zeros_like(part)) for each, part in zip(others, parts.positives, strict=False)],
    )


def _merged(statistics: Sequence[Statistic], parts: Parts, own: list[Tensor]) -> Sums:
    """The sums of whole rows from the parts of their tiles and of the anchors' own positives."""
    if parts.positives:
        own = [torch.cat(both, dim=1) for both in zip(own, parts.positives, strict=True)]
    joined = _joined(statistics, parts._replace(positives=own))
    candidates, positives = iter(joined.candidates), iter(joined.positives)
    totals = [next(candidates if each.over == "candidates" else positives) for each in statistics]
    mass = torch.where(joined.mass == 0, NEVER, joined.mass.log())
    return Sums(Mass(torch.where(joined.shift == NEVER, 0.0, joined.shift), mass), totals)


def pull_tile(
    holders: Holders,
    compared: Compared,
    pieces: Sequence[Tensor],
    wanted: Sequence[bool],
    bounds: Sequence[Bounds],
    known: Tensor,
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """The gradients by the similarities of a tile and by the pieces."""
    shift, log_mass, *rest = known.unbind(1)
    totals, grads = ([each[:, None] for each in some] for some in (rest[: len(rest) // 2], rest[len(rest) // 2 :]))
    sums = Sums(Mass(shift[:, None], log_mass[:, None]), totals)

    def outputs_of(inputs: Sequence[Tensor]) -> Outputs:
        held = holders.held(inputs[1:])
        met = compared.met(inputs[0], held.temperature)
        return _of_met(held, met, holders.replaced(bounds, inputs[1:]), sums, grads)

    grad, *of_pieces = pull_back(outputs_of, [compared.similarity(), *pieces], wanted)
    return [None if grad is None else grad.to(dtype), *of_pieces]


def _of_met(held: Held, met: Met, bounds: Sequence[Bounds], sums: Sums, grads: Grads) -> Outputs:
    """What a tile adds to the statistics, and the gradients by it."""
    log_w = weigh(held.factors, met.tile, bounds).expand(met.valid.shape)
    masked = torch.where(met.valid, log_w.detach(), NEVER)
    found = _cotangents(held.objective, met.tile, masked, log_w, sums, grads)
    if met.promoted is not None:
        found += _cotangents(held.objective, met.tile, torch.where(met.promoted, 0.0, NEVER), None, sums, grads)
    return found


def _cotangents(
    objective: Objective, tile: Tile, masked: Tensor, log_w: Tensor | None, sums: Sums, grads: Grads
) -> Outputs:
    """Values and log-weights of candidates, or values of positives, which have no log-weights, with the gradients by
    them; ``masked`` are the log-weights, NEVER outside."""
    over = "positives" if log_w is None else "candidates"
    relative = masked.to(tile.s.dtype) if log_w is None else masked - sums.mass.shift
    found: list[tuple[Tensor | None, Tensor | None]] = []
    for statistic, total, grad in zip(list(statistics_of(objective).values()), sums.totals, grads, strict=True):
        if statistic.over == over:
            value = statistic.value(tile)
            by_value, by_weight = statistic.cotangents(grad, total, sums.mass, value.detach(), relative)
            found += [(value, by_value), (log_w, by_weight)]
    return [(output, grad) for output, grad in found if output is not None and grad is not None]
