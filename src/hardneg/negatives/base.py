"""What a distribution of negatives is: log-weights over candidates, composed by ``*``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from torch import Tensor

from hardneg.core.errors import warn_once
from hardneg.core.schedules import Schedule, short_repr, value_of
from hardneg.core.types import NEVER, LogWeights, Scores

_registry: dict[str, type[Negatives]] = {}


class Negatives(ABC):
    """q(x-|x): with what probability each candidate is an anchor's negative.

    Subclasses are frozen dataclasses; defining one registers it in the grammar. ``log_weights`` gives [b, n], known up
    to a constant per row, and ``NEVER`` where a candidate is not a negative; it looks at ``scores.valid`` candidates
    only. ``a * b`` multiplies the distributions, left to right: ``b`` sees only the candidates that ``a`` left.
    """

    examples: ClassVar[tuple[str, ...]] = ()
    """Calls in the grammar, for the help and the conformance tests; needed where a field has no default."""
    ranks: ClassVar[bool] = False
    """Whether a candidate's weight depends on which other candidates are valid."""
    masks: ClassVar[bool] = False
    """Whether it only removes candidates."""
    textual: ClassVar[bool] = True
    """Whether it can be written in the grammar; not if it is made of tensors."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.textual:
            _registry[cls.__name__] = cls

    @abstractmethod
    def log_weights(self, scores: Scores) -> LogWeights: ...

    def __mul__(self, other: Negatives) -> Negatives:
        if not isinstance(other, Negatives):
            return NotImplemented
        product = Product((*self.factors, *other.factors))
        _say_if_order_matters(product.factors)
        return product

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def factors(self) -> tuple[Negatives, ...]:
        return (self,)

    def at(self, step: int, total: int | None = None) -> Negatives:
        """This distribution with its schedules evaluated."""
        numbers = {name: value_of(schedule, step, total) for name, schedule in _schedules(self)}
        return replace(self, **numbers) if numbers else self  # type: ignore[type-var]

    def schedules(self) -> list[Schedule]:
        return [schedule for factor in self.factors for _, schedule in _schedules(factor)]


def _schedules(factor: Negatives) -> Iterator[tuple[str, Schedule]]:
    for field in fields(factor):  # type: ignore[arg-type]
        value = getattr(factor, field.name)
        if isinstance(value, Schedule):
            yield field.name, value


def registered_negatives() -> dict[str, type[Negatives]]:
    """Every distribution that the grammar knows, by name."""
    return dict(_registry)


def keep(scores: Scores, mask: Tensor) -> LogWeights:
    """Log-weight 0 for the valid candidates in the mask, NEVER for the others."""
    return scores.candidates.new_zeros(scores.valid.shape).masked_fill(~(scores.valid & mask), NEVER)


@dataclass(frozen=True, repr=False)
class Product(Negatives):
    """Factors multiplied left to right; written ``a * b``.

    >>> from hardneg.negatives import OtherLabel, Tilt
    >>> OtherLabel() * Tilt(1.0)
    OtherLabel() * Tilt(1.0)
    """

    _factors: tuple[Negatives, ...]
    textual: ClassVar = False  # written with *, not by its name

    def log_weights(self, scores: Scores) -> LogWeights:
        total = self._factors[0].log_weights(scores)
        for factor in self._factors[1:]:
            total = total + factor.log_weights(scores.narrowed(total != NEVER))
        return total

    @property
    def factors(self) -> tuple[Negatives, ...]:
        return self._factors

    def at(self, step: int, total: int | None = None) -> Negatives:
        return Product(tuple(factor.at(step, total) for factor in self._factors))

    def __repr__(self) -> str:
        return " * ".join(repr(factor) for factor in self._factors)


@dataclass(frozen=True, repr=False)
class Uniform(Negatives):
    """Every valid candidate with the same weight: SimCLR, MoCo, SimCSE."""

    def log_weights(self, scores: Scores) -> LogWeights:
        return keep(scores, scores.valid)


def _say_if_order_matters(factors: tuple[Negatives, ...]) -> None:
    for position, factor in enumerate(factors):
        ranked = next((before for before in factors[:position] if before.ranks), None)
        if ranked is not None and factor.masks and not factor.ranks:
            name, mask = type(ranked).__name__, type(factor).__name__
            warn_once(
                f"order:{name}*{mask}",
                f"{name} * {mask}: the order matters. {name} looks at all candidates and {mask} then removes some of "
                f"those it chose; write {mask} * {name} to let {name} see only what {mask} leaves.",
            )
