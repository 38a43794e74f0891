"""The console through which all output to a terminal goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from hardneg.core.text import printable_lines


class Terminal(Console):
    r"""A rich console that escapes control characters in the printed content.

    Ids, texts and names come from other people's files: none of them may move the cursor, clear the screen or hide
    text. The codes that rich itself writes, for colours and bars, are kept.

    >>> terminal = Terminal(width=40)
    >>> with terminal.capture() as shown:
    ...     terminal.print("a\x1b[2Jb")
    >>> shown.get()
    'a\\x1b[2Jb\n'
    """

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        """Render as rich does, with control characters of the content escaped."""
        for segment in super().render(*args, **options):
            yield segment if segment.control else segment._replace(text=printable_lines(segment.text))
