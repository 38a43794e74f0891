"""What others wrote is printed without its control characters."""

import sys
import unicodedata

import pytest

from hardneg.core.text import printable, printable_lines


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
def test_point_21_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_no_character_that_a_terminal_acts_on_is_left() -> None:
    every = printable("".join(map(chr, range(sys.maxunicode + 1))))
    assert not {unicodedata.category(letter) for letter in set(every)} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_long_names_are_cut() -> None:
    assert printable("x" * 50, limit=10) == "x" * 10 + "..."
    assert printable("x" * 10, limit=10) == "x" * 10


def test_lines_stay_lines() -> None:
    assert printable_lines("a\nb\x1b") == "a\nb\\x1b"
