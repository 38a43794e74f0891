"""The loop that the recipes share: devices, ranks, checkpoints, records, and the evaluation at the end.

A recipe gives a ``Method``: the encoder to train, and the loss of a batch. The data is ``Items`` of any kind
(training/data/items.py), whose views are a pure function of (seed, epoch, id, view); the batches are one of (seed,
epoch, graphs). So a killed run continues bit by bit from its last checkpoint, and several ranks see what one would have
seen.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardneg.batching.plan import Plan
from hardneg.batching.spec import BatchSpec
from hardneg.core.errors import DataChanged, HardnegWarning, NotFinite
from hardneg.core.schedules import adaptive
from hardneg.io.embeddings import save_arrays
from hardneg.io.files import output_folder, write_atomically
from hardneg.io.sealed import sealing
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.losses.grad_cache import GradCache
from hardneg.training.augmentation.augment import MakeImageViews
from hardneg.training.augmentation.views import Augmentation
from hardneg.training.checks import check_batch, check_sources, check_words, try_negatives
from hardneg.training.data.inputs import joined
from hardneg.training.data.items import Evaluation, Items, Splits
from hardneg.training.data_record import data_record, encoder_record
from hardneg.training.encoders import Represent, check_embeds
from hardneg.training.evaluation.monitors import check_held_out, check_monitor, read_monitor
from hardneg.training.method import Batch, Build, EncodeInputs
from hardneg.training.optimisers import Updates, read_optimiser
from hardneg.training.options.base import TrainOptions, defaults_of
from hardneg.training.parts import (
    accelerator_for,
    check_agreed,
    held_memory,
    progress_bar,
    sampler_for,
    splits,
    synchronised,
)
from hardneg.training.records import final_of, has_collapsed
from hardneg.training.refreshing import PlanRefresher
from hardneg.training.runs import Run

if TYPE_CHECKING:
    from accelerate import Accelerator

SEEN_AFTER, SEEN_SHARE = 3, 0.95
"""After so many epochs fewer items seen are warned of; of uniform batches the dropped last one differs each time."""


def train(
    recipe: str,
    build: Build,
    options: TrainOptions,
    out: str | Path,
    *,
    views: MakeImageViews | Augmentation | None = None,
    resume: bool = False,
    allow_other_data: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Trains, evaluates and writes a run directory; returns the final figures.

    ``views(images, ids, epoch, seed)`` gives the two views of a batch instead of the augmentation that the options
    name, for images; a run is resumed with the same. A finished run is not trained again: with ``resume`` its figures
    are returned. A run that was begun with other items or labels raises ``DataChanged`` unless ``allow_other_data``.
    Where there is nothing to evaluate, as of images without labels, the run ends with its losses and diagnostics.
    """
    spec = check_words(options)
    accelerator = accelerator_for(options)
    run = Run(output_folder(out))
    with run.alone() if accelerator.is_main_process else nullcontext():
        options = _as_begun(options, run)
        if accelerator.is_main_process:
            Run.open(out, recipe, options.as_dict(), resume, defaults_of(options))
        accelerator.wait_for_everyone()
        found = splits(options)
        seen = data_record(found, options.evaluate_with)
        if accelerator.is_main_process and not allow_other_data:
            run.check_data(seen)
        finished = run.result()
        check_agreed(accelerator, finished is not None)
        if finished is not None:
            return finished
        check_batch(options, found.train, accelerator.num_processes)
        check_held_out(options, found)
        data = found.train.prepared(options, views)
        check_sources(options, data)
        loop = Loop(accelerator, run, options, spec, data, build, seen)
        # The recipe has now declared whether it needs labels.
        try_negatives(options, labelled=found.train.labels is not None)
        loop.run_all(quiet)
        loop.finish(found, views)
    return run.result() or {}  # nothing on a machine that does not see the disk of the first rank


def _as_begun(options: TrainOptions, run: Run) -> TrainOptions:
    """With the weight decay that the run was begun with, if none is given; older versions had 1e-6 for all data."""
    if options.weight_decay is not None or not run.begun():
        return options
    return replace(options, weight_decay=run.whole_config()["options"].get("weight_decay"))


class Loop:
    """One training run: its modules, its position, and the steps between two checkpoints."""

    def __init__(
        self,
        accelerator: Accelerator,
        run: Run,
        options: TrainOptions,
        spec: BatchSpec,
        data: Items,
        build: Build,
        seen: dict[str, Any],
    ) -> None:
        self.accelerator, self.disk, self.options, self.spec = accelerator, run, options, spec
        self.data = data.to(accelerator.device)
        self.sampler = sampler_for(accelerator, options, spec, len(data))
        self.total = options.epochs * len(self.sampler)
        torch.manual_seed(options.seed)
        self.method = synchronised(build(options, self.data, self.total).to(accelerator.device), accelerator)
        encoder = encoder_record(self.method.recorded_encoder())
        if accelerator.is_main_process:
            run.check_encoder(encoder)
        self.update = self._prepare()
        self.monitor = read_monitor(options.monitor) if options.monitor_every else None
        if self.monitor is not None:
            check_monitor(options.monitor, self.data)
        self.fresh = PlanRefresher(self.sampler, spec, self.total, self._vectors, options.seed)
        self.adaptive = self._adaptive()
        self.epoch_loss = torch.zeros((), device=accelerator.device)
        self.seen = torch.zeros(len(data), dtype=torch.bool)  # which items were ever in a batch
        self.step, self.epoch, self.saved = 0, 0, 0
        self.epoch_seconds: list[float] = []
        self.begun_seconds = 0.0  # of an epoch that was saved in its middle
        self._restore()
        if accelerator.is_main_process:
            run.record_trained(encoder, data.described(), data.decay(options), seen, self.data.scale())
        check_agreed(accelerator, self.step)

    def _prepare(self) -> Updates:
        """Makes the optimiser, and wraps the encoder for its device and ranks."""
        options, accelerator = self.options, self.accelerator
        on_gpu = accelerator.device.type == "cuda"
        if on_gpu:
            torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
            self.method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.data.check_views(options)
        rows = torch.arange(len(self.data), device=self.data.ids.device)
        check_embeds(self.method.encoder, rows, self.data.plain, self.data.noun)
        parameters = [p for p in self.method.parameters() if p.requires_grad]
        optimizer = read_optimiser(options.optimizer).build(
            parameters, lr=options.learning_rate, weight_decay=self.data.decay(options), fused=on_gpu
        )
        self.encode, self.optimizer = accelerator.prepare(self.method.encoder, optimizer)
        if options.compile:
            # What an earlier run of this process has compiled holds its memory, slows every call by its guards, and
            # after eight of them nothing more would be compiled.
            torch.compiler.reset()
        self.encode = self._prepared(self.encode)
        self.method.prepare(self._prepared)
        inside = {id(p) for p in self.method.encoder.parameters()}
        outside = [p for p in parameters if id(p) not in inside]
        return Updates(accelerator, self.optimizer, parameters, outside, options, len(self.sampler))

    def _adaptive(self) -> list[adaptive]:
        losses = [part for part in self.method.modules() if isinstance(part, ContrastiveLoss)]
        every = [s for one in losses for s in (*one.negatives.schedules(), one.temperature, one.tau_plus)]
        return [schedule for schedule in every if isinstance(schedule, adaptive)]

    def _prepared(self, encoder: nn.Module) -> EncodeInputs:
        """An encoder as the options have it called: compiled, in chunks."""
        options, accelerator, encode = self.options, self.accelerator, encoder
        if options.compile:
            # On a GPU the step is bound by its launches, which CUDA graphs save: 1.6 s an epoch of CIFAR-10, not 3.4.
            graphs = accelerator.device.type == "cuda" and accelerator.num_processes == 1
            encode = torch.compile(encoder, mode="reduce-overhead" if graphs else "default")  # type: ignore[assignment]
        return GradCache(encode, options.encode_chunk, encoder) if options.encode_chunk else encode.__call__

    def run_all(self, quiet: bool) -> None:
        """Trains all epochs that are left."""
        if self.step == 0:
            self.fresh.before_training()
        silent, batch_size = quiet or not self.accelerator.is_main_process, self.options.batch_size
        if not silent and (chosen := self.method.chosen()):
            print(
                f"From the {len(self.data):,} {self.data.noun}s: {', '.join(f'{k} {n:,}' for k, n in chosen.items())}."
            )
        with progress_bar(silent, self.total, self.step, batch_size, noun=self.data.noun) as show:
            for epoch in range(self.epoch, self.options.epochs):
                self.begun = time.perf_counter() - self.begun_seconds
                for index in self._batches(epoch):
                    self._one_step(epoch, index, show)
                self._adapt()
                if self.accelerator.device.type == "cuda":
                    torch.cuda.synchronize(self.accelerator.device)
                self.epoch = epoch + 1
                self._count_seen()
                self.epoch_seconds.append(round(time.perf_counter() - self.begun, 4))
                self.begun_seconds = 0.0
                if self.epoch == 1 and self.accelerator.is_main_process:
                    self.disk.took(held_memory(self.accelerator.device))
                self._look()
                if self.epoch % self.options.save_every == 0 or self.epoch == self.options.epochs:
                    self._save()

    def _count_seen(self) -> None:
        """Marks the items of the epoch that has ended; its plan has the batches of all ranks."""
        for batch in self.sampler.plan:
            self.seen[torch.from_numpy(batch)] = True
        if self.epoch == SEEN_AFTER and self.share_seen < SEEN_SHARE and self.accelerator.is_main_process:
            noun = self.data.noun
            warnings.warn(
                f"Only {self.share_seen:.1%} of the {len(self.data)} {noun}s were in a batch in {SEEN_AFTER} epochs: "
                f'the others are not trained on. Use coverage="once" in --batches, or a smaller --batch-size if the '
                f"last, incomplete batch holds the same {noun}s in every epoch.",
                HardnegWarning,
                stacklevel=2,
            )

    @property
    def share_seen(self) -> float:
        return float(self.seen.double().mean())

    def _batches(self, epoch: int) -> Iterator[Tensor]:
        self.sampler.set_epoch(epoch)
        for batch in self.sampler:
            index = torch.tensor(batch)
            yield index.pin_memory().to(self.data.ids.device, non_blocking=True) if self.data.ids.is_cuda else index

    def _one_step(self, epoch: int, index: Tensor, show: Callable[[dict[str, float]], None]) -> None:
        options, method = self.options, self.method
        method.set_progress(self.step, self.total)
        views = joined(self.data.views(index, epoch, options.seed))
        labels = None if self.data.labels is None else self.data.labels[index]
        with self.accelerator.autocast():
            loss = method.loss_of(self.encode, Batch(views, index, labels, self.data.mined(index)))
        updated = self.update(loss, self.step)
        method.after_step()
        self.step += 1
        self.epoch_loss += method.recorded(loss).detach()
        self.fresh.after_step(self.step, epoch, method.harvest)
        if self.step % options.log_every == 0 or self.step == self.total:
            self._record(epoch, loss, show)
        every, in_the_middle = options.save_every_steps, self.step % len(self.sampler) > 0
        if every and updated and in_the_middle and self.step - self.saved >= every:
            self._save()

    def _look(self) -> None:
        """Records what the monitor says, and keeps the weights that it finds best."""
        if self.monitor is None or self.epoch % self.options.monitor_every or not self.accelerator.is_main_process:
            return
        value = self.monitor(self.data, Represent(self.method.encoder, self.epoch, self.options.seed))
        before = [record["monitor"] for record in self.disk.metrics() if record.get("monitor") is not None]
        self.disk.log(step=self.step, epoch=self.epoch - 1, monitor=value)
        if value > max(before, default=-math.inf):
            best = {"step": self.step, "epoch": self.epoch, "monitor": value}
            self.disk.save_best({**best, "method": self.method.state_dict()})

    def _adapt(self) -> None:
        """Adaptive schedules move by whether the mean loss of the epoch fell."""
        for schedule in self.adaptive:
            schedule.observe(-float(self.accelerator.reduce(self.epoch_loss, "mean")) / len(self.sampler))
        self.epoch_loss = torch.zeros((), device=self.accelerator.device)

    def _vectors(self) -> Tensor:
        """What the ranks plan from, the same on all of them."""
        if not self.spec.encode:
            return self.fresh.known(self.step)
        vectors = normalize(Represent(self.method.encoder).items(self.data), dim=-1)
        if self.accelerator.num_processes > 1:  # batch statistics that are not synchronised differ between ranks
            torch.distributed.broadcast(vectors, src=0)
        return vectors

    def _record(self, epoch: int, loss: Tensor, show: Callable[[dict[str, float]], None]) -> None:
        with torch.no_grad():
            found = self.method.diagnose().summary() | self.method.figures()
            # That of a user's method may be of the rank's own anchors.
            loss = self.accelerator.reduce(self.method.recorded(loss).detach(), "mean")
        record = {"step": self.step, "epoch": epoch, "loss": float(loss), **found}
        if self.options.schedule != "constant":
            record["learning_rate"] = self.update.learning_rate(self.step - 1)
        if not math.isfinite(record["loss"]):
            raise self._not_finite(f"loss={record['loss']}")
        show(record)
        if self.accelerator.is_main_process:
            self.disk.log(**record)

    def _not_finite(self, what: str) -> NotFinite:
        before = " (the last checkpoint is from before)" if self.disk.checkpoint_path.exists() else ""
        fix = f"lower --learning-rate, raise --temperature, or use --precision no{before}"
        return NotFinite("train", "finite losses and weights", f"{what} at step {self.step}", fix)

    def finish(self, splits: Splits, views: MakeImageViews | Augmentation | None = None) -> None:
        """Evaluates and ends the run; the first rank's work, for which the others wait."""
        if self.accelerator.is_main_process:
            figures = self.evaluate(splits, views)
            # Of all attempts, as far as they were saved.
            times = {"seconds": round(sum(self.epoch_seconds), 3), "epoch_seconds": self.epoch_seconds}
            self.disk.took(held_memory(self.accelerator.device))
            self.disk.finish(figures | times | {"steps": self.total, "epochs": self.options.epochs})
        self.accelerator.wait_for_everyone()

    def evaluate(self, splits: Splits, views: MakeImageViews | Augmentation | None = None) -> dict[str, Any]:
        """The figures of the trained encoder, and its embeddings beside them; the first rank's work."""
        records = [record for record in self.disk.metrics() if "loss" in record]
        figures: dict[str, Any] = {"share_seen": self.share_seen}
        if records:
            figures["final"] = final_of(records)
            figures["collapsed"] = self._warn_if_collapsed(figures["final"])
        once = replace(self.options, compile=False)  # what is seen once is not worth compiling for
        test, probe = (
            part and part.prepared(once, views).to(self.accelerator.device) for part in (splits.test, splits.probe)
        )
        represent = Represent(self.method.encoder, self.options.epochs, self.options.seed)
        found: Evaluation = test.evaluate(Splits(self.data, test, probe), represent, self.options)
        if found.arrays:
            write_atomically(self.disk.path / "embeddings.npz", sealing(lambda file: save_arrays(file, **found.arrays)))
        return figures | found.figures

    def _warn_if_collapsed(self, final: dict[str, Any]) -> bool:
        if collapsed := has_collapsed(final, self.method.collapsed_similarity):
            warnings.warn(
                f"The run in {self.disk.path} has collapsed: its embeddings are almost one (two of them have a mean "
                f"similarity of {final['uniform_hardness']:.3f}) and its loss of {final['loss']:.3f} is that of a "
                f"guess. Lower --learning-rate or --temperature, or look at the views (--augment).",
                HardnegWarning,
                stacklevel=2,
            )
        return collapsed

    def _save(self) -> None:
        if not all(bool(torch.isfinite(weights).all()) for weights in self.method.parameters()):
            raise self._not_finite("weights that are not")
        self.saved = self.step
        if not self.accelerator.is_main_process:
            return
        in_the_middle = self.step > self.epoch * len(self.sampler)
        self.disk.save(
            {
                "step": self.step,
                "epoch": self.epoch,
                "epoch_seconds": self.epoch_seconds,
                "method": self.method.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                **self.fresh.state(),
                "seen": self.seen,
                "plan": self.sampler.plan.state() if in_the_middle else None,
                "epoch_loss": self.epoch_loss,
                "begun_seconds": time.perf_counter() - self.begun if in_the_middle else 0.0,
                "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else {},
                "rng": torch.get_rng_state(),
                "rng_cuda": torch.cuda.get_rng_state_all() if self.accelerator.device.type == "cuda" else [],
            }
        )

    def _restore(self) -> None:
        state = self.disk.load(self.accelerator.device)
        if self.accelerator.is_main_process:
            self.disk.forget_after(*(state["step"], state["records"]) if state else (0, 0))
        if state is None:
            return
        self.step, self.epoch, self.epoch_seconds = state["step"], state["epoch"], state["epoch_seconds"]
        self._load_method(state["method"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.fresh.restore(state)
        if len(state["seen"]) == len(self.seen):  # not of other data
            self.seen = state["seen"].cpu()
        if state["plan"] is not None:
            self.sampler.resume(Plan.from_state(state["plan"]), self.step - self.epoch * len(self.sampler))
            self.epoch_loss, self.begun_seconds = state["epoch_loss"], state["begun_seconds"]
        self.saved = self.step
        torch.set_rng_state(state["rng"].cpu())
        if state["rng_cuda"]:
            torch.cuda.set_rng_state_all([one.cpu() for one in state["rng_cuda"]])
        if state["scaler"] and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def _load_method(self, state: dict[str, Any]) -> None:
        try:
            self.method.load_state_dict(state)
        except RuntimeError as error:  # such as a normaliser for each item of a data set that has grown
            what = "a method whose state fits its checkpoint"
            raise DataChanged("train", what, " ".join(str(error).split()), "begin a new run in another --out") from None
