"""What the manifest beside a mined file says, also one of another version or a damaged one."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from hardneg.mining.options import MineOptions
from hardneg.mining.problem import Columns


def read_manifest(path: str) -> dict[str, Any]:
    """The manifest that `hardneg mine` wrote beside its output, or nothing."""
    file = Path(f"{path.rstrip('/')}.manifest.json")
    if not file.exists():
        return {}
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"audit needs a manifest in JSON, got {file}: {error}.") from None
    return manifest if isinstance(manifest, dict) else {}


def similarity_of(told: dict[str, Any]) -> str:
    """That of the manifest; a cosine where it says none."""
    return "dot" if told.get("similarity") == "dot" else "cosine"


def whole_number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def mine_options(told: dict[str, Any]) -> tuple[MineOptions, tuple[str, ...]]:
    """The options of a manifest, also one of another version: what it lacks is as usual, what is new is named."""
    columns = told.get("columns")
    columns = columns if isinstance(columns, dict) else {}
    known = {"options": {one.name for one in fields(MineOptions)}, "columns": {one.name for one in fields(Columns)}}
    needed = [one.name for one in fields(MineOptions) if one.default is MISSING and one.default_factory is MISSING]
    missing = [name for name in needed if not isinstance(told.get(name), str)]
    if missing:
        raise ValueError(f"audit needs a manifest that names {' and '.join(missing)}, got one that does not.")
    foreign = sorted({*(set(told) - known["options"]), *(set(columns) - known["columns"])})
    notes = (f"The manifest has options that this version does not know: {', '.join(foreign)}.",) if foreign else ()
    read = Columns(**{name: value for name, value in columns.items() if name in known["columns"]})
    plain = {name: value for name, value in told.items() if name in known["options"]}
    return MineOptions(**{**plain, "columns": read}), notes
