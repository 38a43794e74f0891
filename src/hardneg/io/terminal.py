"""The console through which all output to a terminal goes, and the progress bars."""

from __future__ import annotations

import html
import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.segment import Segment

from hardneg.core.text import printable, printable_lines


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


class Bar(Protocol):
    """Function that advances a progress bar."""

    def __call__(self, done: float, note: str = "") -> None:
        """Advance the bar.

        Args:
            done: Steps completed since the last call.
            note: Text to show behind the bar; empty keeps the present one.
        """


Bars = Callable[[str, float | None], Bar]
"""(phase, number of steps, or None if unknown) -> function that advances the bar."""


@contextmanager
def progress_bars(quiet: bool = False, console: Console | None = None) -> Iterator[Bars]:
    """Show progress bars on standard error or in a notebook while the block runs, and remove them at its end.

    A bar shows its phase ("encode", "train", "evaluate" ...), the steps completed and the time left, or the time
    elapsed where the number of steps is unknown. It is drawn again several times per second, so that something moves
    even during a long step. Nothing is written outside a terminal (files, pipes) or on ranks other than the first.

    Args:
        quiet: Show no bars.
        console: Where to draw; standard error by default.

    Yields:
        A function of (phase, number of steps) that starts a bar, or restarts the bar of the same phase.
    """
    console = console or Terminal(stderr=True)
    if console.is_jupyter and not quiet and os.environ.get("RANK", "0") == "0":
        with _notebook_bars() as notebook:
            yield notebook
        return
    if quiet or not console.is_terminal or os.environ.get("RANK", "0") != "0":
        yield lambda phase, steps: _ignore  # rich 13.0 prints an empty line even after a disabled bar
        return
    with _terminal_bars(console) as drawn:
        yield drawn


@contextmanager
def _terminal_bars(console: Console) -> Iterator[Bars]:
    """Show progress bars on a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        Task,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Clock(TimeRemainingColumn):
        """Time left, or time elapsed where the number of steps is unknown."""

        def render(self, task: Task) -> Text:
            return super().render(task) if task.total is not None else TimeElapsedColumn().render(task)

    columns = (
        SpinnerColumn("line"),  # in ASCII, for every terminal
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=8),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        Clock(compact=True),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def bar(phase: str, steps: float | None) -> Bar:
            # Reuse the bar of a repeated phase: rich hides the last bars when there are more bars than terminal lines.
            task = tasks[phase] if phase in tasks else progress.add_task(phase, total=steps, note="")
            tasks[phase] = task
            progress.reset(task, total=steps)

            def advance(done: float, note: str = "") -> None:
                fields: dict[str, Any] = {"note": note} if note else {}
                progress.update(task, advance=done, **fields)

            return advance

        yield bar


@contextmanager
def _notebook_bars() -> Iterator[Bars]:
    """Show progress bars in the output of a notebook's cell.

    They are plain HTML: the widgets that rich and tqdm use are not installed everywhere.
    """
    ipython: Any = importlib.import_module("IPython.display")  # without types
    shown: dict[str, str] = {}
    place = ipython.display(ipython.HTML(""), display_id=True)

    def bar(phase: str, steps: float | None) -> Bar:
        begun, drawn, count, text = time.monotonic(), 0.0, 0.0, ""

        def advance(done: float, note: str = "") -> None:
            nonlocal drawn, count, text
            count, text = count + done, note or text
            now = time.monotonic()
            if now - drawn < 0.2 and count != steps:
                return
            drawn = now
            value = "" if steps is None else f' value="{count:g}" max="{steps:g}"'
            number = "" if steps is None else f" {count:,.0f}/{steps:,.0f}"
            words = html.escape(printable(f"{phase}{number} {text} {now - begun:.0f} s"))
            shown[phase] = f"<div><progress{value}></progress> {words}</div>"
            place.update(ipython.HTML("".join(shown.values())))

        advance(0)
        return advance

    try:
        yield bar
    finally:
        place.update(ipython.HTML(""))


def _ignore(done: float, note: str = "") -> None:
    """Show nothing."""
