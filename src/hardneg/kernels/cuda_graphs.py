"""Fewer launches on a GPU: compiled functions of tiles, and CUDA graphs of blocks of rows.

One compiled kernel reads a tile once where eager code writes it many times. Between two kernels, Python and
torch.compile need more time than the kernels of a tile, so the same work for many blocks of rows is captured as a CUDA
graph. On a CPU nothing is compiled. If torch.compile refuses a user's distribution, it runs uncompiled,
after a warning.

``Runner`` compiles the functions of tiles, and ``over_blocks`` and ``capture`` handle graphs; on a CPU these only call
the functions that they get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from hardneg.core.errors import warn_once
from hardneg.core.pairing import Rows, num_rows
from hardneg.core.private_apis import compiled_copy, guards_checked_once, is_compiler_error

DEVICES = ("cuda",)
"""Devices on which compiled functions are worth the seconds that compilation takes."""
BACKEND = "inductor"
BLOCK = 1024
"""Number of candidates that a compiled function sums at once: as many as a kernel keeps in registers."""
AnyOutput = TypeVar("AnyOutput")
Kinds = tuple[type, ...]
TileShape = tuple[int, ...]
_refused_kinds: set[Kinds] = set()


class Runner:
    """Runs functions of tiles for one plan, compiled where that is worthwhile.

    The checks of torch.compile before each call take as long as a tile on a GPU, and tiles of one shape of a plan
    differ only in the numbers in their tensors: only the first of them is checked.

    Args:
        device: Device of the tiles.
        holders: The distributions and the objective, whose types decide what is compiled anew.
    """

    def __init__(self, device: torch.device, holders: Sequence[Any]) -> None:
        self.device, self.kinds = device.type, tuple(type(holder) for holder in holders)
        self._checked: set[tuple[Callable[..., Any], TileShape]] = set()

    @property
    def compiles(self) -> bool:
        """True if functions are compiled here."""
        return self.device in DEVICES and self.kinds not in _refused_kinds

    @property
    def block(self) -> int | None:
        """Number of candidates that are summed at once; None for all."""
        return BLOCK if self.device in DEVICES else None

    def __call__(self, function: Callable[..., AnyOutput], shape: TileShape, *args: Any) -> AnyOutput:
        """Call the function; the arguments have the shapes of a tile of ``shape``."""
        if not self.compiles:
            return function(*args)
        try:
            checked = (function, shape) in self._checked
            self._checked.add((function, shape))
            with guards_checked_once(checked):
                return _compiled(function, self.kinds, shape)(*args)  # type: ignore[no-any-return]
        except RuntimeError as error:
            if not is_compiler_error(error):
                raise
            found = function(*args)  # raises if the function itself is wrong
            _refused_kinds.add(self.kinds)
            names = " * ".join(kind.__name__ for kind in self.kinds[:-1])
            reason = str(error).strip().partition("\n")[0]
            warn_once(
                f"not compiled:{names}",
                f"torch.compile refuses {names}: {reason}. The streamed loss runs it uncompiled: slower, and with more "
                "memory for each tile; hardneg.testing.check_negatives reports what to change.",
            )
            return found


@lru_cache(maxsize=256)
def _compiled(function: Callable[..., Any], kinds: Kinds, shape: TileShape) -> Callable[..., Any]:
    """Compile once for every shape and every kind of distribution and objective."""
    name = "_".join([getattr(function, "__name__", ""), *(kind.__name__ for kind in kinds), *map(str, shape)])
    return compiled_copy(function, name, fullgraph=True, backend=BACKEND)


MIN_BLOCKS = 4
"""Smallest number of blocks for which a graph pays off."""
Step = Callable[[Rows], None]
_capturing = Lock()
_refused_graphs: list[str] = []


def over_blocks(step: Step, blocks: Sequence[Rows], allowed: Callable[[], bool]) -> None:
    """Call ``step``, which stores its results itself, with each block, one after the other.

    Args:
        step: Function of a block of rows.
        blocks: The blocks; on a GPU those of equal size may be replays of one graph.
        allowed: Called after the first block: whether the others may be replays of a graph.
    """
    same = [block for block in blocks if isinstance(block, Tensor) and len(block) == num_rows(blocks[0])]
    if len(same) >= MIN_BLOCKS:
        _replay(step, same[0].clone(), len(same), allowed)
        blocks = blocks[len(same) :]
    for block in blocks:
        step(block)


def _replay(step: Step, rows: Tensor, number: int, allowed: Callable[[], bool]) -> None:
    def next_block() -> None:
        step(rows)
        rows.add_(len(rows))

    next_block()  # compiles, and loads what a capture cannot
    graph = capture(next_block, rows.device) if allowed() else None
    for _ in range(number - 1):
        next_block() if graph is None else graph.replay()


def capture(work: Callable[[], None], device: torch.device) -> Any | None:
    """Capture the work as a CUDA graph without running it; None where that is not possible."""
    if device.type != "cuda" or _refused_graphs or torch.cuda.is_current_stream_capturing():
        return None
    current, stream = torch.cuda.current_stream(device), _stream(device)
    graph, memory = torch.cuda.CUDAGraph(), _memory(device, current.cuda_stream)
    stream.wait_stream(current)
    with _capturing, torch.cuda.stream(stream):
        small = torch.empty(16, 16, dtype=torch.float16, device=device)
        torch.mm(small, small)  # cuBLAS allocates its workspace here, and not in the memory of the graph
        try:
            graph.capture_begin(memory.pool, capture_error_mode="thread_local")
            work()
            graph.capture_end()
        except RuntimeError as error:  # the state after a failed capture is unknown: no further one is tried
            with suppress(RuntimeError):
                graph.capture_end()
            _refused_graphs.append(str(error))
            warn_once("no CUDA graph", f"CUDA graphs cannot be used here, so kernels are launched one by one: {error}")
            return None
        memory.last = graph
    current.wait_stream(stream)
    return graph


class _Memory:
    """The memory pool of all graphs of one stream, whose work is done in order.

    It belongs to the last graph: without one, the memory would be released and could not be used for another graph.
    """

    last: Any = None

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()


@lru_cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@lru_cache
def _memory(device: torch.device, stream: int) -> _Memory:
    return _Memory()
