"""Planned batches in Lightning: refreshed during training, logged, and resumed exactly.

Works with ``lightning`` and ``pytorch_lightning``.

Example::

    sampler = hn.ProximityBatchSampler(len(data), batch_size=256)
    hard = HardBatches(sampler, lambda: encode(model, in_order), every=200)
    trainer = Trainer(callbacks=[hard], use_distributed_sampler=False)
    trainer.fit(model, DataLoader(data, batch_sampler=sampler))

See docs/guides/lightning.md. Methods appear in the order in which the trainer calls them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from hardneg.batching.graph import ProximityGraph
from hardneg.batching.plan import Plan
from hardneg.batching.refresh import Refresh, device_of
from hardneg.batching.sampler import PlannedBatchSampler
from hardneg.core.diagnose import LOG_PREFIX
from hardneg.core.errors import ArgumentError, argument_error, optional
from hardneg.core.types import Given, Keys


def _library() -> Any:
    """Return the imported (else the installed) one of the two libraries; each has its own Callback class."""
    names = ("lightning.pytorch", "pytorch_lightning")
    loaded = [name for name in names if name in sys.modules]
    installed = [name for name in names if find_spec(name.partition(".")[0])]
    return optional([*loaded, *installed, *names][0], "HardBatches", extra="lightning")


class HardBatches(_library().Callback):  # type: ignore[misc]
    """Callback that refreshes a planned sampler and saves its state in the checkpoint.

    Losses that are submodules of the LightningModule have their schedules advanced before each step, and their
    diagnostics are logged as ``hardneg/...`` whenever the trainer logs. The checkpoint contains the plan of the epoch,
    the graph or vectors in use, and the number of batches already trained on; a checkpoint without them cannot be
    resumed.

    Args:
        sampler: Batch sampler of the training loader. Plans cover all ranks; ``batch_size`` is per rank.
        vectors: Returns the vectors of all instances, [n, d], for example ``lambda: encode(model, loader)``. Every rank
            calls it, and all use the result of the first. Without it the data of the sampler never changes.
        every: Batches between refreshes. The first refresh is before the first epoch after the warm-up.
        **options: Further options of ``Refresh``.

    Raises:
        ArgumentError: ``sampler`` is not a planned sampler.
    """

    def __init__(
        self,
        sampler: PlannedBatchSampler,
        vectors: Callable[[], Given] | None = None,
        every: int = 100,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(sampler, PlannedBatchSampler):
            raise argument_error("HardBatches", "a planned sampler such as ProximityBatchSampler", "sampler", sampler)
        self.sampler, self.vectors = sampler, vectors
        self.refresh = None if vectors is None else Refresh(sampler, every, vectors, **options)
        self._next = (0, 0)  # epoch and batch at which a resumed run continues
        self._restored = False
        self._total: int | None = None
        self._losses: list[Any] = []
        self._hooks: list[Any] = []
        self._diagnosing = False
        self._diagnostics: dict[str, float] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Tell the sampler about the ranks."""
        if stage == "fit":
            self._restored, self._total = False, None
            self.sampler.spread(**trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0})

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the losses in the module, hook their diagnostics, and refresh if the first epoch needs it."""
        if self.refresh is not None and self.vectors is not None and trainer.world_size > 1:
            own = self.vectors  # rounding differs between ranks, which would lead to different plans
            self.refresh.vectors = lambda: trainer.strategy.broadcast(Keys(own()).vectors.cpu())
        losses = {name: each for name, each in pl_module.named_modules() if hasattr(each, "set_progress")}
        diagnosable = {name: loss for name, loss in losses.items() if hasattr(loss, "diagnose")}
        for name, loss in diagnosable.items():
            prefix = f"{LOG_PREFIX}{name}/" if len(diagnosable) > 1 else LOG_PREFIX
            self._hooks.append(loss.register_forward_hook(self._diagnose_hook(prefix), with_kwargs=True))
        self._losses = list(losses.values())
        self._first_refresh(
            self._next[0], pl_module
        )  # here, because loader workers request batches before training starts

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise ArgumentError if training resumes from a checkpoint without the state of this callback."""
        if trainer.ckpt_path and not self._restored:
            fix = "resume a checkpoint saved with this callback, or only load its weights and start a new run"
            what, got = "a checkpoint that contains its plan", f"ckpt_path={trainer.ckpt_path!r}"
            raise ArgumentError("HardBatches", what, got, fix)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Refresh before the first epoch after the warm-up."""
        self._first_refresh(trainer.current_epoch, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Advance the schedules, and decide whether this step is diagnosed."""
        if self._total is None:
            steps = trainer.estimated_stepping_batches
            self._total = int(steps) if math.isfinite(steps) else 0
        for loss in self._losses:
            loss.set_progress(trainer.global_step, self._total or None)
        self._diagnosing = (trainer.global_step + 1) % max(trainer.log_every_n_steps, 1) == 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the diagnostics, record the position, and refresh when due."""
        if self._diagnostics:
            pl_module.log_dict(self._diagnostics, on_step=True, on_epoch=False)
        self._diagnosing, self._diagnostics = False, {}
        epoch = trainer.current_epoch
        last = batch_idx + 1 >= trainer.num_training_batches
        self._next = (epoch + 1, 0) if last else (epoch, batch_idx + 1)
        if self._next[0] >= self.sampler.warmup_epochs:
            self._refresh(pl_module, epoch * len(self.sampler) + batch_idx + 1)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove the hooks from the losses."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the plan and the data of the sampler for the checkpoint."""
        epoch, position = self._next
        return {
            "epoch": epoch,
            "position": position,
            "plan": self.sampler.plan.state(),
            "data": _saved_data(self.sampler.data),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the sampler so that the next batch is the one that the interrupted run would have used."""
        plan = Plan.from_state(state_dict["plan"])
        self._next, self._restored = (state_dict["epoch"], state_dict["position"]), True
        self.sampler.data = _loaded_data(state_dict["data"])
        if plan.epoch == state_dict["epoch"]:
            self.sampler.resume(plan, state_dict["position"])
        else:
            self.sampler.set_epoch(state_dict["epoch"])

    def _first_refresh(self, epoch: int, module: nn.Module) -> None:
        """Refresh if the sampler has no data yet and the warm-up is over."""
        if self.sampler.data is None and epoch >= self.sampler.warmup_epochs:
            self._refresh(module, 0)

    def _refresh(self, module: nn.Module, step: int) -> None:
        """Refresh the sampler if ``step`` is due, without changing the random numbers of the training steps."""
        if self.refresh is None or step % self.refresh.every:
            return
        device = device_of(module)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            self.refresh.now(step)

    def _diagnose_hook(self, prefix: str) -> Callable[..., None]:
        """Return a forward hook that diagnoses a loss in the steps that are logged."""

        def hook(loss: Any, args: Any, kwargs: Any, output: Any) -> None:
            if self._diagnosing:
                found = loss.diagnose(*args, **kwargs).summary()
                self._diagnostics |= {prefix + name: value for name, value in found.items() if not math.isnan(value)}

        return hook


# Checkpoints hold only tensors, numbers and text, so that they load with ``weights_only=True``.


def _saved_data(data: Any) -> Any:
    """Return a graph as a dict of tensors; vectors as they are."""
    if isinstance(data, ProximityGraph):
        return {"neighbours": data.neighbours, "similarities": data.similarities, "name": data.name}
    return data


def _loaded_data(saved: Any) -> Any:
    """Invert `_saved_data`."""
    return ProximityGraph(**saved) if isinstance(saved, dict) else saved
