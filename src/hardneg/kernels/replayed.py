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
_refused: list[str] = []


def over_blocks(step: Step, blocks: Sequence[Rows], allowed: Callable[[], bool]) -> None:
    """Calls ``step``, which returns nothing and stores what it finds, with each block, one after the other.

    ``allowed``, after the first call: whether the others may be replays of a graph.
    """
    same = [block for block in blocks if isinstance(block, Tensor) and len(block) == number_of(blocks[0])]
    if len(same) >= FEWEST:
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
    """The work as a CUDA graph, which has not run yet; None where there can be none."""
    if device.type != "cuda" or _refused or torch.cuda.is_current_stream_capturing():
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
        except RuntimeError as error:  # what a capture that failed leaves behind is not known: there is no other
            with suppress(RuntimeError):
                graph.capture_end()
            _refused.append(str(error))
            warn_once("no CUDA graph", f"kernels are launched one by one: {error}")
            return None
        memory.last = graph
    current.wait_stream(stream)
    return graph


class _Memory:
    """Of the tensors inside of graphs, for all graphs of one stream, whose work is done in order.

    It belongs to the last graph: without one it would be given back, and could not be used for another.
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
