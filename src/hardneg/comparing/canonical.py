"""When two ways to write options are the same training: expressions count as they are read, 1 is 1.0."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from hardneg.batching.spec import parse_batches
from hardneg.negatives import parse
from hardneg.training.checks import number_of
from hardneg.training.optimisers import read_optimiser, read_rate

SCHEDULED = ("temperature", "tau_plus")
"""Options that may be schedules, as text; others stand inside of negatives."""
_readers = {"negatives": parse, "batches": parse_batches, "optimizer": read_optimiser, "schedule": read_rate}
EXPRESSIONS = tuple(_readers)
"""The options that can be written in several ways."""


def plainly(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options in the one way in which all that train alike are written.

    >>> plainly({"negatives": "Tilt(beta=1)", "temperature": 1})
    {'negatives': 'Tilt(1.0)', 'temperature': 1.0}
    """
    return {name: _plain(name, value) for name, value in options.items()}


def _plain(name: str, value: Any) -> Any:
    if name in SCHEDULED and isinstance(value, str):
        return _with_floats(number_of(value))
    if name not in _readers:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    return _with_floats(_readers[name](value))


def _with_floats(read: object) -> str:
    return ast.unparse(_Floats().visit(ast.parse(repr(read), mode="eval")))


class _Floats(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        whole = isinstance(node.value, int) and not isinstance(node.value, bool)
        return ast.Constant(float(node.value)) if whole else node  # type: ignore[arg-type]
