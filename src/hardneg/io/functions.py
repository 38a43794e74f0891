"""Python functions and files named by users (``module:function``, ``path/to/file.py:function``), and models by folder.

Encoders, imports and kinds of data that a user names on the command line are loaded here. Nothing in a data file or
manifest may choose such a name: loading one runs its code.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from hardneg.core.errors import ArgumentError, FileError, HardnegError, NoFile
from hardneg.io.sealed import digest_of


def names_a_file(text: str) -> bool:
    """Whether the text is ``file.py:function`` rather than ``module:function``.

    >>> names_a_file("encoders/mine.py:build"), names_a_file("st:models/mine.py")
    (True, False)
    """
    return text.rpartition(":")[0].endswith(".py")


def load_function(text: str, who: str) -> Callable[..., Any]:
    """Return the function that a user has named; its file or module is run.

    Args:
        text: ``file.py:function`` or ``module:function``. A module that is not installed is looked for in the current
            folder.
        who: Caller, for errors.

    Raises:
        NoFile: If the file does not exist.
        ArgumentError: If the text has another form, or the module or the function does not exist.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ArgumentError(who, "a function as 'file.py:function' or 'module:function'", repr(text))
    module = run_file(Path(place), who) if names_a_file(text) else _of_name(place, text, who)
    found = getattr(module, name, None)
    if not callable(found):
        raise ArgumentError(who, f"a function {name!r} in {place}", "none" if found is None else repr(found))
    return found  # type: ignore[no-any-return]


def module_of(text: str) -> str:
    """Return the name in ``sys.modules`` of the module that ``load_function`` runs."""
    place = text.rpartition(":")[0]
    if not names_a_file(text):
        return place
    return re.sub(r"\W", "_", str(Path(place).resolve().with_suffix("")))  # the stem alone could be "torch"


def in_any_folder(text: str) -> str:
    """Return the same function with an absolute path, which is right wherever a process runs."""
    place, _, name = text.rpartition(":")
    return f"{Path(place).absolute()}:{name}" if names_a_file(text) else text


def run_file(path: Path, who: str, what: str = "a Python file that exists") -> ModuleType:
    """Run a Python file as a module and return it.

    The folder of the file is appended to ``sys.path``, so its neighbours can be imported but hide nothing installed.

    Args:
        path: The file.
        who: Caller, for errors.
        what: What the caller needs, for errors.
    """
    if not path.is_file():
        raise NoFile(who, what, path)
    if (name := module_of(f"{path}:")) not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses and pickles need it before it runs
    if str(path.resolve().parent) not in sys.path:
        sys.path.append(str(path.resolve().parent))
    return _up_to_date(sys.modules[name], path, who)


def _of_name(place: str, text: str, who: str) -> ModuleType:
    """Import a module, also from the current folder."""
    if not _is_known(place):
        # At the end, as in run_file, so that files there cannot hide the standard library or installed packages.
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(place)
    except ImportError as error:
        raise ArgumentError(who, "a module that exists", f"{text!r}: {error}") from None
    path = Path(getattr(module, "__file__", None) or "")
    if path.suffix != ".py" or not path.is_file() or place == "__main__":  # a script is not run twice
        return module
    vars(module).setdefault("_digest", digest_of(path))
    return _up_to_date(module, path, who)


def _is_known(place: str) -> bool:
    """Whether the package of a module is found without the current folder."""
    package = place.partition(".")[0]
    return package in sys.modules or not package or importlib.util.find_spec(package) is not None


def _up_to_date(module: ModuleType, path: Path, who: str) -> ModuleType:
    """Return the module as its file is now: run it if it was not run, or if the file has changed since.

    The source is compiled here because Python uses bytecode of a file with the same size and the same second.
    """
    names, content = vars(module), digest_of(path)
    if names.get("_digest") == content:
        return module
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)  # first: it may raise a SyntaxError
    for name in [one for one, value in names.items() if not (one.startswith("__") or isinstance(value, ModuleType))]:
        del names[name]  # functions may have been removed; submodules of a package stay
    try:
        exec(code, names)
    except BaseException as error:
        names["_digest"] = None  # run it again next time, since bytecode may belong to another version
        if isinstance(error, ImportError):
            raise ArgumentError(who, f"{path} to be importable", str(error)) from None
        raise
    names["_digest"] = content
    return module


@contextmanager
def loading_model(who: str, path: str) -> Iterator[None]:
    """Raise NoFile if the block cannot load ``path`` because there is no such folder.

    Libraries treat a path that does not exist as a name on the Hugging Face hub, and then report a failed connection.
    ``folder/name`` can be either: it is a path if ``folder`` exists here; otherwise the hub is tried first.
    """
    folder = Path(path).expanduser()
    what = "a model folder that exists, or the name of a model on the Hugging Face hub"
    fix = "check the path; a model of the hub that is not in the local cache needs a connection"
    is_path = path.startswith((".", "~")) or folder.is_absolute() or len(folder.parts) > 2
    if not folder.exists() and (is_path or (len(folder.parts) == 2 and folder.parent.is_dir())):
        raise NoFile(who, what, path, fix=fix)
    try:
        yield
    except OSError as error:
        if folder.exists():
            raise
        raise NoFile(who, what, path, fix=fix) from error


def load_imports(paths: Iterable[str], who: str = "mine") -> None:
    """Run each file once, with its current content.

    Only for files that a person has named: paths from data or manifests must not get here.

    Args:
        paths: Python files.
        who: Function named in errors.

    Raises:
        FileError: If a file is missing or is no Python file.
        ArgumentError: If a file raises an error when it runs.
    """
    for path in map(Path, paths):
        if path.is_file() and path.suffix != ".py":
            raise FileError(who, "a Python file to import", path)
        try:
            run_file(path, who)
        except HardnegError:
            raise
        except Exception as error:
            raise ArgumentError(who, f"{path} to be importable", f"{type(error).__name__}: {error}") from error
