"""Functions by their name are those that the file has now, also in a process that has run it before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hardneg.core.errors import ArgumentError
from hardneg.io.functions import load_function
from support.errors import raises


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for name in [name for name in sys.modules if name.startswith("own_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize("text", ["own_module:encode", "own_module.py:encode", "own_package:encode"])
def test_a_changed_function_is_run_anew(text: str, folder: Path) -> None:
    """Also where the file has the same size and was written in the same second, so that its bytecode seems current."""
    module = text.partition(":")[0].removesuffix(".py")
    file = folder / ("own_package/__init__.py" if module == "own_package" else f"{module}.py")
    file.parent.mkdir(exist_ok=True)
    for answer in (1, 2):
        file.write_text(f"def encode() -> int:\n    return {answer}\n")
        assert load_function(text, "test")() == answer
        assert load_function(text, "test").__annotations__ == {"return": int}, "not the __future__ of another file"
        assert load_function(text, "test") is load_function(text, "test"), "a file that is the same is run once"
    file.write_text("def other():\n    return 3\n")
    with raises(ArgumentError, who="test", what="'encode'", got="none"):
        load_function(text, "test")
    assert load_function(text.replace("encode", "other"), "test")() == 3


def test_a_changed_file_that_cannot_be_run_is_run_again_once_mended(folder: Path) -> None:
    file = folder / "own_module.py"
    for source in ("def encode():\n    return 1\n", "import own_missing\n", "def encode():\n    return 2\n"):
        file.write_text(source)
        if "missing" in source:
            with pytest.raises(ArgumentError, match="own_missing"):
                load_function("own_module:encode", "test")
        else:
            found = load_function("own_module:encode", "test")()
    assert found == 2


@pytest.mark.parametrize("text", ["own_module:encode", "own_module.py:encode"])
def test_a_syntax_error_leaves_the_function_that_was_loaded(text: str, folder: Path) -> None:
    file = folder / "own_module.py"
    file.write_text("ANSWER = 1\ndef encode():\n    return ANSWER\n")
    found = load_function(text, "test")
    file.write_text("ANSWER = (\n")
    with pytest.raises(SyntaxError):
        load_function(text, "test")
    assert found() == 1


def test_modules_without_a_file_are_taken_as_they_are() -> None:
    assert load_function("math:sqrt", "test")(4.0) == 2.0
