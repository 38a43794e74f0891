"""EMC2 (Yau et al. 2024): negatives from one Metropolis-Hastings chain per anchor, whose law is the softmax of scores.

A step proposes a candidate uniformly and moves there with probability min(1, e^(s_new - s_state)) (eq. 9), in
log-space. After a burn-in the visits are draws from p(z) ~ e^(s_z) over *all* negatives, without its normaliser.

Where the authors' code and this differ: proposals are drawn with replacement (theirs sweep the batch in order, which
does not keep the softmax; neither does a shuffled sweep), both scores are of the current parameters wherever the
state's embedding is at hand (theirs keep the score of the last visit), and visits outside the batch stay in the
estimate, or at least in its normaliser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hardneg.core.draws import draw
from hardneg.core.errors import check_range
from hardneg.core.types import NEVER, LogWeights, Scores
from hardneg.state.stateful import Stateful, check_count, check_ids, last_of_each

PerAnchor = Annotated[Tensor, "b"]
OUTSIDE = -1
"""The column of a state that is not among the candidates."""
_no_share = -1e30
"""A log-weight that weighs nothing and still marks an anchor as one that has negatives."""


def metropolis_hastings(
    scores: Annotated[Tensor, "b n"],
    start: PerAnchor,
    start_score: PerAnchor,
    proposals: Annotated[Tensor, "b k"],
    uniforms: Annotated[Tensor, "b k"],
) -> tuple[Annotated[Tensor, "b k"], Annotated[Tensor, "b k"]]:
    """The column in which each chain stands after each of k steps, and whether it moved; a pure function.

    The state becomes the proposal where log U < s_new - s_state. ``start`` may be OUTSIDE the columns, with the score
    ``start_score``; a start score of -inf takes the first proposal. A proposal of -1 is no proposal.

    >>> s = torch.tensor([[0.0, 2.0, -9.0]])
    >>> steps = torch.tensor([[1, 2, 0]]), torch.tensor([[0.9, 0.5, 0.1]])
    >>> path, moved = metropolis_hastings(s, torch.tensor([0]), torch.tensor([0.0]), *steps)
    >>> path.tolist(), moved.tolist()
    ([[1, 1, 0]], [[True, False, True]])
    """
    proposed = torch.where(proposals >= 0, scores.gather(1, proposals.clamp(min=0)), NEVER)
    # s_new - log U is what the state's score must stay below: one comparison per step, and no exponential.
    bars = torch.where(proposed == NEVER, NEVER, proposed - uniforms.log())
    column, score = start, start_score
    path, moves = [], []
    for column_new, score_new, bar in zip(proposals.unbind(1), proposed.unbind(1), bars.unbind(1), strict=True):
        move = score < bar
        column = torch.where(move, column_new, column)
        score = torch.where(move, score_new, score)
        path.append(column)
        moves.append(move)
    if not path:
        return proposals, torch.zeros_like(proposals, dtype=torch.bool)
    return torch.stack(path, dim=1), torch.stack(moves, dim=1)


@dataclass(frozen=True, eq=False)
class Walk:
    """What the chains of a batch did: where they stood after the burn-in, and how they moved."""

    log_visits: LogWeights
    """Log of the visits of each candidate: the weights of ``surrogate``."""
    log_norm: PerAnchor
    """Log of all visits, also of those outside the candidates."""
    acceptance: PerAnchor
    """Share of the steps that moved."""
    outside: PerAnchor
    """Share of the visits to a state whose embedding is not at hand: in the normaliser, but without a gradient."""
    age: PerAnchor
    """Batches since the score of the anchor's state was computed; NaN at its first visit."""

    def summary(self) -> dict[str, Tensor]:
        """Means over the anchors, on the device."""
        return {name: getattr(self, name).double().nanmean() for name in ("acceptance", "outside", "age")}


class Chain(Stateful):
    """The state of one chain per instance and view: the id of its negative, and that negative's last score.

    burn_in: share of the steps of a batch that are walked but not counted.
    num_views: anchors of one instance with chains of their own, such as its two augmentations.

    Of several rows with one id and view, each walks from the stored state with its own draws, and the last one's end
    is stored. In eval mode nothing is stored. Memory: a few numbers per chain, no vectors.
    """

    state: Tensor
    twin: Tensor
    log_score: Tensor
    scored_at: Tensor
    precise: ClassVar = ("log_score",)

    def __init__(self, num_instances: int, burn_in: float = 0.5, *, num_views: int = 1, seed: int = 0) -> None:
        super().__init__(seed)
        check_count("Chain", "num_instances", num_instances)
        check_count("Chain", "num_views", num_views)
        check_range("Chain", "burn_in", burn_in, 0.0, 1.0, open_high=True)
        self.num_instances, self.num_views, self.burn_in = num_instances, num_views, burn_in
        chains = num_instances * num_views
        self.register_buffer("state", torch.full((chains,), -1))  # -1: no state yet
        self.register_buffer("twin", torch.zeros(chains, dtype=torch.int8))  # which of the columns with that id
        self.register_buffer("log_score", torch.full((chains,), NEVER, dtype=torch.float64))
        self.register_buffer("scored_at", torch.full((chains,), -1))

    def slots(self, ids: PerAnchor, views: PerAnchor | int = 0) -> PerAnchor:
        """Where the chain of an anchor is kept; negative for an id that is nobody's."""
        ids = check_ids("Chain", ids, self.num_instances)
        return torch.where(ids >= 0, ids * self.num_views + views, -1)

    def states_of(self, slots: PerAnchor) -> PerAnchor:
        """The ids of the negatives at which these chains stand, -1 for none."""
        return torch.where(slots >= 0, self.state[slots.clamp(min=0)], -1)

    def twins_of(self, slots: PerAnchor) -> PerAnchor:
        """Which of the candidates with that id it was: the view, if the candidates are views in order."""
        return self.twin[slots.clamp(min=0)].long()

    @torch.no_grad()
    def walk(
        self,
        scores: Scores,
        slots: PerAnchor,
        *,
        num_steps: int | None = None,
        proposable: Annotated[Tensor, "b|1 n"] | None = None,
        draws: tuple[Annotated[Tensor, "b k"], Annotated[Tensor, "b k"]] | None = None,
    ) -> Walk:
        """Walks the chains of these anchors over the candidates, and remembers where they end.

        num_steps: as many as the anchor with the most has candidates, unless given.
        proposable: the candidates that may be proposed, of the valid ones; all unless given.
        draws: proposals and uniforms, if not to be drawn from the seed and the step.
        """
        values = scores.candidates.detach().double()
        start = self._column_of_state(scores, slots)
        start_score = self._start_score(values, start, slots)
        if draws is None:
            allowed = scores.valid if proposable is None else scores.valid & proposable
            steps = int(allowed.sum(-1).max()) if num_steps is None else num_steps
            draws = self._draw(allowed, max(steps, 1), values)
        path, moved = metropolis_hastings(values, start, start_score, *draws)
        counted = path[:, int(self.burn_in * path.shape[1]) :]
        walk = self._walk(scores, counted, moved, slots)
        if self.training:
            self._store(scores, values, slots, start, path[:, -1])
            self.step += 1
        return walk

    def _draw(self, allowed: Tensor, steps: int, like: Tensor) -> tuple[Tensor, Tensor]:
        level = torch.zeros_like(like).masked_fill(~allowed, NEVER)
        proposals = draw(level, steps, self.generator(stream=0), method="categorical")
        uniforms = torch.rand(proposals.shape, generator=self.generator(stream=1), dtype=torch.float64)
        return proposals, uniforms.to(like.device)

    def _column_of_state(self, scores: Scores, slots: Tensor) -> Tensor:
        """The candidate that is the chain's state; of several with its id the same one as before."""
        ids = scores.candidate_tags.ids
        if ids is None:
            raise ValueError("Chain needs the ids of the candidates, got None; pass Keys with ids.")
        same = (ids == self.states_of(slots)[:, None]) & scores.valid & (ids >= 0)
        wanted = torch.minimum(self.twins_of(slots), same.sum(-1) - 1)
        hit = same & (same.cumsum(-1) - 1 == wanted[:, None])
        return torch.where(hit.any(-1), hit.int().argmax(-1), OUTSIDE)

    def _start_score(self, values: Tensor, start: Tensor, slots: Tensor) -> Tensor:
        """Of the current parameters where the state is a candidate, else as it was at the last visit."""
        stale = torch.where(slots >= 0, self.log_score[slots.clamp(min=0)], NEVER)
        if values.shape[1]:
            stale = torch.where(start >= 0, values.gather(1, start.clamp(min=0)[:, None]).squeeze(1), stale)
        return torch.where(stale.isnan(), NEVER, stale)  # a chain must not be stuck where a broken batch left it

    def _walk(self, scores: Scores, counted: Tensor, moved: Tensor, slots: Tensor) -> Walk:
        at_hand = (counted >= 0).double()
        visits = torch.zeros(scores.candidates.shape, dtype=torch.float64, device=counted.device)
        if visits.shape[1]:
            visits = visits.scatter_add(1, counted.clamp(min=0), at_hand)
        log_visits = torch.where(visits > 0, visits.log(), NEVER)
        # All visits outside: the anchor has negatives, none of which is here. Its positive still pulls.
        silent = (visits.sum(-1, keepdim=True) == 0) & scores.valid & (slots >= 0)[:, None]
        scored_at = self.scored_at[slots.clamp(min=0)]
        known = (slots >= 0) & (scored_at >= 0)
        return Walk(
            log_visits=torch.where(silent, _no_share, log_visits).to(scores.candidates.dtype),
            log_norm=torch.full_like(scores.candidates[:, :1].sum(-1), counted.shape[1]).log(),
            acceptance=moved.double().mean(-1),
            outside=1.0 - at_hand.mean(-1),
            age=torch.where(known, (self.step - scored_at).double(), float("nan")),
        )

    def _store(self, scores: Scores, values: Tensor, slots: Tensor, start: Tensor, end: Tensor) -> None:
        ids = scores.candidate_tags.ids
        assert ids is not None
        rows = last_of_each(slots) & (end >= 0)  # a chain that did not leave an outside state keeps it as it was
        start, end, slots, ids = start[rows], end[rows], slots[rows], ids.expand(len(rows), -1)[rows]
        found = ids.gather(1, end[:, None])
        before = torch.arange(ids.shape[1], device=end.device) < end[:, None]
        twin = ((ids == found) & before).sum(-1).clamp(max=127).to(torch.int8)
        self.state[slots] = found.squeeze(1)
        self.twin[slots] = torch.where(start == end, self.twin[slots], twin)
        self.log_score[slots] = values[rows].gather(1, end[:, None]).squeeze(1)
        self.scored_at[slots] = self.step

    def extra_repr(self) -> str:
        return f"num_instances={self.num_instances}, burn_in={self.burn_in}, num_views={self.num_views}"
