"""A Python function by its name: ``module:function``, or ``path/to/file.py:function``."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hardneg.core.errors import ArgumentError, NoFile


def names_a_file(text: str) -> bool:
    """Whether this is ``file.py:function``.

    >>> names_a_file("encoders/mine.py:build"), names_a_file("st:models/mine.py")
    (True, False)
    """
    return text.rpartition(":")[0].endswith(".py")


def load_function(text: str, who: str) -> Callable[..., Any]:
    """The function; the current folder counts. Only for what a person has named: the module is run."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ArgumentError(who, "a function as 'file.py:function' or 'module:function'", repr(text))
    module = _of_file(Path(place), module_of(text), who) if names_a_file(text) else _of_name(place, text, who)
    found = getattr(module, name, None)
    if not callable(found):
        raise ArgumentError(who, f"a function {name!r} in {place}", "none" if found is None else repr(found))
    return found  # type: ignore[no-any-return]


def module_of(text: str) -> str:
    """The name in ``sys.modules`` of the module that ``load_function`` runs."""
    place = text.rpartition(":")[0]
    if not names_a_file(text):
        return place
    return re.sub(r"\W", "_", str(Path(place).resolve().with_suffix("")))  # not the stem alone, which may be torch


def _of_file(path: Path, name: str, who: str) -> Any:
    if not path.is_file():
        raise NoFile(who, "a Python file that exists", path)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it is run, as dataclasses and pickles need
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _of_name(module: str, text: str, who: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ArgumentError(who, "a module that exists", f"{text!r}: {error}") from None
