"""Translate the options of sentence-transformers' ``mine_hard_negatives`` to an expression of the grammar.

    relative_margin, absolute_margin    BelowPositive(relative=..., absolute=...)
    max_score, min_score                AtMost(...), Threshold(...)
    range_min, range_max                Rank(range_min, range_max), after the others
    num_negatives, sampling_strategy    k; draw "top", or "gumbel" for "random", with a seed

sentence-transformers cuts a list of range_max + the number of positives before the filters, so a
query may have too few negatives although the corpus has more. Here the filters come first: the
negatives are the same if that list was long enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hardneg.core.errors import ArgumentError, UnknownName, argument_error, check_among, check_count
from hardneg.negatives import Negatives

_rule_options = ("range_min", "range_max", "max_score", "min_score", "absolute_margin", "relative_margin")
_counterparts = {"num_negatives": "k", "sampling_strategy": "draw"}
_speed_options = ("use_faiss", "faiss_batch_size")
_unsupported = {
    "include_positives": "mine without it, and add the positives to a set for evaluation",
    "use_multi_process": "encode with several processes before, or use `torchrun -m hardneg mine`",
    "as_triplets": "use output_format",
    "margin": "use absolute_margin",
}


@dataclass(frozen=True)
class Translated:
    """The translated options.

    Attributes:
        negatives: Distribution or its expression.
        k: Number of negatives per query.
        draw: How they are drawn.
        candidates: Number of candidates that a cross-encoder scores.
        use_faiss: Whether FAISS searches.
    """

    negatives: Negatives | str
    k: int
    draw: str
    candidates: int
    use_faiss: bool = False


def translate(
    named: dict[str, Any], negatives: Negatives | str | None, k: int | None, draw: str | None, most_positives: int
) -> Translated:
    """Return the rule given in either vocabulary.

    Args:
        named: Options of sentence-transformers by name.
        negatives: Distribution in our vocabulary, or None.
        k: Number of negatives in our vocabulary, or None.
        draw: Draw in our vocabulary, or None.
        most_positives: Largest number of positives of a query.

    Raises:
        ArgumentError: If both vocabularies are used, or an option has no counterpart here.
        UnknownName: If a name is in neither vocabulary.

    Example:
        >>> translate({"range_min": 5, "max_score": 0.8}, None, None, None, 1).negatives
        'AtMost(0.8) * Rank(5)'
    """
    for name, value in named.items():
        if name in _unsupported and value:
            raise ArgumentError("mine", f"no {name}", f"{name}={value!r}", _unsupported[name])
        if name not in (*_rule_options, *_counterparts, *_speed_options, *_unsupported):
            raise UnknownName(name, ["negatives", "k", "draw", *_rule_options, *_counterparts, *_speed_options])
    given = {name: value for name, value in named.items() if value is not None}
    twice = [name for name in _rule_options if name in given and negatives is not None]
    twice += [
        name for name, ours in _counterparts.items() if name in given and {"k": k, "draw": draw}[ours] is not None
    ]
    if twice:
        raise ArgumentError(
            "mine", "an expression or the options of sentence-transformers", f"both, {twice[0]} among the latter"
        )
    k = check_count("mine", "k", given.get("num_negatives", 3) if k is None else k)
    for name in ("range_min", "range_max"):
        if name in given:
            given[name] = check_count("mine", name, given[name], least=0)
    strategy = given.get("sampling_strategy", "top")
    check_among("mine", "sampling_strategy", strategy, ("top", "random"))
    draw = draw or {"top": "top", "random": "gumbel"}[strategy]
    last = given.get("range_max") or _last_rank(given, k, most_positives)
    if negatives is None:
        stop = last if "range_max" in given or draw != "top" else None
        negatives = _expression(given, stop)
    faiss = bool(given.get("use_faiss"))
    return Translated(negatives, k, draw, last if "range_max" in given else max(100, last), faiss)


def _last_rank(given: dict[str, Any], k: int, most_positives: int) -> int:
    """Return the range_max that sentence-transformers uses if none is given."""
    filters = any(name in given for name in ("absolute_margin", "relative_margin", "max_score"))
    return int(given.get("range_min", 0)) + (10 * k if filters else k) + most_positives


def _expression(given: dict[str, Any], stop: int | None) -> str:
    margins = [f"{name}={given[f'{name}_margin']!r}" for name in ("relative", "absolute") if f"{name}_margin" in given]
    parts = [f"BelowPositive({', '.join(margins)})"] if margins else []
    parts += [f"AtMost({float(given['max_score'])!r})"] if "max_score" in given else []
    parts += [f"Threshold({float(given['min_score'])!r})"] if "min_score" in given else []
    start = given.get("range_min", 0)
    if stop is not None and start >= stop:
        raise argument_error("mine", f"a range_min below range_max={stop}", "range_min", start)
    if start or stop is not None:
        parts.append(f"Rank({start})" if stop is None else f"Rank({start}, {stop})")
    return " * ".join(parts) or "Uniform()"
