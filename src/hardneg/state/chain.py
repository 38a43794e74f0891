"""EMC2 (Yau et al. 2024): negatives from Metropolis-Hastings chains, whose law is the softmax of the scores.

A step proposes a candidate uniformly and moves there with probability min(1, e^(s_new - s_state)) (eq. 9), in
log-space. After a burn-in the visits are draws from p(z) ~ e^(s_z) over *all* negatives, without its normaliser.

Which proposals keep that law? A batch is a uniform subset C of the data set, and the state is often outside it. If only
C were proposed, a chain that has entered C could not return, and would relax to the softmax of the batch. So the state,
in every view that can be a column, is proposable too: given T = C + {state}, each member of T is equally likely to have
been the one outside C, so a state with the global law is distributed as the softmax on T, and uniform proposals from T
keep that.

Differences from the authors' code: proposals are drawn with replacement (theirs sweep the batch in order, which does
not keep the softmax; neither does a shuffled sweep), both scores are of the current parameters wherever the state's
embedding is available (theirs keep the score of the last visit), visits outside the batch stay in the estimate, or at
least in its normaliser, and each view of an instance has a chain (theirs share one state per image).

``losses.global_softmax.EMC2`` calls ``Chain.walk``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, check_range
from hardneg.core.types import NEVER, LogWeights, PerAnchor, Scores
from hardneg.search.draws import uniform_columns
from hardneg.state.metropolis import ChainBatch, ChainMemory, Visits, metropolis_hastings
from hardneg.state.stateful import Stateful, Writes, check_count

Draws = tuple[Annotated[Tensor, "b k"], Annotated[Tensor, "b k"]]
"""Proposed columns [b, k] (-1: none) and the logarithms of uniform numbers [b, k]."""
_no_share = -1e30
"""A log-weight without any effect that still marks an anchor as one that has negatives."""


@dataclass(frozen=True, eq=False)
class Walk:
    """The result of the chains of a batch: their visits after the burn-in, and how they moved."""

    log_visits: LogWeights
    """Log of the number of visits of each candidate: the weights of ``surrogate``."""
    log_norm: PerAnchor
    """Log of the number of all visits, including those outside the candidates."""
    acceptance: PerAnchor
    """Share of the steps that moved."""
    outside: PerAnchor
    """Share of the visits to a state without an embedding, which count in the normaliser but have no gradient."""
    age: PerAnchor
    """Batches since the score of the anchor's state was computed; NaN at its first visit."""

    def summary(self) -> dict[str, Tensor]:
        """Return the means of acceptance, outside and age over the anchors, on the device."""
        return {name: getattr(self, name).double().nanmean() for name in ("acceptance", "outside", "age")}


class Chain(Stateful):
    """The state of one chain per instance and view: the id and view of its negative, and that negative's last scores.

    A state that is not among the candidates can still be proposed, with the scores of its views at the last visit.
    Several rows with one id and view all walk from the stored state, with their own draws, and the end of the last
    row is stored. In eval mode nothing is stored. Memory: a few numbers per chain, no vectors.

    Args:
        num_instances: Size of the data set.
        burn_in: Share of the steps of a batch that are walked but not counted.
        num_views: Number of anchors per instance that have their own chain, such as two augmentations; also the number
            of columns that an instance has as a candidate.
        seed: Seed of the draws.
    """

    state: Tensor
    view: Tensor
    log_score: Tensor
    scored_at: Tensor
    precise: ClassVar = ("log_score",)
    shown: ClassVar = ("num_instances", "burn_in", "num_views")

    def __init__(self, num_instances: int, burn_in: float = 0.5, *, num_views: int = 1, seed: int = 0) -> None:
        super().__init__(seed)
        num_instances = check_count("Chain", "num_instances", num_instances)
        num_views = check_count("Chain", "num_views", num_views)
        check_range("Chain", "burn_in", burn_in, 0.0, 1.0, open_high=True)
        self.num_instances, self.num_views, self.burn_in = num_instances, num_views, burn_in
        chains = num_instances * num_views
        self.register_buffer("state", torch.full((chains,), -1))  # -1: no state yet
        self.register_buffer("view", torch.zeros(chains, dtype=torch.int8))
        # Scores of the state's views; -inf where a view was not a candidate.
        self.register_buffer("log_score", torch.full((chains, num_views), NEVER, dtype=torch.float64))
        self.register_buffer("scored_at", torch.full((chains,), -1))

    def slots(self, ids: PerAnchor, views: PerAnchor | int = 0) -> PerAnchor:
        """Return the index of each anchor's chain; negative for ids that stand for no instance."""
        ids = self.checked("Chain", ids, self.num_instances)
        return torch.where(ids >= 0, ids * self.num_views + views, -1)

    def states_of(self, slots: PerAnchor) -> PerAnchor:
        """Return the ids of the negatives at which these chains are, -1 for none."""
        return torch.where(slots >= 0, self.state[slots.clamp(min=0)], -1)

    def views_of(self, slots: PerAnchor) -> PerAnchor:
        """Return the view of that negative."""
        return self.view[slots.clamp(min=0)].long()

    @torch.no_grad()
    def walk(
        self,
        scores: Scores,
        slots: PerAnchor,
        *,
        views: Annotated[Tensor, "b|1 n"] | None = None,
        num_steps: int | None = None,
        draws: Draws | None = None,
    ) -> Walk:
        """Walk the chains of these anchors over the candidates and store where they end.

        Args:
            scores: Scores of b anchors against n candidates with ids.
            slots: Index of each anchor's chain, [b].
            views: View of each candidate; by default, candidates with one id are its views in their order.
            num_steps: Number of steps; by default the largest number of valid candidates of an anchor.
            draws: Proposals and log-uniforms, instead of draws from the seed and the step.

        Raises:
            ArgumentError: If the candidates have no ids.
        """
        ids = scores.candidate_tags.ids
        if ids is None:
            raise ArgumentError("Chain", "the ids of the candidates", "ids=None", "pass Keys with ids")
        views = _occurrence(ids) if views is None else views
        batch = ChainBatch(scores.candidates.detach(), scores.valid, ids, views, slots)
        if draws is None:
            steps = int(scores.valid.sum(-1).max()) if num_steps is None else num_steps
            walk = self._drawn(batch, max(steps, 1))
        else:
            walk = self._walked(batch, *self._start(batch), draws)
        if self.training:
            self.advance()
        return walk

    def log_uniforms(self, proposals: Annotated[Tensor, "b k"]) -> Annotated[Tensor, "b k"]:
        """Return the log of the random numbers of this step, one for each proposal."""
        numbers: Tensor = self.uniforms(tuple(proposals.shape), 1)[0]
        return numbers.log()

    def _drawn(self, batch: ChainBatch, num_steps: int) -> Walk:
        """Four kernels on a GPU, operations of torch elsewhere: the same draws and visits."""
        if (kernels := _kernels_for(batch)) is not None:
            memory = ChainMemory(self.state, self.view, self.log_score, self.scored_at, self.seed, self.step)
            burn_in = int(self.burn_in * num_steps)
            log_visits, end, figures = kernels.walk(batch, memory, num_steps, burn_in, _no_share)
            if self.training:
                kernels.remember(batch, memory, end, self.num_instances)
            return Walk(log_visits, _log_norm(batch, num_steps - burn_in), *figures.unbind())
        numbers = self.uniforms((len(batch.slots), num_steps), 0, 1)
        start, stored = self._start(batch)
        allowed = torch.cat([batch.valid, stored != NEVER], dim=1)
        return self._walked(batch, start, stored, (uniform_columns(allowed, numbers[0]), numbers[1].log()))

    def _start(self, batch: ChainBatch) -> tuple[PerAnchor, Annotated[Tensor, "b v"]]:
        """Return the column at which each chain starts and the stored scores of its state's views.

        A column is -1 for none; columns beyond the candidates are the views of the state. Stored scores are -inf where
        the state is a candidate.
        """
        slots, state, view = batch.slots, self.states_of(batch.slots), self.views_of(batch.slots)
        start = self._column_of_state(batch, state[:, None], view[:, None])
        stored = self.log_score[slots.clamp(min=0)]
        here = ((start >= 0) | (slots < 0))[:, None]
        away = (start < 0) & (state >= 0)
        start = torch.where(away, batch.candidates.shape[1] + view, start)
        return start, torch.where(here | stored.isnan(), NEVER, stored)

    def _column_of_state(self, batch: ChainBatch, state: Tensor, view: Tensor) -> PerAnchor:
        """Return the candidate that is the chain's state, preferably in the same view; -1 if there is none."""
        same = (batch.ids == state) & (state >= 0) & batch.valid
        if not same.shape[1]:
            return torch.full_like(batch.slots, -1)
        best = (same.int() + (same & (batch.views == view)).int()).max(-1)
        return torch.where(best.values > 0, best.indices, -1)

    def _walked(self, batch: ChainBatch, start: PerAnchor, stored: Tensor, draws: Draws) -> Walk:
        values = torch.cat([batch.candidates.double(), stored], dim=1)
        burn_in = int(self.burn_in * draws[0].shape[1])
        visits = _steps_for(values)(values, start, *draws, burn_in)
        walk = self._walk(batch, visits, draws[0].shape[1] - burn_in)
        if self.training:
            self._store(batch, visits.end)
        return walk

    def _walk(self, batch: ChainBatch, visits: Visits, num_counted: int) -> Walk:
        slots, counts = batch.slots, visits.counts[:, : batch.candidates.shape[1]]
        inside = counts.sum(-1)
        log_visits = torch.where(counts > 0, counts.log(), NEVER)
        # If all visits were outside, the anchor has negatives, but none of them here. Its positive still pulls.
        silent = (inside == 0)[:, None] & batch.valid & (slots >= 0)[:, None]
        scored_at = self.scored_at[slots.clamp(min=0)]
        known = (slots >= 0) & (scored_at >= 0)
        return Walk(
            log_visits=torch.where(silent, _no_share, log_visits).to(batch.candidates.dtype),
            log_norm=_log_norm(batch, num_counted),
            acceptance=visits.accepted.double().mean(-1),
            outside=1.0 - inside / num_counted,
            age=torch.where(known, (self.step - scored_at).double(), float("nan")),
        )

    def _store(self, batch: ChainBatch, end: Tensor) -> None:
        """Store the end of each walk; one that ends outside the candidates keeps its id and scores."""
        slots, num_candidates = batch.slots, batch.candidates.shape[1]
        writes, at = Writes(slots), slots.clamp(min=0)
        writes.into(self.view, torch.where(end >= num_candidates, end - num_candidates, self.view[at]))
        if not num_candidates:
            return
        inside = ((end >= 0) & (end < num_candidates))[:, None]
        column = end.clamp(0, num_candidates - 1)[:, None]
        ids, views = (tag.expand(len(slots), -1) for tag in (batch.ids, batch.views))
        values = batch.candidates.double()
        found, view = ids.gather(1, column), views.gather(1, column).clamp(max=self.num_views - 1)
        each = torch.arange(self.num_views, device=ids.device)[:, None, None]
        of_views = torch.where((ids == found) & (views == each), values, NEVER).amax(-1).T
        of_views = of_views.scatter(1, view, values.gather(1, column))
        # An id beyond the instances (a row without an id) cannot be looked up later.
        found = torch.where(found < self.num_instances, found, -1)
        for buffer, new in ((self.state, found), (self.view, view), (self.scored_at, self.step.expand_as(found))):
            writes.into(buffer, torch.where(inside, new, buffer[at, None]).squeeze(1))
        writes.into(self.log_score, torch.where(inside, of_views, self.log_score[at]))


def _occurrence(ids: Annotated[Tensor, "b|1 n"]) -> Annotated[Tensor, "b|1 n"]:
    """Return how many earlier columns have the same id.

    >>> _occurrence(torch.tensor([[7, 3, 7, 7, 3]])).tolist()
    [[0, 0, 1, 2, 1]]
    """
    in_order, order = ids.sort(dim=1, stable=True)
    first = torch.searchsorted(in_order, in_order)
    return torch.empty_like(ids).scatter(1, order, torch.arange(ids.shape[1], device=ids.device) - first)


def _log_norm(batch: ChainBatch, num_counted: int) -> PerAnchor:
    return torch.full_like(batch.slots, num_counted, dtype=batch.candidates.dtype).log()


def _kernels_for(batch: ChainBatch) -> Any | None:
    """Return the module with the kernels if they support this batch."""
    if not batch.candidates.is_cuda:  # Triton is slow to import and needs a GPU
        return None
    from hardneg.state import triton_chains

    return triton_chains if triton_chains.supports(batch) else None


def _steps_for(values: Tensor) -> Callable[..., Visits]:
    """Return the implementation of the steps: a kernel on a GPU, a loop elsewhere, with the same visits to the bit."""
    if values.is_cuda:
        from hardneg.state import triton_chains

        if triton_chains.why_unsupported(values) is None:
            return triton_chains.metropolis_hastings
    return metropolis_hastings
