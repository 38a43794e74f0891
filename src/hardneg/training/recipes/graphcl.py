"""GraphCL with any negatives (You et al. 2020): the first view of each graph against the second views of the batch.

One direction, and the positive is not in the denominator, as in the authors' code; the paper's equation 3 has it
there (``positives_in_denominator="own"``), and ProSampler's equation 14 as well.
"""

from __future__ import annotations

from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.training.options import GraphCLOptions
from hardneg.training.recipes.simclr import SimCLR
from hardneg.training.setup import loss_for


class GraphCL(SimCLR):
    def loss_for(self, options: GraphCLOptions) -> ContrastiveLoss:
        return loss_for(options, views="cross")
