"""Fill the batches of an epoch: track which instances are free, enforce the guard, and count the exceptions.

A planner offers nodes in the order it prefers, and the builder accepts those that are free and allowed by the guard.
Places that a planner leaves open are filled with uniform draws. So coverage and the guard hold for every planner by
construction. ``Guard`` is the public part; ``BatchBuilder`` is used by planners (planners/), and created by ``Epoch``
(planners/base.py).
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
"""Each instance once per epoch, or batches that may overlap."""


@dataclass(frozen=True, eq=False)
class Guard:
    """Instances that may never share a batch: two of one group, or two that are near-duplicates.

    Args:
        groups: Group of each instance (a document, a label, an id) as a whole number, shape [n]; negative: no group.
        near_duplicate: Similarity above which two instances are near-duplicates.
        vectors: Vectors whose inner products are the similarities, shape [n, d].

    Raises:
        ArgumentError: If only one of ``near_duplicate`` and ``vectors`` is given, or the groups are not whole numbers.

    Example:
        >>> from hardneg.batching.planners import UniformPlanner
        >>> plan = UniformPlanner().plan(4, batch_size=2, guard=Guard(groups=torch.tensor([0, 0, 1, 1])))
        >>> [sorted(i // 2 for i in batch.tolist()) for batch in plan]
        [[0, 1], [0, 1]]
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
        """Check the guard for a data set.

        Args:
            num_instances: Number of instances of the data set.
            batch_size: Size of a batch over all ranks.

        Raises:
            ArgumentError: If there are not as many groups or vectors as instances, or fewer groups than a batch needs.
        """
        for name in ("groups", "vectors"):
            value = getattr(self, name)
            if value is not None and len(value) != num_instances:
                raise argument_error("Guard", f"{name} of {num_instances} instances", f"len({name})", len(value))
        if self.groups is not None:
            most = len(torch.unique(self.groups[self.groups >= 0])) + int((self.groups < 0).sum())
            if most < batch_size:
                what = f"at least {batch_size} groups, one for each instance of a batch"
                raise argument_error("Guard", what, "number of groups", most)


@dataclass
class FillCounts:
    """Counts of what happened while the batches of a segment were filled.

    Attributes:
        filled: Instances drawn uniformly, because the planner offered too few.
        forced: Instances placed early, because their group has as many members left as there are batches.
        repeated: Instances already seen in the epoch, because no unseen one was allowed.
        refused: Offers that the guard refused.
    """

    filled: int = 0
    forced: int = 0
    repeated: int = 0
    refused: int = 0


@dataclass
class BatchBuilder:
    """State of an epoch while its batches are filled.

    Planners use ``start`` (a uniform first node), ``offer`` (preferred nodes), ``draw`` (another uniform node), and
    read ``missing`` (open places of the batch) and ``taken`` (1 for nodes that are not free, shape [n]).

    Attributes:
        num_instances: Number of instances of the data set, n.
        sizes: Sizes of all batches of the epoch.
        coverage: "once" (each instance once per epoch) or "free" (batches may overlap).
        guard: Instances that may not share a batch.
        order: Random permutation of the epoch, shape [n]; starts and fills follow it.
        tally: Counts for the current segment.
        num_closed: Number of finished batches.
    """

    num_instances: int
    sizes: list[int]
    coverage: str
    guard: Guard | None
    order: Nodes
    tally: FillCounts = field(default_factory=FillCounts)
    num_closed: int = 0

    def __post_init__(self) -> None:
        self.taken = np.zeros(self.num_instances, dtype=np.uint8)
        self._pointer = 0
        self._batch: list[Nodes] = []
        self.closed: list[Nodes] = []  # the batches of this segment
        self.missing = 0
        self._groups = None
        if self.guard is not None and self.guard.groups is not None:
            self._groups = _GroupCounts(self.guard.groups.cpu().numpy().astype(np.int64), self.order, self.covering)
        self._vectors, self._limit = None, np.inf
        if self.guard is not None and self.guard.vectors is not None and self.guard.near_duplicate is not None:
            self._vectors, self._limit = self.guard.vectors.detach().float().cpu().numpy(), self.guard.near_duplicate

    @property
    def covering(self) -> bool:
        """True if each instance is in one batch per epoch."""
        return self.coverage == "once"

    def begin_segment(self) -> None:
        """Start a new segment, with new counts."""
        self.tally, self.closed = FillCounts(), []

    def replay(self, batch: Nodes) -> None:
        """Mark the instances of an already planned batch of this epoch as taken."""
        if self.covering:
            self._take(batch, force=True)
        self.num_closed += 1

    def open(self) -> None:
        """Open the next batch; starts with members of groups that would otherwise not fit into the epoch."""
        self.missing = self.sizes[self.num_closed]
        self._batch = []
        if self._groups is not None:
            self._groups.open()
            if self.covering:
                urgent = self._groups.urgent(len(self.sizes) - self.num_closed, self.taken)
                self.tally.forced += len(self.offer(urgent))

    def start(self) -> int | None:
        """Take a uniform free node as the first of the batch; None if forced members have filled it."""
        if not self.missing:
            return None
        if not self.covering and self.missing == self.sizes[self.num_closed]:
            first = self.order[self.num_closed % self.num_instances, None]
            self._take(first)
            return int(first[0])
        return self.draw()

    def starts(self, count: int) -> Nodes:
        """Take ``count`` uniform free nodes, such as starts of batches; only for coverage "once" without a guard."""
        assert self.covering
        assert self.guard is None
        parts, missing = [self.order[:0]], count
        for nodes in self._uniform(at_once=max(64, count)):
            parts.append(nodes[:missing])
            missing -= len(parts[-1])
            if not missing:
                break
        found = np.concatenate(parts)
        self.taken[found] = 1
        return found

    def enter(self, node: int) -> None:
        """Put a node from ``starts`` into the open batch."""
        self._take(np.array([node], dtype=np.int64))

    def draw(self) -> int | None:
        """Take one uniform node that is free and allowed; None if there is none, or the batch is full."""
        if not self.missing:
            return None
        for nodes in self._uniform(at_once=1 if self.guard is None else 64):
            allowed = self._allowed(nodes)[:1]
            if len(allowed):
                self._take(allowed)
                return int(allowed[0])
        return None

    def offer(self, nodes: Nodes) -> Nodes:
        """Take the nodes that are free and allowed, in order, until the batch is full.

        Args:
            nodes: Preferred nodes, best first.

        Returns:
            The nodes that were taken.
        """
        nodes = nodes[self.taken[nodes] == 0]
        if self.guard is not None:
            allowed = self._allowed(nodes)
            self.tally.refused += len(nodes) - len(allowed)
            nodes = allowed
        nodes = nodes[: self.missing]
        self._take(nodes)
        return nodes

    def fill(self) -> None:
        """Fill the open places uniformly; with repeated instances if no free one is allowed.

        Raises:
            ArgumentError: If the guard allows too few instances for a batch.
        """
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
        """Add complete batches, whose nodes are taken or may overlap; only without a guard."""
        assert self.guard is None
        for batch in batches:
            self.closed.append(batch)
            self.num_closed += 1

    def close(self) -> None:
        """Finish the open batch."""
        batch = self._members()
        if not self.covering:
            self.taken[batch] = 0
        self.num_closed += 1
        self.closed.append(batch)

    def _members(self) -> Nodes:
        """Return the instances of the open batch."""
        return np.concatenate(self._batch) if self._batch else np.empty(0, dtype=np.int64)

    def _take(self, nodes: Nodes, force: bool = False) -> None:
        """Mark nodes as taken, and put them into the open batch unless ``force``."""
        if not len(nodes):
            return
        self.taken[nodes] = 1
        if self._groups is not None:
            self._groups.enter(nodes)
        if not force:
            self._batch.append(nodes)
            self.missing -= len(nodes)

    def _uniform(self, at_once: int) -> Iterator[Nodes]:
        """Yield free nodes in uniform order: the epoch's permutation, or with coverage "free" a new one per batch."""
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
        """Exchange free nodes that this batch refuses with members of earlier batches of the segment."""
        for node in np.flatnonzero(self.taken == 0).astype(np.int64):
            for batch in self.closed:
                if not self.missing:
                    return
                against = np.flatnonzero(self._conflicts(node, batch))
                places = np.arange(len(batch)) if len(against) == 0 else against
                if len(against) > 1 or not len(welcome := self._allowed(batch[places])):
                    continue
                self._take(welcome[:1])
                if self._groups is not None:
                    self._groups.leave(welcome[:1], np.array([node]))
                self.taken[node] = 1
                batch[batch == welcome[0]] = node
                self.tally.filled += 1
                break

    def _conflicts(self, node: np.int64, batch: Nodes) -> NDArray[np.bool_]:
        """Return which members of a batch the node may not be with, shape [batch]."""
        conflict = np.zeros(len(batch), dtype=bool)
        if self._groups is not None:
            conflict |= self._groups.same(node, batch)
        if self._vectors is not None:
            conflict |= self._vectors[batch] @ self._vectors[node] > self._limit
        return conflict

    def _repeat(self) -> None:
        """Fill the open places with instances that were already in a batch, and warn."""
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
            "guard.repeated",
            "The guard left some instances out of the epoch and repeated others: a group has more members "
            "than there are batches, or there are many near-duplicates. plan.describe() counts them.",
        )

    def _allowed(self, nodes: Nodes) -> Nodes:
        """Return the nodes that may join the open batch together, in order."""
        if self._groups is not None:
            nodes = self._groups.allowed(nodes)
        return nodes if self._vectors is None else self._not_too_close(nodes, self._vectors)

    def _not_too_close(self, nodes: Nodes, vectors: NDArray[np.float32]) -> Nodes:
        """Return the nodes that are not near-duplicates of the batch or of an earlier node."""
        offered = vectors[nodes]
        keep = np.ones(len(nodes), dtype=bool)
        keep &= ~np.any(offered @ vectors[self._members()].T > self._limit, axis=1)
        close = np.triu(offered @ offered.T > self._limit, 1)
        for row in np.flatnonzero(close.any(1)):
            if keep[row]:
                keep &= ~close[row]
        return nodes[keep]


class _GroupCounts:
    """Groups in the open batch, and the number of members of each group that are still free."""

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
        """Start a new batch."""
        self._inside[:] = False

    def enter(self, nodes: Nodes) -> None:
        """Count nodes that join the batch."""
        group = self._group[nodes]
        group = group[group >= 0]
        self._inside[group] = True
        np.subtract.at(self._left, group, 1)

    def leave(self, back: Nodes, instead: Nodes) -> None:
        """Correct the counts after a swap: ``back`` had been counted before, ``instead`` had not."""
        for nodes, change in ((back, 1), (instead, -1)):
            group = self._group[nodes]
            self._left[group[group >= 0]] += change

    def same(self, node: np.int64, batch: Nodes) -> NDArray[np.bool_]:
        """Return which members of a batch have the group of the node, shape [batch]."""
        same: NDArray[np.bool_] = (self._group[batch] == self._group[node]) & (self._group[node] >= 0)
        return same

    def allowed(self, nodes: Nodes) -> Nodes:
        """Return the nodes of groups that are not in the batch, the first one of each group."""
        group = self._group[nodes]
        free = (group < 0) | ~self._inside[group]
        nodes, group = nodes[free], group[free]
        keys = np.where(group < 0, -1 - np.arange(len(group)), group)
        _, first = np.unique(keys, return_index=True)
        return nodes[np.sort(first)]

    def urgent(self, batches_left: int, taken: NDArray[np.uint8]) -> Nodes:
        """Return one member of each group that must be in every remaining batch for all its members to fit."""
        if not self._spread:
            return np.empty(0, dtype=np.int64)
        chosen = []
        for group in np.flatnonzero((self._left >= batches_left) & (self._left > 0)):
            members = self._members[self._first[group] : self._first[group + 1]]
            chosen.append(members[taken[members] == 0][0])
        return np.array(chosen, dtype=np.int64)
