"""A learnt temperature per instance (iSogCLR, Qiu et al. 2023); ``papers.isogclr`` builds the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, check_count, check_range
from hardneg.core.tensors import typed_as
from hardneg.losses.contrastive import ContrastiveLoss


class IndividualTemperatures(nn.Module):
    """A loss whose temperature is looked up by instance: ``loss(z1, z2, ids=ids)``.

    The temperatures are a parameter that is clamped to [low, high] on use. In a training loop of your own, give them to
    the optimiser in a group with ``weight_decay=0.0``, as ``hardneg train isogclr`` does: weight decay would change the
    temperatures of instances that no batch contains.

    Args:
        loss: The loss to call.
        num_instances: Size of the data set.
        start: Temperature of all instances at the beginning.
        low: Lowest temperature.
        high: Highest temperature.

    Example:
        >>> loss = IndividualTemperatures(ContrastiveLoss(objective="isogclr"), num_instances=100)
        >>> z1, z2 = torch.randn(2, 8, 4)
        >>> loss(z1, z2, ids=torch.arange(8)).ndim
        0
    """

    def __init__(
        self, loss: ContrastiveLoss, num_instances: int, start: float = 0.7, low: float = 0.05, high: float = 0.7
    ) -> None:
        super().__init__()
        num_instances = check_count("IndividualTemperatures", "num_instances", num_instances)
        check_range("IndividualTemperatures", "low", low, 1e-6, high)
        check_range("IndividualTemperatures", "start", start, low, high)
        self.loss, self.low, self.high = loss, low, high
        self.temperatures = nn.Parameter(torch.full((num_instances,), start))

    def forward(self, z1: Tensor, z2: Tensor, ids: Annotated[Tensor, "b"] | None = None, **options: Any) -> Tensor:
        """Compute the loss with the temperatures of these instances.

        Args:
            z1: First view, [b, d].
            z2: Second view, [b, d].
            ids: Positions in the data set, [b].
            **options: Further arguments of the loss.

        Raises:
            ArgumentError: If ``ids`` is missing.
        """
        if ids is None:
            raise ArgumentError("IndividualTemperatures", "the ids of the rows", "None", "pass ids=...")
        loss: Tensor = self.loss(z1, z2, ids, temperature=self.of(ids), **options)
        return loss

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> Any:
            """Return what ``forward`` returns."""

    def of(self, ids: Annotated[Tensor, "b"]) -> Annotated[Tensor, "b"]:
        """Return the temperatures of these instances, [b]."""
        return self.temperatures[ids].clamp(self.low, self.high)
