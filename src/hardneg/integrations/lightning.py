"""Planned batches in Lightning: refreshed, logged, and resumed exactly; for ``lightning`` and ``pytorch_lightning``.

sampler = hn.ProximityBatchSampler(len(data), batch_size=256)
hard = HardBatches(sampler, lambda: encode(model, in_order), every=200)
trainer = Trainer(callbacks=[hard], use_distributed_sampler=False)
trainer.fit(model, DataLoader(data, batch_sampler=sampler))
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
from hardneg.core.errors import ArgumentError, argument_error, optional
from hardneg.core.types import Given, Keys


def _library() -> Any:
    """The one that the script has imported, or else the one that is installed: each has a Callback of its own."""
    names = ("lightning.pytorch", "pytorch_lightning")
    loaded = [name for name in names if name in sys.modules]
    installed = [name for name in names if find_spec(name.partition(".")[0])]
    return optional([*loaded, *installed, *names][0], "HardBatches", extra="lightning")


class HardBatches(_library().Callback):  # type: ignore[misc]
    """Keeps a planned sampler fresh, and saves what it needs to resume in the checkpoint.

    sampler: that of the training loader. It is planned for all ranks; ``batch_size`` is per rank.
    vectors: gives the vectors of all instances, [n, d]: ``lambda: encode(model, loader)``. Every rank calls it and
        takes the result of the first. Without it the sampler's data stays as it is.
    every: batches between refreshes. The first is before the first epoch that is not a warm-up.
    The other options are those of ``Refresh``.

    Losses that are modules of the LightningModule get their schedules' progress before each step, and what they
    ``diagnose`` is logged as ``hardneg/...`` whenever the trainer logs. The checkpoint has the plan of the epoch, the
    graph or vectors in use, and the number of batches trained on; a checkpoint without them cannot be resumed.
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
            raise argument_error("HardBatches", "a planned sampler, as ProximityBatchSampler is", "sampler", sampler)
        self.sampler, self.vectors = sampler, vectors
        self.refresh = None if vectors is None else Refresh(sampler, every, vectors, **options)
        self._next = (0, 0)  # epoch and batch
        self._restored = False
        self._total: int | None = None
        self._losses: list[Any] = []
        self._hooks: list[Any] = []
        self._looking = False
        self._seen: dict[str, float] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._restored, self._total = False, None
            self.sampler.spread(**trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0})

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.refresh is not None and self.vectors is not None and trainer.world_size > 1:
            own = self.vectors  # rounding may differ between ranks, and so would their plans
            self.refresh.vectors = lambda: trainer.strategy.broadcast(Keys(own()).vectors.cpu())
        losses = {name: each for name, each in pl_module.named_modules() if hasattr(each, "set_progress")}
        looked_at = {name: loss for name, loss in losses.items() if hasattr(loss, "diagnose")}
        for name, loss in looked_at.items():
            prefix = f"hardneg/{name}/" if len(looked_at) > 1 else "hardneg/"
            self._hooks.append(loss.register_forward_hook(self._look(prefix), with_kwargs=True))
        self._losses = list(losses.values())
        self._first_refresh(self._next[0], pl_module)  # here, since workers draw batches before training starts

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.ckpt_path and not self._restored:
            fix = "resume one that was saved with this callback, or load its weights and begin a new run"
            what, got = "a checkpoint with its plan", f"ckpt_path={trainer.ckpt_path!r}"
            raise ArgumentError("HardBatches", what, got, fix)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._first_refresh(trainer.current_epoch, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._total is None:
            steps = trainer.estimated_stepping_batches
            self._total = int(steps) if math.isfinite(steps) else 0
        for loss in self._losses:
            loss.set_progress(trainer.global_step, self._total or None)
        self._looking = (trainer.global_step + 1) % max(trainer.log_every_n_steps, 1) == 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._seen:
            pl_module.log_dict(self._seen, on_step=True, on_epoch=False)
        self._looking, self._seen = False, {}
        epoch = trainer.current_epoch
        last = batch_idx + 1 >= trainer.num_training_batches
        self._next = (epoch + 1, 0) if last else (epoch, batch_idx + 1)
        if self._next[0] >= self.sampler.warmup_epochs:
            self._refresh(pl_module, epoch * len(self.sampler) + batch_idx + 1)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def state_dict(self) -> dict[str, Any]:
        epoch, position = self._next
        return {
            "epoch": epoch,
            "position": position,
            "plan": self.sampler.plan.state(),
            "data": _saved_data(self.sampler.data),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        plan = Plan.from_state(state_dict["plan"])
        self._next, self._restored = (state_dict["epoch"], state_dict["position"]), True
        self.sampler.data = _loaded_data(state_dict["data"])
        if plan.epoch == state_dict["epoch"]:
            self.sampler.resume(plan, state_dict["position"])
        else:
            self.sampler.set_epoch(state_dict["epoch"])

    def _first_refresh(self, epoch: int, module: nn.Module) -> None:
        if self.sampler.data is None and epoch >= self.sampler.warmup_epochs:
            self._refresh(module, 0)

    def _refresh(self, module: nn.Module, step: int) -> None:
        """In the middle of training: the random numbers of the steps stay as they would be without it."""
        if self.refresh is None or step % self.refresh.every:
            return
        device = device_of(module)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            self.refresh.now(step)

    def _look(self, prefix: str) -> Callable[..., None]:
        def hook(loss: Any, args: Any, kwargs: Any, output: Any) -> None:
            if self._looking:
                found = loss.diagnose(*args, **kwargs).summary()
                self._seen |= {prefix + name: value for name, value in found.items() if not math.isnan(value)}

        return hook


# Tensors, numbers and text only, so that checkpoints load with ``weights_only=True``.


def _saved_data(data: Any) -> Any:
    if isinstance(data, ProximityGraph):
        return {"neighbours": data.neighbours, "similarities": data.similarities, "name": data.name}
    return data


def _loaded_data(saved: Any) -> Any:
    return ProximityGraph(**saved) if isinstance(saved, dict) else saved
