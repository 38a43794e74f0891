"""A loss with the call of open_clip's ClipLoss, with any negatives.

loss = NegativesLoss("Tilt(1.0)")     # ClipLoss(local_loss=True, gather_with_grad=True, rank=..., world_size=...) there
loss(**model(images, texts), output_dict=True)["contrastive_loss"]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hardneg.core.distributed import several_ranks
from hardneg.core.errors import argument_error
from hardneg.core.objectives import Sigmoid
from hardneg.integrations.ranks import distinct_ids, of_all_ranks
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.negatives import Negatives, Uniform

_fixed = {
    "temperature": "it is 1 / logit_scale, which the loss is called with",
    "views": "leave it out: images meet texts",
    "normalize": "leave it out: features are of unit norm",
}


class NegativesLoss(nn.Module):
    """The mean of images against texts and texts against images; ``Uniform()`` is ClipLoss.

    gather: whether the candidates are those of all ranks, with gradient. A rank has its own anchors only: its value is
        that of ``ClipLoss(local_loss=True, gather_with_grad=True)``, and so is the gradient.
    The other options are those of ContrastiveLoss; the temperature is 1 / logit_scale.
    """

    def __init__(self, negatives: Negatives | str = Uniform(), *, gather: bool = True, **options: Any) -> None:
        super().__init__()
        for name in _fixed.keys() & options.keys():
            raise argument_error("NegativesLoss", f"no {name}", name, options[name], _fixed[name])
        self.gather = gather
        self.loss = ContrastiveLoss(negatives, temperature=1.0, views="cross", normalize=False, **options)

    def set_progress(self, step: int, total: int | None = None) -> None:
        """Evaluates the schedules."""
        self.loss.set_progress(step, total)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        ids: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Features are of unit norm, as the models give them. Rows with equal ``ids`` are never negatives.

        ``logit_bias`` is the bias of ``objective="sigmoid"``, in place of one given with it. In a softmax a bias on all
        logits cancels: no other objective reads it, and its gradient is 0.
        """
        temperature = 1.0 / torch.as_tensor(logit_scale)
        if logit_bias is not None and isinstance(self.loss._objective, Sigmoid):
            self.loss._objective = replace(self.loss._objective, bias=logit_bias)
        gathers = self.gather and several_ranks()
        own = distinct_ids(image_features) if gathers and ids is None else ids

        def loss(one: Tensor, other: Tensor) -> Tensor:
            pool = of_all_ranks(other, own) if gathers and own is not None else None
            return self.loss(one, other, ids=own, pool=pool, temperature=temperature)  # type: ignore[no-any-return]

        total = (loss(image_features, text_features) + loss(text_features, image_features)) / 2
        if logit_bias is not None:
            total = total + 0.0 * logit_bias.sum()  # DistributedDataParallel wants a gradient for every parameter
        return {"contrastive_loss": total} if output_dict else total
