"""The small tensors of a streamed loss that may carry a gradient, cut with the tiles and put back together.

The temperature, and tensors that are fields of a distribution or objective (a learnable beta or bias). What is
closed over by a lambda cannot be seen, and gets no gradient: make it a field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from hardneg.core.objectives import Objective
from hardneg.core.pairing import Pairing, Rows
from hardneg.core.sweep import Bounds
from hardneg.negatives.base import Negatives

Holder = TypeVar("Holder")
_field_names: dict[type, tuple[str, ...]] = {}
PER_ANCHOR = ("num_negatives", "log_norm")
"""Fields that hold a number for each anchor as [b]; any other field does as [b, 1]."""


def tensor_fields(holder: Any) -> dict[str, Tensor]:
    kind = holder.__class__
    if kind not in _field_names:
        _field_names[kind] = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
    values = {name: getattr(holder, name) for name in _field_names[kind]}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def is_per_anchor(tensor: Tensor, name: str, rows: int) -> bool:
    """Whether a field holds a number for each anchor, and not a table of as many entries."""
    return tensor.shape == ((rows,) if name in PER_ANCHOR else (rows, 1))


def with_fields(holder: Holder, tensors: dict[str, Tensor]) -> Holder:
    return replace(holder, **tensors) if tensors else holder  # type: ignore[type-var]


def fields_of_rows(holder: Holder, rows: slice, number: int) -> Holder:
    """With the fields that hold a number for each of ``number`` anchors cut to these rows."""
    held = tensor_fields(holder).items()
    return with_fields(holder, {name: each[rows] for name, each in held if is_per_anchor(each, name, number)})


class Held(NamedTuple):
    factors: tuple[Negatives, ...]
    objective: Objective
    temperature: float | Tensor


@dataclass(frozen=True, eq=False)
class Holders:
    """The distributions, the objective and the temperature, and which of the pieces are tensors of theirs."""

    factors: tuple[Negatives, ...]
    objective: Objective
    temperature: float | None  # None: the first of the pieces
    fields: tuple[tuple[int, str, int], ...]  # of which holder, which field, and its place among the pieces
    largest: tuple[tuple[int, str, int], ...] = ()  # bounds with a gradient: of which factor, which one, and its place

    def held(self, pieces: Sequence[Tensor]) -> Held:
        """With these pieces instead of their tensors."""
        changes: list[dict[str, Tensor]] = [{} for _ in (*self.factors, self.objective)]
        for holder, name, place in self.fields:
            changes[holder][name] = pieces[place]
        factors = tuple(with_fields(factor, change) for factor, change in zip(self.factors, changes[:-1], strict=True))
        temperature = pieces[0] if self.temperature is None else self.temperature
        return Held(factors, with_fields(self.objective, changes[-1]), temperature)

    def replaced(self, bounds: Sequence[Bounds], pieces: Sequence[Tensor]) -> list[Bounds]:
        """The bounds with these pieces instead of those that have a gradient."""
        changed = [dict(each) for each in bounds]
        for factor, name, place in self.largest:
            changed[factor][name] = pieces[place]
        return list(changed)


class Piece(NamedTuple):
    """A tensor, and whether its first dimension is that of the anchors."""

    tensor: Tensor
    per_anchor: bool

    def of(self, rows: Rows) -> Tensor:
        return self.tensor[rows] if self.per_anchor else self.tensor


def collect(pairing: Pairing, factors: tuple[Negatives, ...], objective: Objective) -> tuple[Holders, list[Piece]]:
    """The tensors of the temperature and the fields, in one order."""
    pieces, places = [], []
    plain = None if isinstance(pairing.temperature, Tensor) else pairing.temperature
    if isinstance(pairing.temperature, Tensor):
        pieces.append(Piece(pairing.temperature, pairing.temperature.ndim == 2))
    for i, holder in enumerate((*factors, objective)):
        for name, tensor in tensor_fields(holder).items():
            places.append((i, name, len(pieces)))
            pieces.append(Piece(tensor, is_per_anchor(tensor, name, len(pairing))))
    return Holders(factors, objective, plain, tuple(places)), pieces
