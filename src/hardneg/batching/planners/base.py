"""Base class of the planners, and the rules that all batches of an epoch follow.

A planner prepares its data once (``prepare``) and offers nodes for each batch (``fill``). Coverage, the guard,
segments, resuming and descriptions are provided by ``Epoch`` and the builder (filling.py). Samplers (sampler.py) use
``Epoch`` directly, and ``Planner.plan`` makes a single epoch from it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hardneg.batching.filling import BatchBuilder, Guard, coverages
from hardneg.batching.graph import ProximityGraph
from hardneg.batching.plan import Plan, Segment
from hardneg.core.errors import NotFinite, argument_error, check_count, check_counts
from hardneg.core.schedules import schedules_of
from hardneg.search.draws import drawn_seed

_registry: dict[str, type[Planner]] = {}


class Planner(ABC):
    """Base class of planners; subclasses are frozen dataclasses with a ``fill`` and, if they need it, a ``prepare``.

    Attributes:
        offers: False for a planner that leaves every batch to the builder.
        needs: Data it plans from: "nothing", "vectors", or "graph" (which is built where vectors are given).
        name: Name in the records of plans and in the registry; by default that of the class.
    """

    offers: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing"
    name: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__dict__.get("name", cls.__name__)
        _registry[cls.name] = cls

    def prepare(self, data: Any, batch_size: int, rng: np.random.Generator) -> Any:
        """Prepare what ``fill`` needs, once for this data; by default the data themselves.

        Args:
            data: Vectors [n, d], a graph, or the number n, as ``needs`` names it.
            batch_size: Size of a batch over all ranks.
            rng: Source of randomness.
        """
        return data

    @abstractmethod
    def fill(self, prepared: Any, builder: BatchBuilder, rng: np.random.Generator) -> None:
        """Offer nodes to the open batch; open places are filled uniformly afterwards.

        Args:
            prepared: Result of ``prepare``.
            builder: State of the epoch; its ``offer`` takes nodes.
            rng: Source of randomness.
        """

    def fill_all(self, prepared: Any, builder: BatchBuilder, count: int, rng: np.random.Generator) -> None:
        """Fill the next ``count`` batches, one after the other."""
        for _ in range(count):
            builder.open()
            self.fill(prepared, builder, rng)
            builder.fill()
            builder.close()

    def at(self, step: int, total: int | None) -> Planner:
        """Return the planner with every schedule replaced by its value.

        Args:
            step: Epoch.
            total: Number of epochs, if known.
        """
        numbers = {name: schedule(step, total) for name, schedule in schedules_of(self).items()}
        return replace(self, **numbers) if numbers else self  # type: ignore[type-var]

    def plan(
        self,
        data: Any,
        batch_size: int,
        generator: torch.Generator | None = None,
        *,
        coverage: str = "once",
        drop_last: bool = False,
        guard: Guard | None = None,
    ) -> Plan:
        """Plan one epoch.

        Args:
            data: Vectors [n, d], a ``ProximityGraph``, or the number n for a planner that needs neither.
            batch_size: Size of a batch.
            generator: Source of randomness; None: the global one.
            coverage: "once" (each instance once per epoch) or "free" (batches may overlap).
            drop_last: Leave out the last, smaller batch.
            guard: Instances that may not share a batch.

        Raises:
            ArgumentError: If the data are not what the planner needs, or the batch size does not fit.
            NotFinite: If the vectors contain NaN or infinite values.
        """
        n = num_instances_of(data)
        seed = drawn_seed(type(self).__name__, generator, 2**31)
        epoch = Epoch(n, batch_size, coverage=coverage, drop_last=drop_last, guard=guard, seed=seed)
        empty, prepared = epoch.empty_plan(0), self.prepared(data, batch_size, seed)
        return epoch.extended(empty, epoch.builder(empty), self, data, prepared, len(epoch.sizes))

    def prepared(self, data: Any, batch_size: int, seed: int) -> Any:
        """Call ``prepare`` with randomness that depends on the seed only, so that a resumed run repeats it."""
        self._check_data(data)
        return self.prepare(data, batch_size, np.random.default_rng([seed, 3]))

    def _check_data(self, data: Any) -> None:
        """Raise unless the data are of the kind that the planner needs, and finite."""
        if self.needs == "vectors" and not isinstance(data, Tensor):
            raise argument_error(type(self).__name__, "vectors [n, d]", "data", type(data).__name__)
        if self.needs == "graph" and not isinstance(data, (Tensor, ProximityGraph)):
            raise argument_error(type(self).__name__, "a graph or vectors [n, d]", "data", type(data).__name__)
        if isinstance(data, Tensor) and self.needs != "nothing" and not bool(torch.isfinite(data).all()):
            raise NotFinite(type(self).__name__, "finite vectors", "NaN or inf", "check the encoder's output")


def num_instances_of(data: Any) -> int:
    """Return the number of instances of vectors, of a graph, or the number itself."""
    is_many = getattr(data, "ndim", hasattr(data, "__len__"))  # a 0-d tensor has a __len__, which raises
    return len(data) if is_many else check_count("plan", "data", data)


def registered_planners() -> dict[str, type[Planner]]:
    """Return all planners by the name of their class."""
    return dict(_registry)


@dataclass(frozen=True, eq=False)
class Epoch:
    """Rules that the batches of every epoch follow.

    There are as many batches as in a plain epoch, whatever the planner. With several ranks, a last, smaller batch is
    cut to a multiple of their number after planning, so that all ranks get equal slices.

    Attributes:
        num_instances: Number of instances of the data set, n.
        batch_size: Size of a batch over all ranks.
        coverage: "once" (each instance once per epoch) or "free" (batches may overlap).
        drop_last: Leave out the last, smaller batch.
        guard: Instances that may not share a batch.
        seed: Seed of the order.
        num_replicas: Number of ranks.
        limit: Number of instances in all batches of an epoch, at most; None: those that fill batches.

    Raises:
        ArgumentError: If the batch size does not fit, or the coverage is unknown.
    """

    num_instances: int
    batch_size: int
    coverage: str = "once"
    drop_last: bool = False
    guard: Guard | None = None
    seed: int = 0
    num_replicas: int = 1
    limit: int | None = None

    def __post_init__(self) -> None:
        check_counts("plan", self, "num_instances", "batch_size")
        check_counts("plan", self, "seed", least=0)
        if self.batch_size > self.num_instances:
            what = f"a batch of 1 to {self.num_instances} instances"
            if self.num_replicas > 1:
                what += f" over {self.num_replicas} replicas"
            raise argument_error("plan", what, "batch_size", self.batch_size)
        if self.coverage not in coverages:
            raise argument_error("plan", f"coverage among {coverages}", "coverage", self.coverage)
        if self.guard is not None:
            self.guard.check(self.num_instances, self.batch_size)

    @cached_property
    def sizes(self) -> list[int]:
        """Sizes of all batches of an epoch."""
        number = self.num_instances if self.limit is None else min(self.limit, self.num_instances)
        whole, rest = divmod(number, self.batch_size)
        has_rest = rest >= self.num_replicas and not self.drop_last
        return [self.batch_size] * whole + ([rest] if has_rest else [])

    def empty_plan(self, epoch: int) -> Plan:
        """Return the plan of an epoch without any batch."""
        return Plan(self.num_instances, self.batch_size, len(self.sizes), epoch, self.seed)

    def builder(self, plan: Plan) -> BatchBuilder:
        """Return the builder in its state after the batches that the plan already has."""
        order = np.random.default_rng([self.seed, 1, plan.epoch]).permutation(self.num_instances)
        builder = BatchBuilder(self.num_instances, self.sizes, self.coverage, self.guard, order)
        for batch in plan:
            builder.replay(batch)
        return builder

    def extended(
        self, plan: Plan, builder: BatchBuilder, planner: Planner, data: Any, prepared: Any, count: int
    ) -> Plan:
        """Return the plan with ``count`` more batches, a pure function of plan, data, seed and epoch.

        Args:
            plan: Plan to extend.
            builder: Builder in its state after the batches of the plan.
            planner: Chooses the batches.
            data: Data that the planner plans from; its digest is recorded.
            prepared: Result of the planner's ``prepared``.
            count: Number of batches.
        """
        builder.begin_segment()
        rng = np.random.default_rng([self.seed, 2, plan.epoch, len(plan)])
        planner.fill_all(prepared, builder, count, rng)
        tally = vars(builder.tally) if planner.offers else {**vars(builder.tally), "filled": 0}
        segment = Segment(len(plan), count, text_of(planner), digest_of(data), **tally)
        batches = builder.closed
        if self.num_replicas > 1:
            batches = [batch[: len(batch) - len(batch) % self.num_replicas] for batch in batches]
        return plan.extended(batches, segment)


def text_of(planner: Planner) -> str:
    """Return the planner as a call, with its fields that are numbers or names and not the default."""
    shown = [
        f"{part.name}={value!r}"
        for part in fields(planner)  # type: ignore[arg-type]
        if isinstance(value := getattr(planner, part.name), (int, float, str)) and value != part.default
    ]
    return f"{planner.name}({', '.join(shown)})"


def digest_of(data: Any) -> str:
    """Return the digest of vectors or a graph; that of vectors is cached on the tensor until it changes."""
    if not isinstance(data, Tensor):
        return data.digest if isinstance(data, ProximityGraph) else ""
    version = None if data.is_inference() else data._version  # tensors of inference mode have no version
    known = getattr(data, "_hardneg_digest", (None, ""))
    if version is None or known[0] != version:
        raw = data.detach().float().cpu().contiguous().numpy().tobytes()
        known = (version, hashlib.blake2b(raw, digest_size=8).hexdigest())
        data._hardneg_digest = known  # type: ignore[attr-defined]
    return str(known[1])
