"""Several runs of a script in forks of one process, which imports the libraries once."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable


def in_forks(jobs: Iterable[Callable[[], None]]) -> list[int]:
    """Runs one after the other; their exit codes, negative for a signal."""
    codes = []
    for job in jobs:
        child = os.fork()
        if child == 0:
            try:
                job()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return codes
