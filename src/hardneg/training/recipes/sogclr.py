"""SogCLR (Yuan et al. 2022): SimCLR against all images of the data set, through a running normaliser for each.

The gradient is that of the global loss, the surrogate's value means nothing: the loss that is recorded is the real one
of the batch. Other ``negatives`` than uniform ones say which candidates count and how.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import normalize

from hardneg.core.diagnose import Diagnosis
from hardneg.core.distributed import gather
from hardneg.core.types import Keys
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.losses.global_softmax import EMC2, SogCLR
from hardneg.training.data.images import ImageData
from hardneg.training.loop import train
from hardneg.training.method import Batch, Encode, Method
from hardneg.training.options import SogCLROptions, TrainOptions
from hardneg.training.recipes.simclr import harvest_of
from hardneg.training.setup import encoder_for


class GlobalMethod(Method):
    """A loss over the whole data set: every rank computes that of all gathered rows, and so keeps the same state."""

    loss: SogCLR | EMC2

    def __init__(self, options: TrainOptions, data: ImageData) -> None:
        super().__init__()
        options.check()
        self.encoder = encoder_for(options, data)
        self.temperature = float(options.temperature)  # not a schedule, as the options have checked
        self.of_batch = ContrastiveLoss(options.negatives, self.temperature, normalize=False)

    def loss_of(self, encode: Encode, batch: Batch) -> Tensor:
        z1, z2 = normalize(encode(batch.views).float(), dim=-1).chunk(2)  # [b, d] each
        self.first, self.second = (gather(Keys(z, batch.ids, batch.labels)) for z in (z1, z2))
        return self.surrogate()

    @abstractmethod
    def surrogate(self) -> Tensor:
        """What has the gradient of the global loss, of the gathered batch."""

    def recorded(self, loss: Tensor) -> Tensor:
        return self.loss.last["real_loss"]

    def diagnose(self) -> Diagnosis:
        return self.of_batch.diagnose(self.first.vectors, self.second.vectors, self.first.ids, self.first.labels)

    def harvest(self) -> Keys:
        return harvest_of(self.first, self.second)


class SogCLRMethod(GlobalMethod):
    def __init__(self, options: SogCLROptions, data: ImageData, total: int) -> None:
        super().__init__(options, data)
        self.negatives = self.of_batch.negatives  # the same object, so that an adaptive schedule moves both
        self.loss: SogCLR = SogCLR(len(data), self.temperature, options.gamma, negatives=self.negatives)

    def surrogate(self) -> Tensor:
        first, second = self.first, self.second
        loss: Tensor = self.loss(first.vectors, second.vectors, ids=first.ids, labels=first.labels)
        return loss

    def set_progress(self, step: int, total: int) -> None:
        self.loss.negatives = self.negatives.at(step, total)
        self.of_batch.set_progress(step, total)


def main(options: SogCLROptions, out: str | Path, **how: Any) -> dict[str, Any]:
    return train("sogclr", SogCLRMethod, options, out, **how)
