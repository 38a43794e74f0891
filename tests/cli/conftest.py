"""What the verbs hand over, and data to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardneg.cli import tables as table
from hardneg.comparing import Comparison
from hardneg.training import recipes
from hardneg.training.options import TrainOptions


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, TrainOptions, Path, bool]]:
    """What the verb hands over to the recipe, which is not run."""
    seen: list[tuple[str, TrainOptions, Path, bool]] = []

    def note(
        recipe: str, options: TrainOptions, out: Path, resume: bool, allow_other_data: bool, quiet: bool
    ) -> dict[str, Any]:
        seen.append((recipe, options, out, resume))
        return {}

    monkeypatch.setattr(recipes, "run_recipe", note)
    return seen


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Comparison, Path, int]]:
    seen: list[tuple[Comparison, Path, int]] = []
    monkeypatch.setattr(table, "compare_and_show", lambda *what: seen.append(what))
    return seen


@pytest.fixture
def data(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    arrays = {"images": rng.integers(0, 255, (64, 8, 8), dtype=np.uint8), "labels": np.arange(64) % 4}
    np.savez(tmp_path / "data.npz", **arrays)
    return f"npz:{tmp_path / 'data.npz'}"
