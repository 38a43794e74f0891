"""Every option of every recipe of images changes the run, or is one of those that rightly do not.

Those that only texts and graphs have are looked at beside their recipes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.training.data.images import load
from hardneg.training.options import RECIPES, TrainOptions
from hardneg.training.recipes import METHODS
from support.training_runs import everything, run

pytest.importorskip("accelerate", reason="training needs the extra train")
pytestmark = [
    pytest.mark.skipif(find_spec("sklearn") is None, reason="digits need the extra eval"),
    pytest.mark.filterwarnings("ignore:The run in .* has collapsed"),  # runs of four steps on noise do
    pytest.mark.filterwarnings("ignore:--accumulate 2 averages gradients"),
]

OTHER: dict[str, Any] = {
    "encoder": f"{Path(__file__).parents[1]}/support/own_encoder.py:build", "dim": 12,
    "negatives": "Ring(0.1, 0.6)", "temperature": 0.31, "tau_plus": 0.05,
    "batches": "knn()", "epochs": 3, "batch_size": 6, "learning_rate": 2e-3, "weight_decay": 1e-2, "augment": "grey",
    "seed": 1, "precision": "bf16", "log_every": 2, "record": "similarities", "record_at": "3",
    "evaluate_on": "validation", "positives_in_denominator": "none",
    "num_negatives": "mass", "reduction": "pairs", "version": "v3", "queue": 5, "momentum": 0.6, "gamma": 0.3,
    "burn_in": 0.0, "num_steps": 3, "forget": True, "objective": "rince(q=0.3)", "rho": 0.2, "validation_share": 0.3,
    "generate": "mochi(num_hardest=4, num_mixed=4, num_with_anchor=2)",
    "optimizer": "sgd", "schedule": "cosine", "clip": 0.01, "accumulate": 2,
    "loss": "softmax", "num_draws": 3, "pooling": "mean", "cluster_runs": 2, "cluster_every": 2, "warmup": 2,
    "max_steps": 3, "cache": 5, "cache_refresh": 0.4, "four_losses": True, "same_label_negatives": True,
    "head": "linear",
    "hidden_dim": 6, "head_norm": "layer", "num_prototypes": 4, "epsilon": 0.2, "sinkhorn_steps": 1, "num_crops": 1,
    "frozen_epochs": 0, "cluster_positives": True,
    "proposals": "data set", "reencode": True, "num_views": 1, "items_per_epoch": 8,
    "num_support": 3, "num_found": 3, "threshold": 0.9999, "found": "remove",
}  # fmt: skip
"""For each option a value that is not its default; those of data and data_root are files of the test."""

TOGETHER: dict[Any, dict[str, Any]] = {
    ("instance", "positives_in_denominator"): {"loss": "softmax"},
    "cluster_positives": {"loss": "softmax", "clusters": 3},
    ("moco", "hidden_dim"): {"version": "v3"},
    ("moco", "head_norm"): {"version": "v3"},
    "same_label_negatives": {"negatives": "Uniform()"},
    "num_negatives": {"negatives": "Tilt(1.0)"},  # uniform weights are all 1: their sum is their number
    "validation_share": {"evaluate_on": "validation"},
    "record_at": {"record": "similarities"},
    "cluster_runs": {"negatives": "SameCluster()", "clusters": 3},
    "cluster_every": {"negatives": "SameCluster()", "clusters": 3, "epochs": 3},
    "warmup": {"negatives": "SameCluster()", "clusters": 3, "epochs": 3},
}
"""What an option needs beside it to matter, in any recipe or in one."""

NOTHING: dict[str, tuple[Any, str]] = {
    "device": ("auto", "the CPU is what auto finds here"),
    "save_every": (2, "the last epoch is saved whatever it is"),
    "save_every_steps": (1, "so is the end of a run that was saved in mid-epoch"),
}
"""Options that change nothing of the result, another value, and why."""

NOT_RUN = {
    "compile": "the same up to rounding, after a minute of compiling: benchmarks/training_gpu.py trains so",
    "monitor": "test_optimisers.py looks at its records",
    "monitor_every": "test_optimisers.py looks at its records",
    "init": "test_initial_weights.py starts runs with it",
    "patience": "test_optimisers.py stops a run by it",
    "ema": "changes what is evaluated, not what is trained: test_optimisers.py",
    "encode_chunk": "the same up to rounding: test_encode_chunk.py compares",
    "evaluate_with": "of texts: test_text_recipes.py",
    "encoders": "of texts: test_text_recipes.py",
    "directions": "of texts: test_text_recipes.py",
    "context_size": "of texts: test_text_recipes.py",
    "workers": "of image files: test_lazy_images.py",
    "splits": "of image files: test_image_sources.py",
    "cache_images": "of image files: test_lazy_images.py",
    "bad_images": "of image files: test_lazy_images.py",
    "clusters": "needs negatives that need it: test_bank_recipes.py",
    "text_encoder": "of images and texts: test_image_texts.py",
    "ids": "of texts: test_text_recipes.py",
    "denominator": "of pairs: test_two_sided.py",
    "token_pooling": "of texts: test_text_encoders.py",
}

OF_THE_LOOP = {
    "data", "data_root", "batches", "epochs", "max_steps", "batch_size", "optimizer", "learning_rate", "schedule",
    "weight_decay", "clip", "accumulate", "augment", "precision", "device", "log_every", "record", "record_at",
    "evaluate_on", "validation_share", "save_every", "save_every_steps", "num_views", "items_per_epoch",
}  # fmt: skip
"""Options that no recipe reads: the loop that all share does. They are changed in two recipes, the others in all."""

OF_IMAGES = [name for name, options in RECIPES.items() if ":" not in options.data]

REFUSED = {
    ("sogclr", "tau_plus"),
    ("isogclr", "tau_plus"),
    ("emc2", "tau_plus"),
    ("emc2", "negatives"),
    ("supervised", "generate"),
    ("instance", "tau_plus"),
    ("cmc", "tau_plus"),
    ("local-aggregation", "tau_plus"),
    ("byol", "tau_plus"),
    ("byol", "negatives"),
    ("byol", "temperature"),
    ("swav", "tau_plus"),
    ("swav", "negatives"),
    ("fnc", "tau_plus"),
    ("fnc", "negatives"),
    ("negative-cache", "tau_plus"),
    ("negative-cache", "negatives"),
}
"""Options of all recipes that have one value only in these."""

LATER = ("instance", "local-aggregation", "negative-cache", "byol", "swav", "nnclr", "fnc")
"""Of these recipes only what the older ones do not have: what the loop does with the rest is the same for all."""


def runs(recipe: str, name: str) -> bool:
    if name in NOT_RUN or (recipe, name) in REFUSED or recipe == "cmc":  # which has the options of instance
        return False
    if name in OF_THE_LOOP and recipe not in ("simclr", "moco"):
        return False
    return recipe not in LATER or name not in {one.name for one in fields(TrainOptions)} - {"negatives", "seed"}


every_option = pytest.mark.parametrize(
    ("recipe", "name"),
    [(recipe, field.name) for recipe in OF_IMAGES for field in fields(RECIPES[recipe]) if runs(recipe, field.name)],
)

Trained = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What a run of these options leaves behind; each is run once."""
    folder = tmp_path_factory.mktemp("options")
    data = fewer_digits(folder / "digits.npz", 16)
    short = {"data": data, "epochs": 2, "batch_size": 8, "dim": 8, "log_every": 1, "device": "cpu"}

    @cache
    def left_by(recipe: str, items: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
        path = folder / f"run{left_by.cache_info().currsize}"
        run(recipe, path, short | dict(items))
        left = everything(path)
        del left["state"]["of"]  # the options themselves
        return left

    return lambda recipe, options: left_by(recipe, tuple(sorted(options.items())))


def differing(left: dict[str, Any], right: dict[str, Any]) -> set[str]:
    """Which parts of two runs differ in a bit."""
    parts = {name for name in ("result", "metrics") if left[name] != right[name]}
    for name in ("state", "embeddings"):
        bits = [{key: (v.shape, v.dtype, v.tobytes()) for key, v in one[name].items()} for one in (left, right)]
        parts |= {name} if bits[0] != bits[1] else set()
    return parts


@every_option
def test_every_option_changes_the_run(recipe: str, name: str, trained: Trained, tmp_path: Path) -> None:
    if name in NOTHING:
        if name == "device" and torch.cuda.is_available():
            pytest.skip("auto finds a GPU here")
        assert differing(trained(recipe, {}), trained(recipe, {name: NOTHING[name][0]})) == set()
        return
    if name in ("data", "data_root"):
        one, other = other_data(name, tmp_path)
    else:
        one, other = {}, {name: OTHER[name]}
    beside = TOGETHER.get((recipe, name), TOGETHER.get(name, {}))
    changed = differing(trained(recipe, one | beside), trained(recipe, other | beside))
    # Final figures are means over the last records; the sizes that pooling divides by have no gradient.
    if name in ("log_every", "record", "record_at", "four_losses", "pooling"):
        counted = set() if name in ("four_losses", "pooling") else {"state"}  # the checkpoint has the number of records
        assert changed == {"metrics", "result"} | counted
    else:
        assert changed >= {"metrics", "state", "result"}


@pytest.mark.parametrize(("recipe", "name"), sorted(REFUSED))
def test_options_with_one_value_say_so_before_anything_is_loaded(recipe: str, name: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=rf"^{recipe} .*needs {flag} .* got "):
        RECIPES[recipe](**{name: OTHER[name]}).check()
    RECIPES[recipe]().check()


def test_every_recipe_has_options_and_a_method() -> None:
    assert list(METHODS) == list(RECIPES)


def test_the_tables_are_of_options_that_are() -> None:
    names = {field.name for options in RECIPES.values() for field in fields(options)}
    known = {field.name: field.default for recipe in OF_IMAGES for field in fields(RECIPES[recipe])}
    changed = OTHER | {name: value for name, (value, _) in NOTHING.items()}
    assert {*changed, *NOT_RUN, "data", "data_root"} == names
    assert all(known[name] != value for name, value in changed.items() if name != "device")


def other_data(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two files; or one name of a data set in two places."""
    if name == "data":
        return {}, {"data": fewer_digits(folder / "others.npz", 24)}
    for number in range(2):
        write_fashion(folder / str(number), seed=number)
    one, other = ({"data": "fashion-mnist", "data_root": str(folder / str(number))} for number in range(2))
    return one, other


def fewer_digits(path: Path, num_images: int) -> str:
    """As few as make a run, which is evaluated on 16 others; without scikit-learn, whose import takes seconds."""
    digits = load("digits", "all")
    images, labels = digits.images[:, 0].numpy(), digits.labelled("the test").numpy()
    train, test = slice(num_images), slice(-16, None)
    np.savez(path, images=images[train], labels=labels[train], test_images=images[test], test_labels=labels[test])
    return f"npz:{path}"


def write_fashion(folder: Path, seed: int) -> None:
    """IDX files as of Fashion-MNIST, with noise in them."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for prefix in ("train", "t10k"):
        images, labels = rng.integers(0, 255, (16, 28, 28), dtype=np.uint8), np.arange(16, dtype=np.uint8) % 4
        for kind, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            header = struct.pack(f">HBB{array.ndim}i", 0, 8, array.ndim, *array.shape)
            (folder / f"{prefix}-{kind}").write_bytes(header + array.tobytes())
