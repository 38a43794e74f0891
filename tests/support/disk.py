"""Nothing is written through to the disk: tests kill processes, but none cuts the power. Imported for its effect."""

from __future__ import annotations

import os


def fsync(number: int) -> None:
    """In the place of ``os.fsync``, of which a short run makes dozens."""


os.fsync = fsync
