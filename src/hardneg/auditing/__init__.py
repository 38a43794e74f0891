"""Audits of embeddings and of mined files: how hard, how false and how concentrated the negatives of a rule are.

``hardneg.core.diagnose`` measures one batch of scores in memory; an audit measures a whole data set, from tensors
(``entry.audit``) or from files (``files.audit_files``, which is `hardneg audit`).

Reading order: ``options`` and ``rules`` (the request, and the grid search for it), ``prepare`` and ``audited_pairs``
(checked input), ``sampling`` and ``measure`` (the figures), ``result`` (the figures as data), ``terminal`` and ``page``
(the figures as text). ``batches`` measures planned batches, ``files`` and ``inputs`` read files, and ``findings`` lists
the problems of mined negatives.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardneg.auditing.batches import audit_batches
    from hardneg.auditing.entry import audit
    from hardneg.auditing.result import Audit

__all__ = ["Audit", "audit", "audit_batches"]
_home_of = {"Audit": "result", "audit": "entry", "audit_batches": "batches"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line can read the options without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'hardneg.auditing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hardneg.auditing.{_home_of[name]}"), name)
