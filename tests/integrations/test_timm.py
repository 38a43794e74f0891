"""Models of timm and torchvision: trained on planned batches, taken as encoders, and loaded with our weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hardneg as hn
from hardneg.batching import Refresh, encode
from hardneg.training.backbones import library_backbone
from hardneg.training.encoders import build_encoder
from hardneg.training.export import FORMATS, Export
from hardneg.training.trained import CHANNELS, Preprocessing
from hardneg.training.weights import resnet_names
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


@pytest.mark.parametrize("kind", ["torchvision", "timm"])
@pytest.mark.parametrize("name", ["resnet18", "resnet18-imagenet"])
def test_exported_names_load_strictly_and_give_the_same_features(kind: str, name: str) -> None:
    module = library(kind)
    encoder = build_encoder(name, 3, seed=0).eval()
    if kind == "timm":
        model = module.create_model("resnet18", num_classes=0)
    else:
        model = module.models.resnet18(weights=None)
        model.fc = nn.Identity()
    if name == "resnet18":
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    model.load_state_dict(resnet_names(encoder.backbone), strict=True)  # type: ignore[arg-type]
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(model.eval()(images), encoder.features(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "channels"),
    [("resnet18", 1), ("resnet18-imagenet", 1), ("timm:test_vit", 3), ("timm:test_resnet", 1),
     ("torchvision:convnext_tiny", 1), ("torchvision:resnet18", 3)],
)  # fmt: skip
def test_the_printed_lines_read_the_export(name: str, channels: int, tmp_path: Path) -> None:
    kinds = [kind for kind in ("torchvision", "timm") if name.partition(":")[0] in (kind, name)]
    with torch.random.fork_rng():
        encoder: Any = build_encoder(name, channels, seed=0, size=32).eval()
    shape = [channels, 32, 32]
    prepared = Preprocessing([0.4] * channels, [0.2] * channels, shape[1:], CHANNELS[channels])
    config = {"recipe": "simclr", "options": {"data": "npz:a.npz"}}
    config["trained"] = {"encoder": {"name": name}, "data": {"train": {"shape": shape}}}
    images = torch.rand(2, *shape)
    expected = encoder.features((images - 0.4) / 0.2)
    for kind in (*kinds, *(["hub"] if "timm" in kinds and name != "resnet18" else [])):
        output = Export(tmp_path / kind, config, prepared, {})
        FORMATS[kind].write(encoder, output)
        names = {"torch": torch, "images": images, **{one: library(one) for one in kinds}}
        exec("\n".join(FORMATS[kind].lines(output)), names)
        torch.testing.assert_close(names["model"].eval()(names["inputs"]), expected, rtol=1e-4, atol=1e-5)
        if kind == "hub":
            assert names["model"].pretrained_cfg["mean"] == prepared.mean


@pytest.mark.parametrize(
    ("name", "width"), [("torchvision:resnet18", 512), ("timm:test_resnet", 96), ("torchvision:convnext_tiny", 768)]
)
def test_encoders_of_libraries_lose_their_classes(name: str, width: int) -> None:
    library(name.partition(":")[0])
    backbone, found = library_backbone(name, 1)
    assert found == width
    assert backbone.eval()(torch.rand(2, 1, 64, 64)).shape == (2, width)
