"""An HTML page as the tests look at it."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """The words of the page by the id of the table or element they are in, and every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: dict[str, list[list[str]]] = {}
        self.words = ""
        self.open: list[str] = []
        self._table: str | None = None
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "input", "circle", "line", "path", "polyline"):
            self.open.append(tag)
        if tag == "table":
            self._table = dict(attrs).get("id")
        if self._table is not None and tag == "tr":
            self.cells.setdefault(self._table, []).append([])
        if self._table is not None and tag in ("td", "th"):
            self.cells[self._table][-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("circle", "line", "path", "polyline"):
            return
        assert self.open.pop() == tag, f"</{tag}> closes another element"
        self._cell = self._cell and tag not in ("td", "th")
        self._table = None if tag == "table" else self._table

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words += data
        if self._cell and self._table is not None:
            self.cells[self._table][-1][-1] += data

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.tags if name in (attributes.get("class") or "").split()]
