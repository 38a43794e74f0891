"""Runs that start from the weights of another run, of a file, or of a library."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hardneg as hn
from hardneg.core.errors import ArgumentError, FileError, NoFile
from hardneg.training.encoders import build_encoder
from hardneg.training.loop.parts import splits
from hardneg.training.options import RECIPES
from hardneg.training.recipes.moco import moco
from hardneg.training.weights import initialised
from support.errors import raises
from support.training_runs import few_digits, run, short

pytest.importorskip("accelerate", reason="training needs the extra train")

STAGES = {"resnet18": ((2, 2, 2, 2), False), "resnet50": ((3, 4, 6, 3), True)}


def published_resnet(name: str) -> dict[str, torch.Tensor]:
    """A state dict with the names and shapes of torchvision's and timm's ResNets, written by hand."""
    blocks, bottleneck = STAGES[name]
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7)}

    def norm(where: str, width: int) -> None:
        shapes.update({f"{where}.{one}": (width,) for one in ("weight", "bias", "running_mean", "running_var")})

    norm("bn1", 64)
    before = 64
    for stage, number in enumerate(blocks, start=1):
        width = 32 * 2**stage
        out = 4 * width if bottleneck else width
        for block in range(number):
            where = f"layer{stage}.{block}"
            sizes = [(before, 1), (width, 3), (width, 1)] if bottleneck else [(before, 3), (width, 3)]
            for place, (channels, size) in enumerate(sizes, start=1):
                wide = out if place == len(sizes) else width
                shapes[f"{where}.conv{place}.weight"] = (wide, channels, size, size)
                norm(f"{where}.bn{place}", wide)
            if before != out:
                shapes[f"{where}.downsample.0.weight"] = (out, before, 1, 1)
                norm(f"{where}.downsample.1", out)
            before = out
    shapes |= {"fc.weight": (1000, before), "fc.bias": (1000,)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


def forward(state: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """The features of a ResNet with these weights in evaluation mode, as He et al. define it."""
    from torch.nn.functional import batch_norm, conv2d, max_pool2d, relu

    blocks, bottleneck = STAGES[name]

    def normed(x: torch.Tensor, where: str) -> torch.Tensor:
        names = ("running_mean", "running_var", "weight", "bias")
        return batch_norm(x, *(state[f"{where}.{one}"] for one in names))

    x = max_pool2d(relu(normed(conv2d(x, state["conv1.weight"], stride=2, padding=3), "bn1")), 3, 2, 1)
    for stage, number in enumerate(blocks, start=1):
        for block in range(number):
            where, first = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            strides = (1, first, 1) if bottleneck else (first, 1)
            y = x
            for place, stride in enumerate(strides, start=1):
                kernel = state[f"{where}.conv{place}.weight"]
                y = conv2d(y, kernel, stride=stride, padding=kernel.shape[2] // 2)
                y = normed(y, f"{where}.bn{place}")
                y = relu(y) if place < len(strides) else y
            if f"{where}.downsample.0.weight" in state:
                down = conv2d(x, state[f"{where}.downsample.0.weight"], stride=first)
                x = normed(down, f"{where}.downsample.1")
            x = relu(x + y)
    return x.mean((2, 3))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_digits(tmp_path_factory.mktemp("init") / "digits.npz", 64)


@pytest.fixture(scope="module")
def trained(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("init") / "run"
    run("instance", path, short(data, epochs=1))
    return path


def started(data: str, init: Path | str, **options: Any) -> Any:
    wanted = RECIPES["moco"](**short(data, init=str(init), **options))
    return moco(wanted, splits(wanted).train.prepared(wanted), 10)


def test_ring_starts_from_a_run_of_instance_discrimination(trained: Path, data: str, tmp_path: Path) -> None:
    """Fig. 2a of Ring: every weight, those of the momentum encoder too; and a run by --init."""
    expected = hn.load_encoder(trained, normalise=False).state_dict()
    method = started(data, trained)
    for encoder in (method.encoder, method.slow.module):
        assert all(torch.equal(value, expected[name]) for name, value in encoder.state_dict().items())
    options = short(data, epochs=1, init=str(trained), learning_rate=0.0)
    run("moco", tmp_path / "run", options | {"negatives": "Ring(0.1, 0.5)"})
    found = hn.load_encoder(tmp_path / "run", normalise=False).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_with_another_head_only_the_backbone_is_loaded(trained: Path, data: str) -> None:
    expected = hn.load_encoder(trained, normalise=False).state_dict()
    encoder = started(data, trained / "checkpoint.pt", dim=16).encoder
    assert "the head is new" in encoder.init
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, expected[name]) is name.startswith("backbone.") or "bias" in name


@pytest.mark.parametrize(
    ("name", "prefix", "nested"),
    [("resnet18", "", None), ("resnet18", "module.encoder_q.", "state_dict"), ("resnet50", "backbone.", "model")],
)
def test_published_names_are_read_and_give_the_same_features(
    name: str, prefix: str, nested: str | None, tmp_path: Path
) -> None:
    state = published_resnet(name)
    saved: Any = {prefix + key: value for key, value in state.items()}
    saved |= {f"module.encoder_k.{key}": torch.zeros_like(value) for key, value in state.items() if prefix}
    torch.save({nested: saved, "epoch": 3} if nested else saved, tmp_path / "weights.pth")
    options = RECIPES["simclr"](init=str(tmp_path / "weights.pth"))
    encoder: Any = initialised(build_encoder(f"{name}-imagenet", 3, seed=0), options).eval()
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(encoder.features(images), forward(state, name, images), rtol=1e-4, atol=1e-5)


def test_safetensors_and_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("safetensors.torch", reason="needs the extra text")
    state = published_resnet("resnet18")
    library.save_file(state, tmp_path / "weights.safetensors")
    model = SimpleNamespace(state_dict=lambda: state)
    asked = []

    def get_model(name: str, weights: str) -> Any:
        asked.append((name, weights))
        return model

    models = SimpleNamespace(get_model=get_model)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=models))
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=get_model_of_timm(asked, model)))
    for source in (str(tmp_path / "weights.safetensors"), "torchvision:resnet18", "timm:resnet18.a1_in1k"):
        encoder: Any = initialised(build_encoder("resnet18-imagenet", 3), RECIPES["simclr"](init=source))
        assert torch.equal(encoder.backbone.stem[0].weight, state["conv1.weight"])
    assert asked == [("resnet18", "DEFAULT"), ("resnet18.a1_in1k", True)]


def get_model_of_timm(asked: list[Any], model: Any) -> Any:
    def create_model(name: str, pretrained: bool) -> Any:
        asked.append((name, pretrained))
        return model

    return create_model


def test_other_architectures_are_named_before_training(trained: Path, data: str, tmp_path: Path) -> None:
    torch.save(published_resnet("resnet18"), tmp_path / "resnet.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "text.pth").write_text("no weights")
    wrong: list[tuple[Any, str, type, str]] = [
        (trained, "resnet18", ArgumentError, "include no conv1.weight"),
        (tmp_path / "resnet.pth", "resnet18", ArgumentError, r"[64, 3, 7, 7] instead of [64, 1, 3, 3]"),
        (tmp_path / "resnet.pth", "tiny", ArgumentError, "include no layers.0.weight"),
        (tmp_path / "list.pth", "tiny", FileError, "list"),
        (tmp_path / "text.pth", "tiny", FileError, "cannot read"),
        (tmp_path / "missing.pth", "tiny", NoFile, "missing.pth"),
    ]
    for source, encoder, kind, got in wrong:
        with pytest.raises(kind) as error:
            run("simclr", tmp_path / "run", short(data, epochs=1, encoder=encoder, init=str(source)))
        assert got in str(error.value)
        assert not (tmp_path / "run").exists()
    with raises(ArgumentError, who="train", what="--init with the weights of resnet18"):
        run("simclr", tmp_path / "run", short(data, epochs=1, encoder="resnet18", init=str(trained)))


def test_models_of_timm_are_built_for_the_size_of_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def create_model(name: str, **options: Any) -> torch.nn.Module:
        if name == "resnet18" and "img_size" in options:
            raise TypeError("unexpected keyword argument 'img_size'")
        built.append((name, options.get("img_size")))
        module = torch.nn.Sequential(torch.nn.Flatten())
        module.num_features = 8  # type: ignore[assignment]
        return module

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    build_encoder("timm:vit_tiny_patch16_224", 3, size=96)
    build_encoder("timm:resnet18", 3, size=96)
    assert built == [("vit_tiny_patch16_224", 96), ("resnet18", None)]
