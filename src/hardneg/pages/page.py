"""The shell of every page: one self-contained HTML file, light and dark, desktop and phone, nothing fetched."""

from __future__ import annotations

from html import escape

from hardneg.pages.style import STYLE

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(title: str, body: str) -> str:
    """The whole page as text; the title is plain text, the body HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def card(name: str, told: str, chart: str, plain: bool = True) -> str:
    head = escape(name) if plain else name
    return f'<figure class="card"><h3>{head}</h3>{chart}<figcaption>{escape(told)}</figcaption></figure>'


def said_instead(title: str, sentence: str) -> str:
    return f'<section><h2 class="h">{escape(title)}</h2><p>{escape(sentence)}</p></section>'
