"""Run one recipe in its own process, as comparisons do.

``python -m hardneg.training.recipes RECIPE OUT OPTIONS_AS_JSON [--allow-other-data]``

The exit code tells the parent why a run failed (``EXIT_CODES``), the last line of stderr is the message, and warnings
are stored in the run directory.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from hardneg.core.errors import DataChanged, DiskFull, HardnegWarning, NotFinite
from hardneg.training.loop.runs import DATA_CHANGED, DIVERGED, LEAVES_WITH_STDIN, NO_DISK_SPACE, NO_MEMORY, REFUSED, Run
from hardneg.training.options import RECIPES
from hardneg.training.recipes import run_recipe

EXIT_CODES: list[tuple[type[BaseException], int]] = [
    (NotFinite, DIVERGED),
    (DiskFull, NO_DISK_SPACE),
    (torch.OutOfMemoryError, NO_MEMORY),
    (MemoryError, NO_MEMORY),
    (DataChanged, DATA_CHANGED),
    (ValueError, REFUSED),
    (ImportError, REFUSED),
]
"""Exit codes of exceptions; the first class that matches decides. Only the message is printed, without a traceback."""


def main() -> None:
    """Train the recipe of the command line; exit with the code of ``EXIT_CODES`` if it fails."""
    if LEAVES_WITH_STDIN in os.environ:
        Thread(target=_leave_with_stdin, daemon=True).start()
    recipe, out, options, *flags = sys.argv[1:]
    _keep_warnings(Run(Path(out)))
    wanted = RECIPES[recipe](**json.loads(options))
    try:
        run_recipe(recipe, wanted, out, resume=True, quiet=True, allow_other_data="--allow-other-data" in flags)
    except Exception as error:
        code = next((code for kind, code in EXIT_CODES if isinstance(error, kind)), None)
        if code is None:
            raise
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        sys.exit(code)


def _keep_warnings(run: Run) -> None:
    """Store warnings of hardneg in the run directory, where the parent reads them; show others as usual."""
    show = warnings.showwarning

    def keep(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> None:
        if isinstance(message, HardnegWarning):
            run.warn(str(message), message.kind)
        else:
            show(message, category, *where, **line)

    warnings.showwarning = keep


def _leave_with_stdin() -> None:
    """End the process when standard input closes: a killed comparison must leave no run to compete with the next."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
