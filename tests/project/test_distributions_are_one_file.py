"""A distribution is one file: no module outside negatives/ knows one by its class."""

from __future__ import annotations

import ast
from pathlib import Path

import hardneg as hn
from hardneg.negatives import Negatives

ROOT = Path(str(hn.__file__)).parent
NAMES = {name for name, cls in vars(hn.negatives).items() if isinstance(cls, type) and issubclass(cls, Negatives)}


def class_tests(source: str) -> list[str]:
    """Calls of isinstance and issubclass with a distribution, comparisons of type(...) and tables by class."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            tested = node.args[1]
        elif isinstance(node, ast.Dict):
            tested = ast.Tuple([key for key in node.keys if isinstance(key, ast.Name)])
        elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node):
            tested = node
        else:
            continue
        named = {one.id for one in ast.walk(tested) if isinstance(one, ast.Name)}
        if named & (NAMES - {"Negatives"}):
            found.append(ast.unparse(node))
    return found


def test_no_module_outside_negatives_tests_for_a_distribution() -> None:
    others = [path for path in ROOT.rglob("*.py") if "negatives" not in path.relative_to(ROOT).parts[:-1]]
    assert len(others) > 100
    found = {str(path.relative_to(ROOT)): tests for path in others if (tests := class_tests(path.read_text()))}
    assert found == {}


def test_such_tests_are_caught() -> None:
    assert class_tests("isinstance(factor, (Tilt, Ring))")
    assert class_tests("type(factor) is Rank")
    assert class_tests("by = {OtherLabel: 'labels'}")
    assert not class_tests("isinstance(factor, Negatives)")
