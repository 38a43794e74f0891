"""Python files with distributions of the user's, named by the user: importing one registers them in the grammar."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from hardneg.core.errors import ArgumentError, FileError, NoFile
from hardneg.io.sealed import digest_of


def load_imports(paths: Iterable[str], who: str = "mine") -> None:
    """Runs each file once, as it is now. Only for what a person has named: nothing in data or manifests gets here."""
    for path in paths:
        file = Path(path)
        if not file.is_file():
            raise NoFile(who, "a Python file that exists", path)
        if file.suffix != ".py":
            raise FileError(who, "a Python file to import", path)
        name = f"hardneg_imported_{digest_of(file)[:16]}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except Exception as error:
                del sys.modules[name]
                what, got = f"{path} to be importable", f"{type(error).__name__}: {error}"
                raise ArgumentError(who, what, got) from error
