"""The demo of the Makefile compares, audits and reports: run here for two epochs, its figures followed to the page."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hardneg.cli.app import app
from hardneg.comparing import runs as comparison_runs
from hardneg.comparing.arms import parse_arm
from hardneg.comparing.request import letter_of
from hardneg.comparing.verdict import temperature_notes
from support.comparisons import here
from support.html_page import Page

MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"
pytest.importorskip("sklearn", reason="the demo needs the extra eval")
pytest.importorskip("accelerate", reason="the demo needs the extra train")


def demo_commands() -> list[str]:
    (recipe,) = re.findall(r"^demo:.*\n((?:\t.*\n)+)", MAKEFILE.read_text(), re.MULTILINE)
    return recipe.replace("\\\n", " ").strip().splitlines()


def demo_command() -> list[str]:
    """The arguments of the comparison, the first command."""
    program, *arguments = shlex.split(demo_commands()[0])
    assert program == "$(BIN)/hardneg"
    return arguments


def values_of(arguments: list[str], flag: str) -> list[str]:
    return [value for name, value in pairwise(arguments) if name == flag]


def finish(out: Path) -> None:
    """The commands after the comparison: the audit of the first run that the pattern finds, then the report again."""
    audit, report = (line.replace("runs/demo", str(out)) for line in demo_commands()[1:3])
    found = re.fullmatch(r'\tset -- (\S+) && \$\(BIN\)/hardneg (audit) "\$\$1" (--out \S+)', audit)
    assert found is not None, audit
    pattern, verb, to = found.groups()
    run = min(out.glob(str(Path(pattern).relative_to(out))))
    _, *again = shlex.split(report)
    for arguments in ([verb, str(run), *to.split()], again):
        done = CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "NO_COLOR": "1"})
        assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def demo(out: Path) -> tuple[str, dict[str, Any], Page]:
    """What the demo prints, its comparison.json and its page; in the second epoch batches of neighbours begin."""
    short = {"--epochs": "2", "--seeds": "2", "--out": str(out)}
    arguments = demo_command()
    for flag, value in short.items():
        arguments[arguments.index(flag) + 1] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison_runs, "in_a_process", here)
        done = CliRunner().invoke(app, [*arguments, "--jobs", "1"], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    finish(out)
    return done.output, json.loads((out / "comparison.json").read_text()), Page((out / "report.html").read_text())


def test_the_demo_has_four_arms_and_three_seeds_and_a_plain_twin_for_the_tilt() -> None:
    arguments = demo_command()
    arms = [parse_arm(text) for text in values_of(arguments, "--arm")]
    assert len(arms) >= 4
    assert values_of(arguments, "--seeds") == ["3"]
    assert any(arm.beta > 0 for arm in arms)
    assert any("@" in arm.text for arm in arms)
    assert temperature_notes(arms) == []


def test_every_arm_and_seed_learns(demo: tuple[str, dict[str, Any], Page]) -> None:
    _, summary, _ = demo
    arms = values_of(demo_command(), "--arm")
    assert [row["arm"] for row in summary["rows"]] == arms
    for row in summary["rows"]:
        assert len(row["values"]) == 2
        assert min(row["values"]) > 0.5  # chance is 0.1; measured 0.73 to 0.9
    assert len({tuple(row["values"]) for row in summary["rows"]}) == len(arms), "the arms are not one and the same"
    assert summary["k"] == 143, "no more neighbours than a class of digits has"


def test_the_terminal_and_the_page_show_the_figures_of_the_json(demo: tuple[str, dict[str, Any], Page]) -> None:
    printed, summary, page = demo
    head, *lines = page.cells["results"]
    letters = [letter_of(number) for number in range(len(summary["rows"]))]
    for letter, row, line in zip(letters, summary["rows"], lines, strict=True):
        mean = 100 * row["mean"]
        assert row["half_width"] is None, "two seeds have no interval"
        (shown,) = re.findall(rf"^ ?{letter} +(\d.*?)\s*$", printed, re.MULTILINE)
        seeds = " ".join(f"{100 * value:.1f}" for value in row["values"])
        assert " ".join(shown.split()).startswith(f"{seeds} {mean:.1f}")
        cell = dict(zip(head, line, strict=True))
        assert cell["143-NN accuracy of every seed, %"].split() == [f"{100 * value:.2f}" for value in row["values"]]
        assert cell["mean, %"] == f"{mean:.2f}"
    said = " ".join(printed.split())
    for sentence in summary["sentences"]:
        assert sentence in said
        assert sentence in page.words
    assert "report: " in printed
    assert "False negatives, hardness and clamped are means over the last records" in said
    assert "supcon(temperature=0.5)" in page.words
    assert "sees labels" in " ".join(page.words.split())


@pytest.mark.usefixtures("demo")
def test_the_demo_audits_the_embeddings_of_a_run(out: Path) -> None:
    rows = json.loads((out / "audit.json").read_text())["rows"]
    assert len(rows) > 10
    assert all(0.0 <= row["false_negatives"] <= 1.0 for row in rows), "the run has labels"
    assert "<svg" in (out / "audit.html").read_text()
    assert '<a href="audit.html">' in (out / "report.html").read_text()


def test_the_demo_compares_pairs_of_texts_that_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run here for two epochs and seeds of some of the pairs; its page shows the texts."""
    made, compared = demo_commands()[3:]
    (found,) = re.findall(r"test -f (\S+) \|\| \$\(BIN\)/python (\S+) (\S+)$", made)
    file, script, written = found
    assert file == written
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path / "pairs.jsonl")])
    runpy.run_path(str(MAKEFILE.parent / script), run_name="__main__")
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
    assert int(capsys.readouterr().out.split()[0]) == len(lines) > 1000
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines[:600]))
    _, *arguments = shlex.split(compared.replace(file, str(tmp_path / "pairs.jsonl")))
    for flag, value in {"--epochs": "2", "--seeds": "2", "--out": str(tmp_path / "out")}.items():
        arguments[arguments.index(flag) + 1] = value
    arms = values_of(arguments, "--arm")
    assert temperature_notes([parse_arm(text) for text in arms]) == [], "the tilt has its plain twin"
    monkeypatch.setattr(comparison_runs, "in_a_process", here)
    done = CliRunner().invoke(app, [*arguments, "--jobs", "1"], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())["rows"]
    assert [row["arm"] for row in rows] == arms
    assert min(row["mean"] for row in rows) > 0.2, "of 120 sentences"
    page = Page((tmp_path / "out" / "report.html").read_text()).words
    assert sum(json.loads(line)["positive"] in page for line in lines) > 5, "the hardest negatives"


def test_the_readme_tells_what_the_demo_found() -> None:
    """benchmarks/results/demo.json is the comparison.json of a whole demo."""
    found = json.loads((MAKEFILE.parent / "benchmarks" / "results" / "demo.json").read_text())
    arguments, asked = demo_command(), found["comparison"]
    assert [row["arm"] for row in found["rows"]] == asked["arms"] == values_of(arguments, "--arm")
    told = {"--seeds": asked["seeds"]} | {f"--{n.replace('_', '-')}": v for n, v in asked["common"].items()}
    assert {flag: values_of(arguments, flag) for flag in told} == {flag: [str(value)] for flag, value in told.items()}
    (story,) = re.findall(
        r"with (\w+) seeds, no choice of unlabelled negatives is significantly better, and labels are worth about "
        r"(\w+) points",
        " ".join((MAKEFILE.parent / "README.md").read_text().split()),
    )
    labelled = [row for row in found["rows"] if parse_arm(row["arm"]).recipe == "supervised"]
    others = [row for row in found["rows"][1:] if row not in labelled]
    assert len(others) == 3
    assert all(row["difference"] <= row["difference_half_width"] for row in others)
    (worth,) = [row["difference"] for row in labelled if row["difference"] > row["difference_half_width"]]
    words = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    assert story == (words[asked["seeds"]], words[round(100 * worth)])
