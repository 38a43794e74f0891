"""A job in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardneg.mining.options import MineOptions
from support.mining_jobs import make_job


@pytest.fixture
def job(tmp_path: Path) -> MineOptions:
    return make_job(tmp_path)
