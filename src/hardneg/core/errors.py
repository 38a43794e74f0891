"""Errors with fields, warnings that appear once, and the checks of arguments.

Every error says who needs what, what it got and what fixes it, in one sentence made from its fields. Code looks at
the class and the fields, never at the sentence.
"""

from __future__ import annotations

import difflib
import importlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any, Self

from hardneg.core.text import printable

_warned: set[str] = set()
_tensors_too: ContextVar[bool] = ContextVar("tensors_too", default=False)


class HardnegWarning(UserWarning):
    """Something that hurts training and has a fix, which the message names; ``kind`` is the same for the like."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class MiningWarning(HardnegWarning):
    """About what hn.mine was given: vectors of different norms, too few positives, or too few documents for k."""


def warn_once(key: str, message: str) -> None:
    """Warns unless the key did before; what stands before a colon in it is the kind of the warning."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(HardnegWarning(message, key.partition(":")[0]), stacklevel=3)


def forget_warnings() -> None:
    """Lets every warning appear again, for tests and notebooks."""
    _warned.clear()


class HardnegError(Exception):
    """``who`` needs ``what``, got ``got``; ``fix``.

    >>> str(HardnegError("mine", "a corpus", got="corpus=None", fix="pass --corpus FILE"))
    'mine needs a corpus, got corpus=None; pass --corpus FILE.'
    """

    where: str | None = None

    def __init__(self, who: str, what: str, got: str | None = None, fix: str | None = None) -> None:
        self.who, self.what, self.got, self.fix = who, what, got, fix
        Exception.__init__(self, who, what, got, fix)  # not super(): an OSError would take them for its own fields

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, vars(self)  # all fields, so that the error survives pickling

    def within(self, where: str) -> Self:
        """The same error with the place where it happened before its sentence, as in ``hcl(), seed 1: ...``."""
        self.where = where if self.where is None else f"{where}: {self.where}"
        return self

    def __str__(self) -> str:
        sentence = self._sentence().removesuffix(".") + "."  # one that ends with another error has its full stop
        return sentence if self.where is None else f"{self.where}: {sentence}"

    def _sentence(self) -> str:
        got = f", got {self.got}" if self.got is not None else ""
        return f"{self.who} needs {self.what}{got}{self._then()}"

    def _then(self) -> str:
        return f"; {self.fix}" if self.fix else ""


@contextmanager
def located(where: str) -> Iterator[None]:
    """Puts a place, such as the flag of an option, before the sentence of an error that the block raises."""
    try:
        yield
    except HardnegError as error:
        raise error.within(where)  # noqa: B904  (the same error)


class ArgumentError(HardnegError, ValueError):
    """A value that cannot mean anything here."""


class UnknownName(ArgumentError):
    """A name that is none of the ``known`` ones, with the ``nearest`` of them.

    >>> str(UnknownName("epocs", ["epochs", "seed"]))
    "'epocs' is not known. Did you mean epochs? Known: epochs, seed."
    """

    def __init__(
        self, name: str, known: Iterable[str], place: str = "", usage: Mapping[str, str] | None = None
    ) -> None:
        """``place`` says where, as in "Known in run.yaml: ..."; ``usage`` how each known name is used."""
        self.name, self.known, self.place = name, list(known), place
        self.nearest = next(iter(difflib.get_close_matches(name, self.known, n=1)), None)
        self.usage = (usage or {}).get(self.nearest or "")
        super().__init__(place or "hardneg", "a known name", repr(name), self.nearest and f"use {self.nearest}")
        self.args = (name, self.known, place, {self.nearest: self.usage} if self.usage else None)

    def _sentence(self) -> str:
        hint = f" Did you mean {self.nearest}?" if self.nearest else ""
        hint += f" {self.usage}." if self.usage else ""
        known = f"Known{f' {self.place}' if self.place else ''}: {', '.join(self.known) or 'none'}"
        return f"{printable(repr(self.name), 80)} is not known.{hint} {known}."


class GrammarError(ArgumentError):
    """An expression that the grammar cannot read."""


class NotFinite(HardnegError, ValueError):
    """NaN or infinity where numbers are needed."""


class MissingExtra(HardnegError, ImportError):
    """A package that an extra of hardneg installs is not installed."""


class FileError(HardnegError, ValueError):
    """A file that cannot be used, with its ``path``."""

    def __init__(self, who: str, what: str, path: Path | str, got: str | None = None, fix: str | None = None) -> None:
        super().__init__(who, what, got, fix)
        self.path = Path(path)
        self.args = (who, what, str(path), got, fix)

    def _sentence(self) -> str:
        got = f", {self.got}" if self.got else ""
        return f"{self.who} needs {self.what}, got {self.path}{got}{self._then()}."


class NoFile(FileError, FileNotFoundError):
    """A file or folder that is not there."""


class Damaged(FileError):
    """A stored file whose content is not what was written: its checksum differs or it cannot be read."""

    def _sentence(self) -> str:
        got = f" ({self.got})" if self.got else ""
        return f"{self.who}: {self.path} is damaged{got}{self._then()}."


class InUse(FileError):
    """Another process works on the same output."""

    def _sentence(self) -> str:
        return f"{self.who}: {self.path} is in use by another process{self._then()}."


class DataChanged(HardnegError, ValueError):
    """The data is not the data that a run or job was begun with."""


class NotWritten(HardnegError, OSError):
    """A file could not be written, with its ``path`` and the ``errno`` of the system; what was there is unchanged."""

    def __init__(self, path: Path | str, number: int | None, reason: str, fix: str | None = None) -> None:
        super().__init__(str(path), "to be written", reason, fix)
        self.path, self.errno, self.strerror, self.filename = Path(path), number, reason, str(path)
        self.args = (str(path), number, reason, fix)

    def _sentence(self) -> str:
        return f"{self.path} could not be written ({self.got}); what was there before is unchanged{self._then()}."


class DiskFull(NotWritten):
    """The disk is full."""


_flags: ContextVar[Mapping[str, Mapping[str, str]] | None] = ContextVar("flags", default=None)


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def flags_in_errors(flags: Mapping[str, Mapping[str, str]]) -> AbstractContextManager[None]:
    """Inside, errors of these callers name their arguments as the command line does: {"mine": {"k": "-k"}}."""
    return _set(_flags, flags)


def spelled(who: str, name: str) -> str:
    """An argument as its user writes it: ``near_positive``, or ``--near-positive`` on the command line."""
    return (_flags.get() or {}).get(who, {}).get(name, name)


def written(who: str, name: str, value: Any) -> str:
    """An argument with its value: ``draw='top'``, or ``--draw top`` on the command line."""
    flag = spelled(who, name)
    return f"{name}={value!r}" if flag == name else f"{flag} {value}"


def argument_error(who: str, what: str, name: str, value: Any, fix: str | None = None) -> ArgumentError:
    return ArgumentError(who, what, written(who, name, value), fix)


_packages = {"PIL": "Pillow", "faiss": "faiss-cpu", "sklearn": "scikit-learn", "yaml": "pyyaml"}


def optional(module: str, who: str, extra: str) -> Any:
    """A module that only an extra installs; without it, an error that names the extra."""
    try:
        importlib.import_module(module.partition(".")[0])  # so that a part of it that lingers does not hide its absence
        return importlib.import_module(module)
    except ImportError:
        raise missing_extra(who, module, extra) from None


def missing_extra(who: str, module: str, extra: str) -> MissingExtra:
    name = module.split(".")[0]
    package = _packages.get(name, name.replace("_", "-"))
    return MissingExtra(who, package, fix=f"pip install 'hardneg[{extra}]'")


def check_kind(who: str, name: str, value: Any, kind: type, what: str) -> None:
    """Raises unless the value is of this kind; a flag is not a whole number."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise argument_error(who, what, name, value)


def check_callable(who: str, name: str, value: Any, what: str) -> None:
    if not callable(value):
        raise argument_error(who, what, name, value)


def check_range(who: str, name: str, value: Any, low: float, high: float, *, open_high: bool = False) -> None:
    """Raises unless ``low <= value <= high`` (or ``< high``); what is not yet a number, like a schedule, passes.

    So does a tensor, except inside ``tensors_checked()``.
    """
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise argument_error(who, "a number", name, value)
    if isinstance(value, Real):
        numbers = [float(value)]
    elif _tensors_too.get() and hasattr(value, "is_meta") and value.numel() and not value.is_meta:  # no torch for help
        numbers = [value.detach().amin().item(), value.detach().amax().item()]
    else:
        return
    for number in numbers:
        if math.isnan(number) or number < low or number > high or (open_high and number == high):
            bracket = ")" if open_high or high == math.inf else "]"
            raise argument_error(who, f"{spelled(who, name)} in [{low}, {high}{bracket}", name, number)


def tensors_checked() -> AbstractContextManager[None]:
    """Inside, ``check_range`` looks into tensors, which waits for a GPU: for constructors, not for steps."""
    return _set(_tensors_too, True)


def check_among(who: str, name: str, value: Any, known: Sequence[str]) -> None:
    """Raises unless the value is one of the known ones."""
    if value not in known:
        raise argument_error(who, f"{spelled(who, name)} to be one of {', '.join(known)}", name, value)


def check_count(who: str, name: str, value: Any, least: int = 1) -> int:
    """The value as an int; raises unless it is a whole number of at least this. One of numpy or torch is, a flag not.

    >>> import numpy as np
    >>> check_count("mine", "k", np.int64(5))
    5
    """
    number = value
    # An int first, and alone in a compiled graph; torch counts a tensor of True as 1.
    if not isinstance(value, int) and not str(getattr(value, "dtype", "")).endswith("bool"):
        with suppress(TypeError):
            number = index(value)
    check_kind(who, name, number, int, "a whole number")
    if number < least:
        raise argument_error(who, f"{spelled(who, name)} of {least} or more", name, number)
    return int(number)


def check_seed(who: str, seed: Any) -> int:
    """The seed as an int; raises unless it is a whole number of 64 bits, negative ones included."""
    number = check_count(who, "seed", seed, least=-(2**63))
    if number >= 2**63:
        raise argument_error(who, f"{spelled(who, 'seed')} below 2**63", "seed", number)
    return number


def check_counts(who: str, owner: Any, *names: str, least: int = 1) -> None:
    """The same for fields of a frozen dataclass, which are plain ints afterwards, as its repr and JSON need them."""
    for name in names:
        object.__setattr__(owner, name, check_count(who, name, getattr(owner, name), least))
