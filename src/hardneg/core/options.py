"""Options that are declared once: a field of a dataclass with its help, bounds and flags; light, for ``--help``."""

from __future__ import annotations

from collections.abc import Mapping
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


def flag_of(name: str, rules: Mapping[str, Any]) -> str:
    """An option as the command line writes it: ``-k``, ``--near-positive``."""
    return str(next(iter(rules.get("flags") or ()), f"--{name.replace('_', '-')}"))


def argument(help: str, default: Any = MISSING) -> Any:
    """A field that the command line takes without a flag; needed if it has no default."""
    return field(default=default, metadata={"help": help, "argument": True})


def part(name: str = "{}", only: tuple[str, ...] = (), panel: str | None = None) -> dict[str, Any]:
    """The metadata of a field that is itself such a dataclass: its fields (or only these) are flags under this name."""
    return {"part": name, "only": only, "panel": panel}


def make_plain(options: Any) -> None:
    """Numbers of numpy and torch among the fields of a frozen dataclass become Python's, which files can hold.

    Not those with a gradient, which an option cannot pass on.
    """
    for name, value in list(vars(options).items()):
        if getattr(value, "ndim", None) == 0 and not getattr(value, "requires_grad", False):
            object.__setattr__(options, name, value.item())


REQUIRED = MISSING
