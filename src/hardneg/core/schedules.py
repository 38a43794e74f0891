"""Schedules: numbers that change over training, called as ``schedule(step, total)``.

Use one in place of a number: ``Tilt(linear(1.0, 0.0))`` in Python, in a configuration file or on the command line. A
step may be an epoch or an optimiser step; the caller decides. A schedule spans the whole training unless ``steps``
sets its length; afterwards it stays at its end value.

The class names are lower-case because they are used like functions. This module does not import torch, so that the
command line stays fast.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, NoReturn

from hardneg.core.errors import ArgumentError, argument_error, check_range

LONG = 100_000_000
"""More steps than any training has; every schedule reaches its end within them."""
_registry: dict[str, type[Schedule]] = {}


class Schedule(ABC):
    """A number for each step; the base class of all schedules.

    Subclasses are frozen dataclasses that implement ``__call__``. Defining one registers it for the grammar under its
    class name. A schedule is not a number: using it in arithmetic raises ArgumentError with the way to evaluate it.
    """

    examples: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _registry[cls.__name__] = cls

    @abstractmethod
    def __call__(self, step: int, total: int | None = None) -> float:
        """Return the number at a step.

        Args:
            step: Current step, counted from 0.
            total: Number of steps in the run; required unless the schedule has its own length.

        Raises:
            ArgumentError: If the length of the run is needed but ``total`` is None.
        """

    def __repr__(self) -> str:
        return short_repr(self)

    def _not_a_number(self, *_: Any) -> NoReturn:
        """Raise the error that explains how to evaluate a schedule."""
        fix = "evaluate it with negatives.at(step, total), or call loss.set_progress(step, total) before the loss"
        raise ArgumentError(repr(self), "to be a number", "a schedule", fix)

    __mul__ = __rmul__ = __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = _not_a_number
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __float__ = __int__ = _not_a_number


class _Timed:
    """Base of the schedules that span ``steps`` steps, or the whole run if ``steps`` is None."""

    steps: int | None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise argument_error(type(self).__name__, "at least one step", "steps", self.steps)

    def _length(self, total: int | None) -> int:
        length = total if self.steps is None else self.steps
        if length is None:
            fix = "pass total, or set steps= in the schedule"
            raise ArgumentError(type(self).__name__, "the length of the run", "total=None", fix)
        return max(length, 1)


Number = float | Schedule
"""An option that may be a number or a schedule."""


def registered_schedules() -> dict[str, type[Schedule]]:
    """Return every schedule that the grammar accepts, by name."""
    return dict(_registry)


def value_of(number: Number, step: int, total: int | None) -> float:
    """Return a number unchanged, or the value of a schedule at this step.

    Example:
        >>> value_of(0.5, 10, 100), value_of(linear(1.0, 0.0), 10, 100)
        (0.5, 0.9)
    """
    return number(step, total) if isinstance(number, Schedule) else number


def schedules_of(holder: Any) -> dict[str, Schedule]:
    """Return the fields of a dataclass that are schedules, by name; nothing for any other object."""
    values = {field.name: getattr(holder, field.name) for field in fields(holder)} if is_dataclass(holder) else {}
    return {name: value for name, value in values.items() if isinstance(value, Schedule)}


def short_repr(value: Any) -> str:
    """Return the call that recreates a dataclass, without the fields that have their default value.

    Example:
        >>> short_repr(linear(1.0, 0.1, steps=100))
        'linear(1.0, 0.1, steps=100)'
    """
    parts = []
    for field in fields(value):
        current = getattr(value, field.name)
        if field.default is MISSING:
            parts.append(_literal(current))
        elif hasattr(current, "requires_grad") or current != field.default:  # a tensor, recognised without torch
            parts.append(f"{field.name}={_literal(current)}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _literal(value: Any) -> str:
    """Write a number as Python would; numpy's numbers have another repr."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return repr(int(value)) if isinstance(value, Integral) else repr(float(value))
    return repr(value)


@dataclass(frozen=True, repr=False)
class constant(Schedule):  # noqa: N801
    """The same number throughout.

    Args:
        value: The number.
    """

    value: float
    examples: ClassVar = ("constant(0.5)",)

    def __call__(self, step: int, total: int | None = None) -> float:
        """Return the number."""
        return self.value


@dataclass(frozen=True, repr=False)
class linear(_Timed, Schedule):  # noqa: N801
    """A straight line from start to end: start + (end - start) * step / total, then end.

    Ring's paper: ``linear(1.0, 0.1, steps=100)`` in epochs.

    Args:
        start: Value at step 0.
        end: Value after the last step.
        steps: Number of steps to reach the end; the whole run by default.
        inclusive: Divide by total - 1, so that the last step has the end value itself. H-SCL does so,
            start + (epoch - 1) / 199 * (end - start) over 200 epochs (eq. 4, epoch = step + 1), and so does the code of
            Ring, whose values are a linspace.

    Example:
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
        """Return the number at this step."""
        fraction = min(step / max(self._length(total) - self.inclusive, 1), 1.0)
        return (1.0 - fraction) * self.start + fraction * self.end


@dataclass(frozen=True, repr=False)
class cosine(_Timed, Schedule):  # noqa: N801
    """Half a cosine from start to end: end + (start - end) * (1 + cos(pi * step / total)) / 2, then end.

    MoCo v3's momentum is ``cosine(m, 1.0)``.

    Args:
        start: Value at step 0.
        end: Value after the last step.
        steps: Number of steps to reach the end; the whole run by default.

    Example:
        >>> cosine(1.0, 0.0)(50, 100)
        0.5
    """

    start: float
    end: float
    steps: int | None = None
    examples: ClassVar = ("cosine(0.99, 1.0)",)

    def __call__(self, step: int, total: int | None = None) -> float:
        """Return the number at this step."""
        fraction = min(step / self._length(total), 1.0)
        return self.end + (self.start - self.end) * (1.0 + math.cos(math.pi * fraction)) / 2.0


@dataclass(frozen=True, repr=False)
class steps(_Timed, Schedule):  # noqa: N801
    """A staircase of ``num_changes`` equal changes from start to end.

    HCL, appendix D.1, lowers beta by beta / l every e / l epochs: ``steps(beta, 0.0, num_changes=l)``; its opposite is
    ``steps(0.0, beta, ...)``.

    Args:
        start: Value of the first interval.
        end: Value after the last change.
        num_changes: Number of changes; the run has num_changes + 1 values.
        steps: Number of steps to reach the end; the whole run by default.
        variant: ``"paper"``, or ``"code"`` for the behaviour of HCL's script with its nine values: the first value is
            held for two intervals of int(total / 9) epochs, and the end value is reached only in the last ones. (The
            script itself stops with an error for fewer than 9 epochs and for many other lengths; this does not.)

    Example:
        >>> [steps(1.0, 0.0, num_changes=2)(step, 4) for step in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.0]
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
        """Return the number at this step."""
        length = self._length(total)
        if self.variant == "paper":
            done = step * self.num_changes // length
        else:
            done = step // max(length // (self.num_changes + 1), 1) - 1
        fraction = min(max(done, 0), self.num_changes) / self.num_changes
        return (1.0 - fraction) * self.start + fraction * self.end


@dataclass(frozen=True, repr=False)
class exponential(_Timed, Schedule):  # noqa: N801
    """Exponential decay from start towards end: end + (start - end) * exp(-decay * step / total).

    Ring's code decays per step instead of over the run: ``exponential(1.0, 0.1, decay=0.1, steps=1)``, which is close
    to its end after some 50 steps.

    Args:
        start: Value at step 0.
        end: Value that is approached.
        decay: Rate, 0 or more; with the default, e^-5 (0.7 %) of the way is left after the last step.
        steps: Number of steps to which ``decay`` refers; the whole run by default.
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
        """Return the number at this step."""
        return self.end + (self.start - self.end) * math.exp(-self.decay * (step / self._length(total)))


@dataclass(frozen=True, repr=False)
class adaptive(Schedule):  # noqa: N801
    """Moves from start towards end while the metric improves, and back when it does not (Ring, appendix E).

    Call ``observe(metric)`` with a number that should grow: validation accuracy, or minus the training loss. ``hardneg
    train`` does so. The first metric only sets the reference. The paper prints "lowers the threshold if the performance
    increases, otherwise decreasing"; the second is read as raising. This is the only schedule with state, which is part
    of ``ContrastiveLoss.state_dict()``.

    Args:
        start: Initial value, and one limit.
        end: The other limit.
        rate: Change per observation, 0 or more.
        on: What ``hardneg train`` observes: ``"loss"``, the mean loss of each epoch; ``"step"``, the loss of each step;
            or ``"monitor"``, each evaluation of ``--monitor``.

    Example:
        >>> outer = adaptive(1.0, 0.1, rate=0.3)
        >>> outer.observe(0.50); outer.observe(0.55); round(outer(0), 6)
        0.7
    """

    start: float
    end: float
    rate: float = 0.01
    on: str = "loss"
    examples: ClassVar = ("adaptive(1.0, 0.1)", "adaptive(1.0, 0.1, on='monitor')")

    def __post_init__(self) -> None:
        check_range("adaptive", "rate", self.rate, 0.0, math.inf)
        if self.on not in ("loss", "step", "monitor"):
            raise argument_error("adaptive", "on='loss', 'step' or 'monitor'", "on", self.on)
        object.__setattr__(self, "_state", {"value": float(self.start), "last": None})

    def __call__(self, step: int, total: int | None = None) -> float:
        """Return the current value, which does not depend on the step."""
        return float(self._state["value"])

    def observe(self, metric: float) -> None:
        """Move the value by ``rate``: towards the end if the metric grew, otherwise back towards the start."""
        state: dict[str, Any] = self._state
        last, state["last"] = state["last"], float(metric)
        if last is None:
            return
        towards_end = math.copysign(self.rate, self.end - self.start)
        moved = state["value"] + (towards_end if metric > last else -towards_end)
        low, high = sorted((self.start, self.end))
        state["value"] = min(max(moved, low), high)

    def state_dict(self) -> dict[str, Any]:
        """Return the current value and the last metric."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from ``state_dict``."""
        self._state.update(state)

    _state: ClassVar[dict[str, Any]]
