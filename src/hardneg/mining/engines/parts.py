"""Parts of a job that are started one by one, by SLURM for example, and never talk to each other."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hardneg.core.errors import argument_error
from hardneg.mining.engines.base import Engine, PartDone, Work


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
        """
        >>> Part.parse("0/4")
        Part(number=0, of=4)
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
