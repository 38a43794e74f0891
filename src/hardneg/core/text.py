"""Text for terminals and messages: escaped user data, counts with nouns, the first paragraph of a docstring."""

from __future__ import annotations

import html
import inspect
import unicodedata
from collections.abc import Iterable, Sequence

_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories that are escaped: control characters, invisible format characters (such as those that reverse the
direction of writing), lone surrogates, private use, line and paragraph separators."""


def printable(text: object, limit: int | None = None) -> str:
    r"""Return the text with escapes for all characters that a terminal could act on.

    Names of files, classes and arms are data: an escape sequence in a name must not clear the screen or imitate our
    output.

    Args:
        text: Anything; converted by str().
        limit: Cut the text after this many characters and add "...".

    Example:
        >>> printable("cat\x1b[2J\ndog")
        'cat\\x1b[2J\\ndog'
    """
    words = str(text)
    cut = limit is not None and len(words) > limit
    safe = "".join(_escaped(letter) for letter in words[:limit])
    return f"{safe}..." if cut else safe


def printable_lines(text: object) -> str:
    """Escape each line as ``printable`` does but keep line breaks, for our own text that contains names from users."""
    return "\n".join(printable(line) for line in str(text).split("\n"))


def _escaped(letter: str) -> str:
    if unicodedata.category(letter) not in _UNSAFE:
        return letter
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun in the right form.

    Args:
        number: The number.
        one: Singular form.
        many: Plural form, if it is not the singular with an s.

    Example:
        >>> counted(1, "query", "queries"), counted(1200, "row")
        ('1 query', '1,200 rows')
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], notes: Iterable[str] = ()) -> str:
    """Return a table for notebooks (``_repr_html_``); every text is escaped, and the first column is a heading.

    Args:
        title: Caption of the table.
        columns: Heads of the columns.
        rows: Cells of each row, as many as columns.
        notes: Sentences below the table.

    Example:
        >>> html_table("A <b>", ["x"], [["1 < 2"]])
        '<table><caption>A &lt;b&gt;</caption><tr><th>x</th></tr><tr><th>1 &lt; 2</th></tr></table>'
    """

    def cell(value: object, tag: str) -> str:
        return f"<{tag}>{html.escape(printable(value))}</{tag}>"

    lines = ["".join(cell(name, "th") for name in columns)]
    lines += [cell(row[0], "th") + "".join(cell(each, "td") for each in row[1:]) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{cell(title, 'caption')}{body}</table>" + "".join(cell(note, "p") for note in notes)


def summary(cls: type) -> str:
    """Return the first paragraph of a class's docstring on one line."""
    return (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ").replace("``", "")
