"""Errors of the readers that mining and audits share, in the name of the one who asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def asked_by_audit() -> Iterator[None]:
    """Whatever says "mine needs ..." inside says "audit needs ..."."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        text = str(error)
        if not text.startswith("mine needs"):
            raise
        raise type(error)("audit" + text.removeprefix("mine")) from None
