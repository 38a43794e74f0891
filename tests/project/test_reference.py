"""The generated pages of docs/reference are what the code says today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import hardneg as hn

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(reference: ModuleType) -> None:
    for name, text in reference.pages().items():
        page = ROOT / "docs" / "reference" / name
        assert page.read_text(encoding="utf-8") == text, f"{page.name} is out of date: run `make reference`"


def test_every_public_name_and_distribution_is_there(reference: ModuleType) -> None:
    pages = reference.pages()
    for name in ("Keys", "ContrastiveLoss", "mine", "audit", "Queue", "Tilt", "NEVER"):
        assert f"heading: hn.{name}\n" in pages["api.md"]
    for name in reference.ours(hn.registered_negatives()):
        assert f"### `{name}(" in pages["grammar.md"]
    for verb in ("mine", "audit", "compare", "evaluate", "report", "explain", "doctor", "train simclr"):
        assert f"## hardneg {verb}\n" in pages["cli.md"]
    assert "| `-k` | whole number | `5` |" in pages["cli.md"]
