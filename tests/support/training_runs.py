"""What the tests of training share: a few digits in a file, short runs of them, and what must be equal afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.training.evaluation import logistic
from hardneg.training.loop.runs import Run
from hardneg.training.loop.train import Loop
from hardneg.training.options import RECIPES
from hardneg.training.recipes import run_recipe

FEW_ROWS = logistic.MAX_CROSS_VALIDATED
# One of five folds chooses the penalty of the linear probe: all five would take half the time of a short run.
logistic.MAX_CROSS_VALIDATED = 0
NUM_IMAGES, BATCH_SIZE = 320, 32
STEPS = NUM_IMAGES // BATCH_SIZE  # of an epoch
TIMES = {"seconds", "epoch_seconds", "seconds_of"}


def few_digits(path: Path, num_images: int = NUM_IMAGES) -> str:
    """A file with the first digits of scikit-learn and 120 others to test on; its name as a data set."""
    digits = pytest.importorskip("sklearn.datasets", reason="digits need the extra eval").load_digits()
    images = (digits.images * (255.0 / 16.0)).round().astype(np.uint8)
    train, test = slice(num_images), slice(NUM_IMAGES, NUM_IMAGES + 120)
    np.savez(
        path,
        images=images[train],
        labels=digits.target[train],
        test_images=images[test],
        test_labels=digits.target[test],
    )
    return f"npz:{path}"


def short(data: str, **options: Any) -> dict[str, Any]:
    """Options of a run of two epochs that records every step."""
    return {"data": data, "epochs": 2, "batch_size": BATCH_SIZE, "log_every": 1, "dim": 32, "device": "cpu", **options}


def options_of(data: str, **options: Any) -> dict[str, Any]:
    """Of a run of three epochs."""
    return short(data, **{"epochs": 3, **options})


def run(recipe: str, out: Path, options: dict[str, Any], **how: Any) -> dict[str, Any]:
    return run_recipe(recipe, RECIPES[recipe](**options), out, quiet=True, **how)


def stop_after(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts a run after so many epochs."""
    step = Loop._one_step

    def stopped(self: Loop, epoch: int, *rest: Any) -> None:
        if epoch == epochs:
            raise KeyboardInterrupt
        step(self, epoch, *rest)

    monkeypatch.setattr(Loop, "_one_step", stopped)


@contextmanager
def interrupted(step: int) -> Iterator[None]:
    """Interrupts the run that is begun inside before this step."""
    one_step = Loop._one_step

    def stopped(self: Loop, *rest: Any) -> None:
        if self.step == step:
            raise KeyboardInterrupt
        one_step(self, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_one_step", stopped)
        with pytest.raises(KeyboardInterrupt):
            yield


def everything(path: Path) -> dict[str, Any]:
    """All that a run leaves behind, but for the times: for comparisons that must be exact."""
    result, state = Run(path).result(), Run(path).load()
    assert result is not None
    assert state is not None
    with np.load(path / "embeddings.npz") as embeddings:
        arrays = {name: embeddings[name] for name in embeddings}
    return {
        "result": {name: value for name, value in result.items() if name not in TIMES},
        "metrics": (path / "metrics.jsonl").read_text(),
        "state": {name: value for name, value in flat(state).items() if not name.startswith("epoch_seconds")},
        "embeddings": arrays,
    }


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    """To the last bit."""
    assert json.dumps(left["result"]) == json.dumps(right["result"])
    assert left["metrics"] == right["metrics"]
    for name in ("state", "embeddings"):
        assert left[name].keys() == right[name].keys()
        for key, value in left[name].items():
            other = right[name][key]
            assert (value.shape, value.dtype, value.tobytes()) == (other.shape, other.dtype, other.tobytes()), key


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """A checkpoint as one level of names: tensors as arrays, the rest as it is."""
    if isinstance(state, dict):
        parts = [flat(value, f"{name}.{key}" if name else str(key)) for key, value in state.items()]
        return {key: value for part in parts for key, value in part.items()}
    if isinstance(state, torch.Tensor):
        return {name: state.cpu().numpy()}
    if isinstance(state, list):
        return flat(dict(enumerate(state)), name)
    return {name: np.asarray(str(state))}
