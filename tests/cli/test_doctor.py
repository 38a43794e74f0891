"""`hardneg doctor`: versions, device, extras, and what is missing for which verb."""

from __future__ import annotations

import json
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import hardneg as hn
from hardneg.cli.doctor import PURPOSES, examine
from support.command import hardneg

TOOLS = {"all", "bench", "dev", "docs", "test"}


def test_every_extra_for_users_has_a_purpose() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(PURPOSES) == set(project["optional-dependencies"]) - TOOLS


def test_it_shows_versions_device_and_extras_on_one_screen() -> None:
    done = hardneg("doctor", columns=80)
    assert done.exit_code == 0
    for text in (hn.__version__, torch.__version__, "GPU", *PURPOSES):
        assert text in done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def with_versions(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name in changed and changed[name] is None:
            raise metadata.PackageNotFoundError(name)
        return changed.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)


def test_a_missing_and_an_old_package_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, bm25s=None, scipy="1.2.0")
    extras: dict[str, Any] = examine()["extras"]
    assert extras["lexical"]["missing"] == ["bm25s>=0.2"]
    assert extras["eval"]["missing"] == ["scipy>=1.11.1"]
    done = hardneg("doctor")
    assert done.exit_code == 0
    assert "missing bm25s>=0.2" in done.stdout
    assert "pip install 'hardneg[eval,lexical" in done.stdout


def test_without_a_package_that_every_verb_needs_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, numpy="1.20.0")
    done = hardneg("doctor", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["core"]["missing"] == ["numpy>=1.26"]
