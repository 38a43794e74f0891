"""Encoders: their sizes, that a tiny one sees each image alone, that weights, features and modes are what they say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hardneg.core.errors import ArgumentError, MissingExtra
from hardneg.training.augmentation.augment import TINY
from hardneg.training.backbones import BACKBONES, NORMS
from hardneg.training.data.image_texts import ImageTextEncoder
from hardneg.training.data.images import load
from hardneg.training.data.inputs import TwoTowers
from hardneg.training.encoders import (
    Encoder,
    build_encoder,
    check_embeds,
    check_encoder,
    compares_projections,
    embed,
    has_batch_statistics,
)
from support.errors import raises
from support.libraries import library


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "backbone", "feature_dim", "head"),
    [
        ("resnet18", 11_168_832, 512, 512 * 512 + 2 * 512 + 512 * 128 + 128),
        ("resnet50", 23_500_352, 2048, 2048 * 2048 + 2 * 2048 + 2048 * 128 + 128),
        ("tiny", 9 * (3 * 32 + 32 * 64 + 64 * 128) + 2 * (32 + 64 + 128), 128, 2 * (128 * 128 + 128)),
    ],
)
def test_sizes(name: str, backbone: int, feature_dim: int, head: int) -> None:
    encoder = build_encoder(name, in_channels=3)
    assert num_parameters(encoder.backbone) == backbone
    assert encoder.feature_dim == feature_dim
    assert num_parameters(encoder.head) == head


@pytest.mark.parametrize(("name", "size", "channels"), [("tiny", 8, 1), ("tiny", 28, 1), ("resnet18", 32, 3)])
def test_shapes_and_gradients(name: str, size: int, channels: int) -> None:
    encoder = build_encoder(name, channels, projection_dim=64, seed=0)
    projected = encoder(torch.rand(3, channels, size, size))
    assert projected.shape == (3, 64)
    projected.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in encoder.parameters())
    assert encoder.features(torch.rand(3, channels, size, size)).shape == (3, encoder.feature_dim)


def test_resnet_keeps_the_resolution_of_small_images() -> None:
    backbone = build_encoder("resnet18", 3).backbone
    assert backbone.layers(backbone.stem(torch.rand(2, 3, 32, 32))).shape == (2, 512, 4, 4)  # type: ignore[operator]


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_tiny_encoder_keeps_few_maps_of_large_images(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are those of all rows at once; where statistics mix rows, they stay together."""
    monkeypatch.setattr("hardneg.training.backbones._BLOCK_PIXELS", 2 * 80 * 80)
    encoder = build_encoder("tiny", 3, norm=norm, seed=0).double().train()
    images, kept = torch.rand(7, 3, 80, 80, dtype=torch.float64), []

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved.numel())
        return saved

    found = []
    for features in (encoder.backbone, lambda images: encoder.backbone.layers(images).mean((2, 3))):
        encoder.zero_grad()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            loss = features(images).square().sum()
        total = sum(kept)
        loss.backward()
        found.append((loss.detach(), *(parameter.grad.clone() for parameter in encoder.backbone.parameters()), total))
    (*blocks, few), (*whole, many) = found
    for one, other in zip(blocks, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert (few < 0.1 * many) == (norm == "group")


def test_a_tiny_encoder_sees_each_image_alone() -> None:
    encoder = build_encoder("tiny", 1, seed=0).double()
    images = torch.rand(6, 1, 8, 8, dtype=torch.float64)
    alone = torch.cat([encoder(images[i : i + 2]) for i in (0, 2, 4)])
    torch.testing.assert_close(encoder(images), alone, rtol=0, atol=1e-12)
    assert not has_batch_statistics(encoder)
    assert not has_batch_statistics(build_encoder("resnet18", 3, norm="group"))
    assert has_batch_statistics(build_encoder("resnet18", 3))
    assert has_batch_statistics(build_encoder("resnet18", 3).head)


def test_weights_are_those_of_the_seed_and_the_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    first, same, other = (build_encoder("tiny", 1, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.backbone.layers[0].weight, other.backbone.layers[0].weight)  # type: ignore[union-attr,index]


def test_only_the_layers_of_an_encoder_draw_weights() -> None:
    torch.manual_seed(3)
    built = build_encoder("tiny", 1, projection_dim=16).head
    torch.manual_seed(3)
    BACKBONES["tiny"](1, NORMS["group"])
    first, last = nn.Linear(128, 128), nn.Linear(128, 16)
    drawn = [first.weight, first.bias, last.weight, last.bias]
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), drawn, strict=True))


def test_activations_keep_their_scale_through_a_resnet() -> None:
    encoder = build_encoder("resnet18", 3, seed=0)
    features = encoder.features(torch.randn(16, 3, 32, 32))
    assert 0.1 < features.std() < 10


def test_bfloat16_and_channels_last() -> None:
    encoder = build_encoder("tiny", 3, seed=0)
    images = torch.rand(4, 3, 16, 16)
    expected = encoder(images)
    encoder = encoder.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        half = encoder(images.contiguous(memory_format=torch.channels_last))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("norm", "num"), [("group", 4), ("batch", 5)])
def test_heads(norm: str, num: int) -> None:
    head = build_encoder("tiny", 1, norm=norm, projection_dim=8).head
    assert len(list(head.parameters())) == num
    assert head(torch.rand(4, 128)).shape == (4, 8)


def test_any_module_is_an_encoder() -> None:
    encoder = Encoder(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 10)
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(encoder(x), encoder.features(x))
    with raises(ArgumentError, who="Encoder", what="12", got="features=(2, 10)"):
        Encoder(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 12)(x)


def test_which_encoders_compare_projections() -> None:
    plain, projected = Encoder(nn.Linear(4, 4), 4), Encoder(nn.Linear(4, 4), 4, nn.Linear(4, 2))
    assert [compares_projections(one) for one in (nn.Linear(4, 4), plain, projected)] == [False, False, True]
    assert [compares_projections(TwoTowers(plain, one)) for one in (plain, projected)] == [False, True]
    assert not compares_projections(ImageTextEncoder(projected, projected))


def test_wrong_names_are_reported_before_anything_is_built() -> None:
    for arguments, message in [
        (("resnet19",), r"Did you mean resnet18\? Known: tiny, resnet18, resnet50"),
        (("tiny", "layer"), "a norm among"),
        (("torchvision:resnet18", "group"), "a norm among"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_encoder(*arguments)


def test_torchvision_loses_its_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of torchvision's interface; the real one is used where it fits the installed torch."""

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
            self.fc = nn.Linear(64, 1000)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.fc(self.conv1(images).mean((2, 3)))

    models = SimpleNamespace(get_model=lambda name, weights: ResNet())
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=models))
    encoder = build_encoder("torchvision:resnet18", in_channels=1)
    assert encoder.features(torch.rand(2, 1, 32, 32)).shape == (2, 64)
    assert encoder(torch.rand(2, 1, 32, 32)).shape == (2, 128)


def test_a_missing_torchvision_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with raises(MissingExtra, who="torchvision:resnet18", fix="install torchvision"):
        build_encoder("torchvision:resnet18", 3)


def test_embed_is_the_features_in_evaluation_mode_and_restores_training() -> None:
    data = load("digits", "test")
    encoder = build_encoder("tiny", 1, norm="batch", seed=0).train()
    features = embed(encoder, data.images[:50], TINY.plain, batch_size=16)
    assert encoder.training
    assert not features.requires_grad
    with torch.no_grad():
        expected = encoder.eval().features(TINY.plain(data.images[:50]))
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-5)
    (features * torch.ones(1, requires_grad=True)).sum().backward()  # not an inference tensor


def test_a_module_without_features_is_embedded_by_what_it_gives() -> None:
    images = load("digits", "test").images[:30]
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout(0.5)).train()
    check_embeds(module, images, TINY.plain)
    with torch.no_grad():
        expected = module[1](TINY.plain(images).flatten(1))
    torch.testing.assert_close(embed(module, images, TINY.plain, batch_size=7), expected, rtol=0, atol=1e-6)
    assert module.training
    assert embed(nn.Flatten(), images, TINY.plain).shape == (30, 64)


def test_a_module_that_gives_no_vectors_is_reported_before_training() -> None:
    class WithMaps(nn.Module):
        """As torchvision's VGG: its ``features`` are maps, and a part of it."""

        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Conv2d(1, 4, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.features(images).mean((2, 3))

    images = load("digits", "test").images
    fix = r"from {}; wrap it: hardneg\.training\.encoders\.Encoder\(module, feature_dim, head\)"
    with pytest.raises(
        ValueError, match=r"features \[b, d\], got \(2, 4, 6, 6\) for 2 images " + fix.format("WithMaps")
    ):
        check_embeds(WithMaps(), images, TINY.plain)
    with pytest.raises(ValueError, match=r"got \(2, 4, 6, 6\) for 2 images " + fix.format("Conv2d")):
        check_embeds(nn.Conv2d(1, 4, 3), images, TINY.plain)
    check_embeds(Encoder(WithMaps(), 4), images, TINY.plain)


class OfPatches(nn.Module):
    """As timm's VisionTransformer: it asserts that images have its size."""

    num_features = 4

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert images.shape[-1] == 224, f"Input height ({images.shape[-2]}) doesn't match model (224)."
        return images.mean((2, 3)).repeat(1, 4)


def test_a_model_of_a_library_for_images_of_another_size_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = SimpleNamespace(create_model=lambda name, **options: OfPatches())
    monkeypatch.setitem(sys.modules, "timm", timm)
    encoder = build_encoder("timm:vit_tiny_patch16_224", 1, seed=0)
    images = load("digits", "test").images
    for module in (encoder, nn.Sequential(encoder)):  # some recipes have parts around it
        with raises(ArgumentError, who="--encoder", what="8 pixels", got="vit_tiny_patch", fix="--data"):
            check_embeds(module, images, TINY.plain)


def test_a_transformer_of_images_of_another_size_is_named(tmp_path: Path) -> None:
    transformers = library("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=16, num_channels=1)
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    encoder = build_encoder(f"hf:{tmp_path / 'vit'}", 1, seed=0)
    with pytest.raises(ArgumentError, match="8 x 8 pixels"):
        check_embeds(encoder, load("digits", "test").images, TINY.plain)
