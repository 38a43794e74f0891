"""The parts of a training run, built from its options: data, loss, accelerator, sampler and progress bar.

The training loop assembles them; ``loss_for`` is called by the recipes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from hardneg.batching.sampler import PlannedBatchSampler
from hardneg.batching.spec import BatchSpec
from hardneg.core.errors import ArgumentError, optional, warn_once
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.training.data.items import Splits
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
    names = ("num_negatives", "positives_in_denominator", "reduction", "objective", "generate")
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
    # Without a GPU and without cpu=True, Accelerate would treat each rank as a run of its own.
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


def sampler_for(accelerator: Accelerator, options: TrainOptions, spec: BatchSpec, n: int) -> PlannedBatchSampler:
    """Build the sampler that plans the batches of all ranks and yields those of this one.

    Args:
        accelerator: The accelerator of the run.
        options: Options of a recipe.
        spec: How batches are planned, from ``--batches``.
        n: Number of training items.
    """
    return PlannedBatchSampler(
        spec.planner,
        n,
        options.batch_size // accelerator.num_processes,
        seed=options.seed,
        drop_last=True,
        coverage=spec.coverage,
        segment=spec.refresh,
        warmup_epochs=spec.warmup,
        total_epochs=options.epochs,
        num_replicas=accelerator.num_processes,
        rank=accelerator.process_index,
        # A checkpoint within an epoch stores the plan, so such a run plans whole segments instead of 8 batches ahead.
        ahead=8
        if not options.save_every_steps and (accelerator.device.type != "cuda" or spec.planner.needs != "graph")
        else None,
    )


def memory_in_use(device: torch.device) -> PeakMemory:
    """Return the current memory of this process and the peak memory of its GPU, CUDA context included."""
    host: int = optional("psutil", "train", extra="train").Process().memory_info().rss
    return PeakMemory(host, torch.cuda.max_memory_reserved(device) + CUDA_CONTEXT if device.type == "cuda" else 0)


@contextmanager
def progress_bar(
    quiet: bool, total: int, done: int, batch_size: int, console: Console | None = None, noun: str = "image"
) -> Iterator[Callable[[dict[str, float]], None]]:
    """Show a progress bar with the loss, the hardness and the speed.

    Args:
        quiet: Show nothing.
        total: Number of steps of the run.
        done: Number of steps completed before, by a resumed run.
        batch_size: Items per batch, for the speed.
        console: Where to draw, by default the terminal.
        noun: Name of an item, such as "image".

    Yields:
        A function that is called with each record.
    """
    if quiet:
        yield lambda record: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    # Fits into 80 columns up to 100,000 steps at 10,000 items per second.
    columns = (
        BarColumn(bar_width=6),
        MofNCompleteColumn(),
        TextColumn("{task.fields[found]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console) as progress:
        task, begun = progress.add_task("", total=total, completed=done, found=""), time.perf_counter()

        def show(record: dict[str, float]) -> None:
            speed = (record["step"] - done) * batch_size / (time.perf_counter() - begun)
            hardness = f"hardness {record['hardness']:.2f} " if math.isfinite(record["hardness"]) else ""
            found = f"loss {record['loss']:.3f} {hardness}{speed:.0f} {noun}s/s"
            progress.update(task, completed=int(record["step"]), found=f"epoch {record['epoch'] + 1} {found}")

        yield show
