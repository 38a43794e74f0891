"""The interface of engines: a map over tasks, each of which may be killed or run twice."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hardneg.core.errors import HardnegError, argument_error

TRIES = 3
"""Number of times a task whose worker is killed is run: a machine may fail once, a task that kills always does."""


class Work(NamedTuple):
    """A function and the tasks to call it with; both can be pickled, and a task leaves its result in a file.

    Attributes:
        function: Computes a task.
        tasks: The tasks.
        is_done: Whether the result of a task is there.
        done: Called once for each task that is done.
        name: Description of a task in errors.
    """

    function: Callable[[Any], None]
    tasks: Sequence[Any]
    is_done: Callable[[Any], bool]
    done: Callable[[Any], None]
    name: Callable[[Any], str] = str

    def pending(self) -> list[Any]:
        """Return the tasks that are not done, after calling ``done`` for the others."""
        left: list[Any] = []
        for task in self.tasks:
            (self.done if self.is_done(task) else left.append)(task)
        return left


class Engine(ABC):
    """A map over tasks.

    Attributes:
        alone: Whether no other process works on the same output.
    """

    alone = True

    @property
    def first(self) -> bool:
        """True if this process writes the output."""
        return True

    @abstractmethod
    def map(self, work: Work) -> None:
        """Run the tasks that are not done, call ``done`` for each of all, and return when every task is done."""

    def wait(self) -> None:  # noqa: B027 - most engines share nothing
        """Wait for the other processes that share this engine, if there are any."""

    def agree(self, value: str) -> str:
        """Return the value of the first process that shares this engine, the same in all of them."""
        return value

    def leave(self) -> None:  # noqa: B027 - most engines start nothing
        """Stop what the engine started and what would outlive this process."""


class WorkerLost(HardnegError, OSError):
    """A worker process was killed in each of ``tries`` attempts at ``piece``."""

    def __init__(self, piece: str, tries: int, why: str = "") -> None:
        self.piece, self.tries, self.why = piece, tries, why
        fix = "find out what kills it, often too little memory, and run the command again: finished pieces are kept"
        super().__init__("mine", "workers that finish their pieces", piece, fix)
        self.args = (piece, tries, why)

    def _sentence(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"mine: the worker process of {self.piece} was killed {self.tries} times{why}{self._then()}."


class ClusterLost(HardnegError, OSError):
    """The Ray cluster cannot be reached, or stopped before all pieces were done."""


class PartDone(Exception):
    """Raised by a part that has done its share of a stage while other parts have not done theirs."""


@dataclass(frozen=True)
class JobPart(Engine):
    """Part ``number`` of ``of``, counted from 0: every ``of``-th task of each stage.

    After its share of a stage it goes on if the other parts have done theirs, else it ends by ``PartDone``.
    """

    number: int
    of: int
    first = alone = False

    @classmethod
    def parse(cls, text: str) -> JobPart:
        """Read a part written as i/n.

        Raises:
            ArgumentError: If the text is not i/n with i from 0 to n - 1.

        Example:
            >>> JobPart.parse("0/4")
            JobPart(number=0, of=4)
        """
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or int(found[1]) >= int(found[2]):
            raise argument_error("mine", "a part as i/n, with i from 0 to n - 1", "part", text)
        return cls(int(found[1]), int(found[2]))

    def map(self, work: Work) -> None:
        """Run this part's share of the tasks; raise ``PartDone`` if others are missing."""
        for task in work.tasks[self.number :: self.of]:
            if not work.is_done(task):
                work.function(task)
            work.done(task)
        for i, task in enumerate(work.tasks):
            if i % self.of != self.number:
                if not work.is_done(task):
                    raise PartDone
                work.done(task)
