"""What a bound kernel is launched with. Only a GPU runs it: here stand-ins for Triton's kernels write it down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hardneg.core.private_apis import Launched


class Compiled:
    def __init__(self, launches: list[Any]) -> None:
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.launches.append((grid, args))


class Kernel(Compiled):
    """Of ``kernel(base, x, n, BM, BN)``."""

    arg_names = ("base", "x", "n", "BM", "BN")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def compile_and_launch(*args: Any, **constants: Any) -> Compiled:
            self.launches.append((grid, args, constants))
            return Compiled(self.launches)

        return compile_and_launch


def test_a_bound_kernel_is_compiled_once_and_launched_with_every_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # as the index of tensors of a CPU
    x, launches, constants = torch.zeros(4), [], {"BN": 8, "num_warps": 4, "BM": 2}
    kernel = Launched(Kernel(launches))
    launch = kernel.bind(x, 3, **constants)
    for grid, base in (((5,), 0), ((5, 7), 32), ((1,), 64)):
        launch(grid, base)
    kernel.bind(x, 16, **constants)((1,), 0)  # n has another kind
    assert launches == [
        ((5,), (0, x, 3), constants),
        ((5, 7, 1), (32, x, 3, 2, 8)),
        ((1, 1, 1), (64, x, 3, 2, 8)),
        ((1,), (0, x, 16), constants),
    ]
