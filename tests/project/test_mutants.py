"""Every fault of tools/mutants.py still changes one expression, and names tests that exist."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # where dataclasses look for the types of their fields
    spec.loader.exec_module(module)
    return module


def test_every_fault_applies(mutants: ModuleType) -> None:
    assert len(mutants.MUTANTS) >= 60
    assert len(set(mutants.MUTANTS)) == len(mutants.MUTANTS)
    assert mutants.not_applicable(mutants.MUTANTS) == []
    assert all(each.before != each.after for each in mutants.MUTANTS)


def test_every_named_test_exists(mutants: ModuleType) -> None:
    named = {name for each in mutants.MUTANTS for name in each.tests.split()}
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_an_expression_that_is_gone_or_occurs_twice_is_noticed(mutants: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "src" / "hardneg" / "one.py"
    file.parent.mkdir(parents=True)
    file.write_text("a = 1\nb = 2\nb = 2\n")
    once, twice, gone, moved = (
        mutants.Mutant(name, before, "c", "tests") for name, before in
        [("one.py", "a = 1"), ("one.py", "b = 2"), ("one.py", "d = 3"), ("two.py", "a = 1")]
    )  # fmt: skip
    assert mutants.not_applicable([once, twice, gone, moved], tmp_path) == [twice, gone, moved]
