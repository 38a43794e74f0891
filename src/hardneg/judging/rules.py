"""The rules that are judged: expressions and families of them, and the pairs that each would mine.

A family is an expression with alternatives in braces: ``BelowPositive(relative={0.2, 0.1, 0.05})``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from hardneg.core.errors import ArgumentError
from hardneg.judging.design import Population
from hardneg.mining.miner import Mined
from hardneg.negatives import Negatives, parse

DEFAULT = "BelowPositive(relative={0.3, 0.2, 0.1, 0.05, 0.02})"
"""The family that is judged if no rule is given: the margin below the positive."""

_braces = re.compile(r"\{([^{}]*)\}")


def expanded(text: str) -> list[str]:
    """Return the expressions of a family; several braces give all combinations.

    >>> expanded("Rank({0, 10}, 50)")
    ['Rank(0, 50)', 'Rank(10, 50)']
    """
    found = _braces.search(text)
    if found is None:
        return [text]
    values = [value.strip() for value in found[1].split(",") if value.strip()]
    if not values:
        raise ArgumentError("judge", "values in the braces of a family", repr(text), "write {0.1, 0.05}")
    return [each for value in values for each in expanded(text[: found.start()] + value + text[found.end() :])]


def read_rules(rules: Any) -> list[tuple[Any, Negatives]]:
    """Return each rule as it was given, with its distribution.

    Args:
        rules: One or several expressions, families or distributions.

    Raises:
        ArgumentError: If there is no rule, a rule is no expression, or two rules are the same.
    """
    several: Iterable[Any] = [rules] if isinstance(rules, (str, Negatives)) else rules
    if not isinstance(several, Iterable):
        raise ArgumentError("judge", "rules: expressions or distributions", repr(rules))
    found: list[tuple[Any, Negatives]] = []
    for one in several:
        if isinstance(one, Negatives):
            found.append((one, one))
        elif isinstance(one, str):
            found += [(text, parse(text)) for text in expanded(one)]
        else:
            raise ArgumentError("judge", "rules that are expressions or distributions", repr(one))
    if not found:
        raise ArgumentError("judge", "at least one rule", "none", f"pass rules={DEFAULT!r}, for example")
    names = [name_of(negatives) for _, negatives in found]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ArgumentError("judge", "every rule once", f"{twice} twice")
    return found


def name_of(negatives: Negatives) -> str:
    """Return the expression; distributions that cannot be written as text are distinguished by their identity."""
    text = repr(negatives)
    return text if all(factor.textual for factor in negatives.factors) else f"{text} at {id(negatives):x}"


def population_of(rule: Any, negatives: Negatives, mined: Mined) -> Population:
    """Return the filled slots of a mined rule.

    Raises:
        ArgumentError: If the rule leaves no negative for any query.
    """
    rows = mined.rows.cpu().numpy()
    query, slot = np.nonzero(rows >= 0)
    if not len(query):
        fix = "use a less strict expression"
        raise ArgumentError("judge", "rules that leave negatives to judge", repr(negatives), fix)
    similarity = float(mined.scores[mined.rows >= 0].double().mean())
    documents = rows[query, slot].astype(np.int64)
    return Population(rule, repr(negatives), query.astype(np.int64), documents, similarity)
