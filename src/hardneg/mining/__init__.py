"""Mine hard negatives offline, by the same distributions that are used in training.

There are two entry points: ``hn.mine`` for vectors and data sets in memory (``entry.py``) and
`hardneg mine` for files (``options.py`` and ``job.py``). Both build a ``Miner`` (``miner.py``).
Read in this order:

1. ``search.py``, ``select.py``: the options of a search and the rule by which negatives are chosen.
2. ``pairs.py``, ``corpus_scores.py``: positives and excluded pairs, and the scores of queries
   against the corpus.
3. ``search_depth.py``, ``candidates.py``, ``filters.py``: how many candidates an expression needs,
   and the search.
4. ``stages.py``, ``edges.py``: the work in pieces that any process may compute.
5. ``inputs.py``, ``problem.py``, ``output.py``, ``manifest.py``: files in, files out.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardneg.mining.entry import mine
    from hardneg.mining.explain import Explanation
    from hardneg.mining.miner import Mined, Miner
    from hardneg.mining.search import Retriever, Search
    from hardneg.mining.select import Rule

__all__ = ["Explanation", "Mined", "Miner", "Retriever", "Rule", "Search", "mine"]
_home_of = {"Explanation": "explain", "Retriever": "search", "Rule": "select", "Search": "search", "mine": "entry"}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``--help`` works without importing torch."""
    if name not in __all__:
        raise AttributeError(f"module 'hardneg.mining' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hardneg.mining.{_home_of.get(name, 'miner')}"), name)
