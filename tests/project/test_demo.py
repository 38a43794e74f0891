"""The demo of the Makefile: run here for two epochs on digits and some texts, its figures followed to the page."""

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
from hardneg.comparing.request import letter_of, read_tune
from support.comparisons import here
from support.html_page import Page

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = ROOT / "Makefile"
pytest.importorskip("sklearn", reason="the demo needs the extra eval")
pytest.importorskip("accelerate", reason="the demo needs the extra train")


def demo_commands() -> list[str]:
    (recipe,) = re.findall(r"^demo:.*\n((?:\t.*\n)+)", MAKEFILE.read_text(), re.MULTILINE)
    return recipe.replace("\\\n", " ").strip().splitlines()


def comparison_of(data: str) -> list[str]:
    """The arguments of the comparison on digits or on pairs."""
    (line,) = (line for line in demo_commands() if f"compare --data {data}" in line)
    program, *arguments = shlex.split(line)
    assert program == "$(BIN)/hardneg"
    return arguments


def shortened(arguments: list[str], out: Path) -> list[str]:
    """Two epochs and seeds, and two temperatures."""
    values = {"--epochs": "2", "--seeds": "2", "--out": str(out), "--tune": "temperature=0.25,0.5", "--tune-seeds": "1"}
    for flag in values.keys() & set(arguments):
        arguments[arguments.index(flag) + 1] = values[flag]
    return [*arguments, "--jobs", "1"]


def values_of(arguments: list[str], flag: str) -> list[str]:
    return [value for name, value in pairwise(arguments) if name == flag]


def finish(out: Path) -> None:
    """The commands after the comparison: the audit of the first run that the pattern finds, then the report again."""
    audit, report = (line.replace("runs/demo", str(out)) for line in demo_commands()[-3:-1])
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison_runs, "in_a_process", here)
        done = CliRunner().invoke(app, shortened(comparison_of("digits"), out), env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    finish(out)
    return done.output, json.loads((out / "comparison.json").read_text()), Page((out / "report.html").read_text())


@pytest.mark.parametrize("data", ["pairs:examples/docstrings.jsonl", "digits"])
def test_the_demo_gives_a_tilt_and_its_baseline_their_best_temperature(data: str) -> None:
    arguments = comparison_of(data)
    arms = [parse_arm(text) for text in values_of(arguments, "--arm")]
    assert int(*values_of(arguments, "--seeds")) >= 3
    assert arms[0].beta == 0.0
    assert any(arm.beta > 0 for arm in arms)
    tune = read_tune(values_of(arguments, "--tune"))
    assert list(tune) == ["temperature"]
    values = tune["temperature"]
    assert len(values) >= 2
    assert len({value / (1.0 + arm.beta) for arm in arms for value in values} & set(values)) >= 2, "matched ones too"


def test_every_arm_and_seed_learns(demo: tuple[str, dict[str, Any], Page]) -> None:
    _, summary, _ = demo
    arms = values_of(comparison_of("digits"), "--arm")
    assert [row["arm"] for row in summary["rows"]] == arms
    assert set(summary["tuned"]) == set(arms)
    for row in summary["rows"]:
        assert len(row["values"]) == 2
        assert min(row["values"]) > 0.5  # chance is 0.1
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
    assert "supcon()" in page.words
    assert "sees labels" in " ".join(page.words.split())


@pytest.mark.usefixtures("demo")
def test_the_demo_audits_the_embeddings_of_a_run(out: Path) -> None:
    rows = json.loads((out / "audit.json").read_text())["rows"]
    assert len(rows) > 10
    assert all(0.0 <= row["false_negatives"] <= 1.0 for row in rows), "the run has labels"
    assert "<svg" in (out / "audit.html").read_text()
    assert '<a href="audit.html">' in (out / "report.html").read_text()


def test_the_demo_compares_pairs_of_texts_of_the_repository(
    out: Path,
    demo: tuple[str, dict[str, Any], Page],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run here for two epochs and seeds of some of the pairs; its page shows the texts, its last lines the finding."""
    file, pairs = "examples/docstrings.jsonl", tmp_path / "pairs.jsonl"
    lines = (ROOT / file).read_text().splitlines()
    assert len(lines) > 3000
    lines = lines[:: len(lines) // 600][:600]  # of all libraries
    pairs.write_text("\n".join(lines))
    arguments = [one.replace(file, str(pairs)) for one in comparison_of(f"pairs:{file}")]
    monkeypatch.setattr(comparison_runs, "in_a_process", here)
    env = {"COLUMNS": "80", "NO_COLOR": "1"}
    done = CliRunner().invoke(app, shortened(arguments, tmp_path / "out"), env=env)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())["rows"]
    assert [row["arm"] for row in rows] == values_of(arguments, "--arm")
    assert min(row["mean"] for row in rows) > 0.2, "of 120 sentences"
    page = Page((tmp_path / "out" / "report.html").read_text()).words
    assert sum(json.loads(line)["positive"] in page for line in lines) > 5, "the hardest negatives"

    capsys.readouterr()
    _, script, *folders = shlex.split(demo_commands()[-1])
    assert folders == ["runs/demo-text", "runs/demo"]
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path / "out"), str(out)])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    texts, _, _, digits, _ = capsys.readouterr().out.strip().splitlines()
    assert f"{100 * rows[0]['mean']:.1f} % of the names" in texts
    assert f"for {100 * rows[1]['mean']:.1f} %. Too few seeds to tell" in texts
    assert [f"{100 * row['mean']:.1f} %" in digits for row in demo[1]["rows"]] == [True] * 3


@pytest.mark.parametrize(("data", "name"), [("pairs:examples/docstrings.jsonl", "demo_text"), ("digits", "demo")])
def test_the_figures_are_those_of_the_demo(data: str, name: str) -> None:
    """benchmarks/results has the comparison.json of a whole demo."""
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    arguments, asked = comparison_of(data), found["comparison"]
    assert [row["arm"] for row in found["rows"]] == asked["arms"] == values_of(arguments, "--arm")
    assert asked["tune"] == {name: list(tried) for name, tried in read_tune(values_of(arguments, "--tune")).items()}
    assert asked.get("tune_seeds", 1) == max(map(int, values_of(arguments, "--tune-seeds")), default=1)
    given = {"--seeds": [str(asked["seeds"])]} | {
        f"--{option.replace('_', '-')}": [str(value)] for option, value in asked["common"].items() if option != "dim"
    }
    assert {flag: values_of(arguments, flag) for flag in given} == given


def test_the_readme_tells_what_the_demo_found() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    texts, digits = (
        json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()) for name in ("demo_text", "demo")
    )
    tilt, labels = texts["rows"][1], digits["rows"][2]
    assert tilt["difference"] > tilt["difference_half_width"], "a plain yes on texts"
    assert abs(digits["rows"][1]["difference"]) < digits["rows"][1]["difference_half_width"], "and none on digits"
    for row in (*texts["rows"], *digits["rows"]):
        assert f"{100 * row['mean']:.1f}" in readme, row["arm"]
    for row in (tilt, digits["rows"][1], labels):
        points, half = 100 * row["difference"], 100 * row["difference_half_width"]
        assert f"{points:+.1f} ({points - half:+.1f} to {points + half:+.1f})" in readme
