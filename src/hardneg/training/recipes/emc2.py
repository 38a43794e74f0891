"""EMC2 (Yau et al. 2024): SimCLR against all images of the data set, with negatives drawn by Markov chains.

One chain per view of each image walks towards the softmax over all negatives. A chain state outside the batch repels
with its last embedding; with ``forget`` no embeddings are kept, and such a state only enters the normaliser.
"""

from __future__ import annotations

from torch import Tensor

from hardneg.losses.global_softmax import EMC2
from hardneg.state.pools import Bank
from hardneg.training.data.items import Items
from hardneg.training.options import EMC2Options
from hardneg.training.recipes.sogclr import GlobalMethod


class EMC2Method(GlobalMethod):
    """SimCLR with negatives from Markov chains over the data set.

    Args:
        options: Options of the recipe.
        data: The training items; one chain per view of each.
        total: Number of steps of the run.
    """

    def __init__(self, options: EMC2Options, data: Items, total: int) -> None:
        super().__init__(options, data)
        self.num_steps = options.num_steps
        bank = None if options.forget else Bank(len(data), options.dim)
        self.loss = EMC2(len(data), self.temperature, options.burn_in, remember=bank, seed=options.seed)

    def loss_of_views(self, z1: Tensor, z2: Tensor, ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """Advance the chains by the images of the batch and return the surrogate loss of two views, each [b, d]."""
        # The images of a batch differ, so each anchor has 2b - 2 candidates; counting them would synchronise the GPU.
        self.loss.num_steps = self.num_steps or 2 * len(z1) - 2
        return super().loss_of_views(z1, z2, ids, None)
