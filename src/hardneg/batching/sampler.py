"""Batch samplers that follow a plan: they work with any PyTorch loader, cover the data and resume exactly.

``PlannedBatchSampler`` accepts any planner, ``ProximityBatchSampler`` is ProSampler, and ``PlanIterator`` is one pass
over an epoch. The plan of an epoch is made in segments; a new graph takes effect with the next segment. The order is a
pure function of (graphs, seed, epoch). The position belongs to the iterator, not to the sampler, which runs ahead of
training when a loader prefetches. A graph cannot be rebuilt from later weights: to resume, save the plan and assign it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler

from hardneg.batching.background import PlanningProcess
from hardneg.batching.filling import BatchBuilder, Guard
from hardneg.batching.graph import ProximityGraph
from hardneg.batching.plan import Plan, batch_hash
from hardneg.batching.planners.base import Epoch, Planner
from hardneg.batching.planners.proximity import Proximity
from hardneg.batching.planners.uniform import UniformPlanner
from hardneg.core.errors import ArgumentError, argument_error, check_count, warn_once
from hardneg.core.schedules import Number

PlanSource = tuple[Planner, Any, Any]
"""A planner, its data, and the result of its ``prepare``."""


class PlannedBatchSampler(BatchSampler):
    """Batch sampler for any planner; a ``torch.utils.data.BatchSampler``.

    With several ranks a batch is planned for num_replicas x batch_size instances, and each rank gets its slice: after a
    gather the whole global batch is hard. Ranks default to those of torch.distributed. Under Accelerate and the HF
    Trainer, which split batches themselves, there is one: pass the global batch size and ``split_batches=True`` there.
    Without ``set_epoch``, each full pass is followed by the next epoch.

    Args:
        planner: Chooses the batches.
        num_instances: Number of instances of the data set, n.
        batch_size: Size of a batch on each rank.
        data: Vectors [n, d] or a graph to plan from; None: batches are uniform. Assign ``data`` to refresh it.
        seed: Seed of the order.
        drop_last: Leave out the last, smaller batch.
        limit: Number of instances in all batches of an epoch, at most, so that runs of other batch sizes see as many.
        coverage: "once" (each instance once per epoch) or "free" (batches may overlap, after a first epoch and a
            warm-up that cover everything). The number of batches is that of a plain epoch in either case.
        segment: Number of batches that are planned at once.
        warmup_epochs: Number of uniform epochs at the start.
        total_epochs: Number of epochs, over which schedules of the planner run.
        guard: Instances that may not share a batch.
        num_replicas: Number of ranks.
        rank: This rank.
        plan_file: File rewritten whenever a segment is planned, from which a killed run resumes.
        ahead: Plan at most this number of batches at a time, so that a busy GPU does not wait for a whole segment.
            Plans are then incomplete when saved, so use it only for runs that are saved at the ends of epochs.

    Raises:
        ArgumentError: If a number is out of range, ``data`` has another number of instances, or ``ahead`` is combined
            with ``plan_file``.

    Example:
        >>> from hardneg.batching.planners import UniformPlanner
        >>> sampler = PlannedBatchSampler(UniformPlanner(), num_instances=10, batch_size=4)
        >>> [len(batch) for batch in sampler]
        [4, 4, 2]
    """

    sampler: Any
    _resumed: Plan | None

    def __init__(
        self,
        planner: Planner,
        num_instances: int,
        batch_size: int,
        data: Any = None,
        *,
        seed: int = 0,
        drop_last: bool = False,
        limit: int | None = None,
        coverage: str = "once",
        segment: int = 100,
        warmup_epochs: int = 0,
        total_epochs: int | None = None,
        guard: Guard | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        plan_file: str | Path | None = None,
        ahead: int | None = None,
    ) -> None:
        if isinstance(num_instances, Sampler):  # Lightning re-creates samplers with its own sampler as first argument
            fix = "in Lightning, use Trainer(use_distributed_sampler=False): this sampler knows its ranks"
            what, got = "the number of instances", f"num_instances={type(num_instances).__name__}"
            raise ArgumentError(type(self).__name__, what, got, fix)
        self.num_replicas, self.rank = _ranks(type(self).__name__, num_replicas, rank)
        num_instances, batch_size, segment = (
            check_count(type(self).__name__, name, value)
            for name, value in (("num_instances", num_instances), ("batch_size", batch_size), ("segment", segment))
        )
        warmup_epochs = check_count(type(self).__name__, "warmup_epochs", warmup_epochs, least=0)
        if ahead is not None:
            ahead = check_count(type(self).__name__, "ahead", ahead)
            if plan_file is not None:
                raise argument_error(type(self).__name__, "either plan_file or ahead, not both", "ahead", ahead)
        size = batch_size * self.num_replicas
        self._rules = Epoch(num_instances, size, coverage, drop_last, guard, seed, self.num_replicas, limit)
        self._covering_rules = replace(self._rules, coverage="once")
        self.planner, self.num_instances = planner, num_instances
        self.batch_size, self.drop_last = batch_size, drop_last
        self.seed, self.segment, self.ahead = self._rules.seed, segment, ahead
        self.warmup_epochs, self.total_epochs, self.plan_file = warmup_epochs, total_epochs, plan_file
        self.sampler = self  # Lightning calls set_epoch on batch_sampler.sampler only
        self.epoch, self._position, self._passed = 0, 0, False
        self._plan, self._resumed = self._rules.empty_plan(0), None
        self._prepared: tuple[Any, Any, Any] = (None, None, None)
        self._planned: tuple[Plan, Any, Plan] | None = None
        self._data: Any = None
        self.data = data

    def spread(self, num_replicas: int, rank: int) -> None:
        """Plan for these ranks from now on.

        For a sampler that was made before the ranks started, as in a script of Lightning.
        """
        if (num_replicas, rank) == (self.num_replicas, self.rank):
            return
        self.num_replicas, self.rank = _ranks(type(self).__name__, num_replicas, rank)
        size = self.batch_size * num_replicas
        self._rules = replace(self._rules, batch_size=size, num_replicas=num_replicas)
        self._covering_rules = replace(self._rules, coverage="once")
        self._plan, self._resumed = self._rules.empty_plan(self.epoch), None
        self._prepared = (None, None, None)  # was for another batch size

    @property
    def data(self) -> Any:
        """Vectors or graph to plan from; assign to refresh, with effect from the next segment.

        A Future may be assigned as well; the next segment waits for it.
        """
        if isinstance(self._data, Future):
            self._data = self._checked(self._data.result())
        return self._data

    @data.setter
    def data(self, data: Any) -> None:
        self._data = data if isinstance(data, Future) else self._checked(data)

    def _checked(self, data: Any) -> Any:
        """Return the data; raise if it has another number of instances."""
        if data is not None and len(data) != self.num_instances:
            what = f"a graph or vectors of its {self.num_instances} instances"
            raise argument_error(type(self).__name__, what, "len(data)", len(data))
        return data

    @property
    def plan(self) -> Plan:
        """Batches of the current epoch, as far as they are planned; assign a loaded plan to resume its epoch."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        mine = self._rules.empty_plan(plan.epoch)
        for name in ("num_instances", "batch_size", "num_batches", "seed"):
            wanted, got = getattr(mine, name), getattr(plan, name)
            if got != wanted:
                raise argument_error(type(self).__name__, f"a plan with {name}={wanted}", name, got)
        self._plan = self._resumed = plan
        self.epoch, self._passed = plan.epoch, False

    def resume(self, plan: Plan | str | Path, position: int) -> None:
        """Start the next pass within an epoch, for loaders that do not save their state.

        The HF Trainer itself skips batches: assign ``plan`` there instead.

        Args:
            plan: Plan of the epoch, or its file.
            position: Number of batches that were already trained on.

        Raises:
            ArgumentError: If the plan is of another data set or seed, or the position is beyond the epoch.
        """
        self.plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        if not 0 <= position <= len(self):
            what = f"a position of at most {len(self)} batches"
            raise argument_error(type(self).__name__, what, "position", position)
        self._position = position

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; may be called repeatedly at no cost."""
        if epoch != self.epoch:
            self._position = 0
        self.epoch, self._passed = epoch, False

    def __len__(self) -> int:
        """Return the number of batches of every epoch, on every rank."""
        return len(self._rules.sizes)

    def __iter__(self) -> PlanIterator:
        if self._passed:
            self.set_epoch(self.epoch + 1)
        return PlanIterator(self, self.epoch, self._position)

    def _rules_of(self, epoch: int) -> Epoch:
        """Return the rules of an epoch; batches overlap only once every instance has been seen and has a vector."""
        return self._covering_rules if epoch < max(1, self.warmup_epochs) else self._rules

    def _begun(self, epoch: int) -> Plan:
        """Return the plan of an epoch before its first pass: empty, or the resumed plan."""
        if self._resumed is not None and self._resumed.epoch == epoch:
            return self._resumed
        return self._rules.empty_plan(epoch)

    def _source(self, epoch: int) -> PlanSource:
        """Return what the next segment is planned from, with the current data.

        Clusters, communities and walkers are prepared once for each data.
        """
        planner, data = self._planner_for(epoch)
        known_planner, known_data, prepared = self._prepared
        if known_data is not data or known_planner is not type(planner):
            prepared = planner.prepared(data, self._rules.batch_size, self.seed)
            self._prepared = (type(planner), data, prepared)
        return planner, data, prepared

    def _continued(self, plan: Plan, builder: BatchBuilder, source: PlanSource) -> Plan:
        """Return the plan with one more segment, or with a part of one."""
        count = min(self.segment - len(plan) % self.segment, len(self) - len(plan), self.ahead or len(self))
        return self._kept(self._rules_of(plan.epoch).extended(plan, builder, *source, count))

    def _kept(self, plan: Plan) -> Plan:
        """Store a plan as the current one, and write it to the plan file."""
        if self.plan_file is not None and self.rank == 0:
            plan.save(self.plan_file)
        self._plan = plan
        return plan

    def plan_next(self, graph: ProximityGraph, process: PlanningProcess) -> None:
        """Plan the next segment from a graph that is about to become the data, in the thread that built it.

        Args:
            graph: The new graph.
            process: Subprocess that plans.
        """
        before = self._plan if len(self._plan) < len(self) else self._rules.empty_plan(self._plan.epoch + 1)
        planner, _ = self._planner_for(before.epoch, graph)
        if planner.needs == "graph" and len(before) % self.segment == 0:
            count = min(self.segment, len(self) - len(before))
            self._planned = before, graph, process.segment(self._rules_of(before.epoch), before, planner, graph, count)

    def _from_process(self, plan: Plan) -> Plan | None:
        """Return the plan with its next segment if the subprocess planned it from this plan and the current data."""
        data = self.data if plan.epoch >= self.warmup_epochs else None
        (before, graph, planned), self._planned = self._planned or (None, None, None), None
        if planned is None or before is None or graph is not data or before.epoch != plan.epoch:
            return None
        if before is not plan and len(before) + len(plan) > 0:
            return None
        return self._kept(planned)

    def _planner_for(self, epoch: int, data: Any = None) -> tuple[Planner, Any]:
        """Return the planner of an epoch and its data; uniform during warm-up and while there is no data."""
        if epoch < self.warmup_epochs:
            return UniformPlanner(), self.num_instances
        data = self.data if data is None else data
        if data is None and self.planner.needs != "nothing":
            if epoch > self.warmup_epochs:
                warn_once(
                    "sampler.no_data",
                    f"{type(self).__name__} has no graph or vectors in epoch {epoch}, so its batches are uniform; "
                    "assign sampler.graph (or sampler.data), or raise warmup_epochs.",
                )
            return UniformPlanner(), self.num_instances
        return self.planner.at(epoch, self.total_epochs), self.num_instances if data is None else data

    def _slices(self, plan: Plan, first: int) -> list[list[int]]:
        """Return the part of each batch from ``first`` on that belongs to this rank."""
        nodes, offsets = plan.order[plan.offsets[first] :], plan.offsets[first:] - plan.offsets[first]
        if self.num_replicas > 1:
            local = np.diff(offsets) // self.num_replicas
            starts = offsets[:-1] + self.rank * local
            return [nodes[low : low + size].tolist() for low, size in zip(starts, local, strict=True)]
        nodes, ends = nodes.tolist(), offsets.tolist()
        return [nodes[low:high] for low, high in pairwise(ends)]


class ProximityBatchSampler(PlannedBatchSampler):
    """ProSampler: batches are random walks with restart over a proximity graph.

    Batches are uniform until ``graph`` is assigned; assign a new one to refresh it.

    Args:
        num_instances: Number of instances of the data set, n.
        batch_size: Size of a batch on each rank.
        restart: Restart probability, or a schedule over the epochs: the paper's ``linear(0.2, 0.05)`` (with
            ``total_epochs``), or that of the authors' code, ``planners.falling(0.2)``.
        seed: Seed of the order.
        graph: Graph to walk on.
        kind: Search on the graph, as for ``walk``.
        steps: Choice of the next neighbour, as for ``walk``.
        options: Further arguments of ``PlannedBatchSampler``.

    Example:
        >>> import torch, hardneg as hn
        >>> from hardneg.batching.graph import build_graph
        >>> vectors = torch.nn.functional.normalize(torch.randn(100, 8), dim=1)
        >>> sampler = ProximityBatchSampler(num_instances=100, batch_size=16, restart=0.2, seed=0)
        >>> sampler.graph = build_graph(vectors, num_neighbours=10, num_candidates=50)
        >>> len(sampler), sorted(i for batch in sampler for i in batch) == list(range(100))
        (7, True)
    """

    def __init__(
        self,
        num_instances: int,
        batch_size: int,
        *,
        restart: Number = 0.1,
        seed: int = 0,
        graph: ProximityGraph | None = None,
        kind: str = "restart",
        steps: str = "uniform",
        **options: Any,
    ) -> None:
        planner = Proximity(restart=restart, kind=kind, steps=steps)
        super().__init__(planner, num_instances, batch_size, graph, seed=seed, **options)

    @property
    def graph(self) -> ProximityGraph | None:
        """Graph to walk on; None: batches are uniform."""
        graph: ProximityGraph | None = self.data
        return graph

    @graph.setter
    def graph(self, graph: ProximityGraph | None) -> None:
        if graph is not None and not isinstance(graph, ProximityGraph):
            raise argument_error("ProximityBatchSampler", "a graph from build_graph", "graph", type(graph).__name__)
        self.data = graph


class PlanIterator(Iterator[list[int]]):
    """One pass over an epoch; its state is small, and is saved by torchdata's StatefulDataLoader."""

    _plan: Plan
    _position: int
    _hashed: int
    _ready: Iterator[list[int]]
    _builder: BatchBuilder | None
    _source: PlanSource | None

    def __init__(self, sampler: PlannedBatchSampler, epoch: int, position: int = 0) -> None:
        self._sampler = sampler
        self._begin(epoch, position)

    def __iter__(self) -> PlanIterator:
        return self

    @property
    def position(self) -> int:
        """Number of batches of the epoch before the next one."""
        return self._position

    def __next__(self) -> list[int]:
        self._sampler._position = 0  # not earlier: a loader with workers makes two iterators, and uses the second
        for batch in self._ready:
            self._position += 1
            return batch
        if self._position == len(self._sampler):
            if self._sampler.epoch == self._plan.epoch:
                self._sampler._passed = True
            raise StopIteration
        self._continue()
        return next(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this pass, and a digest of the batches so far."""
        low, self._hashed = self._hashed, int(self._plan.offsets[self._position])
        self._hash.update(self._plan.order[low : self._hashed].tobytes())
        return {
            "epoch": self._plan.epoch,
            "position": self._position,
            "seed": self._sampler.seed,
            "digest": self._hash.hexdigest(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            ArgumentError: If the sampler has another seed, or the batches before the position differ from the saved
                ones.
        """
        sampler = self._sampler
        if state["seed"] != sampler.seed:
            what = f"the seed {state['seed']} of the saved state"
            raise argument_error(type(sampler).__name__, what, "seed", sampler.seed)
        sampler.set_epoch(state["epoch"])
        self._begin(state["epoch"], state["position"])
        if self.state_dict()["digest"] != state["digest"]:
            what = f"the plan of the interrupted run to resume epoch {state['epoch']} at batch {state['position']}"
            fix = "before the loader's state is loaded, set sampler.plan = Plan.load(path)"
            raise ArgumentError(type(sampler).__name__, what, "other batches", fix)

    def _begin(self, epoch: int, position: int) -> None:
        """Go to a batch of an epoch, planning those before it if necessary."""
        self._plan, self._builder, self._source = self._sampler._begun(epoch), None, None
        self._hash, self._hashed = batch_hash(self._plan), 0
        self._sampler._plan = self._plan
        while len(self._plan) < position:
            self._extend()
        self._position, self._ready = position, iter(self._sampler._slices(self._plan, position))

    def _continue(self) -> None:
        """Plan the next segment and make its batches ready."""
        self._extend()
        self._ready = iter(self._sampler._slices(self._plan, self._position))

    def _extend(self) -> None:
        """Plan the next segment."""
        sampler = self._sampler
        waits = sampler._planned is not None or isinstance(sampler._data, Future)
        planned = sampler._from_process(self._plan) if waits else None
        if planned is not None:
            self._plan, self._builder, self._source = planned, None, None
            return
        if self._builder is None:
            self._builder = sampler._rules_of(self._plan.epoch).builder(self._plan)
        if self._source is None or len(self._plan) % sampler.segment == 0:
            self._source = sampler._source(self._plan.epoch)
        self._plan = sampler._continued(self._plan, self._builder, self._source)


def _ranks(who: str, num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and this rank, by default those of torch.distributed."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if num_replicas is None:
        num_replicas = torch.distributed.get_world_size() if distributed and not _accelerate_is_active() else 1
    num_replicas = check_count(who, "num_replicas", num_replicas)
    if rank is None:
        rank = torch.distributed.get_rank() if distributed and num_replicas > 1 else 0
    rank = check_count(who, "rank", rank, least=0)
    if rank >= num_replicas:
        raise argument_error(who, f"a rank in [0, {num_replicas})", "rank", rank)
    return num_replicas, rank


def _accelerate_is_active() -> bool:
    """True if Accelerate is in use, which splits batches between ranks itself."""
    state = sys.modules.get("accelerate.state")
    return state is not None and bool(state.PartialState._shared_state)
