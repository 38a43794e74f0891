"""SigLIP through the loss for open_clip, whose models hand their bias over; open_clip itself is not needed."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from hardneg.integrations.open_clip import NegativesLoss


@pytest.mark.parametrize("impl", ["dense", "streamed"])
@pytest.mark.parametrize("objective", ["sigmoid", "sigmoid(bias=-3.0)"])
def test_the_bias_of_the_model_is_that_of_the_sigmoids(objective: str, impl: str) -> None:
    random = torch.Generator().manual_seed(0)
    image, text = (normalize(torch.randn(7, 5, generator=random, dtype=torch.float64), dim=1) for _ in range(2))
    scale, bias = torch.tensor([14.0, -10.0], dtype=torch.float64).unbind()
    leaves = [each.requires_grad_() for each in (image, text, scale.clone(), bias.clone())]
    loss = NegativesLoss(objective=objective, impl=impl)
    sign = 2.0 * torch.eye(7, dtype=torch.float64) - 1.0
    for _ in range(2):  # of another bias at the next step
        found = loss(*leaves[:3], logit_bias=leaves[3])
        logits = leaves[2] * leaves[0] @ leaves[1].T + leaves[3]
        wanted = -logsigmoid(sign * logits).sum() / 7  # open_clip's SigLipLoss
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves))
        leaves[3] = torch.tensor(-4.0, dtype=torch.float64, requires_grad=True)
