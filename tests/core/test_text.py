"""What others wrote is printed without its control characters."""

import io
import re
import sys
import unicodedata
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

import hardneg
from hardneg.core.text import printable, printable_lines
from hardneg.io.terminal import Terminal


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain: Größe 東京 😀", "plain: Größe 東京 😀"),
        ("\x1b[2J\x1b]0;owned\x07", r"\x1b[2J\x1b]0;owned\x07"),
        ("a\rb\nc\td", r"a\rb\nc\td"),
        ("txt.exe\u202egnp", r"txt.exe\u202egnp"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("\x9b31m", r"\x9b31m"),
        ("\udcff", r"\udcff"),
        ("line\u2028break", r"line\u2028break"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_no_character_that_a_terminal_acts_on_is_left() -> None:
    every = printable("".join(map(chr, range(sys.maxunicode + 1))))
    assert not {unicodedata.category(letter) for letter in set(every)} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_long_names_are_cut() -> None:
    assert printable("x" * 50, limit=10) == "x" * 10 + "..."
    assert printable("x" * 10, limit=10) == "x" * 10


def test_lines_stay_lines() -> None:
    assert printable_lines("a\nb\x1b") == "a\nb\\x1b"


def test_a_terminal_escapes_what_it_is_given_and_keeps_its_own_colours() -> None:
    shown = io.StringIO()
    terminal = Terminal(file=shown, force_terminal=True, color_system="standard", width=80, legacy_windows=False)
    table = Table("id")
    table.add_row(Text("\x1b]0;owned\x07\u202ex", style="bold red"))
    terminal.print(table, "\x9b2J")
    found = shown.getvalue()
    assert r"\x1b]0;ow" in found
    assert "\x1b[1;31m" in found
    assert not {"\x1b]", "\x07", "\x9b", "\u202e"} & {found[i : i + n] for i in range(len(found)) for n in (1, 2)}


def test_everything_is_printed_by_the_terminal_that_escapes() -> None:
    sources = Path(hardneg.__file__).parent.rglob("*.py")
    own = [path.name for path in sources if re.search(r"(?<!\w)Console\(", path.read_text(encoding="utf-8"))]
    assert own == []  # but hardneg.io.terminal.Terminal
