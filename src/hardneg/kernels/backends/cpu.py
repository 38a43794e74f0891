"""The closed family on a CPU: sums over tiles in place, and handwritten gradients.

With scores in bits, x = score / ln 2, and a shift R that no x of the row exceeds, let u = 2^(x - R), and let w = u^beta
be the weight of a negative. Sums of a row over its negatives, and over its positives by label, are

    mass = sum of w,    weighed = sum of w u,    positive = sum of u

and log E_q[e^s] = ln(weighed / mass) + R ln 2. The loss of a positive by label is offset - s, or ln(1 + k / u) with
k = 2^(offset / ln 2 - R). The gradient by the score of a pair, where [positive] is 1 for positives by label, is

    w (u a - c) + [positive] (u p - t)

    a = (1 + slope) g / weighed         g: gradient by log E_q[e^s]; slope: beta, or 0 if the tilt is detached
    c = slope (g - m) / mass            m: gradient by the log-mass
    p = l / positive                    l: gradient by the logarithm of the sum over positives
    t = h, or h k / (k + u)             h: gradient by the sum of the losses of positives by label

and one product for each side carries it to the vectors. Three cases need fewer products:

- Anchors that are their own candidates, with one R for all rows: u is symmetric, so the gradient of a pair in both
  roles has a_i + a_j in place of a, and so on, and one product carries it to both.
- Candidates without a gradient, such as a queue: the forward pass sums u times the candidates, and the backward pass
  scales that sum.
- Few scores: the tiles of the forward pass are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hardneg.core.objectives.base import Objective, Row, RowResult
from hardneg.core.pairing import Pairing, matrices, of_rows, other_views, positive_columns, similarity
from hardneg.core.private_apis import is_plain, times_transposed
from hardneg.core.statistics import LogMass, LogMean, LogPositives, Others, PerRow, Support
from hardneg.core.tensors import (
    by_operations,
    constant,
    fields_of_rows,
    first_derivative_only,
    tensor_fields,
    without_autocast,
)
from hardneg.core.types import NEVER, Keys
from hardneg.kernels.backends.cpu_tiles import LN_2, ClosedFormTiles, ExpTile, RowSums, Sides, part_of
from hardneg.negatives.base import Negatives
from hardneg.negatives.closed import ClosedForm

STATISTICS = {
    LogMean: "log_mean",
    LogMass: "log_mass",
    LogPositives: "log_positives",
    Others: "others",
    Support: "support",
}
"""The statistics that are computed here, by the names that they have here."""
DIFFERENTIABLE = ("log_mean", "log_mass", "log_positives")
"""Those of them that have a gradient."""


def rows(pairing: Pairing, negatives: Negatives, objective: Objective, keep: bool) -> RowResult | None:
    """Compute the statistics of a loss of the closed family on a CPU.

    Args:
        pairing: The anchors, positives and candidates of the batch.
        negatives: The distribution of negatives.
        objective: The objective, for the statistics that it declares.
        keep: Whether all scores may be in memory. Tiles are then kept for the backward pass, and derivatives of higher
            order are those of matrices; otherwise there are none.

    Returns:
        The statistics; None for anything that is not supported here.
    """
    if why_not(pairing, negatives, objective) is not None:
        return None
    form = negatives.closed_form()
    assert form is not None
    sides = Sides.of(pairing, form)
    if sides is None:
        return None
    loss = _ClosedFormRows(pairing, negatives, objective, form, sides, keep)
    if not loss.tiles.finite or (pairing.label_positives and loss.tiles.shift is None):
        return None
    own = None if pairing.num_views else similarity(sides.anchors.vectors, pairing.prepared_own().vectors)
    own = None if own is None else own / pairing.temperature
    temperature = pairing.temperature if isinstance(pairing.temperature, Tensor) else None
    vectors = [keys.vectors for keys in sides.keys]
    found = _Statistics.apply(loss, temperature, own, *vectors)  # type: ignore[no-untyped-call]
    return loss.result(dict(zip(loss.outputs, found, strict=True)), own)


def why_not(pairing: Pairing, negatives: Negatives, objective: Objective) -> str | None:
    """Return why ``rows`` does not support these arguments, whatever the values of the vectors; None if it does."""
    sides, temperature = (pairing.anchors, *pairing.candidates), pairing.temperature
    if pairing.anchors.vectors.device.type != "cpu":
        return "the vectors are not on a CPU"
    if pairing.guide is not None:
        return "there is a guide"
    if any(keys.private or not len(keys) or not keys.dim for keys in sides):
        return "candidates are private to each anchor, or there are none"
    if not all(is_plain(keys.vectors) for keys in sides) or len({_is_double(keys) for keys in sides}) > 1:
        return "the vectors are not plain tensors of one type"
    if pairing.num_views and (pairing.positive_mask is not None or pairing.positives.ids is not None):
        return "the positives have ids or a mask"
    if pairing.num_views > 1 and pairing.candidates[0] is not pairing.anchors:
        return "the anchors are not the first candidates"
    if isinstance(temperature, Tensor) and not (is_plain(temperature.detach()) and temperature.detach().min() > 0):
        return "the temperature is not positive"
    form = negatives.closed_form()
    if form is None or form.ceilings:
        return "the distribution is not of the closed family, or has a limit for each anchor"
    if any(type(each) not in STATISTICS for each in objective.statistics().values()):
        return "the objective needs other row statistics"
    if (pairing.label_positives or form.other_labels) and any(keys.labels is None for keys in sides):
        return "labels are missing"
    if not pairing.label_positives:
        return None
    learnt = any(
        isinstance(each, Tensor) and each.requires_grad for each in (temperature, *tensor_fields(objective).values())
    )
    if learnt or objective.pair_form is None:
        return "the objective needs every pair of positives by label, or has learnable numbers"
    return None


def _is_double(keys: Keys) -> bool:
    return keys.vectors.dtype == torch.float64


class _ClosedFormRows:
    """Turns sums over tiles into statistics and losses of positives by label, and their gradients into those of scores.

    Attributes:
        outputs: Names of the outputs of ``_Statistics``: the scores of the anchors' own positives if these are views of
            the batch, the statistics that have a gradient, and the sums of the losses of positives by label.
    """

    def __init__(
        self, pairing: Pairing, negatives: Negatives, objective: Objective, form: ClosedForm, sides: Sides, keep: bool
    ) -> None:
        self.pairing, self.negatives, self.objective = pairing, negatives, objective
        pair_form = objective.pair_form if pairing.label_positives else None
        self.softplus = pair_form is not None and pair_form.softplus
        self.tiles = ClosedFormTiles(pairing, form, sides, keep, self.softplus)
        self.slope = 0.0 if form.detach else self.tiles.beta
        self.names = {name: STATISTICS[type(each)] for name, each in objective.statistics().items()}
        own = pairing.num_views and not self.tiles.joined
        wanted = [name for name in DIFFERENTIABLE if name in self.names.values()]
        pairs = ["losses" if self.softplus else "similar"] if pairing.label_positives else []
        self.outputs = [*(["own scores"] if own else []), *wanted, *pairs]
        self.sums, self.every = RowSums(self.tiles.anchors), slice(0, len(pairing))
        self.found: dict[str, PerRow] = {}  # the statistics of all rows
        self.graph: tuple[dict[str, Tensor], Tensor] | None = None

    def own_scores(self) -> Tensor:
        """Compute the scores of the anchors' own positives, [b, p], from the views of the batch."""
        anchors, views = self.tiles.anchors, self.pairing.num_views
        if self.tiles.joined:
            return anchors.new_empty(len(anchors), 0)
        if views == 2:
            first, second = anchors.chunk(2)
            found = (first * second).sum(-1, keepdim=True).repeat(2, 1)
        elif views == 1:
            found = (anchors * self.tiles.pools[0][: len(anchors)]).sum(-1, keepdim=True)
        else:
            found = similarity(anchors, other_views(anchors, views))
        return found.div_(_detached(self.pairing.temperature))

    def add(self, tile: ExpTile, rows: slice) -> Tensor:
        """Add a tile to the sums of its rows, and return w u."""
        weighed = tile.negative
        if tile.weight is not None:
            weighed = torch.mul(tile.weight, tile.negative, out=self.tiles.room("u", tile.negative))
            self.sums.add("mass", rows, tile.weight.sum(-1, keepdim=True))
        self.sums.add("weighed", rows, weighed.sum(-1, keepdim=True))
        if tile.positive is not None:
            self.sums.add("positive", rows, tile.positive.sum(-1, keepdim=True))
        return weighed

    def counts(self, rows: slice) -> dict[str, PerRow]:
        """Return the numbers of other instances and of negatives, [r, 1] each."""
        sums, tiles, like = self.sums, self.tiles, self.tiles.anchors
        others = self.pairing.num_candidates - (self.pairing.num_views if tiles.numbered else 0)
        number = constant(torch.full, (rows.stop - rows.start, 1), others, dtype=like.dtype, device=like.device)
        number = number - sums.of("same_id", rows) if "same_id" in sums else number
        if "support" in sums:
            return {"others": number, "support": sums.of("support", rows)}
        if not tiles.excludes:
            return {"others": number, "support": number}
        own = self.pairing.num_views - len(tiles.filled) if tiles.joined else 0  # have the anchor's label, too
        return {"others": number, "support": (number + own if own else number) - sums.of("same_label", rows)}

    def statistics(self, own: Tensor, rows: slice) -> dict[str, PerRow]:
        """Return the statistics of the given rows, and the sums behind them, after all of their tiles were added.

        Args:
            own: Scores of the anchors' own positives, [b, p].
            rows: The rows.

        Returns:
            Numbers by name; "none" marks rows without a negative and is left out if there are none.
        """
        sums, found, wanted = self.sums, self.counts(rows), self.names.values()
        mass, weighed = sums.of("mass", rows) if "mass" in sums else found["support"], sums.of("weighed", rows)
        if not self.always and not found["support"].amin() > 0:
            none = found["none"] = found["support"] == 0  # any number: such a row has no gradient
            mass, weighed = mass.masked_fill(none, 1.0), weighed.masked_fill(none, 1.0)
        found |= {"mass": mass, "weighed": weighed}
        if "log_mean" in wanted:
            found["log_mean"] = self.tiles.add_shift((weighed / mass).log_(), rows, LN_2)
        if "log_mass" in wanted:
            found["log_mass"] = self.tiles.add_shift(mass.log(), rows, LN_2 * self.tiles.beta)
        for name in ("log_mean", "log_mass"):
            if "none" in found and name in found:
                found[name].masked_fill_(found["none"], NEVER)
        if "log_positives" in wanted:
            total = sums.of("positive", rows) if "positive" in sums else 0.0
            if own.shape[1]:
                found["own"] = self._own_exponentials(own, rows)
                total = total + found["own"].sum(-1, keepdim=True)
            assert isinstance(total, Tensor)
            some = bool(total.amin() > 0)
            found["positive"] = total if some else total.masked_fill(total == 0, 1.0)
            found["log_positives"] = self.tiles.add_shift(found["positive"].log(), rows, LN_2)
            if not some:
                found["log_positives"].masked_fill_(total == 0, 0.0)
        return found

    @property
    def always(self) -> bool:
        """True if every anchor is known to have a negative, the same number for all."""
        some = self.pairing.num_candidates > self.pairing.num_views
        return some and self.tiles.numbered and not self.tiles.excludes and "support" not in self.sums

    def _own_exponentials(self, own: Tensor, rows: slice) -> Tensor:
        """Return u of the anchors' own positives, [r, p]."""
        found = self.tiles.add_shift(part_of(own, rows) / LN_2, rows, -1.0).exp2_()
        mask = self.pairing.positive_mask
        return found if mask is None else found * mask[rows]

    def offset(self, found: dict[str, PerRow], rows: slice) -> PerRow:
        """Return the offset of the losses of positives by label, [r, 1]."""
        names = {"support": "support", **self.names}
        values = {name: found[here] for name, here in names.items()}
        if "none" in found and self.objective.needs_negatives:  # as in ``Objective.real_losses``
            values = {name: value.masked_fill(found["none"], 1.0) for name, value in values.items()}
        objective = fields_of_rows(self.objective, rows, len(self.pairing))
        form = objective.pair_form
        assert form is not None
        return form.offset(Row(values, of_rows(self.pairing.temperature, rows)))

    def offset_of_all(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return the statistics of all rows as leaves, and the offset as a function of them; computed once."""
        if self.graph is None:
            with torch.enable_grad():
                known = {name: self.found[name] for name in DIFFERENTIABLE if name in self.found}
                leaves = {name: each.detach().requires_grad_() for name, each in known.items()}
                self.graph = leaves, self.offset({**self.found, **leaves}, self.every)
        return self.graph

    def add_losses(self, rows: slice, tiles: Sequence[ExpTile], own: Tensor) -> None:
        """Sum ln(1 + k / u) over the tiles of a block of rows, and the slopes of these losses by the offset."""
        found = self.statistics(own, rows)
        if rows == self.every:
            self.found = found
        offset = self.offset_of_all()[1].detach() if rows == self.every else self.offset(found, rows)
        k = self.tiles.add_shift(offset / LN_2, rows, -1.0).exp2_().clamp_(1e-30, 1e30)
        self.sums.add("k", rows, k)
        for tile in tiles:
            assert tile.positive is not None
            assert tile.promoted is not None
            room = self.tiles.room("u", tile.positive)
            u = torch.sub(1.0, tile.promoted, out=room).add_(tile.positive)  # 1 for other candidates
            losses = torch.div(k, u, out=room).log1p_().mul_(tile.promoted)
            self.sums.add("losses", rows, losses.sum(-1, keepdim=True))
            slopes = torch.div(k, torch.add(tile.positive, k, out=room), out=room).mul_(tile.promoted)
            self.sums.add("slopes", rows, slopes.sum(-1, keepdim=True))

    def outputs_of(self, own: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs, after all tiles were added."""
        found = self.found = self.found or self.statistics(own, self.every)
        if "similar" in self.outputs:
            found["similar"] = self.sums["similar"] / _detached(self.pairing.temperature)
        if "losses" in self.outputs:
            found["losses"] = self._real(self.sums["losses"])
        return tuple(own if name == "own scores" else found[name] for name in self.outputs)

    def _real(self, sums: PerRow) -> PerRow:
        """Replace sums of losses of rows that lack a negative by 0, if the objective needs negatives."""
        none = self.found.get("none")
        return sums if none is None or not self.objective.needs_negatives else sums.masked_fill(none, 0.0)

    def coefficients(self, grads: dict[str, Tensor]) -> dict[str, PerRow]:
        """Return a, c, p, h and k of all rows, those that are not zero; ``grads`` are those by the outputs."""
        grads, found, numbers = dict(grads), self.found, {}
        if "similar" in grads:
            numbers["h"] = -grads["similar"]
        if "losses" in grads:
            h = self._real(grads["losses"])
            numbers |= {"h": h, "k": self.sums["k"]}
            leaves, offset = self.offset_of_all()
            inputs, by_offset = list(leaves.values()), h * self.sums["slopes"]
            parts = torch.autograd.grad(offset, inputs, by_offset, allow_unused=True, retain_graph=True)
            for name, part in zip(leaves, parts, strict=True):
                if part is not None:
                    grads[name] = grads[name] + part if name in grads else part
        if "log_mean" in grads:
            by_mean = grads["log_mean"] * (1.0 + self.slope) if self.slope else grads["log_mean"]
            numbers["a"] = by_mean / found["weighed"]
        if self.slope:
            by_mass = grads.get("log_mean", 0.0) - grads.get("log_mass", 0.0)
            numbers["c"] = by_mass * self.slope / found["mass"]
        if "log_positives" in grads:
            numbers["p"] = grads["log_positives"] / found["positive"]
        return numbers

    def by_score(self, tile: ExpTile, rows: slice, numbers: dict[str, PerRow], both: bool) -> Tensor:
        """Return the gradient by the scores of a tile.

        Args:
            tile: The tile.
            rows: Its rows.
            numbers: The result of ``coefficients``.
            both: Whether each pair also has the role of its mirror image.
        """
        columns, negative = slice(tile.cut.low, tile.cut.high), tile.negative

        def of(name: str) -> Tensor:
            mine = part_of(numbers[name], rows)
            if not both:
                return mine
            return torch.add(mine, numbers[name].T[:, columns], out=self.tiles.room("sum", negative))

        grad = self.tiles.room("gradient", negative)
        grad = torch.mul(negative, of("a"), out=grad) if "a" in numbers else grad.zero_()
        if "c" in numbers:
            grad.sub_(of("c"))
        if tile.weight is not None:
            grad.mul_(tile.weight)
        if tile.positive is None:
            return grad
        assert tile.promoted is not None
        if "p" in numbers:
            grad.addcmul_(tile.positive, of("p"))
        if "k" not in numbers:
            return grad.addcmul_(tile.promoted, of("h"), value=-1.0)
        roles = [{name: part_of(numbers[name], rows) for name in "hk"}]
        roles += [{name: numbers[name].T[:, columns] for name in "hk"}] if both else []
        for role in roles:
            slope = torch.add(tile.positive, role["k"], out=self.tiles.room("sum", negative))
            grad.addcmul_(tile.promoted, torch.div(role["h"] * role["k"], slope, out=slope), value=-1.0)
        return grad

    def result(self, found: dict[str, Tensor], own: Tensor | None) -> RowResult:
        """Return the statistics as the objective named them.

        Args:
            found: The outputs of ``_Statistics``.
            own: Scores of the anchors' own positives, [b, p], unless they are among the outputs.
        """
        own, known, pairing = found.get("own scores", own), {**self.found, **found}, self.pairing
        own = self.own_scores() if own is None else own
        row = Row(
            {"support": known["support"], **{name: known[here] for name, here in self.names.items()}},
            pairing.temperature,
        )
        if self.always:
            row.number = pairing.num_candidates - pairing.num_views
        real = torch.ones_like(own, dtype=torch.bool) if pairing.positive_mask is None else pairing.positive_mask
        if not pairing.label_positives:
            return RowResult(row, own, None if self.always else real)
        number = self.sums["same_label"]

        def sum_pairs(objective: Objective) -> tuple[Tensor, Tensor]:
            if self.softplus:
                return found["losses"][:, 0], number[:, 0]
            losses = number * self.offset(known, self.every) - found["similar"]
            return self._real(losses)[:, 0], number[:, 0]

        return RowResult(row, own, real, sum_pairs)

    def by_matrices(self, temperature: Tensor | None, own: Tensor | None, *vectors: Tensor) -> list[Tensor]:
        """Compute the outputs of ``_Statistics`` from matrices, for derivatives of higher order."""
        pairing, sides = self.pairing, self.tiles.sides
        unit = [*map(pairing.prepare, pairing.candidates)]  # vectors of a queue may be used as they are given
        known = {id(keys): keys.changed(vectors=each) for keys, each in zip(sides.keys, vectors, strict=True)}
        pools = [one if inverse is not None else known[id(keys)]
                 for keys, inverse, one in zip(sides.pools, sides.inverse, unit, strict=True)]  # fmt: skip
        scores = matrices(
            pairing.changed(
                anchors=known[id(sides.anchors)],
                candidates=tuple(pools),
                temperature=pairing.temperature if temperature is None else temperature,
                positives=pairing.prepared_own() if own is not None else pairing.positives,
                ready=True,
            )
        )
        if own is None:
            own = scores.positives[:, : 0 if self.tiles.joined else max(1, pairing.num_views - 1)]
        scores = scores.changed(positives=torch.cat([own, scores.positives[:, own.shape[1] :]], dim=1))
        row = self.objective.dense_row(scores, self.negatives.log_weights(scores))
        found = {here: row.statistics[name] for name, here in self.names.items()} | {"own scores": own}
        if pairing.label_positives:
            positives, real = scores.positives[:, own.shape[1] :], scores.positive_valid[:, own.shape[1] :]
            losses = self.objective.real_losses(positives, row, real)
            found |= {"losses": losses.sum(-1, keepdim=True), "similar": (positives * real).sum(-1, keepdim=True)}
        return [found[name] for name in self.outputs]


def _detached(temperature: float | Tensor) -> float | Tensor:
    return temperature.detach() if isinstance(temperature, Tensor) else temperature


class _Statistics(torch.autograd.Function):
    """The outputs of ``_ClosedFormRows``, by the temperature, scores of own positives, anchors, and other pools."""

    @staticmethod
    def forward(
        ctx: Any, loss: _ClosedFormRows, temperature: Tensor | None, own: Tensor | None, *vectors: Tensor
    ) -> tuple[Tensor, ...]:
        tiles, sides, learns = loss.tiles, loss.tiles.sides, any(ctx.needs_input_grad)
        ctx.loss, ctx.given, ctx.number = loss, own is not None, len(vectors)
        own = loss.own_scores() if own is None else own.detach()
        ahead, kept = torch.zeros_like(tiles.anchors) if sides.ahead and learns else None, []
        for rows in tiles.blocks:
            held = []
            for tile in tiles.first(rows, loss.sums):
                weighed = loss.add(tile, rows)
                if ahead is not None:
                    ahead[rows].add_(tiles.times_pool(weighed, tile.cut))
                if loss.softplus or tiles.keep:
                    held.append(tile)
            if loss.softplus:
                loss.add_losses(rows, held, own)
            kept += held if tiles.keep and learns and ahead is None else []
        found = loss.outputs_of(own)
        saved = (None if as_given else each for each, as_given in zip(vectors, sides.as_given, strict=True))
        ctx.save_for_backward(temperature, own, ahead, *saved, *(each for tile in kept for each in tile[1:]))
        # Aliases, because the loss keeps these tensors: an output refers to ctx, which refers to the loss.
        return tuple(each.detach() for each in found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        loss, (temperature, own, _, *saved) = ctx.loss, ctx.saved_tensors
        with without_autocast(own.device):
            if loss.tiles.keep and (torch.is_grad_enabled() or not all(map(is_plain, grads))):
                inputs = temperature, own if ctx.given else None, *saved[: ctx.number]
                return None, *by_operations(loss.by_matrices, inputs, grads)
            return tuple(_by_tiles(ctx, *grads))


@first_derivative_only
def _by_tiles(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """Compute the gradients by the inputs of ``_Statistics``."""
    loss, (_, own, ahead, *saved) = ctx.loss, ctx.saved_tensors
    by_name = dict(zip(loss.outputs, grads, strict=True))
    numbers = loss.coefficients(by_name)
    sums = _Gradients(loss, ctx.needs_input_grad[1], ctx.needs_input_grad[3:])
    if ahead is not None:
        if "a" in numbers:  # otherwise nothing reaches the scores of the negatives
            sums.of_anchors = ahead * numbers["a"]
    elif numbers and any(ctx.needs_input_grad[place] for place in (1, *range(3, len(ctx.needs_input_grad)))):
        kept = saved[ctx.number :]
        for rows, tile in loss.tiles.stored(kept) if kept else loss.tiles.again():
            sums.add(tile, rows, numbers)
    of_own = loss.found["own"] * numbers["p"] if "p" in numbers and "own" in loss.found else None
    if ctx.given:
        of_temperature, *of_vectors = sums.finish(None, own)
        return None, of_temperature, of_own, *of_vectors
    if "own scores" in by_name:
        of_own = by_name["own scores"] if of_own is None else of_own + by_name["own scores"]
    of_temperature, *of_vectors = sums.finish(of_own, own)
    return None, of_temperature, None, *of_vectors


class _Gradients:
    """Sums of the gradients by the vectors over all tiles.

    Args:
        loss: The loss.
        temperature: Whether the gradient by the temperature is needed.
        vectors: Whether those by the anchors and by the other pools are needed.
    """

    def __init__(self, loss: _ClosedFormRows, temperature: bool, vectors: Sequence[bool]) -> None:
        tiles, sides = loss.tiles, loss.tiles.sides
        self.loss, self.of_temperature, self.wanted = loss, temperature, vectors
        self.of_anchors = torch.zeros_like(tiles.anchors)
        others = iter(vectors[1:])
        wanted = [vectors[0] if keys is sides.anchors else next(others) for keys in sides.pools]
        self.of_pools = [  # transposed, as products give them
            pool.new_zeros(pool.shape[1], len(pool)) if want and not tiles.mirrored(place) else None
            for place, (pool, want) in enumerate(zip(tiles.pools, wanted, strict=True))
        ]
        self.inverse: float | Tensor = 1.0 / _detached(loss.pairing.temperature)
        self.scaled = False

    def add(self, tile: ExpTile, rows: slice, numbers: dict[str, PerRow]) -> None:
        """Add the gradients of a tile."""
        tiles, cut = self.loss.tiles, tile.cut
        grad = self.loss.by_score(tile, rows, numbers, tiles.mirrored(cut.pool))
        if isinstance(tiles.scale, Tensor):
            grad.mul_(tiles.scale[rows] * LN_2)
            self.scaled = True
        if self.wanted[0] or self.of_temperature:
            self.of_anchors[rows].add_(tiles.times_pool(grad, cut))
        if (pool := self.of_pools[cut.pool]) is not None:
            pool[:, cut.low : cut.high].add_(times_transposed(part_of(tiles.anchors, rows).T, grad.T))

    def finish(self, of_own: Tensor | None, own: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients by the temperature, the anchors and the other pools.

        Args:
            of_own: Gradient by the scores of the anchors' own positives, if these are views of the batch.
            own: Those scores, [b, p].
        """
        tiles, pairing, temperature = self.loss.tiles, self.loss.pairing, _detached(self.loss.pairing.temperature)
        for total in () if self.scaled else (self.of_anchors, *self.of_pools):
            if total is not None:
                total.mul_(self.inverse)
        of_temperature = None
        if self.of_temperature:
            assert isinstance(temperature, Tensor)
            total = (tiles.anchors * self.of_anchors).sum(-1, keepdim=True)
            total += 0.0 if of_own is None else (of_own * own).sum(-1, keepdim=True)
            of_temperature = (-total / temperature).sum_to_size(temperature.shape or (1, 1)).reshape(temperature.shape)
        if of_own is not None:
            self._add_own(of_own * self.inverse, pairing.num_views)
        others = []
        for keys, total in zip(tiles.sides.pools, self.of_pools, strict=True):
            if keys is not tiles.sides.anchors:
                others.append(None if total is None else total.T.contiguous())
            elif total is not None:
                self.of_anchors += total.T
        return of_temperature, self.of_anchors if self.wanted[0] else None, *others

    def _add_own(self, pull: Tensor, views: int) -> None:
        """Add the gradients through the anchors' own positives, given those by their similarities."""
        anchors, total = self.loss.tiles.anchors, self.of_anchors
        if views == 1:
            total.addcmul_(pull, self.loss.tiles.pools[0][: len(anchors)])
            if (pool := self.of_pools[0]) is not None:
                pool[:, : len(anchors)].add_((pull * anchors).T)
        elif views == 2:
            both, half = pull[: len(pull) // 2] + pull[len(pull) // 2 :], len(anchors) // 2
            total[:half].addcmul_(both, anchors[half:])
            total[half:].addcmul_(both, anchors[:half])
        else:
            columns = positive_columns(len(anchors), views, anchors.device)
            for column, part in zip(columns.unbind(1), pull.unsqueeze(-1).unbind(1), strict=True):
                total.addcmul_(part, anchors[column]).index_add_(0, column, part * anchors)
