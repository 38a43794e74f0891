"""The grammar: distributions and schedules as text, the same in the CLI, in configs and in reports.

An expression is a product of calls with literal arguments: ``OtherLabel() * Tilt(linear(1.0, 0.0))``. It is read as a
Python expression and never executed.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from hardneg.core.schedules import Schedule, registered_schedules
from hardneg.negatives.base import Negatives, registered_negatives


def parse(text: str) -> Negatives:
    """The distribution that this text describes; ``parse(repr(q)) == q``.

    >>> parse("OtherLabel() * Tilt(linear(1.0, 0.0))").at(5, 10)
    OtherLabel() * Tilt(0.5)
    """
    names: dict[str, Callable[..., Any]] = {**registered_negatives(), **registered_schedules()}
    result = read_expression(text, names)
    if not isinstance(result, Negatives):
        raise ValueError(f"parse needs a distribution such as 'Tilt(1.0)', got text={text!r}.")
    return result


def to_text(negatives: Negatives) -> str:
    """The text that ``parse`` reads back; raises for what is built from raw callables or tensors."""
    text = repr(negatives)
    try:
        if parse(text) == negatives:
            return text
    except ValueError:
        pass
    raise ValueError(
        f"{text} cannot be written as text: it is built from a Python object. Register it under a name "
        "(register_hardening, or a class of its own) to use it in configs and reports."
    )


Names = Mapping[str, Callable[..., Any]]


def read_expression(text: str, names: Names) -> Any:
    """Reads a product of calls of these names with literal arguments; the schedules among them stand in arguments."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        reason = error.msg if text.strip() else "it is empty"
        raise ValueError(f"{text!r} is not an expression like {_usual(names)!r}: {reason}.") from None
    return _evaluate(tree.body, text, names, inside=False)


def _evaluate(node: ast.expr, text: str, names: Names, *, inside: bool) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id="inf"):
            return math.inf
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) | ast.Name(id="inf") as operand):
            return -_evaluate(operand, text, names, inside=inside)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = (_evaluate(side, text, names, inside=inside) for side in (left, right))
            return _multiply(first, second, text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            _check_known(name, names, inside)
            values = [_evaluate(arg, text, names, inside=True) for arg in args]
            options = {str(keyword.arg): _evaluate(keyword.value, text, names, inside=True) for keyword in keywords}
            if len(options) < len(keywords):
                repeated = [keyword.arg for keyword in keywords]
                raise ValueError(f"{name} needs each argument once, got {', '.join(map(str, repeated))} in {text!r}.")
            return _call(name, values, options, names)
        case ast.Name(id=name) if name in names:
            raise ValueError(f"{name} needs brackets in {text!r}: write {_example(name, names)}.")
        case _:
            usual = _usual(names)
            joined = ", joined by '*'" if "*" in usual else ""
            raise ValueError(
                f"{ast.unparse(node)!r} in {text!r} is not part of the grammar: "
                f"use calls with plain values{joined}, such as {usual!r}."
            )


def _multiply(left: Any, right: Any, text: str) -> Any:
    if isinstance(left, Negatives) and isinstance(right, Negatives):
        return left * right
    raise ValueError(f"'*' joins distributions, such as 'OtherLabel() * Tilt(1.0)', got text={text!r}.")


def _check_known(name: str, names: Names, inside: bool) -> None:
    """Raises for an unknown name, with those that fit there: schedules inside of brackets, the others outside."""
    if name in names:
        return
    fitting = sorted(each for each in names if _is_kind(names[each], Schedule) == inside)
    close = difflib.get_close_matches(name, fitting, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    known = f"Known{' inside of brackets' * inside}: {', '.join(fitting) or 'numbers and text'}"
    raise ValueError(f"{name!r} is not known.{hint} {known}.")


def _call(name: str, values: list[Any], options: dict[str, Any], names: Names) -> Any:
    for value in [*values, *options.values()]:
        if isinstance(value, Negatives):
            raise ValueError(f"{name} needs numbers and names as arguments, got {value!r}; join with '*'.")
        if isinstance(value, Schedule) and _is_kind(names[name], Schedule):
            raise ValueError(f"{name} needs numbers as arguments, got the schedule {value!r}.")
    try:
        _check_arguments(name, values, options, names)
        return names[name](*values, **options)
    except TypeError as error:
        reason = str(error).replace(f"{name}.__init__() ", "")
        raise ValueError(f"{name}: {reason}; {_taken(name, names)}.") from None


def _check_arguments(name: str, values: list[Any], options: dict[str, Any], names: Names) -> None:
    """Raises a TypeError as a call would; of a wrong name it tells before it tells of the one that is then missing."""
    signature = inspect.signature(names[name])
    if not _open_ended(signature) and (unknown := [each for each in options if each not in signature.parameters]):
        raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
    signature.bind(*values, **options)


def _open_ended(signature: inspect.Signature) -> bool:
    return any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in signature.parameters.values())


def _taken(name: str, names: Names) -> str:
    """What a call takes, with the usual values: ``it takes beta, detach=False, as in Tilt(1.0)``."""
    signature, example = inspect.signature(names[name]), _example(name, names)
    if _open_ended(signature):
        return f"write it like {example}"
    parameters = [
        each.name if each.default is each.empty else f"{each.name}={each.default!r}"
        for each in signature.parameters.values()
    ]
    return f"it takes {', '.join(parameters) or 'no arguments'}, as in {example}"


def _usual(names: Names) -> str:
    """An expression of the kind that these names are for."""
    if any(_is_kind(each, Negatives) for each in names.values()):
        return "OtherLabel() * Tilt(1.0)"
    return _example(next(iter(names)), names)


def _example(name: str, names: Names) -> str:
    examples = getattr(names[name], "examples", ())
    return examples[0] if examples else f"{name}()"


def _is_kind(named: Callable[..., Any], kind: type) -> bool:
    return isinstance(named, type) and issubclass(named, kind)
