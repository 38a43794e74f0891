"""Python files with distributions of the user's, named by the user: importing one registers them in the grammar."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hardneg.core.errors import ArgumentError, FileError, HardnegError
from hardneg.io.functions import run_file


def load_imports(paths: Iterable[str], who: str = "mine") -> None:
    """Runs each file once, as it is now. Only for what a person has named: nothing in data or manifests gets here."""
    for path in map(Path, paths):
        if path.is_file() and path.suffix != ".py":
            raise FileError(who, "a Python file to import", path)
        try:
            run_file(path, who)
        except HardnegError:
            raise
        except Exception as error:
            raise ArgumentError(who, f"{path} to be importable", f"{type(error).__name__}: {error}") from error
