"""The row engine: one contract, three backends, and the choice between them.

A backend reduces the candidates of every anchor to a few numbers, the row statistics, with autograd:

    losses/contrastive.py  ->  choose(...)  ->  compute_rows(path, ...)  ->  RowResult.loss(...)

A backend applies no objective, no reduction and no warning; of the objective it only reads which statistics it
declares. ``RowResult.loss`` (core/objectives/base.py) applies the objective, in one place for all backends.

| backend | memory | used for |
| --- | --- | --- |
| ``dense`` | matrices [b, n] | small batches, distributions that need whole rows, torch.compile |
| ``tiles`` | a few tiles | every pointwise distribution at any size |
| ``triton`` | none beyond the vectors | uniform, tilted, banded and ranked negatives on a GPU |

For common losses one autograd function replaces ``dense`` and ``tiles``: ``backends/cpu`` computes the closed family on
a CPU, ``backends/tilted`` uniform and tilted negatives of small batches on a GPU. ``compute_rows`` tries them first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

import hardneg.kernels.backends.cpu as cpu
import hardneg.kernels.backends.tilted as tilted
from hardneg.core.bounds import Largest, dense_weights
from hardneg.core.errors import ArgumentError
from hardneg.core.objectives.base import Objective, Row, RowResult
from hardneg.core.pairing import Pairing, matrices
from hardneg.kernels.passes import LargestValue, PromotedPairs, RowStatisticsPass, statistics_of
from hardneg.kernels.plan import Leaf, SweepPlan, bounds_with_gradient, narrows
from hardneg.kernels.sweep import bounds_of, sweep
from hardneg.negatives.base import Mask, Negatives, not_pointwise

Impl = Literal["auto", "dense", "streamed"]
"""Choice of the backend by the user."""

MAX_DENSE_SCORES = {"cpu": 2**22, "cuda": 2**27}
"""Largest number of scores for which ``impl="auto"`` builds a dense matrix, by device.

Above it, tiles that fit the caches are faster on a CPU (benchmarks/algebra.py), and elsewhere a dense matrix would take
several GiB.
"""


class Backend(Protocol):
    """A way to compute row statistics."""

    def why_not(self, pairing: Pairing, negatives: Negatives, objective: Objective) -> str | None:
        """Return the reason why it does not support these arguments; None if it does."""
        ...

    def rows(self, pairing: Pairing, negatives: Negatives, objective: Objective) -> RowResult:
        """Compute the statistics that the objective declares, and the scores of the anchors' own positives.

        The caller has checked the parts of the pairing and disabled autocast.

        Args:
            pairing: The anchors, positives and candidates of the batch.
            negatives: The distribution of negatives.
            objective: The objective, for the statistics that it declares.
        """
        ...


class Path(NamedTuple):
    """Which backend computes a loss, and why.

    Attributes:
        name: "dense", "chunked" (tiles) or "triton".
        reason: The reason in plain words.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose(pairing: Pairing, negatives: Negatives, objective: Objective, impl: Impl, first: Mask | None = None) -> Path:
    """Choose the backend: Triton where it can run, dense matrices while they are small, tiles otherwise.

    Args:
        pairing: The anchors, positives and candidates of the batch.
        negatives: The distribution of negatives.
        objective: The objective, for the statistics that it declares.
        impl: "auto", "dense" or "streamed", which never builds a dense matrix.
        first: A mask that is applied before the negatives; it is built from tensors, which Triton does not support.

    Returns:
        The name of the backend and the reason.
    """
    if impl == "dense":
        return Path("dense", "impl='dense'")
    if torch.compiler.is_compiling():
        return Path("dense" if impl == "auto" else "chunked", "inside torch.compile")
    reason = (
        _why_not_triton(pairing, negatives, objective)
        if first is None
        else f"{type(first).__name__} is built from tensors"
    )
    number = len(pairing) * pairing.num_candidates
    most = MAX_DENSE_SCORES.get(pairing.anchors.vectors.device.type, MAX_DENSE_SCORES["cuda"])
    if reason is None and impl == "auto" and number <= most:
        ranked = getattr(negatives.closed_form(), "window", None) is not None
        reason = "its ranks would be computed from 16-bit products" if ranked else None
    if reason is None:
        return Path("triton", "the distribution is of the closed family")
    if impl == "streamed":
        return Path("chunked", reason)
    if number <= most:
        return Path("dense", f"{number:,} scores are few; no Triton: {reason}")
    if whole_rows := _BACKENDS["chunked"].why_not(pairing, negatives, objective):
        return Path("dense", whole_rows)
    return Path("chunked", f"{number:,} scores are many; no Triton: {reason}")


def _why_not_triton(pairing: Pairing, negatives: Negatives, objective: Objective) -> str | None:
    """Return why Triton cannot compute this; None if it can."""
    device = pairing.anchors.vectors.device.type
    if device != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        return f"the vectors are on {device}, and Triton needs a GPU"
    return _triton().why_not(pairing, negatives, objective)


def compute_rows(path: Path, pairing: Pairing, negatives: Negatives, objective: Objective) -> RowResult:
    """Compute the statistics of a loss by the backend of a path, or by the fused function that replaces it.

    Args:
        path: The result of ``choose``.
        pairing: The anchors, positives and candidates of the batch.
        negatives: The distribution of negatives.
        objective: The objective, for the statistics that it declares.
    """
    if path.name == "triton":
        return _triton().rows(pairing, negatives, objective)
    found = cpu.rows(pairing, negatives, objective, keep=path.name == "dense")
    if found is None and path.name == "dense":
        found = tilted.rows(pairing, negatives, objective)
    return _BACKENDS[path.name].rows(pairing, negatives, objective) if found is None else found


def explain(path: Path, pairing: Pairing, negatives: Negatives, objective: Objective) -> str:
    """Describe a path, and whether a fused function replaces its backend; see ``compute_rows``."""
    if path.name == "triton":
        return str(path)
    reason = cpu.why_not(pairing, negatives, objective)
    if reason is None:
        return f"{path}; computed by the fused function for CPUs"
    if path.name == "dense" and tilted.why_not(pairing, negatives, objective) is None:
        return f"{path}; computed by the fused function for tilts"
    return f"{path}; not fused: {reason}"


class Dense:
    """Matrices [b, n], for every distribution and every objective, also inside torch.compile."""

    def why_not(self, pairing: Pairing, negatives: Negatives, objective: Objective) -> str | None:
        """Return None: matrices work for every distribution and objective."""
        return None

    def rows(self, pairing: Pairing, negatives: Negatives, objective: Objective) -> RowResult:
        """Compute the statistics from matrices; label positives are among the positives of the result."""
        scores = matrices(pairing)
        row = objective.dense_row(scores, dense_weights(negatives.factors, scores))
        return RowResult(row, scores.positives, scores.positive_valid)


@dataclass(frozen=True)
class Tiles:
    """Sweeps over tiles, for any pointwise distribution, objective and device, without a [b, n] tensor.

    Bounds come first, then row statistics, then positives by label. ``plan`` cuts the tiles, and ``passes`` has the
    sweeps; memory is that of a few tiles.

    Attributes:
        tile: Rows and columns of a tile; None chooses them by device and memory.
    """

    tile: tuple[int, int] | None = None

    def why_not(self, pairing: Pairing, negatives: Negatives, objective: Objective) -> str | None:
        """Return why this distribution needs whole rows; None if it works on tiles."""
        return None if streamable(negatives) else "the distribution needs whole rows"

    def rows(self, pairing: Pairing, negatives: Negatives, objective: Objective) -> RowResult:
        """Sweep the bounds, then the statistics; positives by label are swept when the loss needs them."""
        check_streamable(negatives)
        ready = pairing.prepared()
        own = _own_scores(pairing, ready)
        plan = SweepPlan(ready, negatives.factors, objective, own, self.tile, narrows(pairing.anchors.vectors))
        ready = ready.changed(positives=plan.pairing.positives)  # drop vectors that are not needed again
        row = _row(plan, ready, own)
        sum_pairs = partial(_sum_promoted, plan, ready, row) if pairing.label_positives else None
        return RowResult(row, own, plan.pairing.real(slice(0, len(pairing))), sum_pairs)


def _own_scores(pairing: Pairing, ready: Pairing) -> Annotated[Tensor, "b p"]:
    """Score the own positives; for two views from the halves of the rows.

    A copy of the positives would be kept for the backward pass.
    """
    if pairing.num_views != 2:
        return ready.positive_scores()
    first, second = ready.anchors.vectors.chunk(2)
    return (first * second).sum(-1, keepdim=True).repeat(2, 1) / ready.temperature


def _row(plan: SweepPlan, pairing: Pairing, own: Tensor) -> Row:
    """Compute the statistics of all rows, and before them the bounds of the factors."""
    bounds = bounds_of(plan)
    leaves, last = list(plan.leaves), Leaf(own, True)
    largest = []
    for place in bounds_with_gradient(plan.factors):
        (value,) = sweep(LargestValue(plan, [*plan.leaves, last], bounds, place), pairing, [*plan.leaves, last])
        largest.append((*place, len(leaves)))
        leaves.append(Leaf(value, value.ndim > 0))
    plan.functions = replace(plan.functions, largest=tuple(largest))
    values = sweep(RowStatisticsPass(plan, [*leaves, last], bounds), pairing, [*leaves, last])
    return Row(dict(zip(statistics_of(plan.objective), values, strict=True)), pairing.temperature)


def _sum_promoted(plan: SweepPlan, pairing: Pairing, row: Row, objective: Objective) -> tuple[Tensor, Tensor]:
    """Sum the losses of each anchor's positives by label, and count them; the plan has the objective."""
    assert objective is plan.objective
    names = tuple(row.statistics)
    leaves = [*plan.leaves, *(Leaf(row.statistics[name], True) for name in names)]
    sums, number = sweep(PromotedPairs(plan, leaves, names), pairing, leaves)
    return sums[:, 0], number[:, 0]


def check_streamable(negatives: Negatives) -> None:
    """Raise for a factor that needs whole rows, or for a bound whose gradient cannot be computed in tiles.

    Raises:
        ArgumentError: With the name of the factor and a fix.
    """
    for factor in negatives.factors:
        if not factor.pointwise:
            raise not_pointwise(factor, "a streamed loss (impl='streamed')")
        for name in dense_only(factor):
            what = f"a bound of type Largest for {name!r} with grad=True in a streamed loss"
            raise ArgumentError(type(factor).__name__, what, type(factor.bounds()[name]).__name__, "use impl='dense'")


def streamable(negatives: Negatives) -> bool:
    """True if every factor works on tiles, with its gradients."""
    return all(factor.pointwise and not dense_only(factor) for factor in negatives.factors)


def dense_only(factor: Negatives) -> list[str]:
    """The names of the bounds whose gradient needs dense scores."""
    return [name for name, bound in factor.bounds().items() if bound.grad and type(bound) is not Largest]


_BACKENDS: dict[str, Backend] = {"dense": Dense(), "chunked": Tiles()}


def _triton() -> Backend:
    from hardneg.kernels.backends.triton import Triton  # Triton is slow to import

    return Triton()
