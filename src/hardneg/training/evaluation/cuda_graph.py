"""A step of many small kernels as one launch, for loops in which a GPU would wait for Python."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class InOneLaunch:
    """The step of a loop on a GPU as a CUDA graph: recorded for inputs of the first shape, then replayed.

    The first ``warmup`` steps run as they are, since what libraries set up at their first call cannot be recorded;
    so do inputs of another shape, such as the last batch of an epoch. The step must not wait for the GPU, and may only
    read and write tensors that stay where they are.
    """

    def __init__(self, step: Callable[[Tensor], None], warmup: int = 3) -> None:
        self.step, self.warmup = step, warmup
        self._graph: torch.cuda.CUDAGraph | None = None
        self._input: Tensor | None = None

    def __call__(self, value: Tensor) -> None:
        if self._input is None:
            self._input = value.clone()
        if self.warmup:
            self.warmup -= 1
            self._aside(value)
        elif value.shape != self._input.shape:
            self.step(value)
        else:
            self._input.copy_(value)
            self._recorded(self._input).replay()

    def _aside(self, value: Tensor) -> None:
        """In a stream of its own, as recording will be."""
        stream, now = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            self.step(value)
        now.wait_stream(stream)

    def _recorded(self, value: Tensor) -> torch.cuda.CUDAGraph:
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):  # which does not run it
                self.step(value)
        return self._graph
