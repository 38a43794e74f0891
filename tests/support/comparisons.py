"""What the tests of comparisons share: the command, pretended runs and their figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardneg.comparing import runs as comparison_runs
from hardneg.io.embeddings import pack_bits
from hardneg.io.files import write_json
from hardneg.training.loop.runs import Run
from hardneg.training.options import TrainOptions
from hardneg.training.recipes import run_recipe
from support.training_runs import few_digits

Started = list[tuple[str, TrainOptions, Path]]


def here(recipe: str, options: TrainOptions, run: Run, *_: Any, **__: Any) -> dict[str, Any]:
    """In the place of ``in_a_process``, which begins with seconds of imports."""
    return run_recipe(recipe, options, run.path, resume=True, quiet=True)


@pytest.fixture
def runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a comparison are trained in this process; use ``jobs=1``."""
    monkeypatch.setattr(comparison_runs, "in_a_process", here)


def finish(run: Run, figures: dict[str, Any]) -> None:
    """As a process of a run does."""
    write_json(run.config_path, {"recipe": "simclr", "options": {}})
    run.finish(figures)


def nothing(line: str) -> None:
    """Shows no progress."""


def result(knn: float, num_test: int, correct: Any = None) -> dict[str, Any]:
    final = {"false_negatives": 0.1, "hardness": None, "clamped": 0.0}
    right = {} if correct is None else {"correct": {"knn": pack_bits(np.asarray(correct))}}
    return {"knn": knn, "num_test": num_test, "final": final, "steps": 3, "seconds": 1.0, **right}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_digits(tmp_path_factory.mktemp("comparison") / "digits.npz", 96)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The runs that were requested; each ends at once, the better the closer its temperature is to 0.2."""
    seen: Started = []

    def pretend(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        seen.append((recipe, options, run.path))
        found = {"false_negatives": 0.1, "hardness": 0.2, "clamped": 0.0}
        accuracy = round(0.9 - abs(options.temperature - 0.2) - 0.01 * options.seed, 3)
        return {"knn": accuracy, "num_test": 100, "final": found, "steps": 3, "seconds": 1.0, "k": 5}

    monkeypatch.setattr(comparison_runs, "in_a_process", pretend)
    return seen
