"""SogCLR (Yuan et al. 2022): SimCLR against all images of the data set, through a running normaliser for each.

The gradient is that of the global loss, the surrogate's value means nothing: the loss that is recorded is the real one
of the batch. Other ``negatives`` than uniform ones say which candidates count and how.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from hardneg.core.diagnose import Diagnosis
from hardneg.core.distributed import gather
from hardneg.core.types import Keys
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.losses.global_softmax import SogCLR
from hardneg.training.data.images import ImageData
from hardneg.training.loop import train
from hardneg.training.options import SogCLROptions, TrainOptions
from hardneg.training.recipes.simclr import SimCLR
from hardneg.training.setup import loss_for


class GlobalMethod(SimCLR):
    """A loss over the whole data set: every rank computes that of all gathered rows, and so keeps the same state."""

    def __init__(self, options: TrainOptions, data: ImageData) -> None:
        options.check()
        super().__init__(options, data, 0)
        self.of_batch = self.loss  # the subclass has a global loss in its place
        self.temperature = float(options.temperature)  # not a schedule, as the options have checked

    def loss_for(self, options: Any) -> ContrastiveLoss:
        return loss_for(options, gather=False)

    def shared(self, keys: Keys) -> Keys:
        return gather(keys)

    def harvest(self) -> Keys:
        return self.both()

    def recorded(self, loss: Tensor) -> Tensor:
        real: Tensor = self.loss.last["real_loss"]
        return real

    def diagnose(self) -> Diagnosis:
        first, second = self.first, self.second
        found: Diagnosis = self.of_batch.diagnose(first.vectors, second.vectors, first.ids, first.labels)
        return found

    def set_progress(self, step: int, total: int) -> None:
        """The global loss has no schedules of its own."""


class SogCLRMethod(GlobalMethod):
    def __init__(self, options: SogCLROptions, data: ImageData, total: int) -> None:
        super().__init__(options, data)
        self.negatives = self.of_batch.negatives  # the same object, so that an adaptive schedule moves both
        self.loss = SogCLR(len(data), self.temperature, options.gamma, negatives=self.negatives)

    def set_progress(self, step: int, total: int) -> None:
        self.loss.negatives = self.negatives.at(step, total)
        self.of_batch.set_progress(step, total)


def main(options: SogCLROptions, out: str | Path, **how: Any) -> dict[str, Any]:
    return train("sogclr", SogCLRMethod, options, out, **how)
