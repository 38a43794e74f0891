"""Records in TensorBoard as well, where it is installed: ``tensorboard --logdir runs``."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from hardneg.core.errors import warn_once


def show_on_board(path: Path, step: int, figures: dict[str, Any]) -> None:
    """Adds the numbers among the figures to the event file in the directory; does nothing without TensorBoard."""
    board = _board(path, step)
    if board is None:
        return
    for name, value in figures.items():
        if isinstance(value, (int, float)) and name != "step":
            board.add_scalar(name, value, step)
    board.flush()  # a killed run must not lose what its metrics.jsonl has


def leave_board(path: Path) -> None:
    """Closes what was open, so that a resumed run hides the records that it writes again."""
    board = _open.pop(path, None)
    if board is not None:
        board.close()


_open: dict[Path, Any] = {}


def _board(path: Path, step: int) -> Any:
    writer = _writer()
    if writer is not None and path not in _open:
        _open[path] = writer(log_dir=str(path), purge_step=step)
    return _open.get(path)


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
