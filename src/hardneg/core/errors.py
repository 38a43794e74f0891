"""Errors with fields, warnings that appear once, and checks of arguments.

Every error stores who needs what, what was passed instead and how to fix it, and builds one sentence from these fields.
Code and tests match the class and the fields, never the sentence. Read ``HardnegError`` first; its subclasses follow,
then the ``check_*`` functions that constructors call. This module does not import torch, so that the command line
starts quickly.
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

_warned: set[str] = set()  # keys of the warnings that have been shown
_tensors_too: ContextVar[bool] = ContextVar("tensors_too", default=False)


class HardnegWarning(UserWarning):
    """A problem that hurts training, with its fix in the message.

    Attributes:
        kind: Category of the warning, the same for all warnings of the same cause.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class MiningWarning(HardnegWarning):
    """A problem with the inputs of hn.mine: vectors of different norms, few positives, or few documents for k."""


def warn_once(key: str, message: str) -> None:
    """Issue a HardnegWarning unless one with the same key was issued before.

    Args:
        key: Identifies the warning; the part before a colon becomes its ``kind``.
        message: What is wrong and how to fix it.
    """
    if key not in _warned:
        _warned.add(key)
        warnings.warn(HardnegWarning(message, key.partition(":")[0]), stacklevel=3)


def forget_warnings() -> None:
    """Let every warning appear again, for tests and notebooks."""
    _warned.clear()


class HardnegError(Exception):
    """Base class of all errors, with fields and one sentence made from them.

    The sentence is ``{who} needs {what}, got {got}; {fix}.`` Subclasses also derive from the matching builtin, such as
    ValueError.

    Attributes:
        who: Function, class or file that reports the problem.
        what: What it needs.
        got: What it got instead, or None.
        fix: What to do about it, or None.

    Example:
        >>> str(HardnegError("mine", "a corpus", got="corpus=None", fix="pass --corpus FILE"))
        'mine needs a corpus, got corpus=None; pass --corpus FILE.'
    """

    where: str | None = None
    """Place to print before the sentence, such as a flag; set by ``within``."""

    def __init__(self, who: str, what: str, got: str | None = None, fix: str | None = None) -> None:
        self.who, self.what, self.got, self.fix = who, what, got, fix
        Exception.__init__(self, who, what, got, fix)  # not super(): OSError would read them as errno and strerror

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, vars(self)  # all fields, so that the error survives pickling

    def within(self, where: str) -> Self:
        """Return this error with a place added before its sentence, as in ``hcl(), seed 1: ...``."""
        self.where = where if self.where is None else f"{where}: {self.where}"
        return self

    def __str__(self) -> str:
        sentence = self._sentence().removesuffix(".") + "."  # a sentence that ends with another error has one already
        return sentence if self.where is None else f"{self.where}: {sentence}"

    def _sentence(self) -> str:
        got = f", got {self.got}" if self.got is not None else ""
        return f"{self.who} needs {self.what}{got}{self._then()}"

    def _then(self) -> str:
        return f"; {self.fix}" if self.fix else ""


@contextmanager
def located(where: str) -> Iterator[None]:
    """Add a place, such as the flag of an option, to any HardnegError raised in the block."""
    try:
        yield
    except HardnegError as error:
        raise error.within(where)  # noqa: B904  (the same error)


class ArgumentError(HardnegError, ValueError):
    """An argument that is invalid or does not fit the other arguments."""


class UnknownName(ArgumentError):
    """A name that does not exist, with the closest existing one.

    Attributes:
        name: The unknown name.
        known: All valid names.
        nearest: The most similar valid name, or None.

    Example:
        >>> str(UnknownName("epocs", ["epochs", "seed"]))
        "'epocs' is not known. Did you mean epochs? Known: epochs, seed."
    """

    def __init__(
        self, name: str, known: Iterable[str], place: str = "", usage: Mapping[str, str] | None = None
    ) -> None:
        """Store the name and find the closest known one.

        Args:
            name: The unknown name.
            known: All valid names.
            place: Where they are valid, as in "Known in run.yaml: ...".
            usage: A sentence on how to use each name; that of the closest one is shown.
        """
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
    """An expression that the grammar cannot parse."""


class NotFinite(HardnegError, ValueError):
    """NaN or infinity where finite numbers are needed."""


class MissingExtra(HardnegError, ImportError):
    """A required package is not installed; the fix names the extra of hardneg that installs it."""


class FileError(HardnegError, ValueError):
    """A file that cannot be used.

    Attributes:
        path: The file.
    """

    def __init__(self, who: str, what: str, path: Path | str, got: str | None = None, fix: str | None = None) -> None:
        super().__init__(who, what, got, fix)
        self.path = Path(path)
        self.args = (who, what, str(path), got, fix)

    def _sentence(self) -> str:
        got = f", {self.got}" if self.got else ""
        return f"{self.who} needs {self.what}, got {self.path}{got}{self._then()}."


class NoFile(FileError, FileNotFoundError):
    """A file or folder that does not exist."""


class Damaged(FileError):
    """A stored file that cannot be read, or whose checksum differs."""

    def _sentence(self) -> str:
        got = f" ({self.got})" if self.got else ""
        return f"{self.who}: {self.path} is damaged{got}{self._then()}."


class InUse(FileError):
    """Another process is writing to the same output."""

    def _sentence(self) -> str:
        return f"{self.who}: {self.path} is in use by another process{self._then()}."


class DataChanged(HardnegError, ValueError):
    """The data differs from the data that the run or job was started with."""


class NotWritten(HardnegError, OSError):
    """A file could not be written; any existing version is unchanged.

    Attributes:
        path: The file.
        errno: Error number of the operating system, if there is one.
    """

    def __init__(self, path: Path | str, number: int | None, reason: str, fix: str | None = None) -> None:
        super().__init__(str(path), "to be written", reason, fix)
        self.path, self.errno, self.strerror, self.filename = Path(path), number, reason, str(path)
        self.args = (str(path), number, reason, fix)

    def _sentence(self) -> str:
        return f"{self.path} could not be written ({self.got}); any existing file is unchanged{self._then()}."


class DiskFull(NotWritten):
    """A file could not be written because the disk is full."""


_flags: ContextVar[Mapping[str, Mapping[str, str]] | None] = ContextVar("flags", default=None)
"""Flag of each argument of each caller, while the command line runs."""


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def flags_in_errors(flags: Mapping[str, Mapping[str, str]]) -> AbstractContextManager[None]:
    """Show arguments in errors as command line flags inside the block.

    Args:
        flags: Flag of each argument of each caller: {"mine": {"k": "-k"}}.
    """
    return _set(_flags, flags)


def spelled(who: str, name: str) -> str:
    """Return an argument as the user writes it: ``near_positive``, or ``--near-positive`` on the command line."""
    return (_flags.get() or {}).get(who, {}).get(name, name)


def written(who: str, name: str, value: Any) -> str:
    """Return an argument with its value: ``draw='top'``, or ``--draw top`` on the command line."""
    flag = spelled(who, name)
    return f"{name}={value!r}" if flag == name else f"{flag} {value}"


def argument_error(who: str, what: str, name: str, value: Any, fix: str | None = None) -> ArgumentError:
    """Create an ArgumentError for one argument, written as the user wrote it.

    Args:
        who: Function or class that checks the argument.
        what: What it needs.
        name: Name of the argument.
        value: The value that was passed.
        fix: What to do about it.
    """
    return ArgumentError(who, what, written(who, name, value), fix)


# Packages whose name on PyPI differs from the module's.
_packages = {"PIL": "Pillow", "faiss": "faiss-cpu", "sklearn": "scikit-learn", "yaml": "pyyaml"}


def optional(module: str, who: str, extra: str) -> Any:
    """Import a module that an extra installs.

    Args:
        module: Dotted name of the module.
        who: Function or class that needs it.
        extra: Name of the extra of hardneg.

    Raises:
        MissingExtra: If the package is not installed.
    """
    try:
        # The parent first: a submodule that is still in sys.modules must not hide that the package is missing.
        importlib.import_module(module.partition(".")[0])
        return importlib.import_module(module)
    except ImportError:
        raise missing_extra(who, module, extra) from None


def missing_extra(who: str, module: str, extra: str) -> MissingExtra:
    """Create the error for a missing package, with the pip command that installs it."""
    name = module.split(".")[0]
    package = _packages.get(name, name.replace("_", "-"))
    return MissingExtra(who, package, fix=f"pip install 'hardneg[{extra}]'")


def check_kind(who: str, name: str, value: Any, kind: type, what: str) -> None:
    """Raise ArgumentError unless the value is an instance of ``kind``; True and False are not accepted as int."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise argument_error(who, what, name, value)


def check_callable(who: str, name: str, value: Any, what: str) -> None:
    """Raise ArgumentError unless the value can be called."""
    if not callable(value):
        raise argument_error(who, what, name, value)


def check_range(who: str, name: str, value: Any, low: float, high: float, *, open_high: bool = False) -> None:
    """Raise ArgumentError unless ``low <= value <= high``.

    Schedules pass, since their numbers are not known yet. Tensors pass too, except inside ``tensors_checked()``.

    Args:
        who: Function or class that checks the argument.
        name: Name of the argument.
        value: Number, tensor or schedule.
        low: Smallest valid value.
        high: Largest valid value.
        open_high: Exclude ``high`` itself.
    """
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise argument_error(who, "a number", name, value)
    if isinstance(value, Real):
        numbers = [float(value)]
    elif _tensors_too.get() and hasattr(value, "is_meta") and value.numel() and not value.is_meta:  # without torch
        numbers = [value.detach().amin().item(), value.detach().amax().item()]
    else:
        return
    for number in numbers:
        if math.isnan(number) or number < low or number > high or (open_high and number == high):
            bracket = ")" if open_high or high == math.inf else "]"
            raise argument_error(who, f"{spelled(who, name)} in [{low}, {high}{bracket}", name, number)


def tensors_checked() -> AbstractContextManager[None]:
    """Let ``check_range`` inspect tensors inside the block.

    This synchronises with a GPU, so it is meant for constructors and not for training steps.
    """
    return _set(_tensors_too, True)


def check_among(who: str, name: str, value: Any, known: Sequence[str]) -> None:
    """Raise ArgumentError unless the value is one of the known ones."""
    if value not in known:
        raise argument_error(who, f"{spelled(who, name)} to be one of {', '.join(known)}", name, value)


def check_count(who: str, name: str, value: Any, least: int = 1) -> int:
    """Return the value as an int; raise ArgumentError unless it is a whole number of at least ``least``.

    Integers of numpy and torch are accepted; True and False are not.

    Example:
        >>> import numpy as np
        >>> check_count("mine", "k", np.int64(5))
        5
    """
    number = value
    # isinstance first: it is all that a compiled graph evaluates. A tensor of True would pass as 1.
    if not isinstance(value, int) and not str(getattr(value, "dtype", "")).endswith("bool"):
        with suppress(TypeError):
            number = index(value)
    check_kind(who, name, number, int, "a whole number")
    if number < least:
        raise argument_error(who, f"{spelled(who, name)} of {least} or more", name, number)
    return int(number)


def check_seed(who: str, seed: Any) -> int:
    """Return the seed as an int; raise ArgumentError unless it fits 64 bits. Negative seeds are valid."""
    number = check_count(who, "seed", seed, least=-(2**63))
    if number >= 2**63:
        raise argument_error(who, f"{spelled(who, 'seed')} below 2**63", "seed", number)
    return number


def check_counts(who: str, owner: Any, *names: str, least: int = 1) -> None:
    """Apply ``check_count`` to fields of a frozen dataclass and store plain ints, which its repr and JSON need.

    Args:
        who: Function or class that checks the fields.
        owner: The dataclass instance.
        names: Names of the fields.
        least: Smallest valid value.
    """
    for name in names:
        object.__setattr__(owner, name, check_count(who, name, getattr(owner, name), least))
