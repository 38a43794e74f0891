"""Checks of the value of a single option: its type, its bounds, and the words that describe both in errors.

``TrainOptions`` calls ``check_option`` for each of its fields; the readers of flags and YAML files use the helpers.
Expressions and schedules are only checked for their shape here; ``training/loop/checks.py`` parses them.
"""

from __future__ import annotations

import math
import re
from functools import cache, reduce
from operator import or_
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hardneg.core.errors import ArgumentError
from hardneg.core.options import flag_of
from hardneg.core.text import printable

Scheduled = float | str
"""A number, or the text of a schedule such as "linear(0.5, 0.1)"."""

ESTIMATE = "estimate"
"""Value of ``tau_plus`` that is replaced by an estimate from the labels of the training items."""

_largest = 2**63 - 1  # the largest integer that fits into a torch tensor


@cache
def kinds_of(options: type) -> dict[str, Any]:
    """Return the types of the fields of an options class, by name.

    Cached, because Python evaluates annotations from their text on every call and a comparison reads many options.
    """
    return {name: plain(kind) for name, kind in get_type_hints(options).items()}


def check_option(who: str, name: str, value: Any, kind: Any, rules: Any) -> None:
    """Check the value of one option against its type, its bounds and its allowed words.

    Args:
        who: Verb of the command line, the subject of the error.
        name: Name of the field.
        value: The value to check; the text of a schedule is parsed later.
        kind: Type of the field, from ``kinds_of``.
        rules: Metadata of the field, as ``option(...)`` stores it.

    Raises:
        ArgumentError: If the value is not allowed; it names the flag and what is allowed.
    """
    flag, got = flag_of(name, rules), repr(value)
    if rules["among"] and value is not None and value not in rules["among"]:
        raise ArgumentError(who, f"{flag} to be one of {', '.join(rules['among'])}", got)
    if not _is(kind, value):
        raise ArgumentError(who, f"{flag} to be {called(kind)}", got)
    if rules["low"] is not None and value is not None and not isinstance(value, str):
        check_bounds(who, name, value, rules)


def check_bounds(who: str, name: str, value: float, rules: Any, got: str | None = None) -> None:
    """Raise ``ArgumentError`` unless a number is within the bounds of its option.

    Args:
        who: Verb of the command line, the subject of the error.
        name: Name of the field.
        value: The number to check; infinity is never allowed.
        rules: Metadata of the field: ``low`` is required, ``high`` may be None.
        got: Text that the error shows instead of the number, for a number that is only a part of the user's value.
    """
    low, high = rules["low"], rules["high"]
    if high is None and isinstance(value, int) and value > _largest:
        high = _largest
    if not low <= value <= (math.inf if high is None else high) or value == math.inf:
        raise ArgumentError(who, f"{flag_of(name, rules)} {allowed(low, high)}", got or printable(repr(value), 80))


def allowed(low: float, high: float | None) -> str:
    """Describe the bounds of an option for an error.

    Example:
        >>> allowed(1, None), allowed(0.0, 0.999)
        ('of at least 1', 'between 0 and 0.999')
    """
    return f"of at least {shown(low)}" if high is None else f"between {shown(low)} and {shown(high)}"


def shown(bound: float) -> str:
    """Format a bound: a whole number with all its digits, a float in its short form."""
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def from_text(kind: Any, value: Any) -> Any:
    """Convert a value of a YAML file to the value that the flag would have.

    YAML 1.1 reads ``1e-3`` as a string and ``no`` as False, which a user means as a number and as the word.

    Args:
        kind: Type of the option.
        value: The value as the YAML reader returns it.

    Returns:
        The converted value, or the value itself where nothing needs converting.

    Example:
        >>> from_text(float, "1e-3"), from_text(str, False)
        (0.001, 'no')
    """
    kind = unless_none(kind)
    if isinstance(value, str) and kind in (int, float, Scheduled):
        try:
            return int(value) if kind is int else float(value)
        except ValueError:
            return value
    return {True: "yes", False: "no"}[value] if kind is str and isinstance(value, bool) else value


def _is(kind: Any, value: Any) -> bool:
    """Return True if the value has the type; a schedule counts as one by its shape, ``name(...)``.

    So does the word "estimate"; options for which there is no estimate raise when it is read.
    """
    if value is None:
        return NoneType in get_args(kind)
    kind = unless_none(kind)
    if kind == Scheduled and isinstance(value, str):
        return value == ESTIMATE or re.fullmatch(r"\w+\(.*\)", value.strip(), re.DOTALL) is not None
    if get_args(kind):
        return any(_is(one, value) for one in get_args(kind))
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind)


def called(kind: Any) -> str:
    """Describe the type of an option for an error: "a whole number", "a number", "true or false", "text"."""
    kind = unless_none(kind)
    names = {int: "a whole number", float: "a number", bool: "true or false"}
    return 'a number or a schedule such as "linear(0.5, 0.1)"' if kind == Scheduled else names.get(kind, "text")


def plain(kind: Any) -> Any:
    """Return the type, with str for a Literal of words.

    Example:
        >>> plain(Literal["cosine", "dot"]), plain(int)
        (<class 'str'>, <class 'int'>)
    """
    return str if get_origin(kind) is Literal else kind


def unless_none(kind: Any) -> Any:
    """Return the type without its None alternative.

    Example:
        >>> unless_none(int | None)
        <class 'int'>
    """
    parts = get_args(kind)
    return reduce(or_, (one for one in parts if one is not NoneType)) if NoneType in parts else kind
