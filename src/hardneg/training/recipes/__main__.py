"""``python -m hardneg.training.recipes RECIPE OUT OPTIONS_AS_JSON``: one run in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from threading import Thread
from typing import Any

from hardneg.core.errors import HardnegWarning
from hardneg.training.options import RECIPES
from hardneg.training.recipes import run_recipe
from hardneg.training.runs import DIVERGED, LEAVES_WITH_STDIN, Run

NOT_FINITE = "needs finite "
"""What every refusal of a NaN says, whether the loop, the graph or the evaluation meets it first."""


def main() -> None:
    if LEAVES_WITH_STDIN in os.environ:
        Thread(target=_leave_with_stdin, daemon=True).start()
    recipe, out, options = sys.argv[1:]
    _keep_warnings(Run(Path(out)))
    try:
        run_recipe(recipe, RECIPES[recipe](**json.loads(options)), out, resume=True, quiet=True)
    except ValueError as error:
        if NOT_FINITE not in str(error):
            raise
        print(error, file=sys.stderr)
        sys.exit(DIVERGED)


def _keep_warnings(run: Run) -> None:
    """Ours beside the files of the run, for whoever started it; others as usual."""
    show = warnings.showwarning

    def keep(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> None:
        run.warn(str(message)) if issubclass(category, HardnegWarning) else show(message, category, *where, **line)

    warnings.showwarning = keep


def _leave_with_stdin() -> None:
    """A comparison that was killed must not leave a run behind that trains beside the next attempt."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
