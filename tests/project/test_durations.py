"""The option ``--budget`` finds a folder of tests that takes half as much CPU time again, on a machine of any speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.budget import over_budget, speed_of

ROOT = Path(__file__).parents[2]
BUDGET = {"src": 8.0, "tests/core": 40.0, "tests/io": 2.0, "tests/losses": 60.0, "tests/mining": 100.0}
BUSY = """
import time

def test_busy():
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
"""


@pytest.mark.parametrize("speed", [0.3, 1.0, 4.0])
def test_a_folder_that_grew_is_found_on_any_machine(speed: float) -> None:
    same = {name: speed * seconds for name, seconds in BUDGET.items()}
    assert speed_of(same, BUDGET) == pytest.approx(speed)
    assert over_budget(same, BUDGET) == {}
    for name in ("tests/core", "tests/losses", "tests/mining"):
        assert over_budget(same | {name: 1.45 * same[name]}, BUDGET) == {}
        assert over_budget(same | {name: 1.55 * same[name]}, BUDGET) == {name: pytest.approx(1.5 * same[name])}


def test_short_folders_may_take_some_seconds_more_and_new_ones_those_alone() -> None:
    assert over_budget(BUDGET | {"tests/io": 6.9, "src": 12.9, "tests/new": 4.9}, BUDGET) == {}
    found = over_budget(BUDGET | {"tests/io": 7.1, "src": 13.1, "tests/new": 5.1}, BUDGET)
    assert found == {"tests/io": 7.0, "src": 13.0, "tests/new": 5.0}


def test_folders_that_were_not_run_and_those_that_skip_do_not_count() -> None:
    assert over_budget({"tests/core": 55.0}, BUDGET) == {}  # which is all that says how fast the machine is
    assert over_budget(BUDGET | {"tests/mining": 0.0}, BUDGET) == {}


def test_the_budget_names_the_folders_that_are_here() -> None:
    folders = {path.parent.relative_to(ROOT).parts[1] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    budget = json.loads((ROOT / "tests" / "durations.json").read_text(encoding="utf-8"))
    assert set(budget) == {"src"} | {f"tests/{name}" for name in folders}
    assert all(seconds >= 0 for seconds in budget.values())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Three folders with a test of 0.2 s each, and the plugin."""
    for name in ("one", "two", "three"):
        (tmp_path / "tests" / name).mkdir(parents=True)
        (tmp_path / "tests" / name / f"test_{name}.py").write_text(BUSY)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (tmp_path / "tests" / "conftest.py").write_text('pytest_plugins = ["budget"]')
    plugin = (ROOT / "tests/support/budget.py").read_text(encoding="utf-8")
    (tmp_path / "budget.py").write_text(plugin.replace("GROWTH, SPARE = 1.5, 5.0", "GROWTH, SPARE = 1.5, 0.05"))
    return tmp_path


def pytest_in(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "tests"]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=False)


def test_a_run_fails_over_its_budget_and_not_within(tree: Path) -> None:
    file = tree / "tests" / "durations.json"
    run = pytest_in(tree, "--budget", "write", "-p", "xdist", "-n", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    seconds = json.loads(file.read_text())
    assert seconds == {f"tests/{name}": pytest.approx(0.2, abs=0.1) for name in ("one", "three", "two")}
    file.write_text(json.dumps({"tests/one": 0.2, "tests/two": 0.2, "tests/three": 0.2, "tests/gone": 1.0}))
    assert pytest_in(tree, "--budget", "check").returncode == 0
    file.write_text(json.dumps({"tests/one": 0.2, "tests/two": 0.2, "tests/three": 0.05}))
    run = pytest_in(tree, "--budget", "check")
    assert run.returncode == 1
    assert "tests/three" in run.stdout
    assert "tests/two" not in run.stdout
