"""The foundation of the library; it imports no other package of hardneg.

Read in this order:

- ``types``, ``tiles``: vectors with ids (``Keys``), dense ``Scores`` and blocks of scores (``Tile``).
- ``pairing``, ``views``, ``scoring``: which anchors are compared with which candidates, streamed or dense.
- ``bounds``, ``statistics``, ``objectives``: from log-weights to losses, block by block.
- ``generators``: synthetic candidates. ``schedules``: numbers that change over training.
- ``diagnose``: how hard and how false the negatives are. ``distributed``: several processes as one.
- ``errors``, ``text``, ``options``: errors with fields, safe printing, declared options; these need no torch.
- ``tensors``, ``keyed``, ``private_apis``: tensor helpers, order-independent random numbers, private APIs of torch.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Import a module of this package on first use, so that errors and schedules can be used without torch."""
    try:
        return importlib.import_module(f"hardneg.core.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"module 'hardneg.core' has no attribute {name!r}") from None
