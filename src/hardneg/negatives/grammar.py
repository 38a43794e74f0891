"""The grammar: distributions, objectives, generators and schedules as text, for the CLI, configs and reports.

An expression is a product of calls with literal arguments, such as ``OtherLabel() * Tilt(linear(1.0, 0.0))``. It is
parsed as a Python expression and never executed. ``parse`` and ``to_text`` convert distributions; ``read_objective``
and ``read_generator`` accept text or objects; ``read_expression`` is the parser that all of them call.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from hardneg.core.errors import ArgumentError, GrammarError, UnknownName, argument_error
from hardneg.core.generators.base import Generator, registered_generators
from hardneg.core.objectives.base import Function, Objective, Row, registered_objectives
from hardneg.core.schedules import Number, Schedule, registered_schedules
from hardneg.core.text import printable
from hardneg.negatives.base import Negatives, registered_negatives

MAX_LENGTH, MAX_FACTORS, MAX_DEPTH = 10_000, 100, 20
"""Limits of an expression: characters, factors of a product, and levels of nesting."""

MAX_WHOLE = 2**63 - 1
"""Largest absolute value of an integer: it must fit into 64 bits."""


def parse(text: str) -> Negatives:
    """Parse a distribution from its text; ``parse(repr(q)) == q``.

    Args:
        text: A product of calls, such as "OtherLabel() * Tilt(1.0)".

    Raises:
        GrammarError: If the text is not a valid distribution; the message lists what would be.

    Example:
        >>> parse("OtherLabel() * Tilt(linear(1.0, 0.0))").at(5, 10)
        OtherLabel() * Tilt(0.5)
    """
    names: dict[str, Callable[..., Any]] = {**registered_negatives(), **registered_schedules()}
    result = read_expression(text, names)
    if not isinstance(result, Negatives):
        raise GrammarError("parse", "a distribution such as 'Tilt(1.0)'", f"text={_shown(text)}")
    return result


def read_number(value: Number | str, who: str) -> Number:
    """Return a number, or the schedule that a text describes.

    Args:
        value: A number, which is returned as it is, or text such as "linear(0.5, 0.1)".
        who: Caller, for errors.

    Raises:
        ArgumentError: If the text is not a schedule.

    Example:
        >>> read_number("linear(0.5, 0.1)", "train")(50, 100)
        0.3
    """
    if not isinstance(value, str):
        return value
    # Parsed as the argument of a call, the only place where the grammar allows schedules.
    found = read_expression(f"number({value})", {"number": lambda value: value, **registered_schedules()})
    if not isinstance(found, Schedule):
        raise ArgumentError(who, 'a number or a schedule such as "linear(0.5, 0.1)"', repr(value))
    return found


def to_text(negatives: Negatives) -> str:
    """Return the text of a distribution, which ``parse`` reads back.

    Raises:
        NotText: If the distribution is built from Python functions or tensors.
        TooLong: If the text exceeds the limits of the grammar.

    Example:
        >>> from hardneg.negatives import OtherLabel, Tilt
        >>> to_text(OtherLabel() * Tilt(1.0))
        'OtherLabel() * Tilt(1.0)'
    """
    text = repr(negatives)
    try:
        if parse(text) == negatives:
            return text
    except TooLong:
        raise
    except ValueError:
        pass
    raise NotText(text)


class TooLong(GrammarError):
    """An expression exceeds the limits of the grammar."""


class NotText(GrammarError):
    """A distribution has no text because it is built from Python objects."""

    def __init__(self, text: str) -> None:
        fix = "register it under a name (register_hardening, or its own class) to use it in configs and reports"
        super().__init__("to_text", "names and numbers only", text, fix)
        self.args = (text,)

    def _sentence(self) -> str:
        return f"{self.got} cannot be written as text: it is built from a Python object{self._then()}."


KnownNames = Mapping[str, Callable[..., Any]]


def read_expression(text: str, names: KnownNames) -> Any:
    """Parse a product of calls with literal arguments; arguments may be schedules.

    Args:
        text: The expression.
        names: The classes and functions that may be called, by name.

    Returns:
        The object that the calls construct.

    Raises:
        GrammarError: If the text is not such an expression.
        UnknownName: If a call uses a name that is not in ``names``.
    """
    if not isinstance(text, str):
        raise GrammarError("The grammar", f"text like {_usual(names)!r}", f"{type(text).__name__}: {_shown(text)}")
    if len(text) > MAX_LENGTH:
        raise TooLong("The grammar", f"at most {MAX_LENGTH:,} characters", f"{len(text):,}: {_shown(text)}")
    lines = text.strip()
    try:
        tree = ast.parse(f"({lines}\n)" if "\n" in lines else lines, mode="eval")
    except (SyntaxError, ValueError) as error:  # a ValueError for text with a null byte
        reason = (getattr(error, "msg", None) or str(error)) if text.strip() else "it is empty"
        what = f"an expression like {_usual(names)!r}"
        raise GrammarError("The grammar", what, f"{_shown(text)} ({reason})") from None
    except (RecursionError, MemoryError):
        raise _too_deep(text) from None
    _check_size(tree.body, text)
    return _evaluate(tree.body, text, names, inside=False)


def _check_size(tree: ast.expr, text: str) -> None:
    """Raise if an expression is too large, before anything recurses into it.

    A product nests to the left.
    """
    todo: list[tuple[ast.AST, int]] = [(tree, 0)]
    num_factors = 1
    while todo:
        node, depth = todo.pop()
        num_factors += isinstance(node, ast.BinOp)
        depth += not isinstance(node, (ast.BinOp, ast.keyword))
        if num_factors > MAX_FACTORS:
            raise TooLong("The grammar", f"at most {MAX_FACTORS} factors", f"more in {_shown(text)}")
        if depth > MAX_DEPTH:
            raise _too_deep(text)
        todo += [(child, depth) for child in ast.iter_child_nodes(node)]


def _too_deep(text: str) -> TooLong:
    return TooLong("The grammar", f"at most {MAX_DEPTH} levels of nesting", f"more in {_shown(text)}")


def _shown(text: object) -> str:
    return printable(repr(text), limit=200)


def _evaluate(node: ast.expr, text: str, names: KnownNames, *, inside: bool) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return _checked(value, text)
        case ast.Name(id="inf"):
            return math.inf
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) | ast.Name(id="inf") as operand):
            return -_evaluate(operand, text, names, inside=inside)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = (_evaluate(side, text, names, inside=inside) for side in (left, right))
            if isinstance(first, Negatives) and isinstance(second, Negatives):
                return first * second
            what = "distributions on both sides, such as 'OtherLabel() * Tilt(1.0)'"
            raise GrammarError("'*'", what, f"text={_shown(text)}")
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            if name not in names:
                raise _unknown(name, names, inside)
            values = [_evaluate(arg, text, names, inside=True) for arg in args]
            options = [(keyword.arg, _evaluate(keyword.value, text, names, inside=True)) for keyword in keywords]
            return _call(name, values, options, names)
        case ast.Name(id=name) if name in names:
            raise GrammarError(name, "brackets", _shown(text), f"write {_example(name, names)}")
        case ast.Name(id=name) if not inside:
            raise _unknown(name, names, inside)
        case _:
            usual = _usual(names)
            joined = ", joined by '*'" if "*" in usual else ""
            part = ast.unparse(node)
            got = _shown(part) if part == text.strip() else f"{_shown(part)} in {_shown(text)}"
            fix = f"write '{part}' if it is text" if isinstance(node, ast.Name) else None
            raise GrammarError("The grammar", f"calls with plain values{joined}, such as {usual!r}", got, fix)


def _checked(value: Any, text: str) -> Any:
    """Return a number if a float or a 64-bit integer can hold it; infinity is written inf."""
    if isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise TooLong("The grammar", "whole numbers of at most 18 digits", _shown(text))
    if isinstance(value, float) and math.isinf(value):
        raise GrammarError("The grammar", "numbers that a float can hold", _shown(text), "write inf")
    return value


def _unknown(name: str, names: KnownNames, inside: bool) -> UnknownName:
    """Build the error with the names that fit there: schedules inside brackets, the others outside."""
    fitting = sorted(each for each in names if _is_kind(names[each], Schedule) == inside)
    usage = {each: f"It takes {_taken(each, names)}" for each in fitting}
    return UnknownName(name, fitting or ["numbers and text"], "inside brackets" if inside else "", usage)


def _call(name: str, values: list[Any], options: list[tuple[str | None, Any]], names: KnownNames) -> Any:
    for value in [*values, *(value for _, value in options)]:
        if isinstance(value, Negatives):
            raise GrammarError(name, "numbers and names as arguments", _shown(value), "join with '*'")
        if isinstance(value, Schedule) and _is_kind(names[name], Schedule):
            raise GrammarError(name, "numbers as arguments", f"the schedule {_shown(value)}")
    _check_arguments(name, len(values), [str(option) for option, _ in options], names)
    try:
        return names[name](*values, **{str(option): value for option, value in options})
    except TypeError as error:
        raise GrammarError(name, "valid arguments", str(error), f"it takes {_taken(name, names)}") from None


def _check_arguments(name: str, num_values: int, options: list[str], names: KnownNames) -> None:
    """Raise for unknown, repeated or missing arguments, and list the valid ones."""
    signature = inspect.signature(names[name])
    if _open_ended(signature):
        return
    parameters, taken = signature.parameters, f"it takes {_taken(name, names)}"
    by_place = [each.name for each in parameters.values() if each.kind is not each.KEYWORD_ONLY]
    given = [*by_place[:num_values], *options]
    if unknown := [each for each in options if each not in parameters]:
        close = difflib.get_close_matches(unknown[0], parameters, n=1)
        hint = f"did you mean {close[0]}? It takes {_taken(name, names)}" if close else taken
        raise GrammarError(name, "known arguments", unknown[0], hint)
    if repeated := [each for each in options if given.count(each) > 1]:
        raise GrammarError(name, "each argument once", f"{repeated[0]} twice", taken)
    if num_values > len(by_place):
        raise GrammarError(name, f"at most {len(by_place)} arguments without a name", str(num_values), taken)
    if missing := [each.name for each in parameters.values() if each.default is each.empty and each.name not in given]:
        raise GrammarError(name, missing[0], "none", taken)


def _open_ended(signature: inspect.Signature) -> bool:
    return any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in signature.parameters.values())


def _taken(name: str, names: KnownNames) -> str:
    """List the arguments of a call with their defaults: ``beta, detach=False, as in Tilt(1.0)``."""
    signature, example = inspect.signature(names[name]), _example(name, names)
    if _open_ended(signature):
        return f"the options of {example}"
    parameters = [
        each.name if each.default is each.empty else f"{each.name}={each.default!r}"
        for each in signature.parameters.values()
    ]
    return f"{', '.join(parameters) or 'no arguments'}, as in {example}"


def _usual(names: KnownNames) -> str:
    """Return an example expression of the kind that these names are for."""
    if any(_is_kind(each, Negatives) for each in names.values()):
        return "OtherLabel() * Tilt(1.0)"
    return _example(next(iter(names)), names)


def _example(name: str, names: KnownNames) -> str:
    examples = getattr(names[name], "examples", ())
    return examples[0] if examples else f"{name}()"


def _is_kind(named: Callable[..., Any], kind: type) -> bool:
    return isinstance(named, type) and issubclass(named, kind)


AnyObjective = str | Objective | Callable[[Tensor, Row], Tensor]
AnyGenerator = str | Generator

_defaults = {"tau_plus": 0.0, "num_negatives": "support", "positives_in_denominator": "own"}


def read_objective(objective: AnyObjective, who: str = "ContrastiveLoss", **options: Any) -> Objective:
    """Read an objective, and set those options of info_nce on it that differ from their defaults.

    Args:
        objective: A name ("jsd"), text ("rince(q=0.1)"), an Objective, or a function of (positives, row).
        who: Name of the caller, for error messages.
        **options: ``tau_plus``, ``num_negatives`` and ``positives_in_denominator``.

    Raises:
        ArgumentError: If the objective does not have an option that was given, or has it with another value.

    Example:
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
    changed = {name: value for name, value in options.items() if isinstance(value, Tensor) or value != _defaults[name]}
    known: set[str] = {field.name for field in fields(made)} if is_dataclass(made) else set()
    for name, value in changed.items():
        if name not in known:
            raise argument_error(who, f"an objective with {name} for {name}={value!r}", "objective", made)
        written = getattr(made, name)
        if written is not value and (isinstance(written, Tensor) or written not in (_defaults[name], value)):
            what = f"{name} either inside the objective or as an argument of the loss, not both"
            raise ArgumentError(who, what, f"objective={made!r} and {name}={value!r}")
    return replace(made, **changed) if changed else made  # type: ignore[type-var]


def read_generator(generator: AnyGenerator) -> Generator:
    """Read a generator of additional candidates from its name, its text or an object.

    Raises:
        ArgumentError: If it is not a generator.

    Example:
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
