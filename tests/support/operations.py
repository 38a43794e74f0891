"""What a call issues and makes: on a GPU, a small batch costs as much as its operations."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """How many operations are issued; views are none, and memory that is not written to is not one either."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not (function.is_view or "empty" in str(function))
        return function(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that was made."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(each, Tensor):
                self.most = max(self.most, each.untyped_storage().nbytes() // max(each.element_size(), 1))
        return made
