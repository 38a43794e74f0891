"""Text of others, made safe to print; numbers with their nouns; the first paragraph of a docstring."""

from __future__ import annotations

import inspect
import unicodedata

_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Control characters, invisible format characters (such as those that turn the direction of writing), lone surrogates,
private use, line and paragraph separators."""


def printable(text: object, limit: int | None = None) -> str:
    r"""The text with an escape for every character that a terminal could act on; cut to ``limit`` characters.

    Names of files, classes and arms are data: one with an escape sequence must not clear the screen or write a line
    that looks like ours.

    >>> printable("cat\x1b[2J\ndog")
    'cat\\x1b[2J\\ndog'
    """
    words = str(text)
    cut = limit is not None and len(words) > limit
    safe = "".join(_escaped(letter) for letter in words[:limit])
    return f"{safe}..." if cut else safe


def printable_lines(text: object) -> str:
    """As ``printable``, but line breaks stay: for text of several lines that is our own but for the names in it."""
    return "\n".join(printable(line) for line in str(text).split("\n"))


def _escaped(letter: str) -> str:
    if unicodedata.category(letter) not in _UNSAFE:
        return letter
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number and its noun; ``many`` where an s is not enough.

    >>> counted(1, "query", "queries"), counted(1200, "row")
    ('1 query', '1,200 rows')
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def summary(cls: type) -> str:
    """The first paragraph of a docstring on one line."""
    return (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ").replace("``", "")
