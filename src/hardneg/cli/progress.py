"""Progress bars of the verbs mine, audit and evaluate.

Bars appear in terminals only, on the first rank only; nothing is written to files or pipes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Bars = Callable[[str, int], Callable[[int], None]]
"""(description, total steps) -> function to call with the number of steps completed since the last call."""


@contextmanager
def progress_bars() -> Iterator[Bars]:
    """Show progress bars while the block runs, and remove them at its end.

    Yields:
        A function of (description, total steps) that starts a bar, or restarts the bar of the same description, and
        returns the function that advances it. Outside a terminal both do nothing.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from hardneg.io.terminal import Terminal

    console = Terminal()
    if not console.is_terminal or os.environ.get("RANK", "0") != "0":
        yield lambda what, steps: lambda done: None  # rich 13.0 prints an empty line even after a disabled bar
        return
    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*parts, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def bar(what: str, steps: int) -> Callable[[int], None]:
            # Reuse the bar of a repeated stage: rich hides the last bars when there are more bars than terminal lines.
            task = tasks[what] if what in tasks else bars.add_task(what, total=steps)
            tasks[what] = task
            bars.reset(task, total=steps)
            return lambda done: bars.advance(task, done)

        yield bar
