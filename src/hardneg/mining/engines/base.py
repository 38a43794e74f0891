"""An engine is a map over tasks, each of which may be killed or run twice."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hardneg.core.errors import HardnegError, argument_error

TRIES = 3
"""How often a task is run whose worker process is killed: a machine may fail once, a task that kills always does."""


class Work(NamedTuple):
    """A function and the tasks to call it with; both can be pickled, and what a task computes it leaves in a file.

    ``name`` is how an error names a task.
    """

    function: Callable[[Any], None]
    tasks: Sequence[Any]
    is_done: Callable[[Any], bool]
    done: Callable[[Any], None]
    name: Callable[[Any], str] = str

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


class WorkerLost(HardnegError, OSError):
    """The process that worked on ``piece`` was killed in each of ``tries`` attempts."""

    def __init__(self, piece: str, tries: int, why: str = "") -> None:
        self.piece, self.tries, self.why = piece, tries, why
        fix = "find out what kills it, such as too little memory, and run the command again: finished pieces are kept"
        super().__init__("mine", "workers that finish their pieces", piece, fix)
        self.args = (piece, tries, why)

    def _sentence(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"mine: the worker process of {self.piece} was killed {self.tries} times{why}{self._then()}."


class ClusterLost(HardnegError, OSError):
    """The Ray cluster cannot be reached, or is gone while pieces are left."""


class PartDone(Exception):
    """One of several parts has done its share of a stage, and other parts have not done theirs."""


@dataclass(frozen=True)
class JobPart(Engine):
    """Part ``number`` of ``of``, counted from 0: every ``of``-th task of each stage.

    Once its share of a stage is done it goes on if the other parts have done theirs, else it ends.
    """

    number: int
    of: int
    first = alone = False

    @classmethod
    def parse(cls, text: str) -> JobPart:
        """>>> JobPart.parse("0/4")
        JobPart(number=0, of=4)
        """
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or int(found[1]) >= int(found[2]):
            raise argument_error("mine", "a part as i/n, with i from 0 to n - 1", "part", text)
        return cls(int(found[1]), int(found[2]))

    def map(self, work: Work) -> None:
        for task in work.tasks[self.number :: self.of]:
            if not work.is_done(task):
                work.function(task)
            work.done(task)
        for i, task in enumerate(work.tasks):
            if i % self.of != self.number:
                if not work.is_done(task):
                    raise PartDone
                work.done(task)
