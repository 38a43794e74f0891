"""Error messages, exit codes and YAML files of the command line.

Every verb runs inside `errors_for_people`: users see one sentence instead of a traceback. Exit codes: 2 for wrong
input, 1 for problems of the machine (disk, memory), 130 for Ctrl-C.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from hardneg.core.errors import FileError, HardnegError, HardnegWarning, flags_in_errors, optional
from hardneg.core.text import printable, printable_lines


@contextmanager
def errors_for_people(advice: str = "", flags: Mapping[str, Mapping[str, str]] | None = None) -> Iterator[None]:
    """Print an exception of the block as one sentence, and exit with the matching code.

    Args:
        advice: How to continue after Ctrl-C, appended to "Stopped.".
        flags: For each function that errors may name, the flag of each argument, so that errors show ``--corpus``
            instead of ``corpus=``.

    Raises:
        typer.Exit: With code 2 (wrong input), 1 (disk or memory) or 130 (Ctrl-C).
    """
    try:
        with flags_in_errors(flags or {}):
            yield
    except (ValueError, ImportError, FileNotFoundError) as error:
        _print_error(_message_with_location(error))
        raise typer.Exit(2) from None
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            raise  # the reader of a pipe, such as `| head`, has stopped: click exits silently
        _print_error(str(error))
        raise typer.Exit(1) from None
    except MemoryError:
        _print_error("There is not enough memory for this input; use a smaller one, or a machine with more.")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        _print_error(f"Stopped. {advice}".strip())
        raise typer.Exit(130) from None


def _reader_is_gone() -> bool:
    """Return True if standard output is the broken pipe, rather than the pipe of a worker process."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def _message_with_location(error: Exception) -> str:
    """Return the message; for foreign errors, such as those of a user's function, also their class, file and line."""
    if isinstance(error, HardnegError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{error} ({type(error).__name__} in {place.filename}, line {place.lineno})"


_as_python_does = warnings.formatwarning


def warning_for_people(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> str:
    """Format a warning of hardneg as a note without the source line; other warnings as Python does."""
    if issubclass(category, HardnegWarning):
        return f"Note: {printable_lines(message)}\n"
    return _as_python_does(message, category, *where, **line)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of ``name: value`` lines; dashes in names become underscores, as in flags.

    Raises:
        FileError: The file is missing, is not valid YAML, holds no mapping, repeats a name, or uses an alias.
    """
    yaml = optional("yaml", "--config", extra="train")
    if not path.is_file():
        raise FileError(
            "--config", "a YAML file", path, got="which is a folder" if path.exists() else "which does not exist"
        )
    try:
        text = path.read_text(encoding="utf-8")
        alias = next((event for event in yaml.parse(text) if isinstance(event, yaml.AliasEvent)), None)
        # Nested aliases can expand a few lines to billions of values ("billion laughs"), so no alias is accepted.
        values = {} if alias is not None else yaml.safe_load(text) or {}
        if alias is not None:
            name, line = printable(alias.anchor, 40), alias.start_mark.line + 1
            got = f"which uses the alias *{name} in line {line}: write the value itself"
        elif not isinstance(values, dict):
            got = f"which contains a {type(values).__name__}"
        elif twice := _duplicate(str(name.value) for name, _ in (yaml.compose(text).value if values else ())):
            got = f"which sets {printable(twice)} twice"
        else:
            return {_option(name): value for name, value in values.items()}
    except yaml.MarkedYAMLError as error:
        where = f"in line {error.problem_mark.line + 1}: {error.problem}" if error.problem_mark else error.problem
        got = f"which is not valid YAML {where}"
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        got = f"which is not valid YAML ({type(error).__name__})"
    raise FileError("--config", "lines like 'temperature: 0.5'", path, got=got)


def _option(name: object) -> str:
    return str(name).replace("-", "_")


def _duplicate(names: Iterable[str]) -> str | None:
    """Return the first repeated option, or None; YAML itself would silently keep the last value."""
    return next((name for name, count in Counter(map(_option, names)).items() if count > 1), None)


def given(ctx: typer.Context) -> set[str]:
    """Return the names of the options given on the command line; they take precedence over a file."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _print_error(text: str) -> None:
    typer.secho(printable_lines(text), fg="red", err=True)
