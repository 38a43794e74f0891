"""Warnings said once, and the one sentence of all argument errors."""

from __future__ import annotations

import importlib
import math
import warnings
from numbers import Real
from typing import Any

_said: set[str] = set()


class HardnegWarning(UserWarning):
    """Something that hurts training and has a fix, which the message names."""


def warn_once(key: str, message: str) -> None:
    if key not in _said:
        _said.add(key)
        warnings.warn(message, HardnegWarning, stacklevel=3)


def forget_warnings() -> None:
    """Lets every warning be said again, for tests and notebooks."""
    _said.clear()


def argument_error(who: str, what: str, name: str, value: Any) -> ValueError:
    return ValueError(f"{who} needs {what}, got {name}={value!r}.")


_packages = {"PIL": "Pillow", "faiss": "faiss-cpu", "sklearn": "scikit-learn", "yaml": "pyyaml"}


def optional(module: str, who: str, extra: str) -> Any:
    """A module that only an extra installs; without it, an error that names the extra."""
    try:
        importlib.import_module(module.partition(".")[0])  # so that a part of it that lingers does not hide its absence
        return importlib.import_module(module)
    except ImportError:
        raise missing_extra(who, module, extra) from None


def missing_extra(who: str, module: str, extra: str) -> ImportError:
    name = module.split(".")[0]
    package = _packages.get(name, name.replace("_", "-"))
    return ImportError(f"{who} needs {package}: pip install 'hardneg[{extra}]'.")


def check_kind(who: str, name: str, value: Any, kind: type, what: str) -> None:
    """Raises unless the value is of this kind; a flag is not a whole number."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise argument_error(who, what, name, value)


def check_range(who: str, name: str, value: Any, low: float, high: float, *, open_high: bool = False) -> None:
    """Raises unless ``low <= value <= high`` (or ``< high``); what is not yet a number, like a schedule, passes."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise argument_error(who, "a number", name, value)
    if not isinstance(value, Real):
        return
    value = float(value)
    if math.isnan(value) or value < low or value > high or (open_high and value == high):
        bracket = ")" if open_high or high == math.inf else "]"
        raise argument_error(who, f"{name} in [{low}, {high}{bracket}", name, value)
