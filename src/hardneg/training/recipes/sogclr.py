"""SogCLR (Yuan et al. 2022): SimCLR against all images of the data set, through a running normaliser for each.

The gradient is that of the global loss, the surrogate's value means nothing: the loss that is recorded is the real one
of the batch. Other ``negatives`` than uniform ones say which candidates count and how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from hardneg.core.diagnose import Diagnosis
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.losses.global_softmax import SogCLR
from hardneg.losses.replayed import Replayed
from hardneg.training.data.items import Items
from hardneg.training.method import EncodeInputs
from hardneg.training.options import SogCLROptions, TrainOptions
from hardneg.training.recipes.simclr import SimCLR


class GlobalMethod(SimCLR):
    """A loss over the whole data set: every rank computes that of all gathered rows, and so keeps the same state."""

    everywhere: ClassVar[bool] = True
    arguments: ClassVar[dict[str, Any]] = {"gather": False}

    def __init__(self, options: TrainOptions, data: Items) -> None:
        super().__init__(options, data, 0)
        self.of_batch: ContrastiveLoss = self.loss  # the subclass has a global loss in its place
        self.temperature = float(options.temperature)  # not a schedule, as the options have checked
        self.can_replay = options.compile  # the loss depends on the batch and its state alone
        self.replayed: Replayed | None = None

    def prepare(self, how: Callable[[nn.Module], EncodeInputs]) -> None:
        self.replayed = Replayed(self.loss) if self.can_replay else None

    def of_views(self, z1: Tensor, z2: Tensor, ids: Tensor | None, labels: Tensor | None) -> Tensor:
        return (self.replayed or self.loss)(z1, z2, ids, labels)

    def recorded(self, loss: Tensor) -> Tensor:
        real: Tensor = self.loss.last["real_loss"]
        return real

    def diagnose(self) -> Diagnosis:
        return self.of_batch.diagnose(*self.last)

    def set_progress(self, step: int, total: int) -> None:
        """The global loss has no schedules of its own."""


class SogCLRMethod(GlobalMethod):
    def __init__(self, options: SogCLROptions, data: Items, total: int) -> None:
        super().__init__(options, data)
        self.negatives = self.of_batch.negatives  # the same object, so that an adaptive schedule moves both
        self.can_replay &= self.negatives.closed_form() is not None  # others may have schedules, or draw
        self.loss = SogCLR(len(data), self.temperature, options.gamma, negatives=self.negatives)

    def set_progress(self, step: int, total: int) -> None:
        self.loss.negatives = self.negatives.at(step, total)
        self.of_batch.set_progress(step, total)
