"""A recorded step computes what the step does: also for the first ones, and for inputs of another shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hardneg.training.evaluation.cuda_graph import InOneLaunch
from hardneg.training.evaluation.embeddings import linear_predict

pytestmark = pytest.mark.gpu


def weights_after(num_steps: int, recorded: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(1000, 16, generator=generator).cuda(), torch.randint(4, (1000,), generator=generator).cuda()
    layer = nn.Linear(16, 4).cuda()
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(layer.parameters(), 0.01, fused=True, capturable=True)

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(layer(x[rows]), y[rows]).backward()
        optimizer.step()

    one_step = InOneLaunch(step) if recorded else step
    for number in range(num_steps):
        size = 100 if number % 4 else 60 if number else 100
        one_step(torch.randint(1000, (size,), generator=generator).cuda())
    return torch.cat([layer.weight.flatten(), layer.bias]).detach()


@pytest.mark.parametrize("num_steps", [1, 3, 4, 5, 8, 40])
def test_weights_are_those_of_plain_steps(num_steps: int) -> None:
    plain, recorded = (weights_after(num_steps, how) for how in (False, True))
    assert torch.allclose(plain, recorded, rtol=1e-5, atol=1e-7)
    assert bool(plain.any())


def test_the_probe_is_that_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (1500,), generator=generator)
    x = torch.randn(1500, 8, generator=generator) + 1.5 * nn.functional.one_hot(labels, 8)
    split = x[:1000], labels[:1000], x[1000:], labels[1000:]
    here, there = (
        (linear_predict(*(part.to(device) for part in split[:3]), epochs=20).cpu() == split[3]).double().mean().item()
        for device in ("cpu", "cuda")
    )
    assert 0.5 < here < 0.95
    assert there == pytest.approx(here, abs=0.01), "the batches are drawn by another generator"
