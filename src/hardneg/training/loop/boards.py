"""Boards that show the records of a run: TensorBoard if it is installed, Weights & Biases if it is requested.

TensorBoard reads the event file in the run directory: ``tensorboard --logdir runs``. W&B is used if WANDB_PROJECT is
set, and obeys its environment variables (WANDB_MODE=offline writes to the run directory only).

To add a board, write a function that opens a ``Board`` for a run directory and append it to ``BOARDS``. ``Run`` calls
``show_on_boards`` for each record and ``leave_boards`` at the end. docs/explanation/decisions.md says why these are not
accelerate's trackers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hardneg.core.errors import optional, warn_once

WANDB_PROJECT = "WANDB_PROJECT"
Figures = dict[str, float]


class Board(NamedTuple):
    """An open board of one run.

    Attributes:
        show: Shows the figures of a step: ``show(figures, step)``.
        close: Flushes and closes the board.
    """

    show: Callable[[Figures, int], None]
    close: Callable[[], None]


def check_boards() -> None:
    """Raise if W&B is requested but not installed: at the start, not at the first record."""
    _wandb()


def show_on_boards(path: Path, step: int, figures: dict[str, Any]) -> None:
    """Show the numeric figures of a step on every board of a run.

    Args:
        path: The run directory; its boards are opened at the first call.
        step: Number of steps completed.
        figures: Figures by name; those that are not numbers are skipped.
    """
    if path not in _open:
        _open[path] = [board for open_board in BOARDS if (board := open_board(path, step)) is not None]
    numbers = {name: value for name, value in figures.items() if isinstance(value, (int, float)) and name != "step"}
    for board in _open[path]:
        board.show(numbers, step)


def leave_boards(path: Path) -> None:
    """Close the boards of a run; a resumed run opens them again and hides the records after its checkpoint."""
    for board in _open.pop(path, []):
        board.close()


def tensorboard(path: Path, step: int) -> Board | None:
    """Open an event file in the run directory, or return None without TensorBoard.

    Args:
        path: The run directory.
        step: The first step to be shown; later ones of an earlier attempt are hidden.
    """
    if (kind := _writer()) is None:
        return None
    writer = kind(log_dir=str(path), purge_step=step)

    def show(figures: Figures, step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # a killed run must not show fewer records than its metrics.jsonl holds

    return Board(show, writer.close)


@cache
def _writer() -> Any:
    """Return TensorBoard's SummaryWriter, or None, with a warning if it is installed but broken."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    except Exception as error:  # with an incompatible protobuf or numpy, TensorBoard raises almost any exception
        warn_once(
            "tensorboard", f"TensorBoard is installed but cannot be used ({error}); metrics.jsonl holds all records."
        )
        return None
    return SummaryWriter


def wandb(path: Path, step: int) -> Board | None:
    """Open a W&B run named after the directory, or return None if W&B is not requested; a resumed run is continued.

    Args:
        path: The run directory, from which the id of the W&B run is derived.
        step: Unused; W&B keeps its own position.
    """
    if (library := _wandb()) is None:
        return None
    own = hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
    name = f"{path.parent.name}/{path.name}" if path.parent.name else path.name
    run = library.init(project=os.environ[WANDB_PROJECT], name=name, id=own, dir=str(path), resume="allow")
    return Board(lambda figures, step: run.log(figures, step=step), run.finish)


def _wandb() -> Any:
    """Return the wandb library if WANDB_PROJECT is set."""
    return (
        optional("wandb", f"{WANDB_PROJECT}, which is set,", extra="wandb") if os.environ.get(WANDB_PROJECT) else None
    )


BOARDS: list[Callable[[Path, int], Board | None]] = [tensorboard, wandb]
"""Functions that open a board for a run directory and a first step, or return None if it is unavailable."""

_open: dict[Path, list[Board]] = {}
