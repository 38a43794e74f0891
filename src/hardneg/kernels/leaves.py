"""The tensors of a streamed loss that may carry a gradient, cut with the tiles and put back together.

Vectors, temperature, and tensors that are fields of a distribution or objective (a learnable beta or bias). What is
closed over by a lambda cannot be seen, and gets no gradient: make it a field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hardneg.core.pairing import Cut, Pairing

Held = TypeVar("Held")
Backward = TypeVar("Backward", bound=Callable[..., Any])
PER_ANCHOR = ("num_negatives", "log_norm")
"""Fields that hold a number for each anchor as [b]; any other field does as [b, 1]."""


def without_autocast(backward: Backward) -> Backward:
    """A backward pass that recomputes its tiles in the precision of the forward pass, also inside autocast."""

    @wraps(backward)
    def precise(ctx: Any, *grads: Tensor) -> Any:
        with torch.autocast(grads[0].device.type, enabled=False):
            return backward(ctx, *grads)

    return cast(Backward, precise)


def tensor_fields(holder: Any) -> dict[str, Tensor]:
    if not is_dataclass(holder) or isinstance(holder, type):
        return {}
    values = {field.name: getattr(holder, field.name) for field in fields(holder)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def is_per_anchor(tensor: Tensor, name: str, rows: int) -> bool:
    """Whether a field holds a number for each anchor, and not a table of as many entries."""
    return tensor.shape == ((rows,) if name in PER_ANCHOR else (rows, 1))


def with_fields(holder: Held, tensors: dict[str, Tensor]) -> Held:
    return replace(holder, **tensors) if tensors else holder  # type: ignore[type-var]


def fields_of_rows(holder: Held, rows: slice, number: int) -> Held:
    """With the fields that hold a number for each of ``number`` anchors cut to these rows."""
    held = tensor_fields(holder).items()
    return with_fields(holder, {name: each[rows] for name, each in held if is_per_anchor(each, name, number)})


@dataclass(frozen=True)
class Part:
    """Where a tensor is used: by all rows and columns, or cut along one or both."""

    kind: str  # "rows", "columns", "private", "whole"
    pool: int = -1

    def of(self, tensor: Tensor, rows: slice, cut: Cut | None) -> Tensor:
        return tensor[self._index(rows, cut)]

    def add(self, total: Tensor, gradient: Tensor, rows: slice, cut: Cut | None) -> None:
        total[self._index(rows, cut)] += gradient

    def used(self, cut: Cut | None) -> bool:
        return self.pool < 0 or (cut is not None and cut.pool == self.pool)

    def _index(self, rows: slice, cut: Cut | None) -> Any:
        if self.kind == "whole":
            return ...
        if self.kind == "rows":
            return rows
        assert cut is not None
        columns = slice(cut.low, cut.high)
        return columns if self.kind == "columns" else (rows, columns)


class Leaves:
    """All tensors in one order: anchors, positives, pools, temperature, fields of the factors and of the objective."""

    def __init__(self, pairing: Pairing, holders: Sequence[Any]) -> None:
        self.pairing, self.holders = pairing, list(holders)
        self.tensors = [pairing.anchors.vectors, pairing.positives.vectors]
        self.parts = [Part("rows"), Part("rows")]
        for pool, keys in enumerate(pairing.candidates):
            self.tensors.append(keys.vectors)
            self.parts.append(Part("private" if keys.private else "columns", pool))
        self._temperature = len(self.tensors)
        if isinstance(pairing.temperature, Tensor):
            self._append(pairing.temperature)  # [] or [b, 1]
        self._fields: list[tuple[int, str, int]] = []
        for place, holder in enumerate(self.holders):
            for name, tensor in tensor_fields(holder).items():
                self._fields.append((place, name, len(self.tensors)))
                self._append(tensor, name)

    def _append(self, tensor: Tensor, name: str = "") -> None:
        per_anchor = is_per_anchor(tensor, name, len(self.pairing))
        self.tensors.append(tensor)
        self.parts.append(Part("rows" if per_anchor else "whole"))

    def cut(
        self,
        rows: slice,
        cut: Cut | None,
        tensors: Sequence[Tensor],
        grad: Sequence[bool],
        parts: Sequence[Part] | None = None,
    ) -> list[Tensor]:
        """The pieces that one tile uses; those in ``grad`` are leaves of a graph that begins here."""
        pieces = []
        for tensor, part, wanted in zip(tensors, parts or self.parts, grad, strict=True):
            piece = part.of(tensor.detach(), rows, cut) if part.used(cut) else tensor.detach()
            pieces.append(piece.requires_grad_() if wanted and part.used(cut) else piece)
        return pieces

    def temperature(self, pieces: Sequence[Tensor]) -> float | Tensor:
        return pieces[self._temperature] if isinstance(self.pairing.temperature, Tensor) else self.pairing.temperature

    def held(self, pieces: Sequence[Tensor]) -> list[Any]:
        """The factors and the objective with these pieces in place of their tensors."""
        changes: list[dict[str, Tensor]] = [{} for _ in self.holders]
        for place, name, index in self._fields:
            changes[place][name] = pieces[index]
        return [with_fields(holder, change) for holder, change in zip(self.holders, changes, strict=True)]


class Gradients:
    """Sums of the gradients of the pieces, in the shape of the whole tensors."""

    def __init__(self, tensors: Sequence[Tensor], parts: Sequence[Part], wanted: Sequence[bool]) -> None:
        self.parts = parts
        self.totals = [torch.zeros_like(each) if want else None for each, want in zip(tensors, wanted, strict=True)]

    def add(
        self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor], pieces: Sequence[Tensor], rows: slice, cut: Any
    ) -> None:
        """Adds the vector-Jacobian product of the outputs of one tile."""
        some = [(out, grad) for out, grad in zip(outputs, cotangents, strict=True) if out.requires_grad]
        wanted = [i for i, piece in enumerate(pieces) if piece.requires_grad]
        if not some or not wanted:
            return
        found = torch.autograd.grad(
            [out for out, _ in some], [pieces[i] for i in wanted], [grad for _, grad in some], allow_unused=True
        )
        for i, gradient in zip(wanted, found, strict=True):
            total = self.totals[i]
            if gradient is not None and total is not None:
                self.parts[i].add(total, gradient, rows, cut)
