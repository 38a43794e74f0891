"""Options declared once, as dataclass fields with help, bounds and flags.

``hardneg.cli.flags`` turns the fields into command line flags, and configuration files use their names. This module
does not import torch, so that ``--help`` stays fast.
"""

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
    """Declare a field that is a command line flag and a key of configuration files.

    Args:
        default: Default value; ``REQUIRED`` if the user must set it.
        help: Help text.
        panel: Title of the group of flags in ``--help``.
        flags: Spellings on the command line, such as "-k"; ``--name`` by default.
        low: Smallest valid value.
        high: Largest valid value.
        among: The valid values.
    """
    rules = {"help": help, "panel": panel, "flags": flags, "low": low, "high": high, "among": among}
    return field(default=default, metadata=rules)


def flag_of(name: str, rules: Mapping[str, Any]) -> str:
    """Return the flag of an option: ``-k``, ``--near-positive``.

    Example:
        >>> flag_of("near_positive", {}), flag_of("k", {"flags": ("-k",)})
        ('--near-positive', '-k')
    """
    return str(next(iter(rules.get("flags") or ()), f"--{name.replace('_', '-')}"))


def argument(help: str, default: Any = MISSING) -> Any:
    """Declare a field that is a positional argument on the command line; required if it has no default."""
    return field(default=default, metadata={"help": help, "argument": True})


def part(
    name: str = "{}", only: tuple[str, ...] = (), panel: str | None = None, helps: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the metadata of a field that is itself a dataclass of options.

    Args:
        name: Pattern of the flags' names; ``{}`` stands for the name of the inner field.
        only: Names of the inner fields to include; all by default.
        panel: Title of the group of flags in ``--help``.
        helps: Other help texts of inner fields, by their names.
    """
    return {"part": name, "only": only, "panel": panel, "helps": helps or {}}


def make_plain(options: Any) -> None:
    """Convert 0-dimensional numpy and torch values of a frozen dataclass to Python numbers, which files can store.

    Tensors that require a gradient are left alone.
    """
    for name, value in list(vars(options).items()):
        if getattr(value, "ndim", None) == 0 and not getattr(value, "requires_grad", False):
            object.__setattr__(options, name, value.item())


REQUIRED = MISSING
"""Default of an option that the user must set."""
