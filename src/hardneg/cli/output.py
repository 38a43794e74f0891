"""What a verb prints: its result as text or as one line of JSON, and progress bars."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from hardneg.io.terminal import Bars


@dataclass(frozen=True)
class Output:
    """The flags ``--quiet`` and ``--json`` of a verb.

    Attributes:
        quiet: Print neither progress bars nor text; warnings and errors are still printed.
        json: Print the result as one line of JSON on standard output, instead of text.
    """

    quiet: bool = False
    json: bool = False

    @property
    def shows_text(self) -> bool:
        """Whether standard output is for people."""
        return not self.quiet and not self.json

    def bars(self) -> AbstractContextManager[Bars]:
        """Return the context of progress bars (``hardneg.io.terminal.progress_bars``)."""
        from hardneg.io.terminal import progress_bars

        return progress_bars(self.quiet)

    def result(self, figures: Mapping[str, Any], show: Callable[[], object]) -> None:
        """Print the result of the verb.

        Args:
            figures: The result for ``--json``; NaN and infinity become null.
            show: Prints the same as text.
        """
        from hardneg.io.files import without_nan

        if self.json:
            typer.echo(json.dumps(without_nan(dict(figures)), default=str, allow_nan=False))
        elif not self.quiet:
            show()
