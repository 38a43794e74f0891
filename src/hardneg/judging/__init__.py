"""Judge a few hundred mined pairs, and know with a guarantee how many negatives of each rule are false.

Reading order: ``statistics`` (tests and bounds), ``rules`` (what is judged), ``design`` (which pairs, in which order),
``asking`` (the loop), ``entry`` (``hn.judge``), ``result``. `hardneg judge` has ``options``, ``job`` (rounds in a
folder), ``folder`` (what is stored), ``judges``, ``llm`` and ``sheet`` (who answers), and ``page``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardneg.judging.entry import judge
    from hardneg.judging.result import Judged

__all__ = ["Judged", "judge"]
_home_of = {"Judged": "result", "judge": "entry"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line can read the options without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'hardneg.judging' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hardneg.judging.{_home_of[name]}"), name)
