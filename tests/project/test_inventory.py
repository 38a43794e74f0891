"""The inventory of the papers: every Python name, command and flag on the page exists."""

from __future__ import annotations

import importlib
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

import hardneg as hn
from hardneg.batching.spec import parse_batches
from hardneg.negatives import parse

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "inventory.md"
STATES = ("in part: ", "ready, not run")
ITEMS = {"ProSampler": 38, "HCL": 27, "Ring": 24, "H-SCL": 10, "EMC2": 14, "Methods": 4}
"""Number of items of each paper in the list that the page was made from."""


class Item(NamedTuple):
    section: str
    text: str
    python: list[str]
    commands: list[str]
    state: str


def items() -> list[Item]:
    found, section = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| ") and not line.startswith(("| item", "| ---")):
            text, where, state = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            names = re.findall(r"`([^`]+)`", where)
            python, commands = ([name for name in names if (" " in name) == with_space] for with_space in (False, True))
            found.append(Item(section, text, python, commands, state))
    return found


def resolve(name: str) -> object:
    """Import the longest module of a dotted name, and read the rest of it."""
    parts = re.sub(r"^hn\b", "hardneg", name).split(".")
    for end in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise AssertionError(f"{name} is in no module")


def sections_of_commands() -> dict[str, str]:
    """The generated reference of the command line, which test_reference.py keeps up to date, by command."""
    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    return {part.split("\n")[0].strip(): part for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]}


def test_every_item_is_on_the_page_once() -> None:
    found = items()
    assert {name: sum(item.section.startswith(name) for item in found) for name in ITEMS} == ITEMS
    assert Counter((item.section, item.text) for item in found).most_common(1)[0][1] == 1


@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")  # of the order in Threshold * OtherLabel
@pytest.mark.parametrize("item", items(), ids=lambda item: f"{item.section[:5]} {item.text}")
def test_names_and_commands_exist(item: Item) -> None:
    assert not item.state or item.state.startswith(STATES)
    assert item.python or item.commands, "nothing is absent"
    for name in item.python:
        assert name.startswith(("hn.", "hardneg."))
        assert callable(resolve(name)) or isinstance(resolve(name), type)
    for command in item.commands:
        check_command(shlex.split(command))


def check_command(words: list[str]) -> None:
    if words[0] == "python":
        assert (ROOT / words[1]).exists()
        return
    sections = sections_of_commands()
    known = " ".join(words[:3]) if words[1] == "train" else " ".join(words[:2])
    assert known in sections, f"no command {known!r}"
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        if flag.startswith("--"):
            assert f"`{flag}`" in sections[known], f"{known} has no {flag}"
        if flag == "--batches":
            parse_batches(value)
        if flag == "--negatives":
            assert isinstance(parse(value), hn.negatives.Negatives)
