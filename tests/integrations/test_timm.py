"""Models of timm are plain modules: encoded in order, trained on planned batches."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import hardneg as hn
from hardneg.batching import Refresh, encode
from support.libraries import library

timm: Any = library("timm")


def test_a_model_of_timm_on_planned_batches() -> None:
    images = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(images, torch.arange(24))
    model = timm.create_model("test_resnet", num_classes=0)
    sampler = hn.ProximityBatchSampler(24, 8, restart=0.2)
    refresh = Refresh(sampler, 2, lambda: encode(model, DataLoader(data, batch_size=12), progress=False))
    refresh.now()
    loss, before = hn.ContrastiveLoss("Tilt(1.0)", temperature=0.2), [each.clone() for each in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (batch, ids) in enumerate(DataLoader(data, batch_sampler=sampler), start=1):
        optimizer.zero_grad()
        loss(model(batch), model(batch.flip(-1)), ids=ids).backward()
        optimizer.step()
        refresh(step)
    assert step == 3
    assert sampler.plan.segments[0].graph
    assert any(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
