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


def test_the_list_for_language_models_is_up_to_date(reference: ModuleType) -> None:
    text = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    assert text == reference.llms(), "run `make reference`"
    assert "reference/api/losses.html)" in text


def test_every_public_name_is_there(reference: ModuleType) -> None:
    pages = reference.pages()
    for name in hn.__all__:
        if not isinstance(getattr(hn, name), (ModuleType, str)):
            assert f"[`hn.{name}`](api/" in pages["api.md"]
            assert any(f"heading: hn.{name}\n" in text for text in pages.values())
    for name in ("GradCache", "mining.Search", "Mined", "Audit", "Diagnosis", "HardBatches", "schedules.linear"):
        assert f"{name}`](api/" in pages["api.md"]
    assert pages["api/integrations.md"].count(".NegativesLoss\n      toc_label") == 4


def test_no_page_of_the_api_is_left_over(reference: ModuleType) -> None:
    folder = ROOT / "docs" / "reference" / "api"
    assert {f"api/{path.name}" for path in folder.iterdir()} == {name for name in reference.pages() if "/" in name}


def test_every_verb_and_distribution_is_there(reference: ModuleType) -> None:
    pages = reference.pages()
    for name in reference.ours(hn.registered_negatives()):
        assert f"### `{name}(" in pages["grammar.md"]
    for verb in ("mine", "audit", "compare", "evaluate", "report", "explain", "doctor", "train simclr"):
        assert f"## hardneg {verb}\n" in pages["cli.md"]
    assert "| `-k` | integer | `5` |" in pages["cli.md"]
