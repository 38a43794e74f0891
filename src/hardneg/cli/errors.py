"""The message and the exit code of a command that fails."""

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
    """One sentence instead of a traceback: 2 for wrong input, 1 for what the disk refuses, 130 for Ctrl-C.

    ``advice`` says how to continue what Ctrl-C has stopped; ``flags`` how the arguments of callers are written here.
    """
    try:
        with flags_in_errors(flags or {}):
            yield
    except (ValueError, ImportError, FileNotFoundError) as error:
        _say(_with_place(error))
        raise typer.Exit(2) from None
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            raise  # as of `| head`: click ends without a word
        _say(str(error))
        raise typer.Exit(1) from None
    except MemoryError:
        _say("There is not enough memory for this input; use a smaller one, or a machine with more.")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        _say(f"Stopped. {advice}".strip())
        raise typer.Exit(130) from None


def _reader_is_gone() -> bool:
    """Whether it is the output that cannot be written to, and not the pipe of a worker."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def _with_place(error: Exception) -> str:
    """Its sentence; of an error that is not ours, as of a function of the user, also its class and line."""
    if isinstance(error, HardnegError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{error} ({type(error).__name__} in {place.filename}, line {place.lineno})"


_as_python_does = warnings.formatwarning


def warning_for_people(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> str:
    """Our warnings without the source line, which does not help the user."""
    if issubclass(category, HardnegWarning):
        return f"Note: {printable_lines(message)}\n"
    return _as_python_does(message, category, *where, **line)


def read_yaml(path: Path) -> dict[str, Any]:
    """A file of ``name: value`` lines; names may be written like flags, with dashes."""
    yaml = optional("yaml", "--config", extra="train")
    if not path.is_file():
        raise FileError(
            "--config", "a YAML file", path, got=f"where there is {'a folder' if path.exists() else 'none'}"
        )
    try:
        text = path.read_text(encoding="utf-8")
        alias = next((event for event in yaml.parse(text) if isinstance(event, yaml.AliasEvent)), None)
        # A few lines of aliases to aliases stand for billions of values, which the first repr would write out.
        values = {} if alias is not None else yaml.safe_load(text) or {}
        if alias is not None:
            name, line = printable(alias.anchor, 40), alias.start_mark.line + 1
            got = f"which has the alias *{name} in line {line}: write the value there"
        elif not isinstance(values, dict):
            got = f"which holds a {type(values).__name__}"
        elif twice := _twice(str(name.value) for name, _ in (yaml.compose(text).value if values else ())):
            got = f"which has {printable(twice)} twice"
        else:
            return {_option(name): value for name, value in values.items()}
    except yaml.MarkedYAMLError as error:
        where = f"in line {error.problem_mark.line + 1}: {error.problem}" if error.problem_mark else error.problem
        got = f"which is no YAML {where}"
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        got = f"which is no YAML ({type(error).__name__})"
    raise FileError("--config", "lines like 'temperature: 0.5'", path, got=got)


def _option(name: object) -> str:
    return str(name).replace("-", "_")


def _twice(names: Iterable[str]) -> str | None:
    """An option that is repeated, of which YAML would take the last value."""
    return next((name for name, count in Counter(map(_option, names)).items() if count > 1), None)


def given(ctx: typer.Context) -> set[str]:
    """The options that were given on the command line, which win over those of a file."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _say(text: str) -> None:
    typer.secho(printable_lines(text), fg="red", err=True)
