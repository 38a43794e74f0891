"""The kernels run on a GPU where there is one, else in Triton's interpreter (see tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hardneg.kernels.triton_language import installed, interpreted
from support.kernel_inputs import DEVICE


@pytest.fixture
def triton_can_run() -> Iterator[None]:
    """Skips where neither a GPU nor the interpreter is there. NumPy need not warn of the infinities of masks."""
    if not installed:
        pytest.skip("triton 3.4 or newer is not installed")
    if DEVICE == "cpu" and not interpreted:
        pytest.skip("triton was imported without TRITON_INTERPRET=1, and there is no GPU")
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(params=[0, 1 << 30], ids=["sorted", "masked"])
def sorted_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Both ways to mask: rows sorted by id or label, and every block masked."""
    monkeypatch.setattr("hardneg.kernels.triton_sides.SORTED_FROM", request.param)
    return request.param
