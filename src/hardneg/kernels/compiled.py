"""Pointwise functions of tiles, compiled on a GPU: one kernel reads a tile once, where eager code writes it many times.

A distribution of a user's own that torch.compile refuses runs as it is, after a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from hardneg.core.errors import warn_once

DEVICES = ("cuda",)
"""Where compiled functions are worth the seconds that it takes to compile them."""
BACKEND = "inductor"
BLOCK = 1024
"""Candidates whose sums a compiled function forms at once: what a kernel keeps in registers."""
Found = TypeVar("Found")
Outputs = list[tuple[Tensor, Tensor]]
"""What is differentiated, each with the gradient by it."""
OutputsOf = Callable[[Sequence[Tensor]], Outputs]
Kinds = tuple[type, ...]
Shape = tuple[int, ...]
_refused: set[Kinds] = set()


class Runner:
    """Runs functions of tiles for the holders of one plan, compiled where that is worth it.

    What torch.compile checks before each call takes as long as a tile on a GPU, and tiles of one shape of a plan differ
    in the numbers of their tensors only: it is checked for the first of them.
    """

    def __init__(self, device: torch.device, holders: Sequence[Any]) -> None:
        self.device, self.kinds = device.type, tuple(type(holder) for holder in holders)
        self._checked: set[tuple[Callable[..., Any], Shape]] = set()

    @property
    def compiles(self) -> bool:
        return self.device in DEVICES and self.kinds not in _refused

    @property
    def block(self) -> int | None:
        return BLOCK if self.device in DEVICES else None

    def __call__(self, function: Callable[..., Found], shape: Shape, *args: Any) -> Found:
        """The function of these arguments, whose shapes are those of a tile of this shape."""
        if not self.compiles:
            return function(*args)
        try:
            checked = (function, shape) in self._checked
            self._checked.add((function, shape))
            with torch.compiler.set_stance("default", skip_guard_eval_unsafe=checked):
                return _compiled(function, self.kinds, shape)(*args)  # type: ignore[no-any-return]
        except torch._dynamo.exc.TorchDynamoException as error:
            found = function(*args)  # raises, if that was why
            _refused.add(self.kinds)
            names = " * ".join(kind.__name__ for kind in self.kinds[:-1])
            reason = str(error).strip().partition("\n")[0]
            warn_once(
                f"not compiled:{names}",
                f"torch.compile refuses {names}: {reason}. The streamed loss runs it uncompiled: slower, and with more "
                "memory for each tile; hardneg.testing.check_negatives says what to change.",
            )
            return found


@lru_cache(maxsize=256)
def _compiled(function: Callable[..., Any], kinds: Kinds, shape: Shape) -> Callable[..., Any]:
    """Compiled in a copy of another name for every shape and kind of holders.

    torch limits how often one function is compiled, and for a second shape of its arguments it makes kernels for any
    shape, which take several times as long.
    """
    assert isinstance(function, FunctionType)
    name = "_".join([function.__name__, *(kind.__name__ for kind in kinds), *map(str, shape)])
    code = function.__code__.replace(co_name=name)
    copy = FunctionType(code, function.__globals__, name, function.__defaults__)
    return torch.compile(copy, fullgraph=True, backend=BACKEND)


def pull_back(outputs_of: OutputsOf, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """The vector-Jacobian product, by the wanted inputs, of outputs that come with their cotangents."""
    if torch.compiler.is_compiling():
        return _pull_back_traced(outputs_of, inputs, wanted)
    leaves = [each.detach().requires_grad_(want) for each, want in zip(inputs, wanted, strict=True)]
    with torch.enable_grad():
        some = [(out, grad) for out, grad in outputs_of(leaves) if out.requires_grad]
    if not some or not any(wanted):
        return [None] * len(inputs)
    chosen = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad([out for out, _ in some], chosen, [grad for _, grad in some], allow_unused=True))
    return [next(found) if want else None for want in wanted]


def _pull_back_traced(outputs_of: OutputsOf, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """The same by torch.func, which torch.compile can trace."""

    def of_wanted(*leaves: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        left = list(leaves)
        every = [left.pop(0) if want else each for each, want in zip(inputs, wanted, strict=True)]
        pairs = outputs_of(every)
        return tuple(out for out, _ in pairs), tuple(grad for _, grad in pairs)

    chosen = [each for each, want in zip(inputs, wanted, strict=True) if want]
    _, back, cotangents = torch.func.vjp(of_wanted, *chosen, has_aux=True)  # type: ignore[misc]
    found = list(back(cotangents))
    return [found.pop(0) if want else None for want in wanted]
