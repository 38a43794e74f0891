"""The records of a run on boards as well: TensorBoard where it is installed, Weights & Biases where it is wanted.

TensorBoard reads the event file beside the run: ``tensorboard --logdir runs``. W&B is used if WANDB_PROJECT is set, and
then as the environment says (WANDB_MODE=offline writes to the run directory only). A board is a function that opens a
``Board`` for a run directory; another one is added to ``BOARDS``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hardneg.core.errors import optional, warn_once

WHERE = "WANDB_PROJECT"
Figures = dict[str, float]


class Board(NamedTuple):
    show: Callable[[Figures, int], None]  # the figures of a step
    close: Callable[[], None]


def check_boards() -> None:
    """Raise for a board that is wanted and not installed, before hours of training rather than at the first record."""
    _wandb()


def show_on_boards(path: Path, step: int, figures: dict[str, Any]) -> None:
    """Adds the numbers among the figures to every board of the run in this directory."""
    if path not in _open:
        _open[path] = [board for open_board in BOARDS if (board := open_board(path, step)) is not None]
    numbers = {name: value for name, value in figures.items() if isinstance(value, (int, float)) and name != "step"}
    for board in _open[path]:
        board.show(numbers, step)


def leave_boards(path: Path) -> None:
    """Closes what was open, so that a resumed run hides the records that it writes again."""
    for board in _open.pop(path, []):
        board.close()


def tensorboard(path: Path, step: int) -> Board | None:
    if (kind := _writer()) is None:
        return None
    writer = kind(log_dir=str(path), purge_step=step)

    def show(figures: Figures, step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # a killed run must not lose what its metrics.jsonl has

    return Board(show, writer.close)


@cache
def _writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    except Exception as error:  # a TensorBoard that does not fit its protobuf or numpy raises whatever it meets
        warn_once(
            "tensorboard", f"TensorBoard is installed and cannot be used ({error}); metrics.jsonl has all records."
        )
        return None
    return SummaryWriter


def wandb(path: Path, step: int) -> Board | None:
    """A run of W&B under the name of the directory; a resumed one continues it."""
    if (library := _wandb()) is None:
        return None
    own = hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
    name = f"{path.parent.name}/{path.name}" if path.parent.name else path.name
    run = library.init(project=os.environ[WHERE], name=name, id=own, dir=str(path), resume="allow")
    return Board(lambda figures, step: run.log(figures, step=step), run.finish)


def _wandb() -> Any:
    """The library if WANDB_PROJECT is set."""
    return optional("wandb", f"{WHERE}, which is set,", extra="wandb") if os.environ.get(WHERE) else None


BOARDS: list[Callable[[Path, int], Board | None]] = [tensorboard, wandb]
_open: dict[Path, list[Board]] = {}
