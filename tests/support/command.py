"""The command, run in the test's process."""

from __future__ import annotations

from functools import cache
from typing import Any

from typer.testing import CliRunner

from hardneg.cli.app import app


def hardneg(*arguments: str, columns: int = 250) -> Any:
    """Runs the command on a terminal of this width; by default wide enough that tables do not wrap."""
    given = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    return CliRunner().invoke(app, list(arguments), prog_name="hardneg", env=given)


@cache
def help_of(*verb: str, columns: int = 250, flag: str = "--help-all") -> str:
    done = hardneg(*verb, flag, columns=columns)
    assert done.exit_code == 0
    return done.output


def flags(values: dict[str, Any]) -> list[str]:
    """Options as the command takes them."""
    lines = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        off = [f"--no-{flag[2:]}"] if name == "ids" else []  # the only flag that is on by default
        lines += ([flag] if value else off) if isinstance(value, bool) else [flag, str(value)]
    return lines
