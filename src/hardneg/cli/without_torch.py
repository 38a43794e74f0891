"""Run code that imports torch but computes nothing: ``hardneg explain`` reads the grammar, and torch takes a second.

While such code runs, a stand-in answers ``import torch``. Whatever is read from it is a class without behaviour, so
that annotations, base classes and ``isinstance`` work, and whatever is called returns a value without content. Looking
into such a value means that torch is needed after all: everything imported meanwhile is forgotten, and the code runs
again with torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn


class TorchNeeded(BaseException):
    """Code looked into a value of the stand-in. No handler of ordinary errors catches it."""


class _Value:
    """What a call of the stand-in returns; its attributes and results are values, too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Value()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Value()


def _look(*args: Any) -> NoReturn:
    raise TorchNeeded


_more = ("enter", "exit", "matmul", "eq", "ne", "lt", "le", "gt", "ge", "hash", "repr", "str", "format")
for _name in {name for name in {*dir(int), *dir(list)} - {*dir(object)} if name.startswith("__")}:
    setattr(_Value, _name, _look)
for _name in _more:
    setattr(_Value, f"__{_name}__", _look)


class _Kind(type):
    """Type of the classes that the stand-in consists of."""

    def __getattr__(cls, name: str) -> Any:
        return _class_in("torch", name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _Value()


class _StandIn(ModuleType):
    """A module whose missing attributes are classes without behaviour."""

    def __getattr__(self, name: str) -> Any:
        found = _class_in(self.__name__, name)
        setattr(self, name, found)
        return found


def _class_in(module: str, name: str) -> _Kind:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kind(name, (), {"__module__": module})


class _Finder(MetaPathFinder, Loader):
    """Finds the stand-in for torch and its submodules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec for torch and everything below it."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torch" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty stand-in."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: attributes of a stand-in are created when they are read."""


def without_torch(work: Callable[[], None]) -> None:
    """Run a function without importing torch if it does not compute anything, otherwise with torch.

    Args:
        work: Function that imports what it needs. It may be called twice, so its effects come last.
    """
    if "torch" in sys.modules or not _runs_without(work):
        work()


def _runs_without(work: Callable[[], None]) -> bool:
    """Run a function with the stand-in; return False if it needs torch."""
    before, finder = set(sys.modules), _Finder()
    sys.meta_path.insert(0, finder)
    try:
        work()
    except TorchNeeded:
        return False
    finally:  # modules that hold the stand-in must be imported anew
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("torch", "hardneg"):
                del sys.modules[name]
    return True
