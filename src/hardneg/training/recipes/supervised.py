"""Supervised contrastive learning: all images of the anchor's label are positives (SupCon, SCL, H-SCL).

SupCon       negatives="OtherLabel()"              positives_in_denominator="all"
SCL          negatives="OtherLabel()"              num_negatives="candidates", reduction="pairs"
H-SCL(beta)  negatives="OtherLabel() * Tilt(1.0)"  num_negatives="candidates", reduction="pairs"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.training.data.items import Items
from hardneg.training.loop import train
from hardneg.training.options import SupervisedOptions
from hardneg.training.recipes.simclr import SimCLR
from hardneg.training.setup import loss_for


class Supervised(SimCLR):
    def __init__(self, options: SupervisedOptions, data: Items, total: int) -> None:
        data.labelled("supervised")
        super().__init__(options, data, total)

    def loss_for(self, options: SupervisedOptions) -> ContrastiveLoss:
        return loss_for(options, positives="label")


def main(options: SupervisedOptions, out: str | Path, **how: Any) -> dict[str, Any]:
    return train("supervised", Supervised, options, out, **how)
