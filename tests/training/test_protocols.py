"""The encoder before training beside the trained one, and the protocols of papers on finished runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hardneg as hn
from hardneg.cli.app import app
from hardneg.core.errors import ArgumentError
from hardneg.io.embeddings import load_embeddings, pack_bits
from hardneg.training.augmentation.views import parse_augment
from hardneg.training.data.images import ImageData, load
from hardneg.training.data.items import Splits
from hardneg.training.encoders import Encoder, build_encoder
from hardneg.training.evaluation import embeddings
from hardneg.training.evaluation.embeddings import evaluate_embeddings, knn_predict
from hardneg.training.evaluation.measures import BEFORE, nothing_learnt
from hardneg.training.evaluation.protocols import ClassifierTraining, classified, initial_encoder, transfer
from hardneg.training.loop.records import before_training
from hardneg.training.loop.runs import Run
from hardneg.training.loop.train import train
from hardneg.training.options import RECIPES, CMCOptions
from hardneg.training.recipes.cmc import Aspects
from hardneg.training.recipes.simclr import SimCLR
from support.errors import raises
from support.libraries import library
from support.training_runs import few_digits, run, short

pytest.importorskip("accelerate", reason="training needs the extra train")

STILL = "tiny(rotate=0.0, zoom=(1.0, 1.0), shift=0.0, mean=(0.0,), std=(1.0,))"
"""Views that are the images themselves, in [0, 1]."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_digits(tmp_path_factory.mktemp("protocols") / "digits.npz", 128)


@pytest.fixture(scope="module")
def trained(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("protocols") / "run"
    run("simclr", path, short(data, epochs=2, init=None))
    return path


def test_a_result_has_the_encoder_before_training(trained: Path) -> None:
    result = Run(trained).result()
    assert result is not None
    images = [load(result["trained"] and Run(trained).config()["options"]["data"], part) for part in ("train", "test")]
    encoder: Any = hn.load_encoder(trained, "initial")
    with torch.no_grad():
        x, test_x = (encoder.features(part.images) for part in images)
    labels = [part.labels for part in images]
    assert labels[0] is not None
    assert labels[1] is not None
    expected = evaluate_embeddings(x, labels[0], test_x, labels[1])
    for name in ("knn", "1nn", "linear"):
        assert result[BEFORE][name] == pytest.approx(expected[name], abs=1e-2)
    assert result[BEFORE]["difference"] == pytest.approx(result["knn"] - result[BEFORE]["knn"])
    assert result["knn"] != result[BEFORE]["knn"]


def test_the_gain_is_paired_over_the_test_items() -> None:
    generator = np.random.default_rng(0)
    after, before = generator.random(50) < 0.8, generator.random(50) < 0.5
    figures = [
        {"knn": float(one.mean()), "num_test": 50, "correct": {"knn": pack_bits(one)}} for one in (after, before)
    ]
    found = before_training(figures[1], figures[0])
    gains = [int(one) - int(other) for one, other in zip(after, before, strict=True)]
    mean = sum(gains) / 50
    variance = sum((gain - mean) ** 2 for gain in gains) / 49
    assert found["difference"] == pytest.approx(mean)
    assert found["half_width"] == pytest.approx(1.96 * (variance / 50) ** 0.5)
    assert nothing_learnt({**figures[0], BEFORE: found}) == ""
    assert nothing_learnt({**figures[1], BEFORE: before_training(figures[0], figures[1])})
    assert nothing_learnt({**figures[1], BEFORE: before_training(figures[1], figures[1])})


def test_an_encoder_that_cannot_be_built_again_has_no_figures_before(data: str, tmp_path: Path) -> None:
    encoder = Encoder(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16)), 16)

    class Given(SimCLR):
        def __init__(self, options: Any, items: Any, total: int) -> None:
            super().__init__(options, items, total)
            self.encoder = encoder

    result = train("mine", Given, RECIPES["simclr"](**short(data, epochs=1)), tmp_path / "run", quiet=True)
    assert BEFORE not in result
    assert initial_encoder(tmp_path / "run") is None


def few_images() -> Splits:
    """20 images of 2 x 2 pixels to train on and 10 to test on, of two classes."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for first, number in ((0, 20), (20, 10)):
        labels = torch.arange(number) % 2
        noise = torch.randint(0, 90, (number, 1, 2, 2), generator=generator)
        images = (noise + 60 * labels[:, None, None, None]).to(torch.uint8)
        parts.append(ImageData(images, labels, torch.arange(first, first + number), "few", ("a", "b")))
    return Splits(*parts)


def options_of(**more: Any) -> Any:
    return RECIPES["simclr"](augment=STILL, device="cpu", **more)


class ImageAsMap(torch.nn.Flatten):
    """An encoder whose only feature map is the image."""

    def maps(self, images: torch.Tensor) -> torch.Tensor:
        return images


@pytest.mark.parametrize(("protocol", "decay"), [("probe", True), ("maps", False)])
def test_the_probe_is_the_gradient_descent_of_the_papers(protocol: Any, decay: bool) -> None:
    read = few_images()
    schedule = ClassifierTraining(epochs=3, batch_size=8, learning_rate=20.0, weight_decay=0.01, decay=decay)
    found = classified(ImageAsMap(), read, options_of(), schedule, protocol)
    x, test = ((part.images.double() / 255).flatten(1).numpy() for part in (read.train, read.test))
    y = read.train.labels.numpy()
    mean, std = (x.mean(), x.std()) if protocol == "maps" else (x.mean(0), x.std(0))  # of the one channel
    x, test = (x - mean) / std, (test - mean) / std
    rate, step, total = 20.0 * 8 / 256, 0, 9
    w, momentum = np.zeros((5, 2)), np.zeros((5, 2))  # the bias in the last row
    for epoch in range(3):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(epoch)).numpy()
        for begun in range(0, 20, 8):
            rows = order[begun : begun + 8]
            a = np.concatenate([x[rows], np.ones((len(rows), 1))], 1)
            p = np.exp(a @ w)
            p /= p.sum(1, keepdims=True)
            gradient = a.T @ (p - np.eye(2)[y[rows]]) / len(rows) + 0.01 * w
            momentum = 0.9 * momentum + gradient if step else gradient
            now = rate * 0.5 * (1 + np.cos(np.pi * step / total)) if decay else rate
            w = w - now * (gradient + 0.9 * momentum)
            step += 1
    expected = (np.concatenate([test, np.ones((10, 1))], 1) @ w).argmax(1)
    assert found.tolist() == expected.tolist()
    assert (expected == read.test.labels.numpy()).mean() > 0.5


@pytest.mark.parametrize(
    ("name", "size", "shape"),
    [
        ("tiny", 8, (128, 2, 2)),
        ("resnet18", 32, (512, 4, 4)),
        ("resnet18-imagenet", 224, (512, 7, 7)),
        ("timm:resnet18", 64, (512, 2, 2)),
        ("torchvision:resnet18", 64, (512, 2, 2)),
    ],
)
def test_feature_maps_are_those_that_pooling_averages(name: str, size: int, shape: tuple[int, ...]) -> None:
    if ":" in name:
        library(name.partition(":")[0])
    encoder, images = build_encoder(name, 3, size=size, seed=0).eval(), torch.rand(1, 3, size, size)
    with torch.no_grad():
        maps, features = encoder.maps(images), encoder.features(images)
    assert tuple(maps.shape[1:]) == shape
    torch.testing.assert_close(maps.mean((2, 3)), features)


def test_the_maps_of_two_aspects_are_concatenated() -> None:
    encoder = Aspects.built([3, 8, 8], CMCOptions(encoder="tiny", device="cpu")).eval()
    images = torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        halves = encoder.maps(images).mean((2, 3)).chunk(2, dim=1)
        expected = torch.cat([torch.nn.functional.normalize(half, dim=-1) for half in halves], dim=1)
        torch.testing.assert_close(encoder.features(images), expected)


def test_a_probe_of_maps_needs_feature_maps() -> None:
    read, schedule = few_images(), ClassifierTraining(epochs=1)
    for encoder in (torch.nn.Flatten(), Encoder(torch.nn.Flatten(), 4)):
        with raises(ArgumentError, who="evaluate"):
            classified(encoder, read, options_of(), schedule, "maps")


def test_fine_tuning_trains_a_copy_of_the_encoder() -> None:
    """A feature that does not depend on the class misleads a probe; fine-tuned it separates the classes."""
    read = few_images()
    labels = read.test.labels
    encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1), torch.nn.LeakyReLU(0.1))
    with torch.no_grad():
        encoder[1].weight.copy_(torch.tensor([[1.0, -1.0, 1.0, -1.0]]))
        encoder[1].bias.zero_()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    schedule = ClassifierTraining(epochs=30, batch_size=10, learning_rate=1.0)
    protocols: list[Any] = ["probe", "finetune"]
    probe, tuned = (
        float((classified(encoder, read, options_of(), schedule, one) == labels).double().mean()) for one in protocols
    )
    assert tuned >= 0.9 > probe
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_transfer_with_protocols_and_few_labels(trained: Path, data: str) -> None:
    schedule = ClassifierTraining(epochs=2, batch_size=32)
    found = transfer(trained, data, share=0.25, protocols=("probe", "maps", "finetune"), schedule=schedule)
    assert (found["num_train"], found["data"]) == (32, f"{data}, 25 % of the labels")
    for name in ("probe", "maps", "finetune", "knn", "linear"):
        assert 0.1 < found[name] <= 1.0
        assert name in found[BEFORE]
    whole = transfer(trained, data, baseline=False)
    result = Run(trained).result()
    assert result is not None
    assert (whole["num_train"], whole["linear"]) == (128, result["linear"])
    assert BEFORE not in whole


def test_statistics_of_the_other_data(trained: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    prepared = ImageData.prepared
    monkeypatch.setattr(
        ImageData,
        "prepared",
        lambda self, options, *rest: seen.append(options.augment) or prepared(self, options, *rest),
    )
    transfer(trained, data, statistics="data", baseline=False)
    pixels = load(data, "train").images.double() / 255
    mean, std = (float(value) for value in (pixels.mean(), pixels.std(correction=0)))
    values = parse_augment(seen[-1])[1]
    assert values["mean"] == pytest.approx((mean,), abs=1e-6)
    assert values["std"] == pytest.approx((std,), abs=1e-6)


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_shares_of_the_labels_that_leave_nothing_are_named(share: float, trained: Path, data: str) -> None:
    with raises(ArgumentError, who="evaluate", what="share of the labels"):
        transfer(trained, data, share=share)


def test_embeddings_of_the_run_are_those_of_the_trained_encoder(trained: Path, data: str) -> None:
    encoder: Any = hn.load_encoder(trained)
    expected = load_embeddings(trained / "embeddings.npz")[2]
    with torch.no_grad():
        torch.testing.assert_close(encoder.features(load(data, "test").images), expected, rtol=0, atol=1e-6)


def test_protocols_on_the_command_line(trained: Path) -> None:
    arguments = ["evaluate", str(trained), "--labels", "0.5", "--labels", "1.0", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert [one["num_train"] for one in json.loads(done.output)["on"]] == [64, 128]
    table = CliRunner().invoke(app, arguments[:-1], env={"COLUMNS": "200"}).output
    assert "before training" in table
    for wrong in (["--protocol", "lora"], ["--statistics", "data"], ["--labels", "2"], ["--labels", "all"]):
        assert CliRunner().invoke(app, ["evaluate", str(trained), *wrong]).exit_code == 2


def test_a_large_bank_is_searched_in_smaller_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x, test = (torch.randn(n, 8, generator=generator) for n in (60, 25))
    y = torch.arange(60) % 4
    expected = knn_predict(x, y, test, k=7)
    monkeypatch.setattr(embeddings, "MAX_SIMILARITIES", 180)  # three test rows at a time
    assert torch.equal(knn_predict(x, y, test, k=7), expected)
