"""An extension of griffe, which reads the docstrings for the API pages: examples as code, and links to the source.

Google style calls a section with one example ``Example:``. griffe knows ``Examples:`` only, and would show ours as a
quoted note.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]


class Examples(griffe.Extension):
    """Changes docstrings before they are parsed."""

    def __init__(self) -> None:
        super().__init__()
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        self.repository: str = project["urls"]["Repository"]

    def on_object(self, *, obj: griffe.Object, **more: Any) -> None:
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        if obj.parent is not None and obj.parent.is_module and (obj.is_class or obj.is_function):
            summary, _, rest = text.partition("\n\n")
            text = f"{summary} [[source]]({self.link(obj)})\n\n{rest}"
        obj.docstring.value = text

    def link(self, obj: griffe.Object) -> str:
        path = Path(str(obj.filepath)).resolve().relative_to(ROOT).as_posix()
        return f"{self.repository}/blob/main/{path}#L{obj.lineno}"
