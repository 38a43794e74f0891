"""Supervised contrastive learning: all images of the anchor's label are positives (SupCon, SCL, H-SCL).

SupCon       negatives="OtherLabel()"              positives_in_denominator="all"
SCL          negatives="OtherLabel()"              num_negatives="candidates", reduction="pairs"
H-SCL(beta)  negatives="OtherLabel() * Tilt(1.0)"  num_negatives="candidates", reduction="pairs"
HCL, Fig. 4  negatives="Tilt(1.0)"                 same_label_negatives=True: labels choose positives only

``four_losses`` records the quantities of H-SCL's Fig. 4 and 5, independent of the trained loss: the losses of UCL,
SCL, H-UCL and H-SCL, all with positives by label, and the share of anchors for which Assumption 1 holds.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from hardneg.core.distributed import gather
from hardneg.core.scoring import two_views
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.negatives import OtherLabel, Uniform, assumption_1
from hardneg.training.data.items import Items
from hardneg.training.loop.records import COLLAPSED_WITH_LABELS
from hardneg.training.options import SupervisedOptions
from hardneg.training.recipes.simclr import SimCLR


class Supervised(SimCLR):
    """SimCLR with positives by label.

    Args:
        options: Options of the recipe.
        data: Items with labels.
        total: Number of steps of the run.
    """

    arguments: ClassVar[dict[str, Any]] = {"positives": "label"}
    collapsed_similarity: ClassVar[float] = COLLAPSED_WITH_LABELS

    def __init__(self, options: SupervisedOptions, data: Items, total: int) -> None:
        data.labelled("supervised")
        super().__init__(options, data, total)
        # A plain dict, so that these are not submodules: they share the schedules of the loss, which the loop adapts.
        self.four = four_losses(self.loss) if options.four_losses else {}

    def figures(self) -> dict[str, float]:
        """Return the four losses and the share of anchors for which Assumption 1 holds, if they are requested."""
        if not self.four:
            return {}
        first, second = gather(self.first), gather(self.second)
        batch = (first.vectors.detach(), second.vectors.detach(), first.ids, first.labels)
        found = {name: float(loss(*batch)) for name, loss in self.four.items()}
        unlabelled = self.four["loss_h_ucl"]
        scores = two_views(*batch[:2], unlabelled.temperature_now(), *batch[2:])
        hardening = unlabelled.negatives.at(unlabelled.step or 0, unlabelled.total)
        return found | {"assumption": float(assumption_1(scores, hardening))}

    def set_progress(self, step: int, total: int) -> None:
        """Evaluate the schedules of the trained and of the four recorded losses."""
        super().set_progress(step, total)
        for loss in self.four.values():
            loss.set_progress(step, total)


def four_losses(trained: ContrastiveLoss) -> dict[str, ContrastiveLoss]:
    """Build the losses of UCL, SCL, H-UCL and H-SCL.

    They differ in two ways: whether images of the anchor's label are excluded from the negatives, and whether the
    negatives are hardened. The hardening is that of the trained loss, its negatives without the factor
    ``OtherLabel()``.

    Args:
        trained: The loss that is trained, for its hardening and temperature.

    Returns:
        The losses by the name of their figure, such as "loss_h_scl".
    """
    hardening = math.prod((one for one in trained.negatives.factors if one != OtherLabel()), start=Uniform())
    negatives = {
        "loss_ucl": Uniform(),
        "loss_scl": OtherLabel(),
        "loss_h_ucl": hardening,
        "loss_h_scl": OtherLabel() * hardening,
    }
    same: dict[str, Any] = {"same_label_negatives": True, "num_negatives": "candidates", "reduction": "pairs"}
    return {
        name: ContrastiveLoss(one, trained.temperature, positives="label", normalize=False, **same)
        for name, one in negatives.items()
    }
