"""The console that all output to a terminal goes through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from hardneg.core.text import printable_lines


class Terminal(Console):
    r"""A console of rich that escapes the control characters in what it is given, whoever wrote them.

    Ids, texts and names come from the files of others: none of them may move the cursor, clear the screen or hide what
    follows. The codes that rich itself writes, for colours and bars, are added afterwards.

    >>> terminal = Terminal(width=40)
    >>> with terminal.capture() as shown:
    ...     terminal.print("a\x1b[2Jb")
    >>> shown.get()
    'a\\x1b[2Jb\n'
    """

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*args, **options):
            yield segment if segment.control else segment._replace(text=printable_lines(segment.text))
