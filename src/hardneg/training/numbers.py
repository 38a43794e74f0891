"""Options that are numbers or schedules."""

from __future__ import annotations

from dataclasses import fields

from hardneg.core.errors import ArgumentError
from hardneg.core.schedules import LONG, Number, Schedule, registered_schedules, value_of
from hardneg.negatives.grammar import read_expression
from hardneg.training.options import Scheduled, TrainOptions, check_bounds


def number_of(value: Scheduled) -> Number:
    """The number, or the schedule that a text describes.

    >>> number_of("linear(0.5, 0.1)")(50, 100)
    0.3
    """
    if not isinstance(value, str):
        return value
    # As an argument, which is where the grammar has schedules.
    found = read_expression(f"number({value})", {"number": lambda value: value, **registered_schedules()})
    if not isinstance(found, Schedule):
        raise ArgumentError("train", 'a number or a schedule such as "linear(0.5, 0.1)"', repr(value))
    return found


def check_schedules(options: TrainOptions) -> None:
    """Raises for schedules of the temperature and tau_plus that cannot be read, or begin or end out of bounds."""
    rules = {one.name: one.metadata for one in fields(options)}
    for name in ("temperature", "tau_plus"):
        number = number_of(getattr(options, name))
        if isinstance(number, Schedule):
            for step, when in ((0, "begins"), (LONG, "ends")):
                value = value_of(number, step, LONG)
                got = f"{name}={number!r}, which {when} at {value:g}"
                check_bounds("train", name, value, rules[name], got)
