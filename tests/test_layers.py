"""Dependencies point one way, and heavy extras stay inside the functions that need them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "hardneg"

# Lowest first. A module may use those of its own layer and of the layers above it in this table. A new module needs a
# place here; folders count as one module.
LAYERS: list[set[str]] = [
    {"notices", "options", "philox"},
    {"types"},
    {"schedules"},
    {"scoring", "negatives", "objectives"},
    {"pools", "chain", "partition", "graph", "kernels", "distributed"}
    | {"stateful", "cache", "clustering", "momentum", "neighbours", "walk_lanes", "walk_loop", "walks"},
    {"losses", "planners", "sampler", "auditing", "batches", "dry_run", "global_losses", "nce", "refresh"},
    {"papers", "testing"},
    {"mining", "audits", "evaluate", "report", "data"}
    | {
        "arms",
        "array_files",
        "augment",
        "boards",
        "comparisons",
        "encoders",
        "image_files",
        "launches",
        "method",
        "pairs",
        "pixels",
        "readers",
        "runs",
        "same_training",
        "training",
        "training_setup",
        "views",
    },
    {"recipes", "integrations", "__main__", "cli", "cli_audit", "cli_mine", "explain"}
    | {"cli_compare", "cli_errors", "cli_train"},
]
LAYER_OF = {module: number for number, layer in enumerate(LAYERS) for module in layer}

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
            assert node.level == 0, f"line {node.lineno}: write imports from the root, from hardneg.types import ..."
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


def module_of(name: str) -> str:
    """The file or folder right below hardneg that a dotted name belongs to; '' for hardneg itself."""
    return f"{name}.".split(".")[1]


def problems_of_direction(name: str, found: list[Import]) -> list[str]:
    own = module_of(name)
    problems = []
    for each in found:
        if each.target.partition(".")[0] != "hardneg":
            continue
        used = module_of(each.target)
        if used == "__version__":
            continue
        if used not in LAYER_OF:
            problems.append(f"{name}:{each.line} uses {each.target}, which has no layer; import from its own module")
        elif LAYER_OF[used] > LAYER_OF[own]:
            problems.append(f"{name}:{each.line} uses {used}, which stands above {own}")
    return problems


def problems_of_extras(name: str, found: list[Import]) -> list[str]:
    problems = []
    for each in found:
        package = each.target.partition(".")[0]
        if package in EXTRAS and each.at_import:
            problems.append(f"{name}:{each.line} imports {package} at module level; import it where it is needed")
        if package == "triton" and module_of(name) != "kernels":
            problems.append(f"{name}:{each.line} imports triton, which only kernels may do")
    return problems


def is_facade(path: Path) -> bool:
    return path == ROOT / "__init__.py"


def test_every_module_has_a_layer() -> None:
    modules = {module_of(name_of(path)) for path in files() if not is_facade(path)}
    assert modules - set(LAYER_OF) == set(), "give them a place in LAYERS"


def test_dependencies_point_one_way() -> None:
    problems: list[str] = []
    for path in files():
        if not is_facade(path) and module_of(name_of(path)) in LAYER_OF:
            problems += problems_of_direction(name_of(path), imports_of(path.read_text()))
    assert problems == []


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


@pytest.mark.parametrize("path", [ROOT / "__init__.py", ROOT / "cli.py"], ids=name_of)
def test_the_door_is_light(path: Path) -> None:
    """hardneg --help must not wait for torch, so the door imports only what is as light as itself."""
    light = ["options", "cli_audit", "cli_compare", "cli_errors", "cli_mine", "cli_train", "notices"]
    for door in (path, *(ROOT / f"{name}.py" for name in light)):
        at_import = {each.target for each in imports_of(door.read_text()) if each.at_import}
        at_import -= {f"hardneg.{name}" for name in light}
        assert {target.partition(".")[0] for target in at_import} <= set(sys.stdlib_module_names) | {"typer"}


def test_wrong_direction_is_caught() -> None:
    upwards = imports_of("from hardneg.losses import ContrastiveLoss\n")
    assert problems_of_direction("hardneg.negatives.tilt", upwards) == [
        "hardneg.negatives.tilt:1 uses losses, which stands above negatives"
    ]
    hidden = imports_of("def f():\n    from hardneg import papers\n")
    assert problems_of_direction("hardneg.objectives", hidden) == [
        "hardneg.objectives:2 uses papers, which stands above objectives"
    ]
    facade = imports_of("from hardneg import two_views\n")
    assert "has no layer" in problems_of_direction("hardneg.papers", facade)[0]
    assert problems_of_direction("hardneg.papers", upwards) == []


def test_heavy_import_is_caught() -> None:
    early = imports_of("import os\nif os.name:\n    import faiss.contrib\n")
    assert problems_of_extras("hardneg.graph", early) == [
        "hardneg.graph:3 imports faiss at module level; import it where it is needed"
    ]
    late = imports_of("class A:\n    def f(self):\n        import faiss\n        import triton\n")
    assert problems_of_extras("hardneg.graph", late) == ["hardneg.graph:4 imports triton, which only kernels may do"]
    assert problems_of_extras("hardneg.kernels.lse", imports_of("import triton")) == []
    assert (
        problems_of_extras(
            "hardneg.graph", imports_of("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import faiss\n")
        )
        == []
    )


def test_cycle_is_caught() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert set(cycle_in({"a": {"b"}, "b": {"a"}}) or []) == {"a", "b"}
