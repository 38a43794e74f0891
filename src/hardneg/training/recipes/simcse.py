"""SimCSE with any negatives (Gao et al. 2021): two dropout passes of each text, the first against the second ones.

One direction, as in the authors' code; the positive is in the denominator. HCL and DCL are this recipe with other
``negatives`` and ``tau_plus``; ProSampler with a graph that is built once is
``--batches "proximity(warmup=0, encode=True, refresh=1000000)"``.
"""

from __future__ import annotations

from typing import Any

from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.training.recipes.simclr import SimCLR
from hardneg.training.setup import loss_for


class SimCSE(SimCLR):
    def loss_for(self, options: Any) -> ContrastiveLoss:
        return loss_for(options, views="cross")
