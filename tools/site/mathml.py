"""Typesets ```math blocks of the docs as MathML, which browsers draw without scripts; GitHub draws the same blocks."""

from __future__ import annotations

from typing import Any

from latex2mathml.converter import convert


def fence(source: str, language: str, css_class: str, options: dict[str, Any], md: object, **rest: Any) -> str:
    """Convert a block of LaTeX; the arguments are those of a custom fence of pymdownx.superfences."""
    return f'<div class="{css_class}">{convert(source, display="block")}</div>'
