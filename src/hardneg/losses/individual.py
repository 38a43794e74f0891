"""A learnt temperature per instance (iSogCLR, Qiu et al. 2023); ``papers.isogclr`` builds the loss.

With h_j = s_ij - s_ii, the loss of anchor i is tau (log u + rho), where u is the mean of e^(h_j / tau) over the
negatives of the data set. As in SogCLR, u is a running mean over the batches that contain the anchor, so that small
batches have the gradient of the data set:

    d / d h_j   = e^(h_j / tau) / (n u)
    d / d tau   = log u + rho - mean_j(e^(h_j / tau) h_j / tau) / u
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, check_count, check_range
from hardneg.core.objectives import ISogCLR
from hardneg.core.tensors import typed_as
from hardneg.core.types import NEVER
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.state.partition import Partition


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
        gamma: Share of the new value in the running mean u; 1 for the mean over the batch alone. Less than 1 needs
            a loss with the objective ``isogclr``, which then returns a surrogate whose gradient is right; ``last`` has
            the real loss of the batch.

    Raises:
        ArgumentError: If a number is out of range, or ``gamma`` is below 1 for another objective.

    Example:
        >>> loss = IndividualTemperatures(ContrastiveLoss(objective="isogclr"), num_instances=100)
        >>> z1, z2 = torch.randn(2, 8, 4)
        >>> loss(z1, z2, ids=torch.arange(8)).ndim
        0
    """

    last: dict[str, Tensor]

    def __init__(
        self,
        loss: ContrastiveLoss,
        num_instances: int,
        start: float = 0.7,
        low: float = 0.05,
        high: float = 0.7,
        gamma: float = 1.0,
    ) -> None:
        super().__init__()
        num_instances = check_count("IndividualTemperatures", "num_instances", num_instances)
        check_range("IndividualTemperatures", "low", low, 1e-6, high)
        check_range("IndividualTemperatures", "start", start, low, high)
        self.loss, self.low, self.high = loss, low, high
        self.temperatures = nn.Parameter(torch.full((num_instances,), start))
        self.normalisers: Partition | None = None
        self.last = {}
        if gamma != 1.0:
            if not isinstance(loss.objective, ISogCLR):
                raise ArgumentError("IndividualTemperatures", "a loss of the objective isogclr with gamma", repr(gamma))
            self.normalisers, loss.reduction = Partition(num_instances, gamma), "none"

    def forward(
        self,
        z1: Tensor,
        z2: Tensor,
        ids: Annotated[Tensor, "b"] | None = None,
        *,
        documents: Annotated[Tensor, "b"] | None = None,
        **options: Any,
    ) -> Tensor:
        """Compute the loss with the temperatures of these instances.

        Args:
            z1: First view, [b, d].
            z2: Second view, [b, d].
            ids: Positions in the data set, [b].
            documents: Document of each instance, [b]; instances of one document are never negatives of each other. By
                default their positions.
            **options: Further arguments of the loss.

        Raises:
            ArgumentError: If ``ids`` is missing.
        """
        if ids is None:
            raise ArgumentError("IndividualTemperatures", "the ids of the rows", "None", "pass ids=...")
        own = self.of(ids)
        loss: Tensor = self.loss(z1, z2, ids if documents is None else documents, temperature=own, **options)
        if self.normalisers is None:
            return loss
        views = len(loss) // len(ids)  # 2 if both views are anchors
        return self._over_data(loss, own.repeat(views), ids.repeat(views), self.normalisers)

    def _over_data(self, loss: Tensor, tau: Tensor, ids: Tensor, normalisers: Partition) -> Tensor:
        """Return a surrogate with the gradient of the loss over the data set.

        Args:
            loss: Loss of each anchor over the batch, tau (log g + rho), [n].
            tau: Temperature of each anchor, [n].
            ids: Position of each anchor in the data set, [n].
            normalisers: The running means u.
        """
        objective: Any = self.loss.objective
        rho, empty = objective.rho, loss.detach() == 0.0  # anchors without a negative cost exactly 0
        log_g = torch.where(empty, NEVER, loss.detach() / tau.detach() - rho)
        log_u = normalisers.mixed(ids, log_g).to(loss.dtype)
        share = (log_g - log_u).exp()  # g / u
        # The gradient of the first part is g / u times that of log g, that of the second log u + rho by tau.
        surrogate = share * (loss - tau * (log_g + rho)) + tau * (log_u + rho)
        self.last = {"real_loss": loss.detach().mean()}
        return torch.where(empty, 0.0, surrogate).mean()

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> Any:
            """Return what ``forward`` returns."""

    def of(self, ids: Annotated[Tensor, "b"]) -> Annotated[Tensor, "b"]:
        """Return the temperatures of these instances, [b]."""
        return self.temperatures[ids].clamp(self.low, self.high)
