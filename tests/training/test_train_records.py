"""What a run records: what was trained, its last figures, and whether it collapsed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError, HardnegWarning
from hardneg.training.augmentation import from_transform
from hardneg.training.data.images import load
from hardneg.training.loop.data_record import fingerprint
from hardneg.training.loop.records import final_of, has_collapsed
from hardneg.training.loop.runs import Run
from hardneg.training.loop.train import train
from hardneg.training.options import RECIPES
from hardneg.training.recipes.simclr import SimCLR
from hardneg.training.recipes.supervised import Supervised
from support.training_runs import options_of, run, short

pytest.importorskip("accelerate", reason="training needs the extra train")


# What was trained.


def test_a_run_records_what_was_trained(data: str, whole: Path) -> None:
    trained = Run(whole).config()["trained"]
    train_split = load(data, "train")
    assert trained["data"]["train"] == {
        "images": 96,
        "shape": [1, 8, 8],
        "classes": 10,
        "fingerprint": fingerprint(train_split),
    }
    assert trained["data"]["test"]["images"] == 120
    assert trained["encoder"]["name"] == "tiny"
    assert trained["encoder"]["class"] == "hardneg.training.encoders.Encoder"
    encoder = SimCLR(RECIPES["simclr"](**options_of(data)), train_split, 1).encoder
    assert trained["encoder"]["parameters"] == sum(weights.numel() for weights in encoder.parameters())
    assert "rotate=10.0" in trained["views"]
    result = Run(whole).result()
    assert result is not None
    assert result["trained"] == trained


def test_other_encoders_weights_and_views_have_other_records(data: str, whole: Path, tmp_path: Path) -> None:
    def trained(name: str, recipe: str = "simclr", **options: Any) -> dict[str, Any]:
        run(recipe, tmp_path / name, options_of(data, epochs=1, **options))
        return Run(tmp_path / name).config()["trained"]

    usual = Run(whole).config()["trained"]
    assert trained("same") == usual
    assert trained("seed", seed=1)["encoder"]["initial_weights"] != usual["encoder"]["initial_weights"]
    assert trained("dim", dim=16)["encoder"]["parameters"] < usual["encoder"]["parameters"]
    assert usual["encoder"]["projects"]
    assert trained("views", augment="tiny(rotate=5)")["views"] != usual["views"]
    # The predictor of MoCo v3 is not a part of the encoder that methods are compared by.
    for version in ("v2", "v3"):
        assert trained(version, "moco", version=version, queue=64)["encoder"] == usual["encoder"]


def test_views_of_a_user_are_recorded_by_name(data: str, tmp_path: Path) -> None:
    def mine(image: torch.Tensor) -> torch.Tensor:
        return image + 0.1 * torch.randn_like(image)

    run("simclr", tmp_path, options_of(data, epochs=1), views=from_transform(mine))
    assert "mine" in Run(tmp_path).config()["trained"]["views"]
    assert "0x" not in Run(tmp_path).config()["trained"]["views"]


def test_a_run_does_not_go_on_with_another_encoder(data: str, begun: Path) -> None:
    def build(*what: Any) -> SimCLR:
        method = SimCLR(*what)
        method.encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32))
        return method

    with pytest.raises(ArgumentError) as error:
        train("simclr", build, RECIPES["simclr"](**options_of(data)), begun, resume=True, quiet=True)
    assert "Encoder with" in error.value.what
    assert error.value.got.endswith("Sequential with 2080 parameters")


# Collapse and final figures.


def test_a_collapsed_run_warns_and_is_marked(data: str, whole: Path, tmp_path: Path) -> None:
    def dead(*what: Any) -> SimCLR:
        method = SimCLR(*what)
        head = method.encoder.head
        assert isinstance(head, torch.nn.Sequential)
        head.append(torch.nn.BatchNorm1d(32))  # whose scale of 0 leaves the same vector for all
        torch.nn.init.zeros_(head[-1].weight)
        torch.nn.init.ones_(head[-1].bias)
        for weights in method.encoder.parameters():
            weights.requires_grad_(False)
        head[-1].bias.requires_grad_(True)
        return method

    options = RECIPES["simclr"](**options_of(data))
    with pytest.warns(HardnegWarning, match=r"has collapsed: .*similarity .*1.000.* loss of 4.143"):
        result = train("simclr", dead, options, tmp_path / "dead", quiet=True)
    assert result["collapsed"] is True
    good = Run(whole).result()
    assert good is not None
    assert good["collapsed"] is False


@pytest.mark.parametrize(
    ("recipe", "spread", "collapsed"), [("simclr", 0.03, True), ("supervised", 0.03, False), ("supervised", 0.0, True)]
)
def test_classes_that_begin_close_together_have_not_collapsed(
    recipe: str, spread: float, collapsed: bool, data: str, tmp_path: Path
) -> None:
    """As SupCon's in its first steps: their similarity is 0.999, from which the loss recovers."""

    def close(*what: Any) -> Any:
        method = {"simclr": SimCLR, "supervised": Supervised}[recipe](*what)
        head: Any = method.encoder.head
        head.append(torch.nn.BatchNorm1d(32))
        torch.nn.init.constant_(head[-1].weight, spread)
        torch.nn.init.ones_(head[-1].bias)
        for weights in method.encoder.parameters():
            weights.requires_grad_(False)
        head[-1].bias.requires_grad_(True)
        return method

    options = RECIPES[recipe](**short(data, epochs=1, learning_rate=0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HardnegWarning)
        result = train(recipe, close, options, tmp_path / "close", quiet=True)
    assert 0.998 < result["final"]["uniform_hardness"] < 1.001
    assert result["collapsed"] is collapsed


def test_hardness_and_false_negatives_are_means(whole: Path) -> None:
    records, result = Run(whole).metrics(), Run(whole).result()
    assert result is not None
    final = result["final"]
    assert final["records"] == 3
    for name in ("hardness", "false_negatives", "loss"):
        assert final[name] == pytest.approx(np.mean([record[name] for record in records[-3:]]))
        assert final[name] != records[-1][name]
    assert final["step"] == records[-1]["step"]


def test_final_figures_of_records_without_answers() -> None:
    records = [{"step": step, "hardness": 0.1 * step, "false_negatives": None} for step in range(1, 101)]
    final = final_of(records)
    assert final["records"] == 10
    assert final["hardness"] == pytest.approx(0.1 * 95.5)
    assert final["false_negatives"] is None
    assert final_of(records[:1])["records"] == 1
    assert not has_collapsed(final)


@pytest.mark.parametrize(
    ("final", "collapsed"),
    [
        ({"uniform_hardness": 0.99, "loss": 4.1, "effective_number": 62.0}, True),
        (
            {"uniform_hardness": 0.99, "loss": 3.0, "effective_number": 62.0},
            False,
        ),  # a low temperature tells them apart
        ({"uniform_hardness": 0.2, "loss": 4.1, "effective_number": 62.0}, False),  # the loss of a first step
        ({"uniform_hardness": None, "loss": 4.1, "effective_number": 62.0}, False),
    ],
)
def test_collapse_is_similarity_and_loss(final: dict[str, Any], collapsed: bool) -> None:
    assert has_collapsed(final) is collapsed


def test_a_whole_run_warns_of_nothing(data: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HardnegWarning)
        run("simclr", tmp_path, options_of(data, epochs=1))
    assert not [one for one in caught if issubclass(one.category, HardnegWarning)]
