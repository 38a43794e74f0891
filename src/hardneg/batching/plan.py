"""Plan: the batches of an epoch as a value that can be saved, resumed, exported and described.

A ``Plan`` consists of segments, each planned at once from one graph. Planners (planners/base.py) extend plans, samplers
(sampler.py) follow them, and ``Plan.describe`` measures how hard they are.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.batching.stored import load_arrays, save_arrays
from hardneg.core.errors import argument_error, optional

Nodes = NDArray[np.int64]


@dataclass(frozen=True)
class Segment:
    """Consecutive batches that were planned together.

    Attributes:
        first: Number of the first batch.
        count: Number of batches.
        planner: The planner, as text.
        graph: Digest of the graph or vectors that it planned from; empty without any.
        filled: Number of instances drawn uniformly, because the planner offered too few.
        forced: Number of instances placed early, so that their group fits into the remaining batches.
        repeated: Number of instances that were already in another batch of the epoch.
        refused: Number of offers that the guard refused.
    """

    first: int
    count: int
    planner: str
    graph: str
    filled: int = 0
    forced: int = 0
    repeated: int = 0
    refused: int = 0


class _Growing:
    """An array with room for more, so that the segments of an epoch are appended in linear time."""

    def __init__(self, start: Nodes) -> None:
        self.memory, self.used = start, len(start)

    def appended(self, more: Nodes) -> Nodes:
        """Append values and return all; what was returned before stays as it is."""
        used, self.used = self.used, self.used + len(more)
        if self.used > len(self.memory):
            self.memory = np.concatenate([self.memory[:used], np.empty(2 * self.used - used, dtype=np.int64)])
        self.memory[used : self.used] = more
        return self.memory[: self.used]


class _Memory(NamedTuple):
    order: _Growing
    offsets: _Growing


@dataclass(frozen=True, eq=False)
class Plan:
    """The batches of one epoch, as far as they are planned.

    Attributes:
        num_instances: Number of instances of the data set, n.
        batch_size: Size of a full batch, over all ranks.
        num_batches: Number of batches of the whole epoch.
        epoch: Number of the epoch.
        seed: Seed of the sampler.
        order: Instances of all planned batches, one batch after the other, shape [planned instances].
        offsets: Start of each batch in ``order``, and the end of the last one, shape [planned batches + 1].
        segments: How the batches were planned.

    Example:
        >>> plan = Plan.from_batches([[3, 1], [0, 2], [4]], num_instances=5, batch_size=2)
        >>> len(plan), plan[1].tolist(), plan.describe().coverage
        (3, [0, 2], 1.0)
    """

    num_instances: int
    batch_size: int
    num_batches: int
    epoch: int = 0
    seed: int = 0
    order: Nodes = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    offsets: Nodes = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    segments: tuple[Segment, ...] = ()
    _memory: _Memory | None = field(default=None, repr=False)

    @classmethod
    def from_batches(cls, batches: list[Any], num_instances: int, batch_size: int) -> Plan:
        """Return a complete plan with the given batches.

        Args:
            batches: Instances of each batch.
            num_instances: Number of instances of the data set.
            batch_size: Size of a full batch.
        """
        empty = cls(num_instances, batch_size, num_batches=len(batches))
        nodes = [np.asarray(batch, dtype=np.int64) for batch in batches]
        return empty.extended(nodes, Segment(0, len(batches), "given", ""))

    def __len__(self) -> int:
        """Return the number of batches planned so far."""
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Nodes:
        if not -len(self) <= number < len(self):
            raise IndexError(f"the plan has {len(self)} batches, got {number}")
        number %= len(self)
        return self.order[self.offsets[number] : self.offsets[number + 1]]

    def __iter__(self) -> Iterator[Nodes]:
        return (self[number] for number in range(len(self)))

    @property
    def complete(self) -> bool:
        """True if all batches of the epoch are planned."""
        return len(self) == self.num_batches

    def extended(self, batches: list[Nodes], segment: Segment) -> Plan:
        """Return this plan with one more segment."""
        ends = self.offsets[-1] + np.cumsum([len(batch) for batch in batches], dtype=np.int64)
        nodes = np.concatenate([self.order[:0], *batches])
        memory = self._memory
        if memory is None or memory.offsets.used != len(self.offsets):  # else this plan is the last that was extended
            memory = _Memory(_Growing(self.order), _Growing(self.offsets))
        order, offsets = memory.order.appended(nodes), memory.offsets.appended(ends)
        return replace(self, order=order, offsets=offsets, segments=(*self.segments, segment), _memory=memory)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan.from_parts, (self.parts(),)

    def digest(self) -> str:
        """Return sixteen hex digits that identify the batches."""
        hashed = batch_hash(self)
        for batch in self:
            hashed.update(batch.tobytes())
        return str(hashed.hexdigest())

    def parts(self) -> dict[str, Any]:
        """Return the plan as two arrays and a text, for a file or a checkpoint."""
        values = {name: getattr(self, name) for name in ("num_instances", "batch_size", "num_batches", "epoch", "seed")}
        head = json.dumps({**values, "segments": [asdict(segment) for segment in self.segments]})
        return {"order": self.order, "offsets": self.offsets, "head": head}

    @classmethod
    def from_parts(cls, parts: dict[str, Any]) -> Plan:
        """Return the plan with these parts, as ``parts`` returns them."""
        head = json.loads(str(parts["head"]))
        segments = tuple(Segment(**segment) for segment in head.pop("segments"))
        return cls(**head, order=parts["order"], offsets=parts["offsets"], segments=segments)

    def state(self) -> dict[str, Any]:
        """Return the parts with tensors instead of arrays, so that checkpoints load with ``weights_only=True``."""
        return {**self.parts(), "order": torch.from_numpy(self.order), "offsets": torch.from_numpy(self.offsets)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Plan:
        """Return the plan with this state, as ``state`` returns it."""
        return cls.from_parts(state | {name: state[name].cpu().numpy() for name in ("order", "offsets")})

    def save(self, path: str | Path) -> None:
        """Write the plan to an .npz file, without pickle and atomically."""
        save_arrays(path, **self.parts())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Load a saved plan.

        Raises:
            Damaged: If the file has changed since it was saved.
        """
        return load_arrays("Plan.load", path, cls.from_parts, "begin the epoch again without it")

    def columns(self) -> dict[str, Nodes]:
        """Return one row per place in a batch, as columns: batch, place, instance and segment."""
        batch = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        bounds = [segment.first for segment in self.segments]
        return {
            "batch": batch,
            "place": np.arange(len(self.order)) - self.offsets[batch],
            "instance": self.order,
            "segment": np.searchsorted(bounds, batch, side="right") - 1,
        }

    def to_csv(self, path: str | Path) -> None:
        """Write the columns to a CSV file."""
        columns = self.columns()
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))

    def to_parquet(self, path: str | Path) -> None:
        """Write the columns to a Parquet file; needs pyarrow (extra ``text``)."""
        arrow = optional("pyarrow", "Plan.to_parquet", extra="text")
        optional("pyarrow.parquet", "Plan.to_parquet", extra="text").write_table(arrow.table(self.columns()), path)

    def describe(
        self, vectors: Annotated[Tensor, "n d"] | None = None, labels: Annotated[Tensor, "n"] | None = None
    ) -> PlanDescription:
        """Measure the hardness, the false negatives and the coverage of the planned batches.

        Args:
            vectors: Embeddings, shape [n, d], for the similarities.
            labels: Classes, shape [n], for the false negatives.

        Raises:
            ArgumentError: If there are not n vectors or labels.
        """
        for name, value in (("vectors", vectors), ("labels", labels)):
            if value is not None and len(value) != self.num_instances:
                raise argument_error("Plan.describe", f"{name} of {self.num_instances} instances", name, len(value))
        visits = np.bincount(self.order, minlength=self.num_instances)
        nan = float("nan")
        return PlanDescription(
            num_batches=len(self),
            coverage=float((visits > 0).mean()),
            left_out=int((visits == 0).sum()),
            repeats=int(np.maximum(visits - 1, 0).sum()),
            most_visits=int(visits.max(initial=0)),
            filled=sum(segment.filled for segment in self.segments) / max(len(self.order), 1),
            similarity=nan if vectors is None else self._mean_pair(lambda b: _mean_similarity(vectors, b)),
            uniform_similarity=nan if vectors is None else _mean_similarity(vectors, None),
            false_negatives=nan if labels is None else self._mean_pair(lambda b: _same_label(labels, b)),
            uniform_false_negatives=nan if labels is None else _same_label(labels, None),
            segments=self.segments,
        )

    def _mean_pair(self, of_batch: Any) -> float:
        """Return the mean of a statistic over the batches, weighted by their numbers of pairs."""
        sizes = np.diff(self.offsets)
        pairs = sizes * (sizes - 1)
        values = [of_batch(torch.from_numpy(batch)) if len(batch) > 1 else 0.0 for batch in self]
        return float(np.dot(pairs, values) / pairs.sum()) if pairs.sum() else float("nan")


@dataclass(frozen=True)
class PlanDescription:
    """Statistics of a plan; NaN where they need vectors or labels that were not given.

    Similarity and false negatives (same label) are means over the pairs within a batch. ``uniform_*`` is the same mean
    over all pairs of the data set, which uniform batches have on average.

    Attributes:
        num_batches: Number of planned batches.
        coverage: Share of the instances that are in a batch.
        left_out: Number of instances in no batch.
        repeats: Number of visits after the first one, over all instances.
        most_visits: Highest number of batches that have the same instance.
        filled: Share of the places that were filled uniformly.
        similarity: Mean similarity within a batch.
        uniform_similarity: Mean similarity over all pairs.
        false_negatives: Share of pairs within a batch that have the same label.
        uniform_false_negatives: Share of all pairs that have the same label.
        segments: How the batches were planned.
    """

    num_batches: int
    coverage: float
    left_out: int
    repeats: int
    most_visits: int
    filled: float
    similarity: float
    uniform_similarity: float
    false_negatives: float
    uniform_false_negatives: float
    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.num_batches} batches: coverage {self.coverage:.1%}, {self.repeats} repeats "
            f"(at most {self.most_visits} visits), {self.filled:.1%} filled uniformly",
            f"similarity within a batch {self.similarity:.4f} (uniform {self.uniform_similarity:.4f})",
            f"false negatives {self.false_negatives:.2%} (uniform {self.uniform_false_negatives:.2%})",
        ]
        lines += [
            f"batches {s.first}..{s.first + s.count - 1}: {s.planner}" + (f" on graph {s.graph}" if s.graph else "")
            for s in self.segments
        ]
        return "\n".join(line for line in lines if "nan" not in line)


def batch_hash(plan: Plan) -> Any:
    """Return the hash of a plan without batches, to which batches are added one after the other."""
    return hashlib.blake2b(f"{plan.num_instances} {plan.batch_size} {plan.seed} {plan.epoch}".encode(), digest_size=8)


def _mean_similarity(vectors: Tensor, batch: Tensor | None) -> float:
    """Mean of v_i . v_j over pairs i != j = (|sum v|^2 - sum |v|^2) / (n (n - 1)), without forming the pairs."""
    rows = (vectors if batch is None else vectors[batch.to(vectors.device)]).detach().double()
    total = rows.sum(0).square().sum() - rows.square().sum()
    return float(total / (len(rows) * (len(rows) - 1)))


def _same_label(labels: Tensor, batch: Tensor | None) -> float:
    """Share of the pairs with the same label, from the counts of the labels."""
    own = labels if batch is None else labels[batch.to(labels.device)]
    counts = torch.unique(own, return_counts=True)[1].double()
    return float((counts * (counts - 1)).sum() / (len(own) * (len(own) - 1)))
