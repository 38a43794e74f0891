"""The command line: help that answers at once, examples that work, errors that name the fix."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

import hardneg as hn
from hardneg.cli.app import app
from hardneg.core.schedules import registered_schedules
from support.command import hardneg, help_of


def verbs(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """What can be run: ("explain",), and below groups ("train", "simclr")."""
    below = getattr(command, "commands", None)
    return [leaf for name in sorted(below) for leaf in verbs(below[name], (*path, name))] if below else [path]


VERBS = verbs(get_command(app))
GROUPS = sorted({path[0] for path in VERBS})
DISTRIBUTIONS = sorted(hn.registered_negatives().items())


def examples(help_text: str) -> list[str]:
    """What the help offers to copy: the command and a verb, at the start of a line or after ``Try:``."""
    return re.findall(rf"^\s*(?:Try: )?(hardneg (?:{'|'.join(GROUPS)})\b.*?)\s*$", help_text, re.MULTILINE)


def in_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_answers_without_torch():
    done = in_python(
        "import sys\n"
        "from hardneg.cli.app import main\n"
        "sys.argv = ['hardneg', '--help']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "    print('heavy:', sorted(heavy), file=sys.stderr)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "explain" in done.stdout
    assert "heavy: []" in done.stderr


def explained_in_a_new_process(*arguments: str) -> tuple[dict[str, Any], bool]:
    """The JSON that ``hardneg explain`` prints, and whether it loaded torch; torch works in the process afterwards."""
    done = in_python(
        "import json, sys\n"
        "from hardneg.cli.app import app\n"
        f"app({['explain', *arguments, '--json']!r}, standalone_mode=False)\n"
        "print(json.dumps('torch' in sys.modules))\n"
        "import torch, hardneg as hn\n"
        "assert hn.Uniform().log_weights(hn.two_views(torch.eye(2), torch.eye(2), 1.0)).shape == (4, 4)\n"
    )
    assert done.returncode == 0, done.stderr
    *found, loaded = done.stdout.splitlines()
    return json.loads("\n".join(found)), json.loads(loaded)


def test_explain_reads_an_expression_without_torch() -> None:
    text = "OtherLabel() * Threshold(0.5) * Ring(0.1) * Tilt(linear(1.0, 0.0))"
    found, loaded = explained_in_a_new_process(text)
    assert not loaded
    assert found == json.loads(hardneg("explain", text, "--json").output)


def test_explain_lists_the_grammar_without_torch() -> None:
    found, loaded = explained_in_a_new_process()
    assert not loaded
    assert {each["name"] for each in found["distributions"]} <= {name for name, _ in DISTRIBUTIONS}
    here = json.loads(hardneg("explain", "--json").output)  # with the schedules and distributions of other tests
    assert all(each in here[kind] for kind in found for each in found[kind])


def test_explain_loads_torch_where_an_expression_computes() -> None:
    found, loaded = explained_in_a_new_process("Hardening('exponential')")
    assert loaded
    assert found == json.loads(hardneg("explain", "Hardening('exponential')", "--json").output)


def test_the_installed_command_answers():
    done = in_python(
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "(command,) = entry_points(group='console_scripts', name='hardneg')\n"
        "sys.argv = ['hardneg', 'explain', 'Tlit(1.0)']\n"
        "command.load()()\n"
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Did you mean Tilt?" in done.stderr
    assert "Traceback" not in done.stderr


def test_version_is_that_of_the_package():
    result = hardneg("--version")
    assert result.exit_code == 0
    assert result.output.strip() == hn.__version__


def test_no_arguments_show_the_help():
    result = hardneg()
    for verb in GROUPS:
        assert re.search(rf"^\W*{verb}\s", result.output, re.MULTILINE), verb


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_of_every_verb_has_an_example_of_it(verb):
    shown = help_of(*verb)
    assert any(line.startswith(" ".join(("hardneg", *verb))) for line in examples(shown)), shown


def test_the_examples_of_explain_work():
    lines = examples(help_of("explain")) + examples(help_of(flag="--help"))
    assert len(lines) >= 4
    for line in lines:
        result = hardneg(*shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}: {result.stderr}"
        assert result.stdout.strip(), line


def test_explain_lists_every_distribution_and_schedule_with_an_example():
    result = hardneg("explain")
    assert result.exit_code == 0
    for name, cls in [*DISTRIBUTIONS, *registered_schedules().items()]:
        (row,) = re.findall(rf"^│ {name} .*$", result.output, re.MULTILINE)
        _, what, example = (cell.strip() for cell in row.strip("│").split("│"))
        assert what.endswith((".", "...")), f"the docstring of {name} does not start with a sentence: {what}"
        read = (
            hn.parse(example)
            if issubclass(cls, hn.negatives.Negatives)
            else hn.parse(f"Tilt({example})").schedules()[0]
        )
        assert type(read) is cls


@pytest.mark.parametrize("text", [text for _, cls in DISTRIBUTIONS for text in cls.examples])
def test_explain_explains_every_example(text):
    result = hardneg("explain", text)
    assert result.exit_code == 0, result.stderr
    title = result.output.splitlines()[0].strip()
    assert hn.parse(title) == hn.parse(text)


def test_explain_goes_factor_by_factor():
    result = hardneg("explain", "OtherLabel() * Tilt(1.0)", "--temperature", "0.5")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].strip() == "OtherLabel() * Tilt(1.0)"
    order = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert order == ["OtherLabel()", "Tilt(1.0)"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "BelowPositive(0.05)",
            "at least 5 % below the similarity of the anchor's lowest-scored positive: up to 0.76",
        ),
        ("BelowPositive(absolute=0.05)", "at least 0.05 below the similarity of"),
        ("BelowPositive(absolute=-0.1)", "up to 0.1 above the similarity of"),
        ("BelowPositive(0.5, absolute=-0.1)", "at least 50 % below and up to 0.1 above"),
        ("BelowPositive(absolute=0.0, by='guide')", "not above the similarity of"),
        ("BelowPositive(absolute=0.0, by='guide')", "Judged by the guide model."),
        (
            "Ring(0.25, outer=0.6, dynamic_inner=True)",
            "the closest 60 % of the candidates except the very closest 15 %",
        ),
        (
            "Ring(0.1, outer=linear(1.0, 0.1), at_least=3)",
            "At the start: Keeps every candidate except the",
        ),
        ("Ring(0.1, outer=linear(1.0, 0.1))", "At the end: Keeps no candidate."),
        ("Rank(50, 200)", "Skips the closest 50 candidates and keeps the next 150."),
        ("Rank(0, 5)", "Keeps the closest 5 candidates."),
        ("Rank(3)", "Keeps every candidate except the closest 3."),
        ("Rank(0, 1)", "Keeps the closest candidate."),
        ("Rank(1, 4)", "Skips the closest candidate and keeps the next 3."),
        ("Tilt(2.0, source='mined')", "the candidates of 'mined' by e^(2 s)"),
        ("ClippedTilt(10.0, bound=1.0)", "from e^-10 to e^10"),
        ("Gaussian(0.4, sigma=0.3)", "of similarity 0.4 most; those 0.3 away get 0.61 times the weight"),
        ("Hardening('sigmoid', 3.0)", "1 / (1 + e^(-slope x)): a threshold at 0 with soft edges. Here slope is 3."),
        ("Hardening('exponential')", "eta(x) = e^(beta x); the same as Tilt(beta). Here beta is 1."),
        ("Threshold(0.2) * AtMost(0.8)", "of similarity 0.2 or more. Keeps candidates of similarity 0.8 or less."),
        ("From('batch')", "of the source 'batch'"),
    ],
)
def test_explain_says_what_these_numbers_do(text, what, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    cells = [line.split("│")[2].strip() for line in hardneg("explain", text).output.splitlines() if "│" in line]
    assert what in " ".join(cells)


@pytest.mark.parametrize(("beta", "temperature", "effective"), [(1.0, 0.5, "0.25"), (3.0, 0.2, "0.05")])
def test_explain_says_which_temperature_a_tilt_is(beta, temperature, effective):
    result = hardneg("explain", f"Tilt({beta})", "--temperature", str(temperature))
    assert f"At temperature {temperature:g} " in result.output
    assert f"like temperature {effective}," in result.output
    assert "results may differ" in result.output
    assert f"an untilted run at {effective}." in result.output


def test_explain_tells_a_detached_tilt_from_one_with_a_gradient():
    through, detached = (hardneg("explain", text).output for text in ("Tilt(1.0)", "Tilt(1.0, detach=True)"))
    assert "gradient through the weights" in through
    assert "gradient through the weights" not in detached


@pytest.mark.parametrize("text", ["Uniform()", "Ring(0.1, 0.5)", "OtherLabel()", "Tilt(0.0)"])
def test_explain_says_nothing_of_temperature_without_a_tilt(text):
    assert "untilted" not in hardneg("explain", text).output


def test_explain_shows_both_ends_of_a_schedule():
    output = hardneg("explain", "Tilt(linear(1.0, 0.25))").output
    assert "At the start of training: Tilt(1.0)." in output
    assert "At the end: Tilt(0.25)." in output


@pytest.mark.parametrize(
    ("expression", "fix"),
    [
        ("Tlit(1.0)", "Did you mean Tilt?"),
        ("Nonsense()", "Known: AtMost, "),
        ("OtherLabel", "write OtherLabel()"),
        ("Tilt(-1.0)", "Tilt needs beta in [0.0, inf), got beta=-1.0."),
        ("Ring(0.5, 2.0)", "outer"),
        ("Tilt(1.0) *", "'OtherLabel() * Tilt(1.0)'"),
        ("Tilt(1.0) + Uniform()", "joined by '*'"),
        ("Tilt(beta=1.0, strength=2.0)", "got strength"),
        ("linear(1.0, 0.0)", "a distribution such as 'Tilt(1.0)'"),
        ("", "'OtherLabel() * Tilt(1.0)'"),
        ("__import__('os').getcwd()", "calls with plain values"),
    ],
)
def test_a_wrong_expression_names_the_fix_on_stderr(expression, fix):
    result = hardneg("explain", expression)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert fix in result.stderr
    assert isinstance(result.exception, SystemExit)  # and not the error itself: no traceback


@pytest.mark.parametrize("temperature", ["0", "-1", "nan", "warm"])
def test_a_wrong_temperature_is_refused(temperature):
    result = hardneg("explain", "Tilt(1.0)", "--temperature", temperature)
    assert result.exit_code == 2
    assert "--temperature" in result.stderr


def test_an_unknown_verb_is_refused_and_points_to_the_help():
    result = hardneg("explian")
    assert result.exit_code == 2
    assert "explian" in result.stderr
    assert "--help" in result.stderr


def test_a_warning_of_ours_is_a_sentence_without_the_place_in_the_source(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (60, 8, 8), dtype=np.uint8)
    np.savez(
        tmp_path / "data.npz",
        images=images,
        labels=np.arange(60) % 3,
        test_images=images,
        test_labels=np.arange(60) % 4,
    )
    command = ["-m", "hardneg", "train", "simclr", "--data", f"npz:{tmp_path / 'data.npz'}", "--epochs", "1"]
    more = ["--batch-size", "32", "--dim", "8", "--device", "cpu", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, *command, *more], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (note,) = [line for line in done.stderr.splitlines() if line.startswith("Note: ")]
    assert "15 of 60 test items belong to classes without training items (3)" in note
    assert ".py:" not in done.stderr
