"""SimCLR with any negatives (Chen et al. 2020): two views of each image, both against all others of the batch.

HCL, DCL, tilts, rings and thresholds are this recipe with other ``negatives`` and ``tau_plus``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.core.diagnose import Diagnosis
from hardneg.core.distributed import gather
from hardneg.core.types import Keys
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.training.data.images import ImageData
from hardneg.training.loop import train
from hardneg.training.method import Batch, Encode, Method
from hardneg.training.numbers import number_of
from hardneg.training.options import SimCLROptions
from hardneg.training.setup import encoder_for


def harvest_of(first: Keys, second: Keys) -> Keys:
    """Both views of each image, as one vector of unit norm."""
    return Keys(torch.cat([first.vectors, second.vectors], dim=1).detach() * 0.5**0.5, first.ids)


class SimCLR(Method):
    def __init__(self, options: SimCLROptions, data: ImageData, total: int) -> None:
        super().__init__()
        self.encoder = encoder_for(options, data)
        self.loss = self.loss_for(options)

    def loss_for(self, options: Any) -> ContrastiveLoss:
        return ContrastiveLoss(
            options.negatives,
            number_of(options.temperature),
            number_of(options.tau_plus),
            num_negatives=options.num_negatives,
            positives_in_denominator=options.positives_in_denominator,
            objective=options.objective,
            generate=options.generate,
            normalize=False,
            gather=True,
        )

    def loss_of(self, encode: Encode, batch: Batch) -> Tensor:
        self.encoded(encode, batch)
        loss: Tensor = self.loss(self.first.vectors, self.second.vectors, self.first.ids, self.first.labels)
        return loss

    def encoded(self, encode: Encode, batch: Batch) -> None:
        """Both views of the rank's part of the batch."""
        z1, z2 = normalize(encode(batch.views).float(), dim=-1).chunk(2)  # [b, d] each
        self.first, self.second = (Keys(z, batch.ids, batch.labels) for z in (z1, z2))

    def diagnose(self) -> Diagnosis:
        return self.loss.diagnose(self.first.vectors, self.second.vectors, self.first.ids, self.first.labels)

    def harvest(self) -> Keys:
        return gather(harvest_of(self.first, self.second))

    def set_progress(self, step: int, total: int) -> None:
        self.loss.set_progress(step, total)


def main(options: SimCLROptions, out: str | Path, **how: Any) -> dict[str, Any]:
    return train("simclr", SimCLR, options, out, **how)
