"""A small data set, a finished run on it, and one that was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.training_runs import few_digits, options_of, run, stop_after


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_digits(tmp_path_factory.mktemp("data") / "digits.npz", 96)


@pytest.fixture(scope="session")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    run("simclr", path, options_of(data))
    return path


@pytest.fixture
def begun(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was stopped after two of three epochs."""
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            run("simclr", tmp_path / "begun", options_of(data))
    return tmp_path / "begun"
