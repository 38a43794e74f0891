"""The loop that the recipes share: devices, ranks, checkpoints, records, and the evaluation at the end.

A recipe gives a ``Method``: the encoder to train, and the loss of a batch. Augmentation is a pure function of
(seed, epoch, id, view) and the batches of (seed, epoch, graphs), so a killed run continues bit by bit from its last
checkpoint, and several ranks see what one would have seen.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardneg.auditing import Diagnosis
from hardneg.augment import PRESETS, Augment, preset_for
from hardneg.batches import BatchSpec, parse_batches
from hardneg.data import ImageData, check_name, load
from hardneg.encoders import Encoder, build_encoder, check_encoder, embed, has_batch_statistics
from hardneg.evaluate import evaluate_embeddings, save_embeddings
from hardneg.graph import ProximityGraph
from hardneg.losses import ContrastiveLoss
from hardneg.negatives import parse
from hardneg.notices import warn_once
from hardneg.options import TrainOptions
from hardneg.refresh import Refresh
from hardneg.runs import Run, write_atomically
from hardneg.sampler import PlannedBatchSampler
from hardneg.schedules import adaptive
from hardneg.types import Keys

if TYPE_CHECKING:
    from accelerate import Accelerator

Encode = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's part of a global batch: two views of each image."""

    views: Tensor  # [2b, c, h, w]: the first views, then the second ones
    ids: Tensor  # [b], positions in the data set
    labels: Tensor | None  # [b]


class Method(nn.Module, ABC):
    """What a recipe is. Everything that must survive a crash is in its ``state_dict``."""

    encoder: nn.Module
    """Trained and evaluated; ``encode`` below is the same, wrapped for the ranks."""

    @abstractmethod
    def loss_of(self, encode: Encode, batch: Batch) -> Tensor:
        """The loss of a batch; remembers what ``diagnose`` and ``harvest`` ask for."""

    def recorded(self, loss: Tensor) -> Tensor:
        """The loss to record, where that of ``loss_of`` is a surrogate whose value means nothing."""
        return loss

    @abstractmethod
    def diagnose(self) -> Diagnosis:
        """How hard and how false the negatives of the last batch were."""

    @abstractmethod
    def harvest(self) -> Keys:
        """Unit vectors of the last global batch by id, for a graph."""

    def set_progress(self, step: int, total: int) -> None:
        """Evaluates the schedules before a step."""

    def after_step(self) -> None:
        """Updates what follows the weights: a momentum encoder, a queue."""


Build = Callable[[Any, ImageData, int], Method]
"""Makes the method from its options, the data and the total number of steps."""


def train(
    recipe: str, build: Build, options: TrainOptions, out: str | Path, *, resume: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Trains, evaluates and writes a run directory; returns the final figures.

    A finished run is not trained again: with ``resume`` its figures are returned. Without labels, or with one class
    only, there is nothing to evaluate: the run then ends with its losses and diagnostics.
    """
    spec = _check_words(options)
    accelerator = _accelerator(options)
    run = Run(Path(out))
    with run.alone() if accelerator.is_main_process else nullcontext():
        if accelerator.is_main_process:
            Run.open(out, recipe, options.as_dict(), resume)
        accelerator.wait_for_everyone()
        finished = run.result()
        if finished is not None:
            return finished
        data, test = _splits(options)
        _check_batch(options, data, accelerator.num_processes)
        loop = Loop(accelerator, run, options, spec, data, build)
        seconds = loop.run_all(quiet)
        times = {"seconds": round(seconds, 3), "epoch_seconds": loop.epoch_seconds}
        if accelerator.is_main_process:
            run.finish(loop.evaluate(test) | times | {"steps": loop.total, "epochs": options.epochs})
        accelerator.wait_for_everyone()
    return run.result() or {}  # nothing on a machine that does not see the disk of the first rank


def _splits(options: TrainOptions) -> tuple[ImageData, ImageData]:
    """What is trained on and what is evaluated on."""
    data = load(options.data, "train", options.data_root)
    if options.evaluate_on == "validation":
        return data.held_out()
    test = load(options.data, "test", options.data_root)
    if data.images.shape[1:] != test.images.shape[1:]:
        shapes = f"{tuple(data.images.shape[1:])} and {tuple(test.images.shape[1:])}"
        raise ValueError(f"train needs train and test images of one size, got {shapes} in {options.data!r}.")
    return data, test


def _check_words(options: TrainOptions) -> BatchSpec:
    """Raises for names and expressions that nobody knows, before anything is loaded or written."""
    check_name(options.data)
    if options.encoder != "auto":
        check_encoder(options.encoder)
    parse(options.negatives)
    return parse_batches(options.batches)


def encoder_for(options: TrainOptions, data: ImageData) -> Encoder:
    """The encoder that the options name; "auto" is the tiny one for images up to 28 pixels, else ResNet-18."""
    name = options.encoder
    if name == "auto":
        name = "tiny" if max(data.size) <= 28 else "resnet18"
    return build_encoder(name, data.in_channels, projection_dim=options.dim, seed=options.seed)


class Loop:
    """One training run: its modules, its position, and the steps between two checkpoints."""

    def __init__(
        self,
        accelerator: Accelerator,
        run: Run,
        options: TrainOptions,
        spec: BatchSpec,
        data: ImageData,
        build: Build,
    ) -> None:
        self.accelerator, self.disk, self.options, self.spec = accelerator, run, options, spec
        self.data = data.to(accelerator.device)
        self.sampler = _sampler(accelerator, options, spec, len(data))
        self.total = options.epochs * len(self.sampler)
        torch.manual_seed(options.seed)
        self.method = _synchronised(build(options, data, self.total).to(accelerator.device), accelerator)
        on_gpu = accelerator.device.type == "cuda"
        if on_gpu:
            torch.backends.cudnn.benchmark = True
            self.method.encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.augment = _augment(options, data)
        self.views = self.augment.compiled() if options.compile else self.augment.views
        parameters = [p for p in self.method.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(parameters, options.learning_rate, weight_decay=options.weight_decay, fused=on_gpu)
        self.encode, self.optimizer = accelerator.prepare(self.method.encoder, optimizer)
        if options.compile:
            # On a GPU the step is bound by its launches, which CUDA graphs save: 1.6 s an epoch of CIFAR-10, not 3.4.
            graphs = on_gpu and accelerator.num_processes == 1
            self.encode = torch.compile(self.encode, mode="reduce-overhead" if graphs else "default")
        self.refresh = _refresh(self.sampler, spec, self._vectors, options.seed)
        self.harvested = torch.zeros(0)
        losses = [part for part in self.method.modules() if isinstance(part, ContrastiveLoss)]
        self.adaptive = [s for one in losses for s in one.negatives.schedules() if isinstance(s, adaptive)]
        self.epoch_loss = torch.zeros((), device=accelerator.device)
        self.step, self.epoch = 0, 0
        self.epoch_seconds: list[float] = []
        self._restore()

    def run_all(self, quiet: bool) -> float:
        """All epochs that are left; returns the seconds of training, over all attempts."""
        if self.step == 0 and self.spec.encode and self.spec.warmup == 0:
            self.refresh.now()
        silent, batch_size = quiet or not self.accelerator.is_main_process, self.options.batch_size
        with _progress(silent, self.total, self.step, batch_size) as show:
            for epoch in range(self.epoch, self.options.epochs):
                begun = time.perf_counter()
                for index in self._batches(epoch):
                    self._one_step(epoch, index, show)
                self._adapt()
                _synchronize(self.accelerator.device)
                self.epoch = epoch + 1
                self.epoch_seconds.append(round(time.perf_counter() - begun, 4))
                if self.epoch % self.options.save_every == 0 or self.epoch == self.options.epochs:
                    self._save()
        return sum(self.epoch_seconds)

    def _batches(self, epoch: int) -> Iterator[Tensor]:
        self.sampler.set_epoch(epoch)
        for batch in self.sampler:
            index = torch.tensor(batch)
            yield index.pin_memory().to(self.data.ids.device, non_blocking=True) if self.data.ids.is_cuda else index

    def _one_step(self, epoch: int, index: Tensor, show: Callable[[dict[str, float]], None]) -> None:
        options, method = self.options, self.method
        method.set_progress(self.step, self.total)
        first, second = self.views(self.data.images[index], self.data.ids[index], epoch, options.seed)
        labels = None if self.data.labels is None else self.data.labels[index]
        with self.accelerator.autocast():
            loss = method.loss_of(self.encode, Batch(torch.cat([first, second]), index, labels))
        self.optimizer.zero_grad(set_to_none=True)
        self.accelerator.backward(loss)
        self.optimizer.step()
        method.after_step()
        self.step += 1
        self.epoch_loss += method.recorded(loss).detach()
        self._keep_fresh(epoch)
        if self.step % options.log_every == 0 or self.step == self.total:
            self._record(epoch, loss, show)

    def _adapt(self) -> None:
        """Adaptive schedules move by whether the mean loss of the epoch fell."""
        for schedule in self.adaptive:
            schedule.observe(-float(self.accelerator.reduce(self.epoch_loss, "mean")) / len(self.sampler))
        self.epoch_loss = torch.zeros((), device=self.accelerator.device)

    def _keep_fresh(self, epoch: int) -> None:
        """Keeps the embeddings of the batch and, every ``refresh`` steps after the warm-up, plans from them."""
        if self.sampler.planner.needs == "nothing":
            return
        if not self.spec.encode:
            keys = self.method.harvest()
            if not len(self.harvested):
                self.harvested = torch.zeros(len(self.data), keys.dim, device=keys.vectors.device)
            assert keys.ids is not None
            self.harvested.index_copy_(0, keys.ids, keys.vectors.to(self.harvested))
        # Without a warm-up, the first epoch is uniform until a refresh, since nothing is known of the images before.
        if self.step == max(1, self.spec.warmup) * len(self.sampler):
            self.refresh.now(self.step)
        elif epoch >= self.spec.warmup:
            self.refresh(self.step)

    def _vectors(self) -> Tensor:
        """What the ranks plan from, the same on all of them; a copy, since training goes on harvesting."""
        if not self.spec.encode:
            return self.harvested.clone()
        vectors = normalize(self._features(self.data), dim=-1)
        if self.accelerator.num_processes > 1:  # batch statistics that are not synchronised differ between ranks
            torch.distributed.broadcast(vectors, src=0)
        return vectors

    def _features(self, data: ImageData) -> Tensor:
        return embed(self.method.encoder, data.images, self.augment.plain)  # type: ignore[arg-type]

    def _record(self, epoch: int, loss: Tensor, show: Callable[[dict[str, float]], None]) -> None:
        with torch.no_grad():
            found = self.method.diagnose().summary()
            # MoCo's is that of the rank's own anchors.
            loss = self.accelerator.reduce(self.method.recorded(loss).detach(), "mean")
        record = {"step": self.step, "epoch": epoch, "loss": float(loss), **found}
        if not math.isfinite(record["loss"]):
            raise ValueError(
                f"train needs a finite loss, got loss={record['loss']} at step {self.step}; lower --learning-rate, "
                "raise --temperature, or use --precision no. The last checkpoint is from before."
            )
        show(record)
        if self.accelerator.is_main_process:
            self.disk.log(**record)

    def evaluate(self, test: ImageData) -> dict[str, Any]:
        """The figures of the trained encoder, and its embeddings beside them; the first rank's work."""
        records = self.disk.metrics()
        figures: dict[str, Any] = {"final": records[-1]} if records else {}
        if self.data.labels is None or test.labels is None or self.data.num_labels() < 2:
            return figures
        test = test.to(self.accelerator.device)
        split = self._features(self.data), self.data.labels, self._features(test), test.labels
        write_atomically(self.disk.path / "embeddings.npz", lambda file: save_embeddings(file, *split))  # type: ignore[arg-type]
        return figures | evaluate_embeddings(*split, seed=0)  # type: ignore[arg-type]

    def _save(self) -> None:
        if not self.accelerator.is_main_process:
            return
        self.disk.save(
            {
                "step": self.step,
                "epoch": self.epoch,
                "epoch_seconds": self.epoch_seconds,
                "method": self.accelerator.unwrap_model(self.method).state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "harvested": self.harvested,
                "planned_from": _as_state(self.sampler.data),
                "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else {},
                "rng": torch.get_rng_state(),
                "rng_cuda": torch.cuda.get_rng_state_all() if self.accelerator.device.type == "cuda" else [],
            }
        )

    def _restore(self) -> None:
        state = self.disk.load(self.accelerator.device)
        if self.accelerator.is_main_process:
            self.disk.forget_after(state["step"] if state else 0)
        if state is None:
            return
        self.step, self.epoch, self.epoch_seconds = state["step"], state["epoch"], state["epoch_seconds"]
        self.method.load_state_dict(state["method"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.harvested = state["harvested"]
        self.sampler.data = _from_state(state["planned_from"])
        torch.set_rng_state(state["rng"].cpu())
        if state["rng_cuda"]:
            torch.cuda.set_rng_state_all([one.cpu() for one in state["rng_cuda"]])
        if state["scaler"] and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])


def _accelerator(options: TrainOptions) -> Accelerator:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise ImportError("train needs accelerate; pip install 'hardneg[train]'.") from error
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("train needs a CUDA device, got device='cuda' and none is visible; use --device cpu.")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    # Without cpu=True and without a GPU, Accelerate would take each of the ranks for a run of its own.
    on_cpu = options.device == "cpu" or (ranks > 1 and not torch.cuda.is_available())
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=options.precision)
    if accelerator.num_processes != ranks:
        raise ValueError(
            f"train needs Accelerate to see the {ranks} ranks of the launcher, got {accelerator.num_processes}; use "
            "torchrun --nproc_per_node N, or accelerate launch --multi_gpu --num_processes N (also on CPUs)."
        )
    return accelerator


def _synchronised(method: Method, accelerator: Accelerator) -> Method:
    """Batch statistics over all ranks where the backend has them (CUDA); elsewhere each rank has its own."""
    if accelerator.num_processes == 1 or not has_batch_statistics(method):
        return method
    if accelerator.device.type == "cuda":
        return cast(Method, nn.SyncBatchNorm.convert_sync_batchnorm(method))  # type: ignore[no-untyped-call]
    if accelerator.is_main_process:
        warn_once(
            "training.batch_statistics",
            f"The encoder has batch statistics, which {accelerator.num_processes} ranks without CUDA cannot share: "
            "each normalises by its own part of the batch. Use an encoder without them (tiny), or one process.",
        )
    return method


def _check_batch(options: TrainOptions, data: ImageData, ranks: int) -> None:
    if options.batch_size > len(data):
        raise ValueError(
            f"train needs --batch-size of at most the {len(data)} images of {options.data}, "
            f"got batch_size={options.batch_size}."
        )
    if options.batch_size % ranks:
        raise ValueError(f"train needs --batch-size to divide over {ranks} ranks, got batch_size={options.batch_size}.")


def _sampler(accelerator: Accelerator, options: TrainOptions, spec: BatchSpec, n: int) -> PlannedBatchSampler:
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
        ahead=8,
    )


def _augment(options: TrainOptions, data: ImageData) -> Augment:
    name = preset_for(data.images) if options.augment == "auto" else options.augment
    return replace(PRESETS[name], channels_last=options.device != "cpu" and torch.cuda.is_available())


def _refresh(sampler: PlannedBatchSampler, spec: BatchSpec, vectors: Callable[[], Tensor], seed: int) -> Refresh:
    planner = spec.planner
    sizes = {name: getattr(planner, name) for name in ("num_neighbours", "num_candidates") if hasattr(planner, name)}
    return Refresh(sampler, spec.refresh, vectors, seed=seed, **sizes)


def _as_state(data: Any) -> dict[str, Tensor] | None:
    if isinstance(data, ProximityGraph):
        return {"neighbours": data.neighbours.int(), "similarities": data.similarities}
    return None if data is None else {"vectors": data}


def _from_state(state: dict[str, Tensor] | None) -> Any:
    if state is None:
        return None
    if "vectors" in state:
        return state["vectors"]
    return ProximityGraph(state["neighbours"].cpu().long(), state["similarities"].cpu())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _progress(quiet: bool, total: int, done: int, batch_size: int) -> Iterator[Callable[[dict[str, float]], None]]:
    """A bar with the loss, the hardness and the speed; records are shown as they come."""
    if quiet:
        yield lambda record: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  hardness {task.fields[hardness]:.3f}"),
        TextColumn("{task.fields[speed]:.0f} images/s"),
        TimeRemainingColumn(),
    )
    nothing: dict[str, Any] = {"epoch": 0, "loss": math.nan, "hardness": math.nan, "speed": math.nan}
    with Progress(*columns) as progress:
        task, begun = progress.add_task("", total=total, completed=done, **nothing), time.perf_counter()

        def show(record: dict[str, float]) -> None:
            progress.update(
                task,
                completed=int(record["step"]),
                epoch=record["epoch"],
                loss=record["loss"],
                hardness=record["hardness"],
                speed=(record["step"] - done) * batch_size / (time.perf_counter() - begun),
            )

        yield show
