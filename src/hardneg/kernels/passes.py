"""The three differentiable passes over tiles: row statistics, promoted pairs, and the largest value of a bound.

Each is a ``sweep.Sweep``; ``engine.Tiles`` runs them. ``RowStatisticsPass`` computes what an objective declares,
in parts that are merged at the end. ``PromotedPairs`` sums the losses of positives by label, and ``LargestValue`` gives
a bound its gradient. The functions of one tile (``parts_of_tile``, ``pull_tile`` ...) are compiled on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hardneg.core.bounds import Bounds, left_by, weigh
from hardneg.core.objectives.base import Objective, Row
from hardneg.core.pairing import MaskedTile, Rows
from hardneg.core.statistics import Mass, Statistic, Support, row_max
from hardneg.core.tiles import NEVER, Tile
from hardneg.kernels.plan import ComparedTile, Functions, Leaf, Pointwise, SweepPlan
from hardneg.kernels.sweep import At, Grads, Outputs, RowCollector, Sweep, pull_back, rows_of


class Sums(NamedTuple):
    """Sums over whole rows, [b, 1] each: shift and mass of the weights, and the totals of the statistics."""

    mass: Mass
    totals: list[Tensor]


class Parts(NamedTuple):
    """Parts of k blocks of candidates, [b, k] each.

    Attributes:
        shift: Largest log-weight.
        mass: Sum of the weights relative to it.
        candidates: Parts of the statistics over candidates.
        positives: Parts of the statistics over positives.
    """

    shift: Tensor
    mass: Tensor
    candidates: list[Tensor]
    positives: list[Tensor]

    @classmethod
    def of(cls, packed: Annotated[Tensor, "b m k"], statistics: Sequence[Statistic]) -> Parts:
        """Unpack one tensor: storing the parts of a tile one by one would take a GPU longer."""
        shift, mass, *rest = packed.unbind(1)
        number = sum(each.over == "candidates" for each in statistics)
        return cls(shift, mass, rest[:number], rest[number:])

    def packed(self) -> Annotated[Tensor, "b m k"]:
        """Pack the parts into one tensor [b, m, k]."""
        return torch.stack([self.shift, self.mass, *self.candidates, *self.positives], dim=1)


def statistics_of(objective: Objective) -> dict[str, Statistic]:
    """Return the statistics of an objective, with the support first."""
    return {"support": Support(), **objective.statistics()}


class RowStatisticsPass(Sweep):
    """Computes the statistics of all rows, [b, 1] each.

    The last of the leaves are the scores of the anchors' own positives.
    """

    sums: Sums
    """Sums over whole rows, kept for the backward pass."""
    known: Tensor
    """The sums and the gradients by the statistics, next to each other."""

    def __init__(self, plan: SweepPlan, leaves: Sequence[Leaf], bounds: list[Bounds]) -> None:
        super().__init__(plan, leaves)
        self.bounds = bounds

    def forward(self, leaves: list[Leaf]) -> tuple[Tensor, ...]:
        """Compute the parts of all tiles and merge them."""
        plan, tensors = self.plan, [leaf.tensor for leaf in leaves]
        found: RowCollector[Tensor] = RowCollector(len(plan.pairing))
        plan.each(lambda rows: found.put(rows, self._parts(rows, leaves)), alone=True)
        pointwise = plan.functions.with_leaves(tensors)
        statistics = list(statistics_of(pointwise.objective).values())
        own, real = plan.own_tile(tensors[-1], pointwise.temperature)
        parts = Parts.of(found.value, statistics)
        self.sums = _merged(statistics, parts, _parts_of_positives(statistics, own, real, None))
        pairs = zip(statistics, self.sums.totals, strict=True)
        return tuple(statistic.finish(total, self.sums.mass) for statistic, total in pairs)

    def _parts(self, rows: Rows, leaves: list[Leaf]) -> Annotated[Tensor, "r m k"]:
        """Compute the parts of a block of rows, one for each tile."""
        plan, tiles = self.plan, []
        known = [leaf.of(rows) for leaf in leaves[:-1]], rows_of(self.bounds, rows)
        for cut in plan.cuts:
            args = plan.functions, plan.compared(rows, cut), *known, plan.runner.block
            parts = plan.runner(parts_of_tile, plan.shape(rows, cut), *args)
            tiles.append(plan.runner(packed_parts, plan.shape(rows, cut), plan.functions, known[0], parts))
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=2)

    def prepare(self, leaves: list[Leaf], grads: Grads) -> None:
        """Pack the sums and the gradients by the statistics for the tiles."""
        self.known = torch.cat([*self.sums.mass, *self.sums.totals, *grads], dim=1)

    def pull_own(self, leaves: list[Leaf], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        """Compute the gradients by the leaves through the anchors' own positives."""

        def outputs_of(inputs: Sequence[Tensor]) -> Outputs:
            pointwise = self.plan.functions.with_leaves(inputs)
            own, real = self.plan.own_tile(inputs[-1], pointwise.temperature)
            return _cotangents(pointwise.objective, own, torch.where(real, 0.0, NEVER), None, self.sums, grads)

        return pull_back(outputs_of, [leaf.tensor for leaf in leaves], wanted)

    def pull(self, at: At, leaves: list[Leaf], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        """Compute the gradients of one tile."""
        plan, some = self.plan, [leaf.of(at.rows) for leaf in leaves[:-1]]
        known = rows_of(self.bounds, at.rows), self.known[at.rows], plan.products.dtype_of_gradient
        args = plan.functions, at.compared, some, tuple(wanted[:-1]), *known
        return [*plan.runner(pull_tile, plan.shape(at.rows, at.cut), *args), None]


def parts_of_tile(
    functions: Functions,
    compared: ComparedTile,
    leaves: Sequence[Tensor],
    bounds: Sequence[Bounds],
    block: int | None,
) -> Parts:
    """Compute the parts of the statistics for one tile.

    Args:
        functions: The distributions and the objective, without their tensors.
        compared: The products of the tile.
        leaves: The tensors of the functions, cut to the rows of the tile.
        bounds: Bounds of each factor, cut to the rows of the tile.
        block: Number of candidates per block; None for one block.

    Returns:
        The parts of every block of the tile.
    """
    pointwise = functions.with_leaves(leaves)
    statistics = list(statistics_of(pointwise.objective).values())
    masked = compared.masked(compared.similarity(), pointwise.temperature)
    log_w = torch.where(masked.valid, weigh(pointwise.factors, masked.tile, functions.replaced(bounds, leaves)), NEVER)
    blocks = _blocks(log_w, block, NEVER)
    shift = row_max(blocks)
    relative = blocks - torch.where(shift == NEVER, 0.0, shift)
    some = [each for each in statistics if each.over == "candidates"]
    candidates = [each.part(_blocks(each.value(masked.tile), block, 0.0), relative) for each in some]
    positives = [] if masked.promoted is None else _parts_of_positives(statistics, masked.tile, masked.promoted, block)
    return Parts(shift[..., 0], relative.exp().sum(-1), candidates, positives)


def _parts_of_positives(statistics: Sequence[Statistic], tile: Tile, real: Tensor, block: int | None) -> list[Tensor]:
    """Compute the parts of the statistics over positives for one tile."""
    relative = _blocks(torch.where(real, 0.0, NEVER).to(tile.s.dtype), block, NEVER)
    some = [each for each in statistics if each.over == "positives"]
    return [each.part(_blocks(each.value(tile), block, 0.0), relative) for each in some]


def _blocks(x: Annotated[Tensor, "b n"], block: int | None, fill: float) -> Annotated[Tensor, "b k m"]:
    """Cut the columns into blocks of ``block``, padded with ``fill``; without a number, into one block."""
    if block is None:
        return x[:, None]
    number = max(1, -(-x.shape[1] // block))
    return pad(x, (0, number * block - x.shape[1]), value=fill).reshape(len(x), number, block)


def packed_parts(functions: Functions, leaves: Sequence[Tensor], parts: Parts) -> Annotated[Tensor, "r m 1"]:
    """Merge the parts of all blocks of a tile and pack them.

    It is not compiled together with ``parts_of_tile``, which would then read the tile twice.

    Args:
        functions: The distributions and the objective, without their tensors.
        leaves: The tensors of the functions.
        parts: The parts of the blocks of one tile.
    """
    if parts.shift.shape[1] > 1:
        parts = _joined(list(statistics_of(functions.with_leaves(leaves).objective).values()), parts)
    return parts.packed()


def _joined(statistics: Sequence[Statistic], parts: Parts) -> Parts:
    """Merge the parts of all blocks into one."""
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
    """Merge the parts of the tiles with those of the anchors' own positives into sums over whole rows."""
    if parts.positives:
        own = [torch.cat(both, dim=1) for both in zip(own, parts.positives, strict=True)]
    joined = _joined(statistics, parts._replace(positives=own))
    candidates, positives = iter(joined.candidates), iter(joined.positives)
    totals = [next(candidates if each.over == "candidates" else positives) for each in statistics]
    mass = torch.where(joined.mass == 0, NEVER, joined.mass.log())
    return Sums(Mass(torch.where(joined.shift == NEVER, 0.0, joined.shift), mass), totals)


def pull_tile(
    functions: Functions,
    compared: ComparedTile,
    leaves: Sequence[Tensor],
    wanted: Sequence[bool],
    bounds: Sequence[Bounds],
    known: Tensor,
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Compute the gradients by the similarities of a tile and by the leaves.

    Args:
        functions: The distributions and the objective, without their tensors.
        compared: The products of the tile.
        leaves: The tensors of the functions, cut to the rows of the tile.
        wanted: Whether each gradient is needed: the similarities, then the leaves.
        bounds: Bounds of each factor, cut to the rows of the tile.
        known: Sums and gradients of these rows, see ``RowStatisticsPass.known``.
        dtype: Type of the gradient by the similarities.
    """
    shift, log_mass, *rest = known.unbind(1)
    totals, grads = ([each[:, None] for each in some] for some in (rest[: len(rest) // 2], rest[len(rest) // 2 :]))
    sums = Sums(Mass(shift[:, None], log_mass[:, None]), totals)

    def outputs_of(inputs: Sequence[Tensor]) -> Outputs:
        pointwise = functions.with_leaves(inputs[1:])
        masked = compared.masked(inputs[0], pointwise.temperature)
        return _of_tile(pointwise, masked, functions.replaced(bounds, inputs[1:]), sums, grads)

    grad, *of_leaves = pull_back(outputs_of, [compared.similarity(), *leaves], wanted)
    return [None if grad is None else grad.to(dtype), *of_leaves]


def _of_tile(pointwise: Pointwise, masked: MaskedTile, bounds: Sequence[Bounds], sums: Sums, grads: Grads) -> Outputs:
    """Return what a tile contributes to the statistics, with the gradients by it."""
    tile, valid, promoted = masked
    log_w = weigh(pointwise.factors, tile, bounds).expand(valid.shape)
    found = _cotangents(pointwise.objective, tile, torch.where(valid, log_w.detach(), NEVER), log_w, sums, grads)
    if promoted is not None:
        found += _cotangents(pointwise.objective, tile, torch.where(promoted, 0.0, NEVER), None, sums, grads)
    return found


def _cotangents(
    objective: Objective, tile: Tile, masked: Tensor, log_w: Tensor | None, sums: Sums, grads: Grads
) -> Outputs:
    """Return values and log-weights of candidates, or values of positives, with the gradients by them.

    Args:
        objective: The objective.
        tile: The tile.
        masked: Log-weights, NEVER outside.
        log_w: Log-weights with a gradient; None for positives, which have none.
        sums: Sums over whole rows.
        grads: Gradients by the statistics.
    """
    over = "positives" if log_w is None else "candidates"
    relative = masked.to(tile.s.dtype) if log_w is None else masked - sums.mass.shift
    found: list[tuple[Tensor | None, Tensor | None]] = []
    for statistic, total, grad in zip(list(statistics_of(objective).values()), sums.totals, grads, strict=True):
        if statistic.over == over:
            value = statistic.value(tile)
            by_value, by_weight = statistic.cotangents(grad, total, sums.mass, value.detach(), relative)
            found += [(value, by_value), (log_w, by_weight)]
    return [(output, grad) for output, grad in found if output is not None and grad is not None]


class PromotedPairs(Sweep):
    """Computes the sum of the losses of each anchor's promoted candidates, and their number, [b, 1] each.

    The last of the leaves are the statistics with these names.
    """

    def __init__(self, plan: SweepPlan, leaves: Sequence[Leaf], names: tuple[str, ...]) -> None:
        super().__init__(plan, leaves)
        self.names = names

    def forward(self, leaves: list[Leaf]) -> tuple[Tensor, ...]:
        """Sum the losses of all tiles."""
        plan = self.plan
        found: RowCollector[tuple[Tensor, Tensor]] = RowCollector(len(plan.pairing))

        def step(rows: Rows) -> None:
            some, tiles = [leaf.of(rows) for leaf in leaves], []
            for cut in plan.cuts:
                args = plan.functions, plan.compared(rows, cut), some, self.names
                tiles.append(plan.runner(sum_of_tile, plan.shape(rows, cut), *args))
            total, number = (torch.stack(each).sum(0) for each in zip(*tiles, strict=True))
            found.put(rows, (total, number))

        plan.each(step)
        return found.value

    def pull(self, at: At, leaves: list[Leaf], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        """Compute the gradients of one tile."""
        some = [leaf.of(at.rows) for leaf in leaves]
        args = self.plan.functions, at.compared, some, self.names, tuple(wanted), grads[0][at.rows]
        return self.plan.runner(pull_pairs, self.plan.shape(at.rows, at.cut), *args)


def sum_of_tile(
    functions: Functions,
    compared: ComparedTile,
    leaves: Sequence[Tensor],
    names: tuple[str, ...],
    similarity: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the sums of the losses of a tile's promoted pairs, and their numbers.

    Args:
        functions: The distributions and the objective, without their tensors.
        compared: The products of the tile.
        leaves: The tensors of the functions, then the row statistics.
        names: Names of the row statistics, the last of the leaves.
        similarity: Similarities to use instead of the tile's, for their gradient.

    Returns:
        Sum and number of the losses of each row, [r, 1] each.
    """
    pointwise = functions.with_leaves(leaves)
    masked = compared.masked(compared.similarity() if similarity is None else similarity, pointwise.temperature)
    assert masked.promoted is not None
    row = Row(dict(zip(names, leaves[len(leaves) - len(names) :], strict=True)), pointwise.temperature)
    total = pointwise.objective.real_losses(masked.tile.s, row, masked.promoted).sum(-1, keepdim=True)
    return total, masked.promoted.sum(-1, keepdim=True).to(total.dtype)


def pull_pairs(
    functions: Functions,
    compared: ComparedTile,
    leaves: Sequence[Tensor],
    names: tuple[str, ...],
    wanted: Sequence[bool],
    grad: Tensor,
) -> list[Tensor | None]:
    """Compute the gradients of the losses of a tile's promoted pairs by its similarities and by the leaves.

    Args:
        functions: The distributions and the objective, without their tensors.
        compared: The products of the tile.
        leaves: The tensors of the functions, then the row statistics.
        names: Names of the row statistics.
        wanted: Whether each gradient is needed: the similarities, then the leaves.
        grad: Gradient by the sum of the losses of each row, [r, 1].
    """

    def outputs_of(inputs: Sequence[Tensor]) -> Outputs:
        return [(sum_of_tile(functions, compared, inputs[1:], names, inputs[0])[0], grad)]

    return pull_back(outputs_of, [compared.similarity(), *leaves], wanted)


class LargestValue(Sweep):
    """Routes the gradient of a bound's largest value to the pairs that reach it, in equal parts.

    It is not compiled: a pair reaches the value where both have the same bits. The last of the leaves are the scores of
    the anchors' own positives.
    """

    share: Tensor
    """Gradient of each pair that reaches the value of its row."""

    def __init__(self, plan: SweepPlan, leaves: Sequence[Leaf], bounds: list[Bounds], place: tuple[int, str]) -> None:
        super().__init__(plan, leaves)
        self.bounds, (self.place, self.name) = bounds, place
        self.over = plan.factors[self.place].bounds()[self.name].over

    def forward(self, leaves: list[Leaf]) -> tuple[Tensor, ...]:
        """Return the value of the bound, which was computed before."""
        self.value = self.bounds[self.place][self.name].clone()
        return (self.value,)

    def prepare(self, leaves: list[Leaf], grads: Grads) -> None:
        """Count the pairs that reach the value of their row, and divide its gradient by their number."""
        plan = self.plan
        number = torch.zeros(len(plan.pairing), 1, dtype=torch.long, device=grads[0].device)
        if self.over == "positives":
            number += self._of_own([leaf.tensor for leaf in leaves])[1].sum(-1, keepdim=True)
        for rows in plan.rows if self._in_tiles else ():
            some = [leaf.of(rows) for leaf in leaves]
            for cut in plan.cuts:
                compared = plan.compared(rows, cut)
                reached = self._of_tile(rows, compared, [compared.similarity(), *some])[1]
                number[rows] += reached.sum(-1, keepdim=True)
        self.share = grads[0] / (number if grads[0].ndim else number.sum()).clamp(min=1)

    def pull_own(self, leaves: list[Leaf], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        """Compute the gradients through the anchors' own positives that reach the value."""
        if self.over == "candidates":
            return [None] * len(leaves)

        def outputs_of(inputs: Sequence[Tensor]) -> Outputs:
            value, reached = self._of_own(inputs)
            return [(value, reached * self.share)]

        return pull_back(outputs_of, [leaf.tensor for leaf in leaves], wanted)

    def pull(self, at: At, leaves: list[Leaf], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        """Compute the gradients through the pairs of a tile that reach the value."""
        if not self._in_tiles:
            return [None] * len(wanted)

        def outputs_of(inputs: Sequence[Tensor]) -> Outputs:
            value, reached = self._of_tile(at.rows, at.compared, inputs)
            return [(value, reached * (self.share[at.rows] if self.share.ndim else self.share))]

        return pull_back(outputs_of, [at.compared.similarity(), *(leaf.of(at.rows) for leaf in leaves)], wanted)

    @property
    def _in_tiles(self) -> bool:
        return self.over == "candidates" or self.plan.pairing.label_positives

    def _of_own(self, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the values of the anchors' own positives, and which of them are the largest."""
        pointwise = self.plan.functions.with_leaves(leaves)
        tile, real = self.plan.own_tile(leaves[-1], pointwise.temperature)
        value = pointwise.factors[self.place].bounds()[self.name].value(tile)  # type: ignore[attr-defined]
        return value, real & (value == self.value)

    def _of_tile(self, rows: Rows, compared: ComparedTile, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the values of a tile, and which of them are the largest."""
        pointwise = self.plan.functions.with_leaves(inputs[1:])
        masked = compared.masked(inputs[0], pointwise.temperature)
        value = pointwise.factors[self.place].bounds()[self.name].value(masked.tile)  # type: ignore[attr-defined]
        bounds = rows_of(self.bounds, rows)
        with torch.no_grad():
            mask = masked.promoted
            if self.over == "candidates":
                mask = left_by(pointwise.factors[: self.place], bounds[: self.place])(masked.tile, masked.valid)
            return value, mask & (value == bounds[self.place][self.name])
