"""Fixtures of the Triton kernels."""

from __future__ import annotations

import pytest

from support.kernel_inputs import SORTED_FROM


@pytest.fixture(params=SORTED_FROM)
def sorted_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Both ways to mask: rows sorted by id or label, and every block masked."""
    monkeypatch.setattr("hardneg.kernels.triton.sides.SORTED_FROM", SORTED_FROM[request.param])
    return SORTED_FROM[request.param]
