"""Base of the stateful classes: randomness from a seed and a step, and updates by id with a rule for duplicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, argument_error
from hardneg.core.errors import check_count as check_count
from hardneg.core.keyed import generator_at


class Stateful(nn.Module):
    """All state in buffers, so that ``state_dict`` is complete, its randomness included.

    Draws come from a generator made of the seed and the step, both buffers: a restored module draws what the saved one
    would have drawn, on any device. ``precise`` buffers keep their dtype when the module is sent to half precision;
    ``widening`` ones take the dtype of what is loaded.
    """

    precise: ClassVar[tuple[str, ...]] = ()
    widening: ClassVar[tuple[str, ...]] = ()
    seed: Tensor
    step: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.register_buffer("seed", torch.tensor(seed))
        self.register_buffer("step", torch.tensor(0))

    def generator(self, stream: int = 0) -> torch.Generator:
        """The randomness of this step; different streams are independent."""
        return generator_at(int(self.seed), int(self.step), stream)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        dtypes = {name: getattr(self, name).dtype for name in self.precise}
        values = {name: getattr(self, name) for name in self.precise}
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, dtype in dtypes.items():
            after = getattr(self, name)
            if after.dtype != dtype:  # a cast: taken back from the value before it, on the new device
                setattr(self, name, values[name].to(after.device))
        return moved

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in self.widening:
            saved = state_dict.get(prefix + name)
            if saved is not None:
                setattr(self, name, getattr(self, name).to(saved.dtype))
        super()._load_from_state_dict(state_dict, prefix, *args)


def last_of_each(slots: Annotated[Tensor, "b"]) -> Annotated[Tensor, "b"]:
    """True at the last row of each slot: of rows that would write to one place, the last one does. Negative: never.

    >>> last_of_each(torch.tensor([4, 7, 4, -1])).tolist()
    [False, True, True, False]
    """
    if len(slots) == 0:
        return slots.new_zeros(0, dtype=torch.bool)
    _, group = torch.unique(slots, return_inverse=True)  # type: ignore[no-untyped-call]
    position = torch.arange(len(slots), device=slots.device)
    # The largest position does not depend on the order of the writes, so a GPU gives the same answer each time.
    last = torch.zeros_like(position).scatter_reduce(0, group, position, "amax")
    return (last[group] == position) & (slots >= 0)


def check_ids(who: str, ids: Tensor | None, num_instances: int) -> Tensor:
    """The ids, if each is below num_instances; negative: no instance. Costs one synchronisation on a GPU."""
    if ids is None:
        raise ArgumentError(who, "the ids of the rows", "ids=None", "pass the positions in the data set")
    if len(ids) and int(ids.max()) >= num_instances:
        raise argument_error(who, f"ids below num_instances={num_instances}", "ids.max()", int(ids.max()))
    return ids
