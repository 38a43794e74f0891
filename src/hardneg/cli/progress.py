"""Bars for what takes long, in a terminal only: nothing is written to a file or a pipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Bars = Callable[[str, int], Callable[[int], None]]
"""(what is done, how many steps) -> call it with the number of steps done."""


@contextmanager
def progress_bars() -> Iterator[Bars]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from hardneg.io.terminal import Terminal

    console = Terminal()
    if not console.is_terminal or os.environ.get("RANK", "0") != "0":
        yield lambda what, steps: lambda done: None  # rich 13.0 ends even a disabled bar with an empty line
        return
    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*parts, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def bar(what: str, steps: int) -> Callable[[int], None]:
            # A stage that comes again begins its bar again: of more bars than lines the last are not shown.
            task = tasks[what] if what in tasks else bars.add_task(what, total=steps)
            tasks[what] = task
            bars.reset(task, total=steps)
            return lambda done: bars.advance(task, done)

        yield bar
