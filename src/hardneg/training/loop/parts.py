"""The parts of a training run, built from its options: data, loss, accelerator, sampler with refreshes, progress bar.

The training loop assembles them; ``loss_for`` is called by the recipes. ``PlanRefresher`` is called after each step.
Planners such as ``proximity()`` group similar items into a batch and need embeddings of all items. These are either
harvested from the batches at no cost or computed by an extra pass of the encoder (``encode=True``).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from hardneg.batching.graph import ProximityGraph
from hardneg.batching.refresh import Refresh
from hardneg.batching.sampler import PlannedBatchSampler
from hardneg.batching.spec import BatchSpec
from hardneg.core.errors import ArgumentError, optional, warn_once
from hardneg.core.types import Keys
from hardneg.io.terminal import progress_bars
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.training.data.items import Items, Splits
from hardneg.training.data.kinds import kind_of
from hardneg.training.encoders import has_batch_statistics
from hardneg.training.loop.checks import number_of
from hardneg.training.loop.runs import PeakMemory
from hardneg.training.options import TrainOptions

if TYPE_CHECKING:
    from accelerate import Accelerator
    from rich.console import Console


AnyModule = TypeVar("AnyModule", bound=nn.Module)
OURS = "hardneg"
"""Key in the shared state of Accelerate that marks it as created by a run of ours."""
CUDA_CONTEXT = 600 * 2**20
"""Bytes of GPU memory that a process uses besides its tensors."""


def splits(options: TrainOptions) -> Splits:
    """Load the items of a run.

    Args:
        options: Options of a recipe; ``data`` selects the kind, and ``evaluate_on`` the test items.

    Returns:
        The training items, the test items, and the labelled items that the evaluation is fitted to if they differ
        from the training items.
    """
    return kind_of(options.data).splits(options)


def loss_for(options: TrainOptions, **more: Any) -> ContrastiveLoss:
    """Build the contrastive loss that the options describe.

    Options without one of the loss's arguments leave its default.

    Args:
        options: Options of a recipe.
        more: Arguments that the recipe fixes; they override the options.
    """
    names = ("num_negatives", "positives_in_denominator", "reduction", "objective", "generate", "same_label_negatives")
    chosen = {name: getattr(options, name) for name in names if hasattr(options, name)}
    temperature, tau_plus = number_of(options.temperature), number_of(options.tau_plus)
    chosen |= {"gather": True, **more}
    return ContrastiveLoss(options.negatives, temperature, tau_plus, normalize=False, **chosen)


def accelerator_for(options: TrainOptions) -> Accelerator:
    """Create the accelerator of a run: its device, precision and ranks.

    Args:
        options: Options of a recipe; ``device`` and ``precision`` are used.

    Raises:
        MissingExtra: If accelerate is not installed.
        ArgumentError: If accelerate does not see the ranks that the launcher has started.
    """
    accelerate = optional("accelerate", "train", extra="train")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    # Without a GPU and without cpu=True, Accelerate would treat each rank as a separate run.
    on_cpu = options.device == "cpu" or (ranks > 1 and not torch.cuda.is_available())
    state = accelerate.state.AcceleratorState
    _forget_another_run(state, options.precision, on_cpu)
    ours = not state._shared_state
    accelerator: Accelerator = accelerate.Accelerator(cpu=on_cpu, mixed_precision=options.precision)
    if ours:
        state._shared_state[OURS] = True
    if accelerator.num_processes != ranks:
        raise ArgumentError(
            "train",
            f"Accelerate to see the {ranks} ranks of the launcher",
            str(accelerator.num_processes),
            "use torchrun --nproc_per_node N, or accelerate launch --multi_gpu --num_processes N (also on CPUs)",
        )
    return accelerator


def _forget_another_run(state: Any, precision: str, on_cpu: bool) -> None:
    """Reset Accelerate's process-wide state if an earlier run of ours had another precision or device."""
    now = state._shared_state
    if now.get(OURS) and (now["_mixed_precision"] != precision or on_cpu != (now["device"].type == "cpu")):
        state._reset_state(reset_partial_state=now["num_processes"] == 1)


def synchronised(method: AnyModule, accelerator: Accelerator) -> AnyModule:
    """Share batch statistics across ranks where the backend can (CUDA); elsewhere warn that each rank has its own.

    Args:
        method: The method, whose BatchNorm layers are converted.
        accelerator: The accelerator of the run.
    """
    if accelerator.num_processes == 1 or not has_batch_statistics(method):
        return method
    if accelerator.device.type == "cuda":
        return cast(AnyModule, nn.SyncBatchNorm.convert_sync_batchnorm(method))  # type: ignore[no-untyped-call]
    if accelerator.is_main_process:
        warn_once(
            "training.batch_statistics",
            f"The encoder has batch normalisation, whose statistics {accelerator.num_processes} ranks without CUDA "
            "cannot share: each rank uses those of its own part of the batch. Use an encoder without batch "
            "normalisation (tiny), or one process.",
        )
    return method


def check_agreed(accelerator: Accelerator, value: int) -> None:
    """Raise unless all ranks read the same value from the disk.

    A rank that does not see the run directory would start the run again.

    Args:
        accelerator: The accelerator of the run.
        value: The value of this rank, such as the step of its checkpoint.
    """
    if accelerator.num_processes > 1:
        found = accelerator.gather(torch.tensor([int(value)], device=accelerator.device))
        if bool((found != found[0]).any()):
            raise ArgumentError("train", "every rank to see the folder of --out", f"ranks at {found.tolist()}")


def sampler_for(accelerator: Accelerator, options: TrainOptions, spec: BatchSpec, data: Items) -> PlannedBatchSampler:
    """Build the sampler that plans the batches of all ranks and yields those of this one.

    Args:
        accelerator: The accelerator of the run.
        options: Options of a recipe.
        spec: How batches are planned, from ``--batches``.
        data: The training items.
    """
    # A checkpoint within an epoch stores the plan, so such a run plans whole segments instead of 8 batches ahead. A run
    # that reads files writes such a checkpoint when one is lost.
    stores_plan = bool(options.save_every_steps) or data.fetches
    return PlannedBatchSampler(
        spec.planner,
        len(data),
        options.batch_size // accelerator.num_processes,
        seed=options.seed,
        drop_last=True,
        limit=options.items_per_epoch or None,
        coverage=spec.coverage,
        segment=spec.refresh,
        warmup_epochs=spec.warmup,
        total_epochs=options.epochs,
        num_replicas=accelerator.num_processes,
        rank=accelerator.process_index,
        ahead=8 if not stores_plan and (accelerator.device.type != "cuda" or spec.planner.needs != "graph") else None,
    )


def memory_in_use(device: torch.device) -> PeakMemory:
    """Return the current memory of this process and the peak memory of its GPU, CUDA context included."""
    host: int = optional("psutil", "train", extra="train").Process().memory_info().rss
    return PeakMemory(host, torch.cuda.max_memory_reserved(device) + CUDA_CONTEXT if device.type == "cuda" else 0)


@contextmanager
def progress_bar(
    quiet: bool, total: int, done: int, batch_size: int, console: Console | None = None
) -> Iterator[Callable[[dict[str, float] | None], None]]:
    """Show the progress of training, with the epoch, the loss, the hardness and the items per second.

    Args:
        quiet: Show nothing.
        total: Number of steps of the run.
        done: Number of steps completed before, by a resumed run.
        batch_size: Items per batch, for the speed.
        console: Where to draw, by default the terminal.

    Yields:
        A function to call after each step, with the record of the step or None.
    """
    begun = time.perf_counter()
    with progress_bars(quiet, console) as bars:
        advance = bars("train", total)
        advance(done)

        def show(record: dict[str, float] | None) -> None:
            note = ""
            if record is not None:
                speed = (record["step"] - done) * batch_size / (time.perf_counter() - begun)
                hardness = f"hardness {record['hardness']:.2f} " if math.isfinite(record["hardness"]) else ""
                note = f"epoch {record['epoch'] + 1} loss {record['loss']:.3f} {hardness}{speed:.0f}/s"
            advance(1, note)

        yield show


LEAD = 33
"""Largest number of steps by which a refresh precedes the batches planned from it; enough to build a graph."""


class PlanRefresher:
    """Collects the embeddings of each batch and lets the sampler plan again every ``refresh`` steps after the warm-up.

    Args:
        sampler: The sampler of the run.
        spec: How batches are planned, from ``--batches``.
        total: Number of steps of the run.
        vectors: Returns the unit vectors [n, d] from which batches are planned.
        seed: Seed of the approximate neighbour graph and of replacements for missing vectors.
    """

    def __init__(
        self, sampler: PlannedBatchSampler, spec: BatchSpec, total: int, vectors: Callable[[], Tensor], seed: int
    ) -> None:
        self.sampler, self.spec, self.total = sampler, spec, total
        planner, sizes = spec.planner, ("num_neighbours", "num_candidates")
        chosen = {name: getattr(planner, name) for name in sizes if hasattr(planner, name)}
        self.refresh = Refresh(sampler, spec.refresh, vectors, seed=seed, **chosen)
        self.refreshed: int | None = None  # the step of the last refresh
        self.harvested = torch.zeros(0)

    def before_training(self) -> None:
        """Plan the first epoch from an untrained or pretrained encoder, if there is no warm-up."""
        if self.spec.encode and self.spec.warmup == 0:
            self._plan_anew(0)

    def after_step(self, step: int, epoch: int, harvest: Callable[[], Keys]) -> None:
        """Keep the embeddings of this step, and plan again when due.

        Args:
            step: Number of steps completed, this one included.
            epoch: The epoch of this step, counted from 0.
            harvest: Returns the embeddings of the step by item.
        """
        if self.sampler.planner.needs == "nothing":
            return
        if not self.spec.encode:
            self._keep(harvest())
        # Without a warm-up, the first epoch is uniform until a refresh, since there are no embeddings before.
        first = self.refreshed is None and step == max(1, self.spec.warmup) * len(self.sampler) < self.total
        if first or (epoch >= self.spec.warmup and self.is_due(step, epoch)):
            self._plan_anew(step)

    def known(self, step: int) -> Tensor:
        """Return the harvested vectors, [n, d]; an item without one has the vector of a random other item.

        Such items were in a dropped last batch. With vectors of zeros no planner would ever select them; as the
        neighbour of another item each of them can be drawn.

        Args:
            step: Number of steps completed, which varies the random choice.
        """
        missing = ~self.harvested.any(1)
        if not missing.any() or missing.all():
            return self.harvested
        here, there = (torch.nonzero(rows)[:, 0] for rows in (~missing, missing))
        drawn = np.random.default_rng([self.refresh.seed, 4, step]).integers(len(here), size=len(there))
        vectors = self.harvested.clone()
        vectors[there] = vectors[here[torch.from_numpy(drawn).to(here.device)]]
        return vectors

    def is_due(self, step: int, epoch: int) -> bool:
        """Return True shortly before the segment that starts nearest to ``refresh`` steps after the last refresh.

        It is done a few steps early, since on a GPU the graph is built while training continues.

        Args:
            step: Number of steps completed.
            epoch: The current epoch, counted from 0.
        """
        every, done = self.spec.refresh, step - epoch * len(self.sampler)
        begun = (done - 1) // every * every
        size = min(every, len(self.sampler) - begun)
        left = begun + size - done
        nearest = step - (self.refreshed or 0) + min(every, len(self.sampler)) / 2 >= every
        return nearest and left == self._lead(size) and step + left < self.total

    def _lead(self, size: int) -> int:
        """Return by how many steps a refresh precedes the end of a segment of this size."""
        return min(LEAD, (self.spec.refresh - 1) // 3, size - 1)

    def may_plan(self, done: int, batch: int) -> bool:
        """Return True unless a refresh may still come that decides the segment beginning at a batch of an epoch.

        Args:
            done: Number of steps of the epoch that training has completed.
            batch: Number of batches of the epoch before the segment.
        """
        independent = batch == 0 or self.sampler.planner.needs == "nothing"
        return independent or done >= batch - self._lead(self.spec.refresh)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: harvested vectors, last refresh, and the data of the current plan."""
        return {"harvested": self.harvested, "refreshed": self.refreshed, "planned_from": _as_state(self.sampler.data)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint, unless it has another number of items."""
        if len(state["harvested"]) in (0, self.sampler.num_instances):
            self.harvested, self.refreshed = state["harvested"], state["refreshed"]
            self.sampler.data = _from_state(state["planned_from"])

    def _keep(self, keys: Keys) -> None:
        """Store the vectors of a batch by item."""
        if not len(self.harvested):
            self.harvested = torch.zeros(self.sampler.num_instances, keys.dim, device=keys.vectors.device)
        assert keys.ids is not None
        self.harvested.index_copy_(0, keys.ids, keys.vectors.to(self.harvested))

    def _plan_anew(self, step: int) -> None:
        """Plan again from fresh embeddings."""
        self.refresh.now(step)
        self.refreshed = step


def _as_state(data: Any) -> dict[str, Tensor] | None:
    """Return a graph or vectors as tensors for a checkpoint."""
    if isinstance(data, ProximityGraph):
        return {"neighbours": data.neighbours.int(), "similarities": data.similarities}
    return None if data is None else {"vectors": data}


def _from_state(state: dict[str, Tensor] | None) -> Any:
    """Return the graph or the vectors that ``_as_state`` has stored."""
    if state is None:
        return None
    if "vectors" in state:
        return state["vectors"]
    return ProximityGraph(state["neighbours"].cpu().long(), state["similarities"].cpu())
