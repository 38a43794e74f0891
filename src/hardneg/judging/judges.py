"""The judges that `hardneg judge` offers besides people and LLMs: a function of texts, and a CrossEncoder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hardneg.core.errors import ArgumentError
from hardneg.io.functions import load_function, names_a_file
from hardneg.io.sealed import digest_of

Texts = tuple[str, str]
OfTexts = Callable[[list[Texts]], Iterable[Any]]
"""[(text of the query, text of the document), ...] -> for each pair a bool, a grade, or None."""


def function_judge(text: str) -> tuple[OfTexts, str]:
    """Return the function that a user has named, and what identifies it: its name and the digest of its file.

    Args:
        text: ``file.py:function`` or ``module:function``.
    """
    function = load_function(text, "judge")
    path = text.rpartition(":")[0] if names_a_file(text) else None
    return function, text if path is None else f"{Path(path).name}:{function.__name__} {digest_of(Path(path))[:16]}"


def calibrated(scores: Sequence[float], relevant: Sequence[bool]) -> float:
    """Return the threshold of scores that agrees best with people, weighing both kinds of pairs equally.

    Args:
        scores: Score of each pair.
        relevant: Whether people found it relevant.

    Raises:
        ArgumentError: Unless there are both kinds.

    Example:
        >>> calibrated([0.1, 0.2, 0.4, 0.9], [False, False, True, True])
        0.3...
    """
    values, yes = np.asarray(scores, dtype=np.float64), np.asarray(relevant, dtype=bool)
    if not yes.any() or yes.all():
        fix = "answer some pairs of both kinds with --answers, or give --above"
        got = f"{int(yes.sum())} relevant and {int((~yes).sum())} irrelevant pairs"
        raise ArgumentError("judge", "human answers of both kinds to calibrate the scores", got, fix)
    levels = np.unique(values)
    middles = np.concatenate([[levels[0] - 1.0], (levels[:-1] + levels[1:]) / 2])
    quality = [float((values[yes] > cut).mean() + (values[~yes] <= cut).mean()) for cut in middles]
    return float(middles[int(np.argmax(quality))])


def digest_of_text(text: str) -> str:
    """Return a short digest of a text, for the state of a judgement."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
