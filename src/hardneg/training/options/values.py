"""Checks of the value of an option: its type, its bounds, and how both are described."""

from __future__ import annotations

import math
import re
from functools import cache, reduce
from operator import or_
from types import NoneType
from typing import Any, get_args, get_type_hints

from hardneg.core.errors import ArgumentError
from hardneg.core.options import flag_of
from hardneg.core.text import printable

Scheduled = float | str
"""A number, or the text of a schedule such as "linear(0.5, 0.1)"."""


_largest = 2**63 - 1  # of the whole numbers that torch takes


@cache
def kinds_of(options: type) -> dict[str, Any]:
    """The types of the fields, which Python evaluates from their text each time; a comparison reads many options."""
    return get_type_hints(options)


def check_option(who: str, name: str, value: Any, kind: Any, rules: Any) -> None:
    """Raises before anything is loaded, naming the option and what it allows; the text of a schedule is read later."""
    flag, got = flag_of(name, rules), repr(value)
    if rules["among"] and value not in rules["among"]:
        raise ArgumentError(who, f"{flag} to be one of {', '.join(rules['among'])}", got)
    if not _is(kind, value):
        raise ArgumentError(who, f"{flag} to be {called(kind)}", got)
    if rules["low"] is not None and value is not None and not isinstance(value, str):
        check_bounds(who, name, value, rules)


def check_bounds(who: str, name: str, value: float, rules: Any, got: str | None = None) -> None:
    """Raises unless a number is within what its option allows; ``got`` where the number is a part of what was given."""
    low, high = rules["low"], rules["high"]
    if high is None and isinstance(value, int) and value > _largest:
        high = _largest
    if not low <= value <= (math.inf if high is None else high) or value == math.inf:
        raise ArgumentError(who, f"{flag_of(name, rules)} {allowed(low, high)}", got or printable(repr(value), 80))


def allowed(low: float, high: float | None) -> str:
    return f"of at least {shown(low)}" if high is None else f"between {shown(low)} and {shown(high)}"


def shown(bound: float) -> str:
    """A bound as people write it: a whole number with all its digits."""
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def from_text(kind: Any, value: Any) -> Any:
    """A value of a YAML file as a flag would have read it: YAML takes 1e-3 for a word and no for False."""
    kind = unless_none(kind)
    if isinstance(value, str) and kind in (int, float, Scheduled):
        try:
            return int(value) if kind is int else float(value)
        except ValueError:
            return value
    return {True: "yes", False: "no"}[value] if kind is str and isinstance(value, bool) else value


def _is(kind: Any, value: Any) -> bool:
    if value is None:
        return NoneType in get_args(kind)
    kind = unless_none(kind)
    if kind == Scheduled and isinstance(value, str):
        return re.fullmatch(r"\w+\(.*\)", value.strip(), re.DOTALL) is not None
    if get_args(kind):
        return any(_is(one, value) for one in get_args(kind))
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind)


def called(kind: Any) -> str:
    kind = unless_none(kind)
    names = {int: "a whole number", float: "a number", bool: "true or false"}
    return 'a number or a schedule such as "linear(0.5, 0.1)"' if kind == Scheduled else names.get(kind, "text")


def unless_none(kind: Any) -> Any:
    """The kind of a value that is given, where None stands for one that is not."""
    parts = get_args(kind)
    return reduce(or_, (one for one in parts if one is not NoneType)) if NoneType in parts else kind
