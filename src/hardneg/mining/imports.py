"""Import Python files with the user's own distributions, named by the user: importing registers them in the grammar."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hardneg.core.errors import ArgumentError, FileError, HardnegError
from hardneg.io.functions import run_file


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
