"""Numbers that change over training: ``schedule(step, total)``.

Lower-case class names, because they are used like functions and written that way in the grammar:
``Tilt(linear(1.0, 0.0))``. A step may be an epoch or an optimiser step; the caller decides. The schedule runs over
the whole training unless ``steps`` says how long it takes; after that it stays at its end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, NoReturn

from hardneg.core.errors import ArgumentError, argument_error, check_range

LONG = 100_000_000
"""Steps of an imagined training, in which every schedule comes to its end."""
_registry: dict[str, type[Schedule]] = {}


class Schedule(ABC):
    """A number for each step. Subclasses are frozen dataclasses that implement ``__call__``."""

    examples: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _registry[cls.__name__] = cls

    @abstractmethod
    def __call__(self, step: int, total: int | None = None) -> float:
        """The number at this step."""

    def __repr__(self) -> str:
        return short_repr(self)

    def _not_a_number(self, *_: Any) -> NoReturn:
        fix = "evaluate it with negatives.at(step, total), or call loss.set_progress(step, total) before the loss"
        raise ArgumentError(repr(self), "to be a number", "a schedule", fix)

    __mul__ = __rmul__ = __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = _not_a_number
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __float__ = __int__ = _not_a_number


class _Timed:
    """What the schedules have in common that run over ``steps`` where that is given, otherwise over the whole run."""

    steps: int | None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise argument_error(type(self).__name__, "at least one step", "steps", self.steps)

    def _length(self, total: int | None) -> int:
        length = total if self.steps is None else self.steps
        if length is None:
            fix = "pass total or build it with steps="
            raise ArgumentError(type(self).__name__, "the length of the run", "total=None", fix)
        return max(length, 1)


Number = float | Schedule


def registered_schedules() -> dict[str, type[Schedule]]:
    return dict(_registry)


def value_of(number: Number, step: int, total: int | None) -> float:
    return number(step, total) if isinstance(number, Schedule) else number


def schedules_of(holder: Any) -> dict[str, Schedule]:
    """The fields of a dataclass that are schedules, by name; none of any other object."""
    values = {field.name: getattr(holder, field.name) for field in fields(holder)} if is_dataclass(holder) else {}
    return {name: value for name, value in values.items() if isinstance(value, Schedule)}


def short_repr(value: Any) -> str:
    """The call that makes this dataclass again, without the fields left at their default."""
    parts = []
    for field in fields(value):
        current = getattr(value, field.name)
        if field.default is MISSING:
            parts.append(_literal(current))
        elif hasattr(current, "requires_grad") or current != field.default:  # a tensor; help needs no torch
            parts.append(f"{field.name}={_literal(current)}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _literal(value: Any) -> str:
    """Numpy's numbers have a repr of their own."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return repr(int(value)) if isinstance(value, Integral) else repr(float(value))
    return repr(value)


@dataclass(frozen=True, repr=False)
class constant(Schedule):  # noqa: N801
    """The same number throughout."""

    value: float
    examples: ClassVar = ("constant(0.5)",)

    def __call__(self, step: int, total: int | None = None) -> float:
        return self.value


@dataclass(frozen=True, repr=False)
class linear(_Timed, Schedule):  # noqa: N801
    """start + (end - start) * step / total, then end.

    ``inclusive`` divides by total - 1, so that the last step has the end value itself: H-SCL's
    l(start, end, epoch) = start + (epoch - 1) / 199 * (end - start) over 200 epochs (eq. 4, epoch = step + 1) and
    the code of Ring, whose array is a linspace. Ring's paper: ``linear(1.0, 0.1, steps=100)`` in epochs.

    >>> linear(1.0, 0.0)(25, 100)
    0.75
    >>> linear(-0.3, 0.0, inclusive=True)(199, 200)
    0.0
    """

    start: float
    end: float
    steps: int | None = None
    inclusive: bool = False
    examples: ClassVar = ("linear(1.0, 0.1)", "linear(0.2, 0.05, steps=100)")

    def __call__(self, step: int, total: int | None = None) -> float:
        fraction = min(step / max(self._length(total) - self.inclusive, 1), 1.0)
        return (1.0 - fraction) * self.start + fraction * self.end


@dataclass(frozen=True, repr=False)
class cosine(_Timed, Schedule):  # noqa: N801
    """end + (start - end) * (1 + cos(pi * step / total)) / 2, then end: half a cosine.

    MoCo v3's momentum is ``cosine(m, 1.0)``.
    """

    start: float
    end: float
    steps: int | None = None
    examples: ClassVar = ("cosine(0.99, 1.0)",)

    def __call__(self, step: int, total: int | None = None) -> float:
        fraction = min(step / self._length(total), 1.0)
        return self.end + (self.start - self.end) * (1.0 + math.cos(math.pi * fraction)) / 2.0


@dataclass(frozen=True, repr=False)
class steps(_Timed, Schedule):  # noqa: N801
    """A staircase of ``num_changes`` equal changes from start to end.

    HCL, appendix D.1: beta falls by beta / l every e / l epochs: ``steps(beta, 0.0, num_changes=l)``, and its
    opposite ``steps(0.0, beta, ...)``. ``variant="code"`` is what HCL's script does with its nine values instead:
    the first value is held for two intervals of int(total / 9) epochs and the end comes only in the last ones. (The
    script itself stops with an error for fewer than 9 epochs and for many other lengths; this does not.)
    """

    start: float
    end: float
    num_changes: int = 8
    steps: int | None = None
    variant: str = "paper"
    examples: ClassVar = ("steps(1.0, 0.0, num_changes=4)",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_changes < 1:
            raise argument_error("steps", "at least one change", "num_changes", self.num_changes)
        if self.variant not in ("paper", "code"):
            raise argument_error("steps", "variant 'paper' or 'code'", "variant", self.variant)

    def __call__(self, step: int, total: int | None = None) -> float:
        length = self._length(total)
        if self.variant == "paper":
            done = step * self.num_changes // length
        else:
            done = step // max(length // (self.num_changes + 1), 1) - 1
        fraction = min(max(done, 0), self.num_changes) / self.num_changes
        return (1.0 - fraction) * self.start + fraction * self.end


@dataclass(frozen=True, repr=False)
class exponential(_Timed, Schedule):  # noqa: N801
    """end + (start - end) * exp(-decay * step / total).

    Ring's code decays per step, not over the run: ``exponential(1.0, 0.1, decay=0.1, steps=1)``, which is at its
    end after some 50 steps.
    """

    start: float
    end: float
    decay: float = 5.0
    steps: int | None = None
    examples: ClassVar = ("exponential(1.0, 0.1)",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("exponential", "decay", self.decay, 0.0, math.inf)

    def __call__(self, step: int, total: int | None = None) -> float:
        return self.end + (self.start - self.end) * math.exp(-self.decay * (step / self._length(total)))


@dataclass(frozen=True, repr=False)
class adaptive(Schedule):  # noqa: N801
    """Moves from start towards end while the metric improves, and back when it does not (Ring, appendix E).

    Call ``observe(metric)`` after each epoch with a number that should grow (validation accuracy, or minus the
    training loss after each step). The paper prints "lowers the threshold if the performance increases, otherwise
    decreasing"; the second is read as raising. The first metric is only remembered. This is the one schedule with
    state: it is part of ``ContrastiveLoss.state_dict()``.

    >>> outer = adaptive(1.0, 0.1, rate=0.3)
    >>> outer.observe(0.50); outer.observe(0.55); round(outer(0), 6)
    0.7
    """

    start: float
    end: float
    rate: float = 0.01
    examples: ClassVar = ("adaptive(1.0, 0.1)",)

    def __post_init__(self) -> None:
        check_range("adaptive", "rate", self.rate, 0.0, math.inf)
        object.__setattr__(self, "_state", {"value": float(self.start), "last": None})

    def __call__(self, step: int, total: int | None = None) -> float:
        return float(self._state["value"])

    def observe(self, metric: float) -> None:
        state: dict[str, Any] = self._state
        last, state["last"] = state["last"], float(metric)
        if last is None:
            return
        towards_end = math.copysign(self.rate, self.end - self.start)
        moved = state["value"] + (towards_end if metric > last else -towards_end)
        low, high = sorted((self.start, self.end))
        state["value"] = min(max(moved, low), high)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state.update(state)

    _state: ClassVar[dict[str, Any]]
