"""Options that are declared once: a field of a dataclass with its help, bounds and flags; light, for ``--help``."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def option(
    default: Any,
    help: str,
    panel: str | None = None,
    *flags: str,
    low: float | None = None,
    high: float | None = None,
    among: Any = None,
) -> Any:
    """A field that becomes a flag and a name in files; ``REQUIRED`` as default makes it needed."""
    rules = {"help": help, "panel": panel, "flags": flags, "low": low, "high": high, "among": among}
    return field(default=default, metadata=rules)


def argument(help: str, default: Any = MISSING) -> Any:
    """A field that the command line takes without a flag; needed if it has no default."""
    return field(default=default, metadata={"help": help, "argument": True})


def part(name: str = "{}", only: tuple[str, ...] = (), panel: str | None = None) -> dict[str, Any]:
    """The metadata of a field that is itself such a dataclass: its fields (or only these) are flags under this name."""
    return {"part": name, "only": only, "panel": panel}


REQUIRED = MISSING
