"""Objectives and generators as they are written: a name, a text of the grammar, an object or a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error
from hardneg.core.generators import Generator, registered_generators
from hardneg.core.objectives import Function, Objective, Row, registered_objectives
from hardneg.core.schedules import registered_schedules
from hardneg.negatives.grammar import read_expression

AnyObjective = str | Objective | Callable[[Tensor, Row], Tensor]
AnyGenerator = str | Generator

_usual = {"tau_plus": 0.0, "num_negatives": "support", "positives_in_denominator": "own"}


def read_objective(objective: AnyObjective, who: str = "ContrastiveLoss", **options: Any) -> Objective:
    """The objective that is meant, with those of info_nce's options that it has and that are not the usual ones.

    >>> read_objective("rince(q=0.1)")
    rince(q=0.1)
    >>> read_objective("jsd", tau_plus=0.1)
    jsd(tau_plus=0.1)
    """
    made: Any = objective
    if isinstance(objective, str):
        made = read_expression(_called(objective), {**registered_objectives(), **registered_schedules()})
    elif not isinstance(objective, Objective) and callable(objective):
        made = Function(objective)
    if not isinstance(made, Objective):
        raise argument_error(who, "an objective such as 'info_nce'", "objective", objective)
    changed = {name: value for name, value in options.items() if isinstance(value, Tensor) or value != _usual[name]}
    known: set[str] = {field.name for field in fields(made)} if is_dataclass(made) else set()
    for name, value in changed.items():
        if name not in known:
            raise argument_error(who, f"an objective with {name} for {name}={value!r}", "objective", made)
        written = getattr(made, name)
        if written is not value and (isinstance(written, Tensor) or written not in (_usual[name], value)):
            what = f"{name} either inside the objective or beside it"
            raise ArgumentError(who, what, f"objective={made!r} and {name}={value!r}")
    return replace(made, **changed) if changed else made  # type: ignore[type-var]


def read_generator(generator: AnyGenerator) -> Generator:
    """
    >>> read_generator("mochi(num_hardest=64)")
    mochi(num_hardest=64)
    """
    made: Any = generator
    if isinstance(generator, str):
        made = read_expression(_called(generator), registered_generators())
    if not isinstance(made, Generator):
        raise ArgumentError("ContrastiveLoss", "a candidate generator such as 'mochi()'", f"generate={generator!r}")
    return made


def _called(text: str) -> str:
    return f"{text}()" if text.strip().isidentifier() else text
