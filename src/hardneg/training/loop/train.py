"""The training loop that all recipes share: devices, ranks, checkpoints, records and the final evaluation.

A recipe contributes a ``Method`` (``training/loop/method.py``): the encoder to train and the loss of a batch. The data
is ``Items`` of any kind (``training/data/items.py``). Views are a pure function of (seed, epoch, id, view) and batches
of (seed, epoch, graph), so a killed run resumes bit by bit from its last checkpoint, and several ranks together see the
batches that one process would see.

Read ``train`` first, the entry point of ``hardneg train`` and ``hn.train``: it checks the options, opens the run
directory and drives a ``Loop``. ``Loop.run_all`` trains the remaining epochs; ``Loop.finish`` evaluates and writes
result.json.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardneg.batching.plan import Plan
from hardneg.batching.refresh import eval_mode
from hardneg.batching.spec import BatchSpec
from hardneg.core.errors import DataChanged, HardnegError, HardnegWarning, NotFinite
from hardneg.core.schedules import adaptive
from hardneg.io.embeddings import save_arrays
from hardneg.io.files import output_folder, write_atomically
from hardneg.io.sealed import sealing
from hardneg.io.terminal import progress_bars
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.losses.grad_cache import GradCache
from hardneg.state.momentum import AveragedWeights
from hardneg.training.augmentation.augment import MakeImageViews
from hardneg.training.augmentation.views import Augmentation
from hardneg.training.data.inputs import joined
from hardneg.training.data.items import Evaluation, Items, Splits
from hardneg.training.encoders import Represent, check_embeds
from hardneg.training.evaluation.measures import BEFORE
from hardneg.training.evaluation.monitors import check_held_out, check_monitor, read_monitor
from hardneg.training.loop.checks import check_batch, check_sources, check_words, try_negatives, with_estimate
from hardneg.training.loop.data_record import data_record, encoder_record
from hardneg.training.loop.loading import Loading, num_workers
from hardneg.training.loop.method import Batch, Build, EncodeInputs
from hardneg.training.loop.optimisers import Updates, read_optimiser
from hardneg.training.loop.parts import (
    PlanRefresher,
    accelerator_for,
    check_agreed,
    memory_in_use,
    progress_bar,
    sampler_for,
    splits,
    synchronised,
)
from hardneg.training.loop.records import NUM_BINS, Moments, Seconds, before_training, final_of, has_collapsed
from hardneg.training.loop.runs import Run
from hardneg.training.options.base import TrainOptions, defaults_of

if TYPE_CHECKING:
    from accelerate import Accelerator

SEEN_AFTER, SEEN_SHARE = 3, 0.95
"""After this many epochs, warn if a smaller share of the items was in a batch.

Uniform batches reach it: their dropped, incomplete last batch holds other items in every epoch."""


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
    """Train a recipe, evaluate its encoder and write a run directory.

    A finished run is not trained again: with ``resume`` its figures are returned. Without labels there may be no
    accuracies, only losses and diagnostics.

    Args:
        recipe: Name of the recipe, stored in config.json.
        build: Constructor of the method: ``build(options, data, total_steps)``.
        options: Options of the recipe.
        out: The run directory.
        views: Replaces ``options.augment`` for images: ``views(images, ids, epoch, seed)`` returns two [b, c, h, w].
        resume: Continue the run in ``out`` if there is one.
        allow_other_data: Continue even if the items or labels differ from those that the run was started with.
        quiet: Print nothing and show no progress bar.

    Returns:
        The content of result.json; empty on a machine that does not share the disk of the first rank.

    Raises:
        ArgumentError: If options are wrong or contradict each other or the data; a new directory is removed again.
        FileError: If ``out`` holds another run, or a run with other options.
        DataChanged: If the data differs from that of the resumed run and ``allow_other_data`` is not set.
        NotFinite: If a loss or a weight is NaN or infinite.
    """
    spec = check_words(options)
    accelerator = accelerator_for(options)
    run = Run(output_folder(out))
    with run.exclusive() if accelerator.is_main_process else nullcontext():
        if accelerator.is_main_process:
            Run.open(out, recipe, options.as_dict(), resume, defaults_of(options))
        accelerator.wait_for_everyone()
        found = splits(options)
        options, seen = with_estimate(options, found.train, data_record(found, options.evaluate_with))
        if accelerator.is_main_process and not allow_other_data:
            run.check_data(seen)
        check_agreed(accelerator, (finished := run.result()) is not None)
        if finished is not None:
            return finished
        check_batch(options, found.train, accelerator.num_processes)
        check_held_out(options, found)
        data = found.train.prepared(options, views)
        check_sources(options, data)
        loop = Loop(accelerator, run, options, spec, data, build, seen)
        # Only after the recipe is built, which raises a clearer error if it requires labels.
        try_negatives(options, labelled=found.train.labels is not None)
        loop.run_all(quiet)
        with progress_bars(quiet or not accelerator.is_main_process) as bars:
            bars("evaluate", None)
            loop.finish(found, views)
    return run.result() or {}  # empty on a machine that does not share the disk of the first rank


class Loop:
    """One training run: its modules, its position, and the steps between two checkpoints.

    The constructor builds the method, wraps it for device and ranks, and restores the newest checkpoint.

    Args:
        accelerator: Device, precision and ranks.
        run: The run directory.
        options: Options of the recipe.
        spec: How batches are planned, from ``--batches``.
        data: The training items, prepared with their augmentation.
        build: Constructor of the method.
        seen: Description of the data for config.json, by which a resumed run recognises other data.
    """

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
        self.accelerator, self.run, self.options, self.spec = accelerator, run, options, spec
        self.data, self.build = data.to(accelerator.device), build
        self.sampler = sampler_for(accelerator, options, spec, data)
        self.total = options.epochs * len(self.sampler)
        self.last = min(self.total, options.max_steps or self.total)  # schedules still run over all epochs
        torch.manual_seed(options.seed)
        self.method = synchronised(build(options, self.data, self.total).to(accelerator.device), accelerator)
        encoder = encoder_record(self.method.recorded_encoder())
        self.initial_weights = encoder["initial_weights"]
        if accelerator.is_main_process:
            run.check_encoder(encoder)
        self.average = AveragedWeights(self.method.encoder, options.ema) if options.ema else None
        self.update = self._prepare()
        self.monitor = read_monitor(options.monitor) if options.monitor_every else None
        if self.monitor is not None:
            check_monitor(options.monitor, self.data)
        self.moments = Moments.of(options.record, options.record_at).within(self.last)
        self.seconds = Seconds()
        self.refresher = PlanRefresher(self.sampler, spec, self.last, self._vectors, options.seed)
        self.adaptive = self._adaptive()
        self.epoch_loss = torch.zeros((), device=accelerator.device)
        self.seen = torch.zeros(len(data), dtype=torch.bool)  # [n], True for items that were in a batch
        self.step, self.epoch, self.saved, self.updated = 0, 0, 0, False
        self.epoch_seconds: list[float] = []
        self.begun_seconds = 0.0  # time already spent on an epoch that was resumed in its middle
        self.loading = Loading(data, self.sampler, options, self._may_plan, accelerator.device.type == "cuda")
        self._restore()
        if accelerator.is_main_process:
            run.record_trained(encoder, data.described(), data.decay(options), seen, self.data.scale())
        check_agreed(accelerator, self.step)

    def _prepare(self) -> Updates:
        """Build the optimiser and wrap the encoder for its device and ranks."""
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
            # Code compiled for an earlier run of this process keeps its memory, slows every call by its guards, and
            # counts towards torch's limit of eight recompilations, after which nothing more is compiled.
            torch.compiler.reset()
        self.encode = self._wrapped(self.encode)
        self.method.prepare(self._wrapped)
        inside = {id(p) for p in self.method.encoder.parameters()}
        outside = [p for p in parameters if id(p) not in inside]
        return Updates(accelerator, self.optimizer, parameters, outside, options, len(self.sampler))

    def _adaptive(self) -> list[adaptive]:
        """Return the adaptive schedules of all losses of the method."""
        losses = [part for part in self.method.modules() if isinstance(part, ContrastiveLoss)]
        every = [s for one in losses for s in (*one.negatives.schedules(), one.temperature, one.tau_plus)]
        return [schedule for schedule in every if isinstance(schedule, adaptive)]

    def _wrapped(self, encoder: nn.Module) -> EncodeInputs:
        """Wrap an encoder as the options say: compiled, encoding in chunks."""
        options, accelerator, encode = self.options, self.accelerator, encoder
        if options.compile:
            # On a GPU kernel launches bound the step, which CUDA graphs avoid: an epoch of CIFAR-10 in 1.6 s, not 3.4.
            graphs = accelerator.device.type == "cuda" and accelerator.num_processes == 1
            encode = torch.compile(encoder, mode="reduce-overhead" if graphs else "default")  # type: ignore[assignment]
        return GradCache(encode, options.encode_chunk, encoder) if options.encode_chunk else encode.__call__

    def run_all(self, quiet: bool) -> None:
        """Train all remaining epochs.

        Args:
            quiet: Print nothing and show no progress bar, as on all ranks but the first.
        """
        if self.step == 0:
            self.begun = time.perf_counter()
            with self.seconds.part("graph"):
                self.refresher.before_training()
            self.begun_seconds = time.perf_counter() - self.begun
        silent, batch_size = quiet or not self.accelerator.is_main_process, self.options.batch_size
        if not silent and (chosen := self.method.chosen()):
            values = ", ".join(f"{name} {value:,}" for name, value in chosen.items())
            print(f"Chosen for {len(self.data):,} {self.data.noun}s: {values}.", file=sys.stderr)
        ranks = self.accelerator.num_processes
        if not silent and (note := self.data.estimate(batch_size // ranks, num_workers(self.options))):
            print(f"Data: {note}", file=sys.stderr)
        if not silent and (init := getattr(self.method.recorded_encoder(), "init", None)):
            print(f"Initial weights: {init}.", file=sys.stderr)
        with closing(self.loading), progress_bar(silent, self.last, self.step, batch_size) as show:
            for epoch in range(self.epoch, self.options.epochs):
                if self._out_of_patience() or self.step == self.last:
                    break
                self.begun = time.perf_counter() - self.begun_seconds
                self._run_epoch(epoch, show)
                self._adapt("loss", -self.epoch_loss / len(self.sampler))
                self.epoch_loss = torch.zeros((), device=self.accelerator.device)
                if self.accelerator.device.type == "cuda":
                    torch.cuda.synchronize(self.accelerator.device)
                self.epoch = epoch + 1
                self._count_seen()
                self.epoch_seconds.append(round(time.perf_counter() - self.begun, 4))
                self.begun_seconds = 0.0
                if self.epoch == 1 and self.accelerator.is_main_process:
                    self.run.record_memory(memory_in_use(self.accelerator.device))
                self._run_monitor()
                due = self.epoch % self.options.save_every == 0 or self.step == self.last
                if due or self._out_of_patience():
                    self._save()

    def _out_of_patience(self) -> bool:
        """Return whether the last ``--patience`` values of the monitor were no better than the best one before them."""
        if not self.options.patience:
            return False
        stop = torch.zeros((), device=self.accelerator.device)
        if self.accelerator.is_main_process:  # the only rank that reads the records
            values = self._monitored()
            best = values.index(max(values)) if values else 0
            stop += len(values) - best > self.options.patience
        return bool(self.accelerator.reduce(stop, "sum") > 0)

    def _monitored(self) -> list[float]:
        """Return all values of the monitor so far."""
        return [record["monitor"] for record in self.run.metrics() if record.get("monitor") is not None]

    @property
    def evaluated(self) -> nn.Module:
        """The encoder that is evaluated: the average of the weights with ``--ema``, else the trained one."""
        return self.method.encoder if self.average is None else self.average.module

    def _count_seen(self) -> None:
        """Mark the items of the epoch that has ended as seen; the plan holds the batches of all ranks."""
        trained = self.step - (self.epoch - 1) * len(self.sampler)
        for batch in islice(self.sampler.plan, trained):
            self.seen[torch.from_numpy(batch)] = True
        if self.epoch == SEEN_AFTER and self.share_seen < SEEN_SHARE and self.accelerator.is_main_process:
            noun = self.data.noun
            warnings.warn(
                f"Only {self.share_seen:.1%} of the {len(self.data)} {noun}s were in a batch in the "
                f'first {SEEN_AFTER} epochs; the model is not trained on the others. Use coverage="once" in --batches, '
                f"or a smaller --batch-size if the last, incomplete batch holds the same {noun}s in every epoch.",
                HardnegWarning,
                stacklevel=2,
            )

    @property
    def share_seen(self) -> float:
        """Share of the training items that were in at least one batch."""
        return float(self.seen.double().mean())

    def _run_epoch(self, epoch: int, show: Callable[[dict[str, float] | None], None]) -> None:
        """Train on the remaining batches of an epoch; if one cannot be loaded, save a checkpoint before raising."""
        batches = iter(self.loading.epoch(epoch))
        while self.step < self.last:
            with self.seconds.part("views" if self.data.fetches else "sampling"):
                try:
                    batch = next(batches, None)
                except HardnegError:
                    if self.updated:  # gradients of batches that are not complete are not saved
                        self._save()
                    raise
            if batch is None:
                return
            here = self.data.ids.device
            index = batch.positions.pin_memory() if here.type == "cuda" else batch.positions
            self._one_step(epoch, index.to(here, non_blocking=True), show, batch.fetched)

    def _may_plan(self, epoch: int, batch: int) -> bool:
        """Return whether the segment that begins at a batch of an epoch can be planned at this step."""
        return self.refresher.may_plan(self.step - epoch * len(self.sampler), batch)

    def _one_step(
        self,
        epoch: int,
        index: Tensor,
        show: Callable[[dict[str, float] | None], None],
        fetched: Tensor | None = None,
    ) -> None:
        """Train on one batch: encode, compute the loss, update, and record or save when due."""
        options, method = self.options, self.method
        method.set_progress(self.step, self.total)
        with self.seconds.part("views"):
            prepared = () if fetched is None else (fetched,)
            views = joined(self.data.views(index, options.epoch_of_views(epoch), options.seed, *prepared))
        labels = None if self.data.labels is None else self.data.labels[index]
        with self.accelerator.autocast():
            loss = method.loss_of(self.encode, Batch(views, index, labels, self.data.mined(index)))
        self.updated = self.update(loss, self.step)
        if self.average is not None and self.updated:
            self.average.update_parameters(method.encoder)
        method.after_step()
        self.step += 1
        self.epoch_loss += (recorded := method.recorded(loss).detach())
        self._adapt("step", -recorded)
        with self.seconds.part("graph"):
            self.refresher.after_step(self.step, epoch, method.harvest)
        due = self.step % options.log_every == 0 or self.step == self.last
        with self.seconds.part("recording"):
            show(self._record(epoch, loss) if due else None)
            if self.moments.due(self.step):
                self._record_moment(epoch)
        every, in_the_middle = options.save_every_steps, self.step % len(self.sampler) > 0
        if every and self.updated and in_the_middle and self.step - self.saved >= every:
            self._save()

    def _run_monitor(self) -> None:
        """Evaluate the monitor when due: record its value, keep the best weights, and adapt schedules to it."""
        if self.monitor is None or self.epoch % self.options.monitor_every:
            return
        total = torch.zeros((), device=self.accelerator.device)
        value = self.monitor(self.data, Represent(self.evaluated, self.epoch, self.options.seed, spread=True))
        if self.accelerator.is_main_process:
            before = self._monitored()
            self.run.log(step=self.step, epoch=self.epoch - 1, monitor=value)
            if value > max(before, default=-math.inf):
                best = {"step": self.step, "epoch": self.epoch, "monitor": value}
                self.run.save_best({**best, **self._weights()})
            total += value * self.accelerator.num_processes  # the other ranks add 0 to the mean
        self._adapt("monitor", total)

    def _weights(self) -> dict[str, Any]:
        """Return the state of the method, and the averaged weights if there are any."""
        average = {} if self.average is None else {"average": self.average.state_dict()}
        return {"method": self.method.state_dict(), **average}

    def _adapt(self, on: str, metric: Tensor) -> None:
        """Advance the adaptive schedules that observe this metric, which grows as training improves.

        Args:
            on: "loss", "step" or "monitor".
            metric: The metric of this rank, a scalar; its mean over the ranks is observed.
        """
        schedules = [schedule for schedule in self.adaptive if schedule.on == on]
        observed = float(self.accelerator.reduce(metric, "mean")) if schedules else 0.0
        for schedule in schedules:
            schedule.observe(observed)

    def _vectors(self) -> Tensor:
        """Return unit vectors [n, d] of all items from which batches are planned, equal on all ranks."""
        if not self.spec.encode:
            return self.refresher.known(self.step)
        with self.seconds.part("encoding"):
            return normalize(Represent(self.method.encoder, spread=True).items(self.data), dim=-1)

    def _record(self, epoch: int, loss: Tensor) -> dict[str, float]:
        """Record loss and diagnostics of the last step; raise ``NotFinite`` if the loss is NaN or infinite."""
        with torch.no_grad():
            found = self.method.diagnose().summary() | self.method.figures()
            # A user's method may compute its loss from the rank's own anchors, so average over the ranks.
            loss = self.accelerator.reduce(self.method.recorded(loss).detach(), "mean")
        record = {"step": self.step, "epoch": epoch, "loss": float(loss), **found}
        if self.options.schedule != "constant":
            record["learning_rate"] = self.update.learning_rate(self.step - 1)
        if not math.isfinite(record["loss"]):
            raise self._not_finite(f"loss={record['loss']}")
        if self.accelerator.is_main_process:
            self.run.log(**record)
        return record

    def _record_moment(self, epoch: int) -> None:
        """Record what ``--record`` asks for: similarities of the last batch, the exact loss over the data set."""
        found: dict[str, Any] = {}
        with torch.no_grad():
            if "similarities" in self.moments.kinds:
                found["similarities"] = self.method.diagnose(NUM_BINS).similarities()
            if "global_loss" in self.moments.kinds:
                found["global_loss"] = float(self.method.global_loss(*self._views_of_all(epoch)))
        if self.accelerator.is_main_process:
            self.run.log(step=self.step, epoch=epoch, **found)

    def _views_of_all(self, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return unit vectors of both views of all items, [n, d] each, in evaluation mode, and their positions."""
        encoder, every, parts = self.method.encoder, torch.arange(len(self.data), device=self.data.ids.device), []
        epoch = self.options.epoch_of_views(epoch)
        with eval_mode(encoder):
            for index in every.split(512):  # type: ignore[no-untyped-call]
                z = encoder(joined(self.data.views(index, epoch, self.options.seed)))
                parts.append(torch.stack(normalize(z.float(), dim=-1).chunk(2)))
        return *torch.cat(parts, dim=1), every

    def _not_finite(self, what: str) -> NotFinite:
        before = " (the last checkpoint was written before that)" if self.run.checkpoint_path.exists() else ""
        fix = f"lower --learning-rate, raise --temperature, or use --precision no{before}"
        return NotFinite("train", "finite losses and weights", f"{what} at step {self.step}", fix)

    def finish(self, splits: Splits, views: MakeImageViews | Augmentation | None = None) -> None:
        """Evaluate and end the run; all ranks encode, and the first one writes.

        Args:
            splits: Training, test and probe items as they were loaded.
            views: The augmentation with which ``train`` was called, if any.
        """
        figures = self.evaluate(splits, views)
        if self.accelerator.is_main_process:
            # Summed over all attempts of a resumed run, as far as they were saved.
            total = sum(self.epoch_seconds)
            times = {"seconds": round(total, 3), "epoch_seconds": self.epoch_seconds}
            times["seconds_of"] = self.seconds.of_run(total)
            self.run.record_memory(memory_in_use(self.accelerator.device))
            self.run.finish(figures | times | {"steps": self.step, "epochs": self.epoch})
        self.accelerator.wait_for_everyone()

    def evaluate(self, splits: Splits, views: MakeImageViews | Augmentation | None = None) -> dict[str, Any]:
        """Compute the final figures of the trained encoder and write embeddings.npz.

        Args:
            splits: Training, test and probe items as they were loaded.
            views: The augmentation with which ``train`` was called, if any.

        Returns:
            ``share_seen``, the means over the last records (``final``), ``collapsed``, the figures of the evaluation,
            and under ``before_training`` those of the encoder before training.
        """
        figures: dict[str, Any] = {"share_seen": self.share_seen}
        first = self.accelerator.is_main_process
        if first and (records := [record for record in self.run.metrics() if "loss" in record]):
            figures["final"] = final_of(records)
            figures["collapsed"] = self._warn_if_collapsed(figures["final"], records)
        once = replace(self.options, compile=False)  # compiling does not pay off for a single pass
        test, probe = (
            part and part.prepared(once, views).to(self.accelerator.device) for part in (splits.test, splits.probe)
        )
        represent = Represent(self.evaluated, self.options.epochs, self.options.seed, spread=True)
        splits = Splits(self.data, test, probe)
        found: Evaluation = test.evaluate(splits, represent, self.options)
        if (initial := self._initial_encoder()) is not None:
            before = test.evaluate(splits, replace(represent, encoder=initial), self.options).figures
            figures[BEFORE] = before_training(before, found.figures)
        if first and found.arrays:
            write_atomically(self.run.path / "embeddings.npz", sealing(lambda file: save_arrays(file, **found.arrays)))
        return figures | found.figures

    def _initial_encoder(self) -> nn.Module | None:
        """Build the encoder before training again, or return None if the method builds another one each time."""
        with torch.random.fork_rng():
            torch.manual_seed(self.options.seed)
            method = self.build(self.options, self.data, self.total).to(self.accelerator.device)
        same = encoder_record(method.recorded_encoder())["initial_weights"] == self.initial_weights
        return method.encoder if same else None

    def _warn_if_collapsed(self, final: dict[str, Any], records: list[dict[str, Any]]) -> bool:
        if collapsed := has_collapsed(final, self.method.collapsed_similarity, records):
            warnings.warn(
                f"The run in {self.run.path} has collapsed: its embeddings are almost identical (the mean similarity "
                f"of two of them is {final['uniform_hardness']:.3f}) and its loss of {final['loss']:.3f} is that of "
                f"random guessing. Lower --learning-rate or --temperature, or check the augmentation (--augment).",
                HardnegWarning,
                stacklevel=2,
            )
        return collapsed

    def _save(self) -> None:
        """Write a checkpoint, unless a weight is NaN or infinite; all ranks check, the first one writes."""
        if not all(bool(torch.isfinite(weights).all()) for weights in self.method.parameters()):
            raise self._not_finite("NaN or infinite weights")
        self.saved = self.step
        if not self.accelerator.is_main_process:
            return
        in_the_middle = self.step > self.epoch * len(self.sampler)
        self.run.save(
            {
                "step": self.step,
                "epoch": self.epoch,
                "epoch_seconds": self.epoch_seconds,
                "epoch_seconds_of": self.seconds.spent,
                **self._weights(),
                "optimizer": self.optimizer.state_dict(),
                **self.refresher.state(),
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
        """Restore the newest checkpoint, if there is one, and drop the records written after it."""
        state = self.run.load(self.accelerator.device)
        if self.accelerator.is_main_process:
            self.run.forget_after(*(state["step"], state["records"]) if state else (0, 0))
        if state is None:
            return
        self.step, self.epoch, self.epoch_seconds = state["step"], state["epoch"], state["epoch_seconds"]
        self.seconds = Seconds(state["epoch_seconds_of"])
        self._load_method(state["method"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.refresher.restore(state)
        if len(state["seen"]) == len(self.seen):  # unless the run continues with other data
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
        """Load the state of the method; raise ``DataChanged`` if its shapes do not fit."""
        try:
            self.method.load_state_dict(state)
        except RuntimeError as error:  # for example, one normaliser per item of a data set that has grown
            what = "a method whose state fits its checkpoint"
            raise DataChanged("train", what, " ".join(str(error).split()), "begin a new run in another --out") from None
