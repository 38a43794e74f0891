"""Base of the stateful classes: randomness from a seed and a step, and updates by id with a rule for duplicates.

A step of training must not wait for the GPU, which would then wait for the launches of the rest of the step. So what
the host needs of a buffer is looked up only after a change from outside, and rows are chosen without counting them.
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

Kept = TypeVar("Kept")


class Stateful(nn.Module):
    """All state in buffers, so that ``state_dict`` is complete, its randomness included.

    Draws come from a generator made of the seed and the step, both buffers: a restored module draws what the saved one
    would have drawn, on any device. ``precise`` buffers keep their dtype when the module is sent to half precision;
    ``widening`` ones take the dtype of what is loaded. ``shown`` are the attributes of its repr.
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
        """The randomness of this step; different streams are independent."""
        return generator_at(self.number("seed"), self.number("step"), stream)

    @outside_graphs
    def uniforms(self, shape: tuple[int, ...], *streams: int) -> list[Tensor]:
        """float64 numbers in [0, 1) of this step, made on the device from its buffers: on a GPU, as a CPU's, they would
        take longer than the rest of a step of EMC2, and a graph would repeat them. Different streams are independent.
        """
        return [uniforms_at(self.seed, self.step, stream, shape) for stream in streams]

    def number(self, name: str) -> int:
        """The number in a buffer."""
        return self.looked_up(name, int)

    def set_number(self, name: str, value: int) -> None:
        buffer: Tensor = getattr(self, name)
        buffer.fill_(value)
        self._looked_up[name] = buffer, buffer._version, value

    def looked_up(self, name: str, read: Callable[[Tensor], Kept]) -> Kept:
        """What ``read`` finds in a buffer; read again only after something else than ``set_number`` has changed it."""
        buffer: Tensor = getattr(self, name)
        seen = self._looked_up.get(name)
        if seen is None or seen[0] is not buffer or seen[1] != buffer._version:
            seen = self._looked_up[name] = buffer, buffer._version, read(buffer)
        found: Kept = seen[2]
        return found

    @outside_graphs
    def advance(self) -> None:
        """The next step. It is counted on the device, and on the host if it is known there."""
        seen, before = self._looked_up.get("step"), self.step._version
        self.step += 1
        if seen is not None and seen[0] is self.step and seen[1] == before:
            self._looked_up["step"] = self.step, self.step._version, seen[2] + 1

    def checked(self, who: str, ids: Tensor | None, num_instances: int) -> Tensor:
        """``check_ids``; on a GPU at calls 1, 2, 4, 8 ... only. A wrong id also fails in the kernel that uses it, or
        makes the loss NaN.

        Inside torch.compile it is not looked at.
        """
        if isinstance(ids, Tensor) and torch.compiler.is_compiling():
            return ids
        self._calls += 1
        seldom = self._calls & (self._calls - 1) == 0
        if isinstance(ids, Tensor) and ids.is_cuda and (not seldom or torch.cuda.is_current_stream_capturing()):
            return ids
        return check_ids(who, ids, num_instances)

    def check_next(self) -> None:
        """The ids of the next call are looked at, also on a GPU."""
        self._calls = 0

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.shown)

    def __getstate__(self) -> dict[str, Any]:
        """Without what was looked up: the versions of a copy's buffers count from the beginning."""
        return {**self.__dict__, "_looked_up": {}}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        values = {name: getattr(self, name) for name in self.precise}
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in values.items():
            after = getattr(self, name)
            if after.dtype != before.dtype:  # a cast: taken back from the value before it, on the new device
                setattr(self, name, before.to(after.device))
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
    return (last_rows(slots) == torch.arange(len(slots), device=slots.device)) & (slots >= 0)


def last_rows(slots: Annotated[Tensor, "b"]) -> Annotated[Tensor, "b"]:
    """For each row the last one that has the same slot.

    >>> last_rows(torch.tensor([4, 7, 4, -1])).tolist()
    [2, 1, 2, 3]
    """
    in_order, order = slots.sort(stable=True)
    ends = torch.searchsorted(in_order, in_order, right=True) - 1
    return torch.empty_like(order).scatter_(0, order, order[ends])


class Writes:
    """Rows that are written to slots: of several rows with one slot the last one is, and one with a negative is not.

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
        """``values`` has a row for each slot, of which those of ``rows`` are written."""
        new = values.to(buffer)[self.rows]
        buffer[self.slots] = torch.where(self.any, new, buffer[self.slots])


def check_ids(who: str, ids: Tensor | None, num_instances: int) -> Tensor:
    """The ids, if each is below num_instances; negative: no instance. Costs one synchronisation on a GPU."""
    if not isinstance(ids, Tensor):
        got = "ids=None" if ids is None else f"ids of {type(ids).__name__}"
        raise ArgumentError(who, "the ids of the rows as a tensor", got, "pass the positions in the data set")
    if len(ids) and int(ids.max()) >= num_instances:
        raise argument_error(who, f"ids below num_instances={num_instances}", "ids.max()", int(ids.max()))
    return ids
