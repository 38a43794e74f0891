"""The grammar: distributions and schedules as text, the same in the CLI, in configs and in reports.

An expression is a product of calls with literal arguments: ``OtherLabel() * Tilt(linear(1.0, 0.0))``. It is read as a
Python expression and never executed.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

from hardneg.negatives.base import Negatives, registered_negatives
from hardneg.schedules import Schedule, registered_schedules


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


def read_expression(text: str, names: Mapping[str, Callable[..., Any]]) -> Any:
    """Reads a product of calls of these names with literal arguments."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not an expression like 'OtherLabel() * Tilt(1.0)': {error.msg}.") from None
    return _evaluate(tree.body, text, names)


def _evaluate(node: ast.expr, text: str, names: Mapping[str, Callable[..., Any]]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id="inf"):
            return math.inf
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) | ast.Name(id="inf") as operand):
            return -_evaluate(operand, text, names)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _multiply(_evaluate(left, text, names), _evaluate(right, text, names), text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            values = [_evaluate(arg, text, names) for arg in args]
            options = {str(keyword.arg): _evaluate(keyword.value, text, names) for keyword in keywords}
            if len(options) < len(keywords):
                repeated = [keyword.arg for keyword in keywords]
                raise ValueError(f"{name} needs each argument once, got {', '.join(map(str, repeated))} in {text!r}.")
            return _call(name, values, options, names)
        case ast.Name(id=name) if name in names:
            raise ValueError(f"{name} needs brackets in {text!r}: write {_example(name, names)}.")
        case _:
            raise ValueError(
                f"{ast.unparse(node)!r} in {text!r} is not part of the grammar: "
                "use calls with plain values, joined by '*', such as 'OtherLabel() * Tilt(1.0)'."
            )


def _multiply(left: Any, right: Any, text: str) -> Any:
    if isinstance(left, Negatives) and isinstance(right, Negatives):
        return left * right
    raise ValueError(f"'*' joins distributions, such as 'OtherLabel() * Tilt(1.0)', got text={text!r}.")


def _call(name: str, values: list[Any], options: dict[str, Any], names: Mapping[str, Callable[..., Any]]) -> Any:
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(f"{name!r} is not known.{hint} Known: {', '.join(sorted(names))}.")
    for value in [*values, *options.values()]:
        if isinstance(value, Negatives):
            raise ValueError(f"{name} needs numbers and names as arguments, got {value!r}; join with '*'.")
        target = names[name]
        if isinstance(value, Schedule) and isinstance(target, type) and issubclass(target, Schedule):
            raise ValueError(f"{name} needs numbers as arguments, got the schedule {value!r}.")
    try:
        return names[name](*values, **options)
    except TypeError as error:
        reason = str(error).replace(f"{name}.__init__() ", "")
        raise ValueError(f"{name}: {reason}; write it like {_example(name, names)}.") from None


def _example(name: str, names: Mapping[str, Callable[..., Any]]) -> str:
    examples = getattr(names[name], "examples", ())
    return examples[0] if examples else f"{name}()"
