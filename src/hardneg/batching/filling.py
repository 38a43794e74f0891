"""Fills the batches of an epoch: which instances are free, which may share a batch, and what each guarantee costs.

A planner offers nodes in the order it prefers; the filler takes those that are free and that the guard allows. What a
planner leaves open is filled with uniform draws. So coverage and the guard hold for every planner, by construction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.batching.plan import Nodes
from hardneg.core.errors import ArgumentError, argument_error, check_range, warn_once

coverages = ("once", "free")


@dataclass(frozen=True, eq=False)
class Guard:
    """Who may never share a batch: two of one group, or two closer than a near-duplicate similarity.

    ``groups`` is one whole number per instance (a document, a label, an id); below 0: no group. Similarity is
    the inner product of ``vectors`` as given.
    """

    groups: Annotated[Tensor, "n"] | None = None
    near_duplicate: float | None = None
    vectors: Annotated[Tensor, "n d"] | None = None

    def __post_init__(self) -> None:
        if (self.near_duplicate is None) != (self.vectors is None):
            raise argument_error("Guard", "near_duplicate together with vectors", "near_duplicate", self.near_duplicate)
        if self.near_duplicate is not None:
            check_range("Guard", "near_duplicate", self.near_duplicate, -1.0, float("inf"))
        if self.groups is not None and (self.groups.ndim != 1 or self.groups.is_floating_point()):
            raise argument_error("Guard", "whole numbers [n]", "groups", tuple(self.groups.shape))

    def check(self, num_instances: int, batch_size: int) -> None:
        for name in ("groups", "vectors"):
            value = getattr(self, name)
            if value is not None and len(value) != num_instances:
                raise argument_error("Guard", f"{name} of {num_instances} instances", f"len({name})", len(value))
        if self.groups is not None:
            most = len(torch.unique(self.groups[self.groups >= 0])) + int((self.groups < 0).sum())
            if most < batch_size:
                what = f"at least {batch_size} groups, as many as a batch has instances"
                raise argument_error("Guard", what, "number of groups", most)


@dataclass
class FillCounts:
    """What happened while batches were filled."""

    filled: int = 0  # drawn uniformly because the planner offered too few
    forced: int = 0  # placed early because their group has as many members left as there are batches
    repeated: int = 0  # seen before in the epoch, since no unseen instance was allowed
    refused: int = 0  # offers the guard turned down


@dataclass
class BatchFiller:
    """Bookkeeping of one epoch. ``sizes`` are the sizes of all its batches."""

    num_instances: int
    sizes: list[int]
    coverage: str
    guard: Guard | None
    order: Nodes  # a permutation drawn for the epoch: starts and fills follow it
    tally: FillCounts = field(default_factory=FillCounts)
    num_closed: int = 0

    def __post_init__(self) -> None:
        self.taken = np.zeros(self.num_instances, dtype=np.uint8)
        self._pointer = 0
        self._batch: list[Nodes] = []
        self.closed: list[Nodes] = []  # the batches of this segment
        self.missing = 0
        self._crowd = None
        if self.guard is not None and self.guard.groups is not None:
            self._crowd = _Crowd(self.guard.groups.cpu().numpy().astype(np.int64), self.order, self.covering)
        self._vectors, self._limit = None, np.inf
        if self.guard is not None and self.guard.vectors is not None and self.guard.near_duplicate is not None:
            self._vectors, self._limit = self.guard.vectors.detach().float().cpu().numpy(), self.guard.near_duplicate

    @property
    def covering(self) -> bool:
        return self.coverage == "once"

    def begin_segment(self) -> None:
        self.tally, self.closed = FillCounts(), []

    def replay(self, batch: Nodes) -> None:
        """A batch of this epoch that was planned before: its instances are taken."""
        if self.covering:
            self._take(batch, force=True)
        self.num_closed += 1

    def open(self) -> None:
        self.missing = self.sizes[self.num_closed]
        self._batch = []
        if self._crowd is not None:
            self._crowd.open()
            if self.covering:
                urgent = self._crowd.urgent(len(self.sizes) - self.num_closed, self.taken)
                self.tally.forced += len(self.offer(urgent))

    def start(self) -> int | None:
        """A uniform free node to begin the batch with, taken; None where forced members filled the batch."""
        if not self.missing:
            return None
        if not self.covering and self.missing == self.sizes[self.num_closed]:
            first = self.order[self.num_closed % self.num_instances, None]
            self._take(first)
            return int(first[0])
        return self.draw()

    def starts(self, count: int) -> Nodes:
        """Uniform free nodes to begin the next ``count`` batches with, taken now; coverage "once", no guard."""
        assert self.covering
        assert self.guard is None
        found = self.order[:0]
        for nodes in self._uniform(at_once=64):
            found = np.concatenate([found, nodes[: count - len(found)]])
            if len(found) == count:
                break
        self.taken[found] = 1
        return found

    def enter(self, node: int) -> None:
        """The start of the open batch, one of ``starts``."""
        self._take(np.array([node], dtype=np.int64))

    def draw(self) -> int | None:
        """One uniform node of those still free and allowed; None if there is none or no place for it."""
        if not self.missing:
            return None
        for nodes in self._uniform(at_once=1 if self.guard is None else 64):
            allowed = self._allowed(nodes)[:1]
            if len(allowed):
                self._take(allowed)
                return int(allowed[0])
        return None

    def offer(self, nodes: Nodes) -> Nodes:
        """Takes the nodes that are free and allowed, in their order, until the batch is full; returns the taken."""
        nodes = nodes[self.taken[nodes] == 0]
        if self.guard is not None:
            allowed = self._allowed(nodes)
            self.tally.refused += len(nodes) - len(allowed)
            nodes = allowed
        nodes = nodes[: self.missing]
        self._take(nodes)
        return nodes

    def fill(self) -> None:
        """Fills the rest of the batch uniformly; with repeats where no free instance is allowed."""
        before = self.missing
        if before:
            for nodes in self._uniform(at_once=max(64, 2 * before)):
                self.offer(nodes)
                if not self.missing:
                    break
        self.tally.filled += before - self.missing
        if self.missing and self.covering:
            self._swap()
        if self.missing:
            self._repeat()

    def add(self, batches: Iterable[Nodes]) -> None:
        """Whole batches that need no look at coverage or a guard."""
        assert not self.covering
        assert self.guard is None
        for batch in batches:
            self.closed.append(batch)
            self.num_closed += 1

    def close(self) -> None:
        batch = self._members()
        if not self.covering:
            self.taken[batch] = 0
        self.num_closed += 1
        self.closed.append(batch)

    def _members(self) -> Nodes:
        return np.concatenate(self._batch) if self._batch else np.empty(0, dtype=np.int64)

    def _take(self, nodes: Nodes, force: bool = False) -> None:
        if not len(nodes):
            return
        self.taken[nodes] = 1
        if self._crowd is not None:
            self._crowd.enter(nodes)
        if not force:
            self._batch.append(nodes)
            self.missing -= len(nodes)

    def _uniform(self, at_once: int) -> Iterator[Nodes]:
        """Free nodes in uniform order: along the epoch's permutation, or along one of the batch's own."""
        if self.covering:
            while len(ahead := self.order[self._pointer : self._pointer + 512]) and self.taken[ahead[0]]:
                free = np.flatnonzero(self.taken[ahead] == 0)
                self._pointer += int(free[0]) if len(free) else len(ahead)
            order, place = self.order, self._pointer
        else:
            rng = np.random.default_rng([*self.order[:4].tolist(), self.num_closed])
            some = rng.choice(self.num_instances, min(self.num_instances, max(at_once, 64)), replace=False)
            yield some[self.taken[some] == 0]
            order, place = rng.permutation(self.num_instances), 0
        while place < self.num_instances:
            nodes = order[place : place + at_once]
            place += len(nodes)
            yield nodes[self.taken[nodes] == 0]

    def _swap(self) -> None:
        """Free nodes that this batch refuses go into earlier batches of the segment, and members of those come here."""
        for node in np.flatnonzero(self.taken == 0).astype(np.int64):
            for batch in self.closed:
                if not self.missing:
                    return
                against = np.flatnonzero(self._conflicts(node, batch))
                places = np.arange(len(batch)) if len(against) == 0 else against
                if len(against) > 1 or not len(welcome := self._allowed(batch[places])):
                    continue
                self._take(welcome[:1])
                if self._crowd is not None:
                    self._crowd.leave(welcome[:1], np.array([node]))
                self.taken[node] = 1
                batch[batch == welcome[0]] = node
                self.tally.filled += 1
                break

    def _conflicts(self, node: np.int64, batch: Nodes) -> NDArray[np.bool_]:
        conflict = np.zeros(len(batch), dtype=bool)
        if self._crowd is not None:
            conflict |= self._crowd.same(node, batch)
        if self._vectors is not None:
            conflict |= self._vectors[batch] @ self._vectors[node] > self._limit
        return conflict

    def _repeat(self) -> None:
        again = self.order[~np.isin(self.order, self._members())]
        again = np.roll(again, self.num_closed)
        again = self._allowed(again)[: self.missing]
        if len(again) < self.missing:
            size = self.sizes[self.num_closed]
            what, got = f"{size} instances that may share a batch", f"only {size - self.missing + len(again)}"
            raise ArgumentError("Guard", what, got, "use smaller batches or a higher near_duplicate")
        self.tally.repeated += len(again)
        self._take(again)
        warn_once(
            "room.repeated",
            "The guard left some instances out of the epoch, and others come twice instead: a group has more "
            "members than there are batches, or near-duplicates are many. plan.describe() counts them.",
        )

    def _allowed(self, nodes: Nodes) -> Nodes:
        if self._crowd is not None:
            nodes = self._crowd.allowed(nodes)
        return nodes if self._vectors is None else self._not_too_close(nodes, self._vectors)

    def _not_too_close(self, nodes: Nodes, vectors: NDArray[np.float32]) -> Nodes:
        offered = vectors[nodes]
        keep = np.ones(len(nodes), dtype=bool)
        keep &= ~np.any(offered @ vectors[self._members()].T > self._limit, axis=1)
        close = np.triu(offered @ offered.T > self._limit, 1)
        for row in np.flatnonzero(close.any(1)):
            if keep[row]:
                keep &= ~close[row]
        return nodes[keep]


class _Crowd:
    """Groups: which are in the open batch, and how many members of each are still to come."""

    def __init__(self, groups: Nodes, order: Nodes, covering: bool) -> None:
        values, inverse = np.unique(groups, return_inverse=True)
        self._group = np.where(groups < 0, -1, inverse).astype(np.int64)
        self._inside = np.zeros(len(values), dtype=bool)
        self._left = np.bincount(self._group[self._group >= 0], minlength=len(values))
        self._spread = covering and bool((self._left > 1).any())
        members = order[self._group[order] >= 0]
        self._members = members[np.argsort(self._group[members], kind="stable")]
        self._first = np.concatenate([[0], np.cumsum(self._left)])

    def open(self) -> None:
        self._inside[:] = False

    def enter(self, nodes: Nodes) -> None:
        group = self._group[nodes]
        group = group[group >= 0]
        self._inside[group] = True
        np.subtract.at(self._left, group, 1)

    def leave(self, back: Nodes, instead: Nodes) -> None:
        """A node that entered this batch had been counted before; the one that took its old place had not."""
        for nodes, change in ((back, 1), (instead, -1)):
            group = self._group[nodes]
            self._left[group[group >= 0]] += change

    def same(self, node: np.int64, batch: Nodes) -> NDArray[np.bool_]:
        same: NDArray[np.bool_] = (self._group[batch] == self._group[node]) & (self._group[node] >= 0)
        return same

    def allowed(self, nodes: Nodes) -> Nodes:
        group = self._group[nodes]
        free = (group < 0) | ~self._inside[group]
        nodes, group = nodes[free], group[free]
        keys = np.where(group < 0, -1 - np.arange(len(group)), group)
        _, first = np.unique(keys, return_index=True)
        return nodes[np.sort(first)]

    def urgent(self, batches_left: int, taken: NDArray[np.uint8]) -> Nodes:
        """One member of each group that must be in every batch from here on, or its members would not fit."""
        if not self._spread:
            return np.empty(0, dtype=np.int64)
        chosen = []
        for group in np.flatnonzero((self._left >= batches_left) & (self._left > 0)):
            members = self._members[self._first[group] : self._first[group + 1]]
            chosen.append(members[taken[members] == 0][0])
        return np.array(chosen, dtype=np.int64)
