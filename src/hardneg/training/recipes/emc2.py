"""EMC2 (Yau et al. 2024): SimCLR against all images of the data set, with negatives drawn by Markov chains.

One chain per view of each image walks towards the softmax over all negatives (eq. 9); the images that it visits after
its burn-in replace the softmax in the gradient (eq. 11). It proposes images of the batch and its own state, or with
``proposals="data set"`` any image (Algorithm 1 as printed). A state outside the batch repels with its last embedding;
with ``reencode`` it is encoded again and gets a gradient; with ``forget`` no embeddings are kept, and such a state only
enters the normaliser.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.core.distributed import spread
from hardneg.core.types import Keys
from hardneg.losses.global_softmax import EMC2
from hardneg.state.pools import Bank
from hardneg.training.data.inputs import joined
from hardneg.training.data.items import Items
from hardneg.training.loop.method import Batch, EncodeInputs
from hardneg.training.options import EMC2Options
from hardneg.training.recipes.instance import encode_all
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
        self.options, self.data, self.num_steps = options, data, options.num_steps
        self.of_data_set = options.proposals == "data set"
        self.can_replay &= not (self.of_data_set or options.reencode)
        bank = None if options.forget or options.reencode else Bank(len(data), options.dim)
        self.loss: EMC2 = EMC2(
            len(data),
            self.temperature,
            options.burn_in,
            proposals=options.proposals,
            remember=bank,
            seed=options.seed,
        )
        self.steps_an_epoch, self.epoch = max(1, total // options.epochs), 0

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """Store embeddings of all images before the first step if chains propose them; then compute the loss."""
        self.encode: EncodeInputs = lambda inputs: encode(inputs)  # a function: a module would be registered again
        banks = (self.loss.remember_first, self.loss.remember)
        for view, bank in enumerate(banks if self.of_data_set else ()):
            if bank is not None and not len(bank.keys()):
                self._fill(encode, bank, view)
        return super().loss_of(encode, batch)

    def _fill(self, encode: EncodeInputs, bank: Bank, view: int) -> None:
        """Store one view of every image."""
        every = torch.arange(len(self.data))

        def push(keys: Keys) -> None:
            bank.push(keys.changed(vectors=normalize(keys.vectors, dim=-1)))

        encode_all(encode, self.data, self.options, every, push, view=view, epoch=self.options.epochs)

    def loss_of_views(self, z1: Tensor, z2: Tensor, ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """Advance the chains by the images of the batch and return the surrogate loss of two views, each [b, d]."""
        # The images of a batch differ, so each anchor has 2b - 2 candidates; counting them would synchronise the GPU.
        self.loss.num_steps = self.num_steps or 2 * len(z1) - 2
        if self.options.reencode:
            loss: Tensor = self.loss(z1, z2, ids, encode=self.encoded)
            return loss
        return super().loss_of_views(z1, z2, ids, None)

    def encoded(self, ids: Tensor, views: Tensor) -> Tensor:
        """Return unit vectors of these views of items under the current encoder, with a gradient, [len(ids), d].

        Args:
            ids: Positions of the items.
            views: 0 for the first view of an item, 1 for the second.
        """
        order = views.argsort(stable=True)  # first views before second ones, so that each part is one batch of views

        def encode(part: Tensor) -> Tensor:
            sides = [ids[part[views[part] == view]] for view in (0, 1)]
            made = [self.data.views(i, self.epoch, self.options.seed)[view] for view, i in enumerate(sides) if len(i)]
            return normalize(self.encode(joined(made)).float(), dim=-1)

        return spread(encode, order)[order.argsort()]

    def set_progress(self, step: int, total: int) -> None:
        """Set the epoch, which selects the views of states that are encoded again."""
        self.epoch = self.options.epoch_of_views(step // self.steps_an_epoch)
