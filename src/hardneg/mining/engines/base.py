"""An engine is a map over tasks, each of which may be killed or run twice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Work(NamedTuple):
    """A function and the tasks to call it with; both can be pickled, and what a task computes it leaves in a file."""

    function: Callable[[Any], None]
    tasks: Sequence[Any]
    is_done: Callable[[Any], bool]
    done: Callable[[Any], None]

    def left(self) -> list[Any]:
        """The tasks that are not done; calls ``done`` for the others."""
        left: list[Any] = []
        for task in self.tasks:
            (self.done if self.is_done(task) else left.append)(task)
        return left


class Engine(ABC):
    """A map over tasks. ``alone``: whether no other process works on the same output."""

    alone = True

    @property
    def first(self) -> bool:
        """Whether this process writes the output."""
        return True

    @abstractmethod
    def map(self, work: Work) -> None:
        """Runs the tasks that are not done, and calls ``done`` for each of all; returns when every task is done."""

    def wait(self) -> None:  # noqa: B027 - most engines share nothing
        """Waits for the other processes that share this engine, if there are any."""

    def agree(self, value: str) -> str:
        """The value that the first of the processes that share this engine gives."""
        return value

    def leave(self) -> None:  # noqa: B027 - most engines start nothing
        """Ends what the engine has started and the end of this process would not."""


class PartDone(Exception):
    """One of several parts has done its share of a stage, and other parts have not done theirs."""
