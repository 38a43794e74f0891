"""Mutated manifests, run directories and comparisons: no code runs, nothing else is written, and errors are sentences.

100 of them by default; HARDNEG_FUZZ=2000 gives the full run, and HARDNEG_FUZZ_FROM=n begins at another one.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from hardneg.cli.app import app
from hardneg.core.errors import HardnegWarning, forget_warnings
from support.comparisons import here
from support.mutations import CANARY, mutate_file
from support.stored_files import commands, make_stored
from support.watched import Deeds, TooLong, watched

pytest.importorskip("accelerate", reason="training needs the extra train")
NUMBER = int(os.environ.get("HARDNEG_FUZZ", 100))
FIRST = int(os.environ.get("HARDNEG_FUZZ_FROM", 0))
TOGETHER = 20  # mutations in one test, so that two thousand do not make two thousand lines


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stored(tmp_path_factory.mktemp("stored"))


@pytest.fixture
def in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of comparisons start no process, and nobody asks git: then any process that is started is a finding."""
    (tmp_path / f"{CANARY}.py").write_text("run = print\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("hardneg.comparing.runs.in_a_process", here)
    monkeypatch.setattr("hardneg.io.provenance._commit", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", HardnegWarning)
        yield


def tree(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_dir() or path.read_bytes()
        for path in folder.rglob("*")
    }


class Harmless(HTMLParser):
    """Raises for what a browser would run."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tag = tag
        for name, value in attrs:
            assert not name.startswith("on"), f"<{tag} {name}={value}>"
            assert not (value or "").lower().startswith("javascript:"), f"<{tag} {name}={value}>"
        assert tag != "img" or str(dict(attrs)["src"]).startswith("data:"), attrs

    def handle_data(self, data: str) -> None:
        assert getattr(self, "tag", "") != "script" or CANARY not in data, data


def one_case(number: int, stored: Path, folder: Path) -> str | None:
    """What is wrong with the answer to this mutation, or None."""
    random = Random(number)
    every = commands(f"npz:{stored / 'data.npz'}")
    name = list(every)[number % len(every)]
    arguments, output, targets = every[name]
    at = folder / f"case{number}"
    shutil.copytree(stored, at, symlinks=True)
    (at / "out").mkdir()
    paths = [path for target in targets for path in sorted(at.glob(target)) or [at / target] if path.parent.is_dir()]
    chosen = random.sample(paths, k=min(len(paths), random.choice((1, 1, 1, 2))))
    for path in dict.fromkeys(chosen):
        mutate_file(path, random)
    before = tree(at)
    forget_warnings()
    try:
        with watched() as deeds:
            answer = CliRunner().invoke(app, arguments(at))
    except TooLong as error:
        return f"{name} {_names(chosen, at)}: {error}"
    problem = _problem(answer, deeds, at, output, before)
    shutil.rmtree(at)
    return None if problem is None else f"case {number}: {name} {_names(chosen, at)}: {problem}"


def _names(paths: list[Path], at: Path) -> list[str]:
    return [str(path.relative_to(at)) for path in paths]


def _problem(answer: Any, deeds: Deeds, at: Path, output: str, before: dict[str, Any]) -> str | None:
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        last = traceback.extract_tb(answer.exc_info[2])[-1]
        ours = [one for one in traceback.extract_tb(answer.exc_info[2]) if "/hardneg/" in one.filename][-1]
        where = f"{ours.filename.rpartition('/hardneg/')[2]}:{ours.lineno} ({Path(last.filename).name}:{last.lineno})"
        return f"traceback {where} {type(answer.exception).__name__}: {str(answer.exception)[:150]!r}"
    if answer.exit_code not in (0, 1, 2):
        return f"exit code {answer.exit_code}: {answer.output[-200:]}"
    if answer.exit_code and len(answer.stderr) > 5000:
        return f"an error of {len(answer.stderr)} characters"
    if deeds.processes or sys.modules.pop(CANARY, None):
        return f"code ran: {deeds.processes or CANARY}"
    allowed = (at / output, Path("/dev"), Path("/proc"))
    outside = [path for path in deeds.written if not _inside(path, allowed)]
    if outside:
        return f"written: {outside[:3]}"
    after = tree(at)
    changed = sorted(one for one in {*before, *after} if before.get(one) != after.get(one))
    if elsewhere := [one for one in changed if one.partition("/")[0] != output]:
        return f"changed: {elsewhere[:3]}"
    if set("\x1b\x07\x00") & {*answer.output, *answer.stderr}:
        return f"control characters: {answer.output[-200:]!r} {answer.stderr[-200:]!r}"
    for page in (at / "out").glob("*.html"):
        try:
            Harmless().feed(page.read_text())
        except AssertionError as error:
            return f"the page runs code: {str(error)[:200]}"
    return None


def _inside(path: Path, allowed: tuple[Path, ...]) -> bool:
    """By its real folder: a link must not lead out."""
    real = path.parent.resolve() / path.name
    return (
        any(real == one or one in real.parents for one in allowed)
        or path.suffix == ".pyc"
        or "__pycache__" in str(path)
    )


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("first", range(FIRST, FIRST + NUMBER, TOGETHER))
def test_mutated_files_run_no_code_and_write_nowhere_else(
    first: int, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problems = [one_case(number, stored, tmp_path) for number in range(first, min(first + TOGETHER, FIRST + NUMBER))]
    found = [problem for problem in problems if problem is not None]
    if found:
        pytest.fail("\n".join(found), pytrace=False)
    assert not (tmp_path / CANARY).exists()


@pytest.mark.usefixtures("in_this_process")
def test_files_that_are_not_mutated_are_read(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the mutations would show nothing."""
    monkeypatch.chdir(tmp_path)
    for name, (arguments, output, _) in commands(f"npz:{stored / 'data.npz'}").items():
        at = tmp_path / name.replace(" ", "-")
        shutil.copytree(stored, at)
        (at / "out").mkdir()
        before = tree(at)
        with watched() as deeds:
            answer = CliRunner().invoke(app, arguments(at))
        assert answer.exit_code == 0, (name, answer.output, answer.exception)
        assert _problem(answer, deeds, at, output, before) is None, name
