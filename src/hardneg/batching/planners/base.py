"""Who shares a batch: an open set of planners, one small file each.

A planner says what it needs of the data (``prepare``, once) and offers nodes to each batch (``fill``). Coverage, the
guard, segments, resuming and describing come free.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hardneg.batching.filling import BatchFiller, Guard, coverages
from hardneg.batching.graph import ProximityGraph
from hardneg.batching.plan import Plan, Segment
from hardneg.core.errors import NotFinite, argument_error, check_count, check_counts
from hardneg.core.schedules import schedules_of
from hardneg.search.draws import drawn_seed

_registry: dict[str, type[Planner]] = {}


class Planner(ABC):
    """Subclasses are frozen dataclasses with a ``fill`` and, where something is worked out first, a ``prepare``."""

    name: ClassVar[str]
    """The name in plans and records."""
    offers: ClassVar[bool] = True  # False: leaves every batch to the filler
    needs: ClassVar[str] = "nothing"  # what it plans from: "nothing", "vectors" or "graph" (which vectors give, too)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__dict__.get("name", cls.__name__)
        _registry[cls.name] = cls

    def prepare(self, data: Any, batch_size: int, rng: np.random.Generator) -> Any:
        """What ``fill`` needs, worked out once for this data."""
        return data

    @abstractmethod
    def fill(self, prepared: Any, filler: BatchFiller, rng: np.random.Generator) -> None:
        """Offers nodes to the open batch; places it leaves open are filled uniformly."""

    def fill_all(self, prepared: Any, filler: BatchFiller, count: int, rng: np.random.Generator) -> None:
        """The next ``count`` batches, one after the other."""
        for _ in range(count):
            filler.open()
            self.fill(prepared, filler, rng)
            filler.fill()
            filler.close()

    def at(self, step: int, total: int | None) -> Planner:
        """The same planner with every schedule at its number."""
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
        """One epoch's batches from vectors [n, d], a ProximityGraph, or (where neither is needed) the number n."""
        n = num_instances_of(data)
        seed = drawn_seed(type(self).__name__, generator, 2**31)
        epoch = Epoch(n, batch_size, coverage=coverage, drop_last=drop_last, guard=guard, seed=seed)
        empty, prepared = epoch.empty_plan(0), self.prepared(data, batch_size, seed)
        return epoch.extended(empty, epoch.filler(empty), self, data, prepared, len(epoch.sizes))

    def prepared(self, data: Any, batch_size: int, seed: int) -> Any:
        """``prepare`` with randomness that depends on the seed only, so that a resumed run prepares the same."""
        self._check_data(data)
        return self.prepare(data, batch_size, np.random.default_rng([seed, 3]))

    def _check_data(self, data: Any) -> None:
        if self.needs == "vectors" and not isinstance(data, Tensor):
            raise argument_error(type(self).__name__, "vectors [n, d]", "data", type(data).__name__)
        if self.needs == "graph" and not isinstance(data, (Tensor, ProximityGraph)):
            raise argument_error(type(self).__name__, "a graph or vectors [n, d]", "data", type(data).__name__)
        if isinstance(data, Tensor) and self.needs != "nothing" and not bool(torch.isfinite(data).all()):
            raise NotFinite(type(self).__name__, "finite vectors", "NaN or inf", "look at the encoder's output")


def num_instances_of(data: Any) -> int:
    """Of vectors or a graph, or the number itself."""
    is_many = getattr(data, "ndim", hasattr(data, "__len__"))  # a number of torch has a __len__, which raises
    return len(data) if is_many else check_count("plan", "data", data)


def registered_planners() -> dict[str, type[Planner]]:
    return dict(_registry)


@dataclass(frozen=True, eq=False)
class Epoch:
    """What the batches of every epoch have in common: how many, how large, and what they promise.

    As many batches as a plain epoch over ``num_instances`` has, whatever the planner. With several replicas a last,
    smaller batch is cut to a multiple of their number once it is planned, so that all get the same.
    """

    num_instances: int
    batch_size: int
    coverage: str = "once"
    drop_last: bool = False
    guard: Guard | None = None
    seed: int = 0
    num_replicas: int = 1

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

    @property
    def sizes(self) -> list[int]:
        whole, rest = divmod(self.num_instances, self.batch_size)
        has_rest = rest >= self.num_replicas and not self.drop_last
        return [self.batch_size] * whole + ([rest] if has_rest else [])

    def empty_plan(self, epoch: int) -> Plan:
        return Plan(self.num_instances, self.batch_size, len(self.sizes), epoch, self.seed)

    def filler(self, plan: Plan) -> BatchFiller:
        """The filler in its state after the batches that the plan already has."""
        order = np.random.default_rng([self.seed, 1, plan.epoch]).permutation(self.num_instances)
        filler = BatchFiller(self.num_instances, self.sizes, self.coverage, self.guard, order)
        for batch in plan:
            filler.replay(batch)
        return filler

    def extended(self, plan: Plan, filler: BatchFiller, planner: Planner, data: Any, prepared: Any, count: int) -> Plan:
        """The plan with ``count`` more batches, a pure function of its batches, the data, the seed and the epoch."""
        filler.begin_segment()
        rng = np.random.default_rng([self.seed, 2, plan.epoch, len(plan)])
        planner.fill_all(prepared, filler, count, rng)
        tally = vars(filler.tally) if planner.offers else {**vars(filler.tally), "filled": 0}
        segment = Segment(len(plan), count, text_of(planner), digest_of(data), **tally)
        return plan.extended([batch[: len(batch) - len(batch) % self.num_replicas] for batch in filler.closed], segment)


def text_of(planner: Planner) -> str:
    """The planner as a call, with the numbers and names among its fields."""
    shown = [
        f"{part.name}={value!r}"
        for part in fields(planner)  # type: ignore[arg-type]
        if isinstance(value := getattr(planner, part.name), (int, float, str)) and value != part.default
    ]
    return f"{planner.name}({', '.join(shown)})"


def digest_of(data: Any) -> str:
    """Of vectors it is kept with the tensor until that changes, since every piece of a plan needs it."""
    if not isinstance(data, Tensor):
        return data.digest if isinstance(data, ProximityGraph) else ""
    version = None if data.is_inference() else data._version  # which tensors of inference mode do not have
    known = getattr(data, "_hardneg_digest", (None, ""))
    if version is None or known[0] != version:
        raw = data.detach().float().cpu().contiguous().numpy().tobytes()
        known = (version, hashlib.blake2b(raw, digest_size=8).hexdigest())
        data._hardneg_digest = known  # type: ignore[attr-defined]
    return str(known[1])
