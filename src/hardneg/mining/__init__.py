"""Offline mining with the same negatives as in training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardneg.mining.engine import Mined, Miner
    from hardneg.mining.entry import mine
    from hardneg.mining.explain import Explanation
    from hardneg.mining.search import Retriever, Search
    from hardneg.mining.select import Rule

__all__ = ["Explanation", "Mined", "Miner", "Retriever", "Rule", "Search", "mine"]
_home_of = {"Explanation": "explain", "Retriever": "search", "Rule": "select", "Search": "search", "mine": "entry"}


def __getattr__(name: str) -> Any:
    """Names when first used, so that the options of the command line can be had without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'hardneg.mining' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hardneg.mining.{_home_of.get(name, 'engine')}"), name)
