"""A missing package is named with an extra that installs it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_extra_that_an_error_names_exists() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra
        for path in (ROOT / "src").rglob("*.py")
        for extra in re.findall(r"(?:extra=\"|hardneg\[)([a-z,]+)", path.read_text())
    }
    assert "text" in named
    assert {one for each in named for one in each.split(",")} <= set(known)
