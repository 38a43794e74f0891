"""Private APIs of torch and Triton, all in one place, each with a public fallback.

Each was tested with torch 2.6 and 2.13 or Triton 3.4 and 3.5:

- ``is_plain`` reads flags of functorch (``torch._C``) and ``forward_ad._current_level``. Without them every tensor
  counts as "not plain", and ordinary operations are used.
- ``compiled_copy`` compiles a code object under a new name. It uses Python's ``CodeType.replace`` alone.
- ``guards_checked_once`` passes ``skip_guard_eval_unsafe`` to ``torch.compiler.set_stance``. Without it guards are
  evaluated before each call.
- ``is_compiler_error`` reads the base class of the errors of torch.compile, ``torch._dynamo.exc``. Without it every
  RuntimeError counts, which is what these errors derive from.
- ``times_transposed`` calls ``torch.ops.mkldnn._linear_pointwise``. Without it products are those of ``torch.mm``.
- ``lerp_all`` calls ``torch._foreach_lerp_``. Without it each tensor is changed by ``Tensor.lerp_``.
- ``Launched`` launches the compiled kernel that ``kernel[grid](...)`` returned again, without Triton's checks of the
  arguments. Without it use ``kernel[grid](...)`` each time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_plain(tensor: Tensor) -> bool:
    """Return True if custom autograd functions may replace single operations on this tensor.

    False under a compiler, for tensor subclasses, in functorch transforms and with forward-mode derivatives: these
    must see every operation.
    """
    if type(tensor) is not Tensor or torch.compiler.is_compiling():
        return False
    try:
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return False
        return not torch._C._functorch.is_legacy_batchedtensor(tensor)  # of torch.autograd.grad(is_grads_batched=True)
    except AttributeError:
        return False


def compiled_copy(function: Callable[..., Any], name: str, **options: Any) -> Callable[..., Any]:
    """Compile a copy of a function under another name.

    torch limits how often one function is compiled, and for a second shape of its arguments it compiles kernels for
    any shape, which take several times as long.

    Args:
        function: A plain Python function.
        name: Name of the copy.
        options: Keyword arguments of ``torch.compile``.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=name)
    return torch.compile(FunctionType(code, function.__globals__, name, function.__defaults__), **options)


def guards_checked_once(checked: bool) -> AbstractContextManager[Any]:
    """Skip the guards of compiled functions inside the block.

    Args:
        checked: True if the guards were evaluated before for arguments of the same kind; False changes nothing.
    """
    try:
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("default", skip_guard_eval_unsafe=checked)
    except (AttributeError, TypeError):
        return nullcontext()
    return stance


def is_compiler_error(error: Exception) -> bool:
    """Return True if torch.compile raised the error because it cannot compile a function."""
    try:
        return isinstance(error, torch._dynamo.exc.TorchDynamoException)
    except AttributeError:
        return isinstance(error, RuntimeError)


def times_transposed(first: Tensor, second: Tensor) -> Tensor:
    """Return ``first @ second.T`` on a CPU, without gradient: [r, d] times [c, d] is [r, c].

    In float32 by oneDNN, which uses the vector units of every x86 CPU. MKL, behind ``torch.mm``, takes twice as long on
    those that are not Intel's. Both have the same precision.
    """
    if first.dtype == torch.float32 and first.shape[1]:
        try:
            found: Tensor = torch.ops.mkldnn._linear_pointwise(first, second, None, "none", [], "")
            return found
        except (AttributeError, RuntimeError):
            pass
    return torch.mm(first, second.T)


def lerp_all(tensors: list[Tensor], targets: list[Tensor], weight: float) -> None:
    """Move each tensor towards its target in place, ``t + weight (target - t)``, in few launches on a GPU.

    Args:
        tensors: The tensors to change.
        targets: A target of the same shape and device for each.
        weight: Share of the way, from 0 to 1.
    """
    try:
        together = torch._foreach_lerp_
    except AttributeError:
        for tensor, target in zip(tensors, targets, strict=True):
            tensor.lerp_(target, weight)
        return
    together(tensors, targets, weight)


class Launched:
    """A Triton kernel whose repeated launches skip Triton's inspection of the arguments.

    For small batches that inspection takes longer than the kernel. The first launch with given constants and kinds of
    arguments (dtype, alignment, divisibility: what Triton specialises on) goes through Triton; later ones reuse the
    compiled kernel directly.

    Args:
        kernel: Function decorated with triton.jit.
        interpreted: True under Triton's interpreter, where every launch goes through Triton.
    """

    def __init__(self, kernel: Any, interpreted: bool = False) -> None:
        self.kernel, self.interpreted = kernel, interpreted
        self._known: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if self.interpreted:
            self.kernel[grid](*args, **constants)
            return
        device = _device(args)
        if device != torch.cuda.current_device():  # Triton launches on the current one
            with torch.cuda.device(device):
                self._launch(grid, *args, **constants)
            return
        key = _key(device, args, constants)
        known = self._known.get(key)
        if known is None:
            self._known[key] = self.kernel[grid](*args, **constants)
        else:
            known[(*grid, 1, 1)[:3]](*args, *self._values(args, constants))

    def _values(self, args: tuple[Any, ...], constants: dict[str, Any]) -> list[Any]:
        return [constants[name] for name in self.kernel.arg_names[len(args) :]]

    def bind(self, *args: Any, **constants: Any) -> Callable[[tuple[int, ...], int], None]:
        """Return ``launch(grid, base)``, which runs ``kernel[grid](base, *args, **constants)``.

        Use it for many launches that differ only in ``base``, a multiple of 16: the other arguments are inspected once.
        """
        known, every = None, (0, *args)

        def launch(grid: tuple[int, ...], base: int) -> None:
            nonlocal known
            if known is None or _device(args) != torch.cuda.current_device():
                self._launch(grid, base, *args, **constants)
                known = self._known.get(_key(_device(args), every, constants))
            else:
                known[(*grid, 1, 1)[:3]](base, *args, *values)

        values = [] if self.interpreted else self._values(every, constants)
        return launch


def _device(args: tuple[Any, ...]) -> int:
    return next(each.device.index for each in args if isinstance(each, torch.Tensor))


def _key(device: int, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """Return the properties of a launch that Triton compiles separate kernels for."""
    kinds = [
        None if each is None
        else (each.dtype, each.data_ptr() % 16) if isinstance(each, torch.Tensor)
        else (each == 1, each % 16 == 0, each < 2**31) if isinstance(each, int)
        else type(each)
        for each in args
    ]  # fmt: skip
    return (device, *constants.values(), *kinds)
