"""Errors and warnings by their class and fields, whatever their sentence says."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hardneg.core.errors import HardnegWarning


@contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], **fields: str) -> Iterator[Any]:
    """Like ``pytest.raises``: an error of the class, of which each named field contains the text.

    Example:
        >>> from hardneg.core.errors import ArgumentError, check_count
        >>> with raises(ArgumentError, who="mine", got="k=0"):
        ...     check_count("mine", "k", 0)
    """
    with pytest.raises(kind) as caught:
        yield caught
    for name, part in fields.items():
        assert part in str(getattr(caught.value, name)), f"{name} of {caught.value!r}"


@contextmanager
def warns(kind: str, *parts: str) -> Iterator[list[warnings.WarningMessage]]:
    """Like ``pytest.warns``: a HardnegWarning of this kind, whose message has these values. Others are issued again."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield heard
    expected = [one for one in heard if _is_of(one, kind, parts)]
    for one in heard:
        if not _is_of(one, kind, ()):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    assert expected, [str(one.message) for one in heard]


def _is_of(one: warnings.WarningMessage, kind: str, parts: tuple[str, ...]) -> bool:
    message = one.message
    return (
        isinstance(message, HardnegWarning)
        and (message.kind == kind or message.kind.startswith(f"{kind}."))
        and all(part in str(message) for part in parts)
    )
