"""What is declared, locked and shipped: pyproject.toml, the lock files and the wheel."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "tools" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def test_oldest_versions_are_the_declared_lower_bounds(lock: ModuleType) -> None:
    assert (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8") == lock.oldest(), "run `make lock`"


def test_the_command_line_needs_a_typer_that_works_with_the_newest_click(lock: ModuleType) -> None:
    """0.12.4 to 0.15.2 raise TypeError for every --help with click 8.2 and later."""
    assert numbers(lock.declared()["typer"]) >= [0, 16]


def test_the_lock_pins_every_package_within_its_bounds(lock: ModuleType) -> None:
    pins = lock.pinned(ROOT / "constraints.txt")
    for name, bound in lock.declared().items():
        assert numbers(pins[name]) >= numbers(bound), name
    for tool in ("pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "import-linter", "zensical"):
        assert tool in pins


def test_the_lock_names_no_address() -> None:
    for path in ROOT.glob("constraints*.txt"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][A-Za-z0-9.]*", line) for line in lines if not line.startswith("#"))


def test_every_install_of_the_makefile_and_the_workflow_is_constrained() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    installs = [line for line in text.splitlines() if "$(PIP)" in line and line.startswith("\t")]
    assert len(installs) >= 5
    assert all("-c constraints" in line for line in installs)


def test_the_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "src"):
        (source / name).symlink_to(ROOT / name)
    done = subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("hardneg-*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("hardneg/")}
    package = ROOT / "src"
    files = {str(path.relative_to(package)) for path in (package / "hardneg").rglob("*") if path.is_file()}
    assert shipped == {name for name in files if "__pycache__" not in name}
