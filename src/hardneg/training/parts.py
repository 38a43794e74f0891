"""What a training run is made of, from its options: data, loss, sampler, ranks, and a progress bar."""

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
from hardneg.training.checks import number_of
from hardneg.training.data.items import Splits
from hardneg.training.data.kinds import kind_of
from hardneg.training.encoders import has_batch_statistics
from hardneg.training.options import TrainOptions
from hardneg.training.runs import PeakMemory

if TYPE_CHECKING:
    from accelerate import Accelerator
    from rich.console import Console

AnyModule = TypeVar("AnyModule", bound=nn.Module)
OURS = "hardneg"
CUDA_CONTEXT = 600 * 2**20  # bytes


def splits(options: TrainOptions) -> Splits:
    """What is trained on, what is evaluated on, and the labelled items that the evaluation is fitted to, if others."""
    return kind_of(options.data).splits(options)


def loss_for(options: TrainOptions, **more: Any) -> ContrastiveLoss:
    """The loss that the options describe, as far as they have its arguments; ``more`` are those of a recipe."""
    names = ("num_negatives", "positives_in_denominator", "reduction", "objective", "generate")
    chosen = {name: getattr(options, name) for name in names if hasattr(options, name)}
    temperature, tau_plus = number_of(options.temperature), number_of(options.tau_plus)
    chosen |= {"gather": True, **more}
    return ContrastiveLoss(options.negatives, temperature, tau_plus, normalize=False, **chosen)


def accelerator_for(options: TrainOptions) -> Accelerator:
    accelerate = optional("accelerate", "train", extra="train")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    # Without cpu=True and without a GPU, Accelerate would take each of the ranks for a run of its own.
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
    """Accelerate keeps the precision and device of a process; those of an earlier run of ours need not be of this."""
    now = state._shared_state
    if now.get(OURS) and (now["_mixed_precision"] != precision or on_cpu != (now["device"].type == "cpu")):
        state._reset_state(reset_partial_state=now["num_processes"] == 1)


def synchronised(method: AnyModule, accelerator: Accelerator) -> AnyModule:
    """Batch statistics over all ranks where the backend has them (CUDA); elsewhere each rank has its own."""
    if accelerator.num_processes == 1 or not has_batch_statistics(method):
        return method
    if accelerator.device.type == "cuda":
        return cast(AnyModule, nn.SyncBatchNorm.convert_sync_batchnorm(method))  # type: ignore[no-untyped-call]
    if accelerator.is_main_process:
        warn_once(
            "training.batch_statistics",
            f"The encoder has batch statistics, which {accelerator.num_processes} ranks without CUDA cannot share: "
            "each normalises by its own part of the batch. Use an encoder without them (tiny), or one process.",
        )
    return method


def check_agreed(accelerator: Accelerator, value: int) -> None:
    """Raises unless all ranks found the same on the disk; one that does not see it would start again."""
    if accelerator.num_processes > 1:
        found = accelerator.gather(torch.tensor([int(value)], device=accelerator.device))
        if bool((found != found[0]).any()):
            raise ArgumentError("train", "every rank to see the folder of --out", f"ranks at {found.tolist()}")


def sampler_for(accelerator: Accelerator, options: TrainOptions, spec: BatchSpec, n: int) -> PlannedBatchSampler:
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
        # What is not planned yet cannot be saved, so a run that is saved in mid-epoch plans whole segments.
        ahead=8
        if not options.save_every_steps and (accelerator.device.type != "cuda" or spec.planner.needs != "graph")
        else None,
    )


def held_memory(device: torch.device) -> PeakMemory:
    """What this process holds now, and the most it has held of its GPU, with what CUDA keeps beside the tensors."""
    host: int = optional("psutil", "train", extra="train").Process().memory_info().rss
    return PeakMemory(host, torch.cuda.max_memory_reserved(device) + CUDA_CONTEXT if device.type == "cuda" else 0)


@contextmanager
def progress_bar(
    quiet: bool, total: int, done: int, batch_size: int, console: Console | None = None, noun: str = "image"
) -> Iterator[Callable[[dict[str, float]], None]]:
    """A bar with the loss, the hardness and the speed; records are shown as they come."""
    if quiet:
        yield lambda record: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    # 80 columns hold a run of 100,000 steps at 10,000 items a second.
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
