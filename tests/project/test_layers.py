"""Heavy extras stay inside the functions that need them, and no module needs itself; lint-imports checks the layers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "hardneg"

EXTRAS = {
    "accelerate", "faiss", "kornia", "lightning", "matplotlib", "numba", "psutil", "pytorch_lightning",
    "sentence_transformers", "sklearn", "torch_geometric", "torchvision", "transformers",
}  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One imported module, and whether importing the file imports it."""

    target: str
    at_import: bool
    line: int


def imports_of(source: str) -> list[Import]:
    return list(_imports(ast.parse(source).body, at_import=True))


def _imports(nodes: list[ast.stmt], at_import: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, at_import, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"line {node.lineno}: write imports from the root, from hardneg.core.types import ..."
            )
            for alias in node.names:
                within = node.module == "hardneg" or (ROOT.parent / str(node.module).replace(".", "/")).is_dir()
                yield Import(f"{node.module}.{alias.name}" if within else str(node.module), at_import, node.lineno)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _imports(node.body, at_import=False)
        else:
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from _imports(getattr(node, field, []), at_import and not (typing_only and field == "body"))


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    """``hardneg.negatives.tilt``; a folder's __init__ is the folder."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def problems_of_extras(name: str, found: list[Import]) -> list[str]:
    problems = []
    for each in found:
        package = each.target.partition(".")[0]
        if package in EXTRAS and each.at_import:
            problems.append(f"{name}:{each.line} imports {package} at module level; import it where it is needed")
        if package == "triton" and not name.startswith("hardneg.kernels"):
            problems.append(f"{name}:{each.line} imports triton, which only kernels may do")
    return problems


def test_extras_are_imported_where_they_are_needed() -> None:
    problems: list[str] = []
    for path in files():
        problems += problems_of_extras(name_of(path), imports_of(path.read_text()))
    assert problems == []


def test_no_module_needs_itself() -> None:
    known = {name_of(path) for path in files()}
    needs = {
        name_of(path): {
            target
            for each in imports_of(path.read_text())
            if each.at_import
            for target in (each.target, each.target.rpartition(".")[0])
            if target in known and target != "hardneg"
        }
        for path in files()
    }
    # Importing hardneg.negatives.tilt runs the folder's __init__ first; files of a folder do not depend on it for that.
    for name, targets in needs.items():
        targets.discard(name.rpartition(".")[0])
        needs[name] = {target for target in targets if not any(other.startswith(f"{target}.") for other in targets)}
    assert cycle_in(needs) is None


def cycle_in(needs: dict[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def test_heavy_import_is_caught() -> None:
    early = imports_of("import os\nif os.name:\n    import faiss.contrib\n")
    assert problems_of_extras("hardneg.batching.graph", early) == [
        "hardneg.batching.graph:3 imports faiss at module level; import it where it is needed"
    ]
    late = imports_of("class A:\n    def f(self):\n        import faiss\n        import triton\n")
    assert problems_of_extras("hardneg.batching.graph", late) == [
        "hardneg.batching.graph:4 imports triton, which only kernels may do"
    ]
    assert problems_of_extras("hardneg.kernels.lse", imports_of("import triton")) == []
    assert (
        problems_of_extras(
            "hardneg.batching.graph",
            imports_of("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import faiss\n"),
        )
        == []
    )


def test_cycle_is_caught() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert set(cycle_in({"a": {"b"}, "b": {"a"}}) or []) == {"a", "b"}
