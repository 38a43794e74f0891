"""Audits of embeddings and of mined files: how hard, how false and how concentrated the negatives of a rule are.

``hardneg.core.diagnose`` looks at one batch of scores, without opening a file; this looks at whole data sets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardneg.auditing.engine import audit
    from hardneg.auditing.result import Audit

__all__ = ["Audit", "audit"]
_home_of = {"Audit": "result", "audit": "engine"}


def __getattr__(name: str) -> Any:
    """Names when first used, so that the options of the command line can be had without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'hardneg.auditing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hardneg.auditing.{_home_of[name]}"), name)
