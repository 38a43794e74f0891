"""The same work for many blocks of rows: on a GPU a CUDA graph, which is launched as one and not kernel by kernel.

What Python and torch.compile do between two kernels takes longer than the kernels of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hardneg.core.errors import warn_once
from hardneg.core.pairing import Rows, number_of

FEWEST = 4
"""A graph for fewer blocks would cost more than it saves."""
Step = Callable[[Rows], None]
_capturing = Lock()


def over_blocks(step: Step, blocks: Sequence[Rows], allowed: Callable[[], bool]) -> None:
    """Calls ``step``, which returns nothing and stores what it finds, with each block, one after the other.

    ``allowed``, after the first call: whether the others may be replays of a graph.
    """
    first = blocks[0] if blocks else slice(0)
    same = [block for block in blocks if number_of(block) == number_of(first)]
    if isinstance(first, Tensor) and len(same) >= FEWEST:
        _replay(step, first.clone(), len(same), allowed)
        blocks = blocks[len(same) :]
    for block in blocks:
        step(block)


def _replay(step: Step, rows: Tensor, number: int, allowed: Callable[[], bool]) -> None:
    def next_block() -> None:
        step(rows)
        rows.add_(len(rows))

    next_block()  # compiles, and loads what a capture cannot
    graph = capture(next_block, rows.device) if allowed() else None
    for _ in range(1, number):
        next_block() if graph is None else graph.replay()


def capture(work: Callable[[], None], device: torch.device) -> Any | None:
    """The work as a CUDA graph, which has not run yet; None where there can be none."""
    if device.type != "cuda" or not hasattr(torch.cuda, "MemPool") or torch.cuda.is_current_stream_capturing():
        return None
    current = torch.cuda.current_stream(device)
    stream, pool = _stream(device), _pool(device, current.cuda_stream)
    stream.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    with _capturing, torch.cuda.stream(stream):
        small = torch.empty(16, 16, dtype=torch.float16, device=device)
        torch.mm(small, small)  # cuBLAS allocates its workspace here, and not in the memory of the graph
        graph.capture_begin(pool.id, capture_error_mode="thread_local")
        try:
            work()
        except RuntimeError as error:
            _give_up(graph, error)
            return None
        graph.capture_end()
    current.wait_stream(stream)
    return graph


def _give_up(graph: Any, error: RuntimeError) -> None:
    with suppress(RuntimeError):  # which says once more that the capture failed
        graph.capture_end()
    warn_once("no CUDA graph", f"the tiles of a streamed loss are launched one by one: {error}")


@lru_cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@lru_cache
def _pool(device: torch.device, stream: int) -> Any:
    """Memory for the tensors inside of graphs, which may be in use until the work of this stream is done."""
    with torch.cuda.device(device):
        return torch.cuda.MemPool()
