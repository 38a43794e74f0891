"""Options that the call of another library fixes; that library need not be installed."""

from __future__ import annotations

from typing import Any

import pytest

from hardneg.core.errors import ArgumentError
from hardneg.integrations.open_clip import NegativesLoss


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"temperature": 0.1}, r"NegativesLoss needs no temperature, got temperature=0\.1; it is 1 / logit_scale"),
        ({"views": "two"}, "NegativesLoss needs no views, got views='two'; leave it out"),
        ({"normalize": True}, "NegativesLoss needs no normalize, got normalize=True; leave it out"),
    ],
)
def test_open_clip(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        NegativesLoss(**option)
