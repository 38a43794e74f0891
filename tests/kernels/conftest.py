"""Fixtures of the Triton kernels."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[0, 1 << 30], ids=["sorted", "masked"])
def sorted_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Both ways to mask: rows sorted by id or label, and every block masked."""
    monkeypatch.setattr("hardneg.kernels.triton.sides.SORTED_FROM", request.param)
    return request.param
