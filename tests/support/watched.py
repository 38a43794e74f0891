"""What a call does to the machine: the files that it writes, and the processes that it starts."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {
    "os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.symlink": 2, "os.link": 2, "os.truncate": 1,
    "shutil.rmtree": 1, "shutil.move": 2, "shutil.copyfile": 2, "os.chmod": 1,
}  # fmt: skip
_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn", "os.fork")


@dataclass
class Deeds:
    """Of one call."""

    written: list[Path] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)


_now: Deeds | None = None
_hooked = False


class TooLong(BaseException):
    """The call did not end in its time; no ``except Exception`` may hide it."""


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _now is None:
        return
    if event == "open":
        path, mode, flags = arguments
        if isinstance(path, (str, bytes)) and (flags & _WRITES or (isinstance(mode, str) and set(mode) & set("wax+"))):
            _now.written.append(Path(os.path.abspath(os.fsdecode(path))))
    elif event in _CHANGES:
        for path in arguments[: _CHANGES[event]]:
            if isinstance(path, (str, bytes, os.PathLike)):
                _now.written.append(Path(os.path.abspath(os.fsdecode(path))))
    elif event in _PROCESSES:
        _now.processes.append(f"{event} {arguments}")


@contextmanager
def watched(seconds: int = 120, gigabytes: int = 8) -> Iterator[Deeds]:
    """Records the deeds of what is called inside, within limits of time and of memory that it may ask for."""
    global _now, _hooked
    if not _hooked:
        sys.addaudithook(_hook)  # for the life of the process; it does nothing outside of this block
        _hooked = True

    def late(*_: Any) -> None:
        raise TooLong(f"it took more than {seconds} seconds")

    before, limits = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    signal.alarm(seconds)
    resource.setrlimit(resource.RLIMIT_AS, (used + gigabytes * 2**30, limits[1]))
    _now = deeds = Deeds()
    try:
        yield deeds
    finally:
        _now = None
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
