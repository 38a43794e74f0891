"""Constant tensors that are made once: small batches on a GPU are a matter of how many operations are issued."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def kept(make: Callable[..., Tensor], *arguments: Any, device: torch.device, **options: Any) -> Tensor:
    """``make(*arguments, device=device, **options)``, kept for the next call, unless someone has written to it.

    >>> kept(torch.arange, 3, device=torch.device("cpu"))
    tensor([0, 1, 2])
    """
    if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return make(*arguments, device=device, **options)
    found, version = _kept(make, *arguments, device=device, **options)
    if type(found) is Tensor and found._version == version:
        return found
    return make(*arguments, device=device, **options)  # written to, or made in another mode, such as FakeTensorMode


@lru_cache(maxsize=64)
def _kept(make: Callable[..., Tensor], *arguments: Any, **options: Any) -> tuple[Tensor, int]:
    with torch.inference_mode(False):  # a tensor of inference could not be saved for a backward pass
        found = make(*arguments, **options)
    return found, found._version
