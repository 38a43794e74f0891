"""A loss that replaces open_clip's ClipLoss and SigLipLoss and accepts any negatives.

Example::

    loss = NegativesLoss("Tilt(1.0)")  # instead of ClipLoss(local_loss=True, gather_with_grad=True, ...)
    loss(**model(images, texts), output_dict=True)["contrastive_loss"]

See docs/guides/lightly-and-open-clip.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hardneg.core.distributed import several_ranks
from hardneg.core.errors import argument_error
from hardneg.core.objectives import Sigmoid
from hardneg.core.tensors import typed_as
from hardneg.integrations.ranks import distinct_ids, of_all_ranks
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.negatives import Negatives, Uniform

_fixed = {
    "temperature": "it is 1 / logit_scale, an argument of the call",
    "views": "leave it out: images are always compared with texts",
    "normalize": "leave it out: features already have unit norm",
}


class NegativesLoss(nn.Module):
    """Mean of the losses of images against texts and of texts against images.

    With ``Uniform()`` it equals ClipLoss. The temperature is 1 / logit_scale, passed in each call.

    Args:
        negatives: Distribution over negatives, as an object or in the grammar.
        gather: Use the features of all ranks as candidates, with gradient. Anchors are those of this rank, so value and
            gradient equal those of ``ClipLoss(local_loss=True, gather_with_grad=True)``.
        **options: Further options of ``ContrastiveLoss``, except ``temperature``, ``views`` and ``normalize``.

    Raises:
        ArgumentError: One of the three fixed options is given.
    """

    def __init__(self, negatives: Negatives | str = Uniform(), *, gather: bool = True, **options: Any) -> None:
        super().__init__()
        for name in _fixed.keys() & options.keys():
            raise argument_error("NegativesLoss", f"no {name}", name, options[name], _fixed[name])
        self.gather = gather
        self.loss = ContrastiveLoss(negatives, temperature=1.0, views="cross", normalize=False, **options)

    def set_progress(self, step: int, total: int | None = None) -> None:
        """Set the schedules to their values at ``step`` of ``total`` steps."""
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
        """Return the loss of a batch; the arguments are named like the outputs of open_clip's models.

        Args:
            image_features: [b, d], of unit norm.
            text_features: [b, d], of unit norm.
            logit_scale: 1 / temperature.
            logit_bias: Bias of ``objective="sigmoid"``; replaces one given with the objective. A bias on all logits
                cancels in a softmax, so other objectives ignore it and its gradient is 0.
            output_dict: Return ``{"contrastive_loss": loss}`` instead of the loss.
            ids: [b]; rows with equal ids are never negatives of each other.
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

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> Any:
            """Return what ``forward`` returns."""
