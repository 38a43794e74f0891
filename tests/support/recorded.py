"""What a CUDA graph does, on a CPU: operations are recorded and run again, on the same memory with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "lift_fresh"}
"""What no graph can hold, since the host would wait for the GPU, or give it numbers."""


class Recorded(TorchDispatchMode):
    """``capture`` of hardneg.kernels.cuda_graphs, but for state: what is written while recording is taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.waits: list[str] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in WAITS:
            self.waits.append(name)
        result = func(*args, **(kwargs or {}))
        places = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        new = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if not new or func._schema.is_mutable or any(each.untyped_storage().data_ptr() not in places for each in new):
            self.calls.append((func, args, kwargs or {}, [] if func._schema.is_mutable else new))
        return result

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, kept in self.calls:
                found = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
                for place, value in zip(kept, found, strict=False):
                    place.detach().copy_(value)


def recorder(buffers: list[Tensor], graphs: list[Recorded]) -> Callable[[Callable[[], None], torch.device], Recorded]:
    """In place of ``capture``: work that is captured has not run yet."""

    def capture(work: Callable[[], None], device: torch.device) -> Recorded:
        before = [buffer.clone() for buffer in buffers]
        graph = Recorded()
        with graph:
            work()
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        graphs.append(graph)
        return graph

    return capture
