"""EMC2 (Yau et al. 2024): SimCLR against all images of the data set, whose negatives Markov chains draw.

One chain for each view of each image walks towards the softmax over all negatives. A state outside the batch repels
with its last embedding; with ``forget`` none are kept, and it only counts in the normaliser.
"""

from __future__ import annotations

from torch import Tensor

from hardneg.losses.global_softmax import EMC2
from hardneg.state.pools import Bank
from hardneg.training.data.items import Items
from hardneg.training.options import EMC2Options
from hardneg.training.recipes.sogclr import GlobalMethod


class EMC2Method(GlobalMethod):
    def __init__(self, options: EMC2Options, data: Items, total: int) -> None:
        super().__init__(options, data)
        self.num_steps = options.num_steps
        bank = None if options.forget else Bank(len(data), options.dim)
        self.loss = EMC2(len(data), self.temperature, options.burn_in, remember=bank, seed=options.seed)

    def of_views(self, z1: Tensor, z2: Tensor, ids: Tensor | None, labels: Tensor | None) -> Tensor:
        # Each anchor has as many candidates, since the images of a batch differ: they need not be counted on a GPU.
        self.loss.num_steps = self.num_steps or 2 * len(z1) - 2
        return super().of_views(z1, z2, ids, None)
