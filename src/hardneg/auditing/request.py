"""Errors of the readers that mining and audits share, in the name of the one who asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hardneg.core.errors import HardnegError


@contextmanager
def asked_by_audit() -> Iterator[None]:
    """Errors of mining inside are errors of the audit that called it."""
    try:
        yield
    except HardnegError as error:
        if error.who == "mine":
            error.who = "audit"
            error.args = ("audit", *error.args[1:])
        raise
