"""Base class of the stateful modules: randomness from a seed and a step, and updates by id with a rule for duplicates.

A training step must not wait for the GPU, which would then wait for the launches of the rest of the step. So the values
of buffers that the host needs are cached and read again only after a change from outside (``looked_up``), and rows are
selected without counting them (``Writes``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, argument_error, check_seed
from hardneg.core.errors import check_count as check_count
from hardneg.core.keyed import generator_at, uniforms_at
from hardneg.core.tensors import outside_graphs

LookedUp = TypeVar("LookedUp")


class Stateful(nn.Module):
    """A module with all state in buffers, so that ``state_dict`` is complete, including its randomness.

    Random numbers come from a generator built from the seed and the step, both buffers: a restored module draws what
    the saved one would have drawn, on any device.

    Attributes:
        precise: Buffers that keep their dtype when the module is converted to half precision.
        widening: Buffers that adopt the dtype of a loaded state.
        shown: Attributes in ``repr``.
    """

    precise: ClassVar[tuple[str, ...]] = ()
    widening: ClassVar[tuple[str, ...]] = ()
    shown: ClassVar[tuple[str, ...]] = ()
    seed: Tensor
    step: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._looked_up: dict[str, tuple[Tensor, int, Any]] = {}
        self._calls = 0
        self.register_buffer("seed", torch.tensor(check_seed(type(self).__name__, seed)))
        self.register_buffer("step", torch.tensor(0))

    def generator(self, stream: int = 0) -> torch.Generator:
        """Return the random generator of this step; different streams are independent."""
        return generator_at(self.number("seed"), self.number("step"), stream)

    @outside_graphs
    def uniforms(self, shape: tuple[int, ...], *streams: int) -> list[Tensor]:
        """Return float64 numbers in [0, 1) of this step, one tensor per stream; different streams are independent.

        They are computed on the device from its buffers: drawn on a CPU they would take longer than the rest of a step
        of EMC2, and a graph would repeat them.
        """
        return [uniforms_at(self.seed, self.step, stream, shape) for stream in streams]

    def number(self, name: str) -> int:
        """Return the number in a buffer."""
        return self.looked_up(name, int)

    def set_number(self, name: str, value: int) -> None:
        """Write a number to a buffer and to the cache of the host."""
        buffer: Tensor = getattr(self, name)
        buffer.fill_(value)
        self._looked_up[name] = buffer, buffer._version, value

    def looked_up(self, name: str, read: Callable[[Tensor], LookedUp]) -> LookedUp:
        """Return ``read(buffer)``, cached until something other than ``set_number`` changes the buffer."""
        buffer: Tensor = getattr(self, name)
        seen = self._looked_up.get(name)
        if seen is None or seen[0] is not buffer or seen[1] != buffer._version:
            seen = self._looked_up[name] = buffer, buffer._version, read(buffer)
        found: LookedUp = seen[2]
        return found

    @outside_graphs
    def advance(self) -> None:
        """Advance the step, on the device and, if it is cached there, on the host."""
        seen, before = self._looked_up.get("step"), self.step._version
        self.step += 1
        if seen is not None and seen[0] is self.step and seen[1] == before:
            self._looked_up["step"] = self.step, self.step._version, seen[2] + 1

    def checked(self, who: str, ids: Tensor | None, num_instances: int) -> Tensor:
        """Check the ids as ``check_ids`` does; on a GPU only at calls 1, 2, 4, 8 ..., because a check waits for it.

        Between these calls a wrong id fails in the kernel that uses it, or makes the loss NaN. Inside torch.compile
        nothing is checked.
        """
        if isinstance(ids, Tensor) and torch.compiler.is_compiling():
            return ids
        self._calls += 1
        seldom = self._calls & (self._calls - 1) == 0
        if isinstance(ids, Tensor) and ids.is_cuda and (not seldom or torch.cuda.is_current_stream_capturing()):
            return ids
        return check_ids(who, ids, num_instances)

    def check_next(self) -> None:
        """Check the ids at the next call, also on a GPU."""
        self._calls = 0

    def extra_repr(self) -> str:
        """Return the attributes in ``shown``."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.shown)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without cached values: the versions of a copy's buffers count from the beginning."""
        return {**self.__dict__, "_looked_up": {}}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        values = {name: getattr(self, name) for name in self.precise}
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in values.items():
            after = getattr(self, name)
            if after.dtype != before.dtype:  # a cast: restore the value from before it, on the new device
                setattr(self, name, before.to(after.device))
        return moved

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in self.widening:
            saved = state_dict.get(prefix + name)
            if saved is not None:
                setattr(self, name, getattr(self, name).to(saved.dtype))
        super()._load_from_state_dict(state_dict, prefix, *args)


def last_of_each(slots: Annotated[Tensor, "b"]) -> Annotated[Tensor, "b"]:
    """Return True at the last row of each slot, the one whose write counts; False for negative slots.

    Example:
        >>> last_of_each(torch.tensor([4, 7, 4, -1])).tolist()
        [False, True, True, False]
    """
    return (last_rows(slots) == torch.arange(len(slots), device=slots.device)) & (slots >= 0)


def last_rows(slots: Annotated[Tensor, "b"]) -> Annotated[Tensor, "b"]:
    """Return the last row that has the same slot, for each row.

    Example:
        >>> last_rows(torch.tensor([4, 7, 4, -1])).tolist()
        [2, 1, 2, 3]
    """
    in_order, order = slots.sort(stable=True)
    ends = torch.searchsorted(in_order, in_order, right=True) - 1
    return torch.empty_like(order).scatter_(0, order, order[ends])


class Writes:
    """Writes rows to slots of a buffer: if rows share a slot, the last one counts; negative slots are skipped.

    Args:
        slots: The slot of each row, [b].

    Example:
        >>> buffer, writes = torch.zeros(3), Writes(torch.tensor([2, 0, 2, -1]))
        >>> writes.into(buffer, torch.tensor([5.0, 6.0, 7.0, 8.0]))
        >>> buffer.tolist()
        [6.0, 0.0, 7.0]
    """

    def __init__(self, slots: Annotated[Tensor, "b"]) -> None:
        self.last, real = last_rows(slots), slots >= 0
        if not len(slots):
            self.slots, self.rows, self.any = slots, self.last, real.new_zeros(1)
            return
        # A row without a slot repeats the write of one that has one: all writes to one place are the same.
        other = slots.argmax(dim=0, keepdim=True)
        self.any = real[other]
        self.slots = torch.where(real, slots, slots[other]).clamp(min=0)
        self.rows = torch.where(real, self.last, self.last[other])

    def into(self, buffer: Tensor, values: Annotated[Tensor, "b ..."]) -> None:
        """Write the rows to their slots.

        Args:
            buffer: The buffer to write to.
            values: One row per slot, [b, ...].
        """
        new = values.to(buffer)[self.rows]
        buffer[self.slots] = torch.where(self.any, new, buffer[self.slots])


def check_ids(who: str, ids: Tensor | None, num_instances: int) -> Tensor:
    """Return the ids if each is below num_instances; negative ids stand for no instance.

    Costs one synchronisation on a GPU.

    Args:
        who: Name of the caller, for errors.
        ids: Ids [b].
        num_instances: Size of the data set.

    Raises:
        ArgumentError: If the ids are not a tensor, or one is too large.
    """
    if not isinstance(ids, Tensor):
        got = "ids=None" if ids is None else f"ids of {type(ids).__name__}"
        raise ArgumentError(who, "the ids of the rows as a tensor", got, "pass the positions in the data set")
    if len(ids) and int(ids.max()) >= num_instances:
        raise argument_error(who, f"ids below num_instances={num_instances}", "ids.max()", int(ids.max()))
    return ids
