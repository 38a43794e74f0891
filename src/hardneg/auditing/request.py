"""Errors raised by the readers that mining and audits share name the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hardneg.core.errors import HardnegError


@contextmanager
def as_audit_errors() -> Iterator[None]:
    """Errors of mining inside are errors of the audit that called it."""
    try:
        yield
    except HardnegError as error:
        if error.who == "mine":
            error.who = "audit"
            error.args = ("audit", *error.args[1:])
        raise
