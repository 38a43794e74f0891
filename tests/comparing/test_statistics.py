"""Intervals and verdicts: what a difference of accuracies is worth."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hardneg.cli.tables import show_comparison
from hardneg.comparing.arms import parse_arm
from hardneg.comparing.statistics import (
    Outcomes,
    detectable_errors,
    difference_of,
    holm,
    holm_levels,
    mean_of,
)
from hardneg.comparing.verdict import Verdict, answer, headline, rows_of, sentences, verdicts_of
from support.command import hardneg
from support.comparisons import Started, result
from support.html_page import Page

FIRST = [0.812, 0.835, 0.790, 0.841, 0.828]


OTHERS = [[0.829, 0.847, 0.818, 0.848, 0.851], [0.80, 0.85, 0.77, 0.86, 0.83], [0.81, 0.83, 0.78, 0.82, 0.81]]


def outcomes(accuracies: list[float], num_test: int = 10**9) -> Outcomes:
    return Outcomes(np.array(accuracies), None, num_test)


@pytest.mark.parametrize("values", OTHERS)
def test_intervals_of_many_test_items_are_those_of_scipy(values: list[float]) -> None:
    """With 10^9 test items only the seeds count; the variance of five has a quarter of the weight unpaired."""
    stats = pytest.importorskip("scipy.stats", reason="intervals need the extra eval")
    found = difference_of(outcomes(values), outcomes(FIRST))
    assert found is not None
    apart, one, other = (np.var(x, ddof=1) for x in (np.subtract(values, FIRST), values, FIRST))
    error = ((0.75 * apart + 0.25 * (one + other)) / 5) ** 0.5
    assert found.half_width == pytest.approx(1.05 * stats.t.ppf(0.975, 4 / (0.875**2 + 0.125**2)) * error, rel=1e-4)
    assert found.value == pytest.approx(np.mean(values) - np.mean(FIRST))


def test_the_variance_of_test_items_is_found() -> None:
    """A table with known effects of runs and items, 300 times over: the mean estimate is the true variance."""
    random, seeds, items = np.random.default_rng(0), 4, 50
    errors, values = [], []
    for _ in range(300):
        table = 0.1 * random.standard_normal((seeds, 1)) + random.standard_normal(items) * 0.7
        table = table + 0.5 * random.standard_normal((seeds, items))
        found = mean_of(Outcomes(table.mean(1), table, items))
        assert found is not None
        errors.append(found.error)
        values.append(found.value)
    expected = 0.1**2 / seeds + 0.7**2 / items + 0.5**2 / (seeds * items)
    assert np.mean(np.square(errors)) == pytest.approx(expected, rel=0.1)
    assert np.var(values) == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("freedom", [2, 4, 29])
def test_four_fifths_of_the_comparisons_find_the_detectable_difference(freedom: int) -> None:
    """Of 200,000 simulated tests 80 % see such a difference, to four errors."""
    stats = pytest.importorskip("scipy.stats", reason="intervals need the extra eval")
    n, factor = freedom + 1, detectable_errors(freedom)
    draws = np.random.default_rng(n).normal(factor / n**0.5, 1.0, (200_000, n))
    seen = np.abs(draws.mean(1)) > 1.05 * stats.t.ppf(0.975, freedom) * draws.std(1, ddof=1) / n**0.5
    assert seen.mean() == pytest.approx(0.8, abs=4 * (0.8 * 0.2 / len(draws)) ** 0.5)


def test_detectable_differences_are_continuous_in_the_degrees_of_freedom() -> None:
    assert detectable_errors(999.0) == pytest.approx(detectable_errors(1001.0), rel=2e-3)


def test_seeds_that_agree_by_rounding_are_not_certain() -> None:
    found = difference_of(outcomes([0.81, 0.82, 0.83], 100), outcomes([0.80, 0.81, 0.82], 100))
    assert found is not None
    assert found.half_width > 0.05, "100 items decide, of which nobody knows which were right"


def test_verdicts_of_the_table_are_those_of_the_intervals() -> None:
    arms = [parse_arm(text) for text in ("simclr()", "hcl()", "debiased()", "simclr(temperature=0.1)")]
    results = [[result(v, 10**8) for v in values] for values in (FIRST, *OTHERS)]
    rows, verdicts = rows_of(arms, results, "knn"), verdicts_of(arms, results, "knn")
    *reported, last = sentences(verdicts)
    for row, values, verdict, sentence in zip(rows[1:], OTHERS, verdicts, reported, strict=True):
        assert row.difference == verdict.difference == pytest.approx(np.mean(values) - np.mean(FIRST))
        assert row.difference_half_width == verdict.half_width
        assert ("not significant" in sentence) == (verdict.standing == "alike")
    assert "B is 1.74 points above A: not significant after correction (95 % interval +0." in reported[0]
    assert "5 seeds and 100,000,000 test items do not reliably detect less than" in reported[1]
    assert "corrected for the 3 differences (Holm's method)" in last
    alone = verdicts_of(arms[:2], results[:2], "knn")
    assert "B is 1.74 points above A: significant (95 % interval +0." in alone[0].sentence()
    assert len(sentences(verdicts[:1])) == 1, "one difference is not several"
    assert np.isnan(rows[0].hardness)


def test_the_test_items_count() -> None:
    """Seeds that agree on six points: 200 test items, of which the arms disagree on 24, do not carry that."""
    first = np.arange(200) < 160
    better = first ^ (np.arange(200) % 200 >= 182) ^ (np.arange(200) < 6)  # 18 gained, 6 lost: six points
    results = [[result(float(x.mean()), 200, x)] * 3 for x in (first, better)]
    arms = [parse_arm("simclr()"), parse_arm("hcl()")]
    (verdict,) = verdicts_of(arms, results, "knn")
    expected = (np.var(better * 1.0 - first, ddof=1) / 200) ** 0.5  # McNemar's, as seeds add nothing
    assert verdict.difference == pytest.approx(0.06)
    assert verdict.half_width == pytest.approx(1.05 * 1.97196 * expected, rel=1e-3)
    little = first ^ (np.arange(200) >= 194) ^ (np.arange(200) < 2)
    few = [[result(float(x.mean()), 200, x)] * 3 for x in (first, little)]
    (verdict,) = verdicts_of(arms, few, "knn")
    assert verdict.standing == "alike", "six gained and two lost: two points in every seed are not significant"


def test_two_seeds_have_no_verdict(data: str, started: Started, tmp_path: Path) -> None:
    common = ("--arm", "simclr()", "--arm", "hcl()", "--data", data, "--batch-size", "32", "--out", str(tmp_path))
    done = hardneg("compare", *common, "--seeds", "2")
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "comparison.json").read_text())
    assert [one["standing"] for one in facts["verdicts"]] == ["open"]
    assert "significant" not in json.dumps(facts)
    assert facts["rows"][1]["difference_half_width"] is None
    assert facts["headline"] == "No verdict on digits.npz: 2 seeds are fewer than 3."
    assert facts["answer"] == []
    assert all(": no verdict." in one for one in facts["sentences"]), "the reason is in the headline"
    assert done.output.count("fewer than 3") == 1


def test_terminal_json_and_page_have_the_same_sentences(data: str, started: Started, tmp_path: Path) -> None:
    arms = ("--arm", "simclr()", "--arm", "simclr(temperature=0.25)", "--arm", "hcl()", "--arm", "supcon()")
    done = hardneg("compare", *arms, "--data", data, "--batch-size", "32", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "comparison.json").read_text())
    reported = [facts["headline"], *facts["answer"], *facts["sentences"]]
    assert len(reported) > 5
    page = " ".join(Page((tmp_path / "report.html").read_text()).words.split())
    for sentence in reported:
        assert sentence in " ".join(done.output.split())
        assert sentence in page


@pytest.mark.parametrize(("seeds", "items"), [(3, 200), (3, 2000), (6, 500)])
@pytest.mark.parametrize("world", [0, 1, 3])
def test_verdicts_hold_in_simulated_comparisons(seeds: int, items: int, world: int) -> None:
    """A small version of experiments/verdict_simulation.py; 200 comparisons, so with more slack than its 400."""
    from verdict_simulation import WORLDS, cell

    found = cell(WORLDS[world], seeds, items, 200)
    assert found["called_different"] <= 0.08
    assert found["found"] >= 0.5


def test_the_docs_have_the_table_of_the_simulation() -> None:
    from verdict_simulation import table

    root = Path(__file__).parents[2]
    found = json.loads((root / "experiments" / "verdict_simulation.json").read_text())
    assert found["times"] == 400
    assert table(found["worlds"]) in (root / "docs" / "explanation" / "verdict.md").read_text()
    cells = [cell for world in found["worlds"] for cell in world["cells"]]
    assert max(cell["called_different"] for cell in cells) <= 0.07
    assert sum(cell["found"] < 0.5 for cell in cells) == 1, "the one that the page names"


@pytest.mark.parametrize("arms", [3, 6])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_a_family_of_equal_arms_has_a_significant_difference_in_at_most_five_percent(world: int, arms: int) -> None:
    """A small version of experiments/verdict_simulation.py, in which each arm is compared with the first."""
    from verdict_simulation import WORLDS, family

    found = family(WORLDS[world], arms, 3, 1_000, items=200)
    assert found["corrected"] <= 0.05
    assert found["alone"] > 1.5 * found["corrected"], "without the correction there are more"


@pytest.mark.parametrize("method", ["all", "of_each_other"])
def test_verdicts_of_whole_comparisons_keep_the_family_rate(method: str) -> None:
    """400 comparisons of arms with a control and with labels: at most 5 % have a significant difference of any kind."""
    texts = {
        "all": ("simclr(temperature=0.5)", "simclr(temperature=0.25)", "hcl(beta=1)", "debiased()"),
        "of_each_other": ("simclr()", "supcon()", "hscl()", "simclr(temperature=0.2)", "supcon(temperature=0.1)"),
    }[method]
    arms, random, false = [parse_arm(text) for text in texts], np.random.default_rng(4), 0
    for _ in range(400):
        results = [[result(value, 10**8) for value in 0.8 + 0.01 * random.standard_normal(3)] for _ in arms]
        verdicts = verdicts_of(arms, results, "knn")
        assert len({one.family for one in verdicts} | {len(verdicts)}) == 1
        false += any(one.standing in ("above", "below") for one in verdicts)
    assert false / 400 <= 0.05


def test_the_docs_have_the_table_of_families() -> None:
    from verdict_simulation import family_table

    root = Path(__file__).parents[2]
    found = json.loads((root / "experiments" / "verdict_simulation.json").read_text())
    page = (root / "docs" / "explanation" / "verdict.md").read_text()
    assert family_table(found["families"]) in page
    cells = [cell for one in found["families"] for cell in one["cells"]]
    assert f"at or below {100 * max(cell['corrected'] for cell in cells):.1f} %" in page
    assert found["family_times"] == 2_000
    assert max(cell["corrected"] for cell in cells) <= 0.05
    assert max(cell["alone"] for cell in cells) > 0.15


def test_holm_rejects_in_steps() -> None:
    """The second largest p-value is below 0.05 and not below 0.05 / 2, so it and the largest are not significant."""
    p_values = [0.2, 0.001, 0.03, 0.012]
    assert holm(p_values) == pytest.approx([0.2, 0.004, 0.06, 0.036])
    assert holm_levels(p_values) == pytest.approx([0.025, 0.0125, 0.025, 0.05 / 3])
    assert holm([]) == holm_levels([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_p_values_and_corrected_intervals_agree_with_the_verdict() -> None:
    random = np.random.default_rng(0)
    arms = [parse_arm(f"simclr(temperature={0.1 * i + 0.1:.1f})") for i in range(5)]
    seen = set()
    for _ in range(40):
        levels = 0.8 + 0.012 * random.standard_normal(5)
        results = [[result(level + 0.004 * one, 10**6) for one in random.standard_normal(4)] for level in levels]
        for one in verdicts_of(arms, results, "knn"):
            assert one.corrected_half_width is not None
            assert one.half_width is not None
            assert one.half_width <= one.corrected_half_width
            assert (abs(one.difference) > one.corrected_half_width) == (one.standing != "alike")
            seen.add((one.standing, abs(one.difference) > one.half_width))
    assert ("alike", True) in seen, "significant by itself, and not after the correction"
    assert {standing for standing, _ in seen} == {"above", "below", "alike"}
    found = difference_of(outcomes(OTHERS[0]), outcomes(FIRST))
    assert found is not None
    assert found.half_width_at(found.p_value) == pytest.approx(abs(found.value))


def test_arms_without_any_difference_are_alike() -> None:
    arms, same = [parse_arm("simclr()"), parse_arm("hcl()")], np.arange(200) < 160
    (verdict,) = verdicts_of(arms, [[result(0.8, 200, same)] * 3] * 2, "knn")
    assert (verdict.standing, verdict.difference, verdict.p_value) == ("alike", 0.0, 1.0)
    assert verdict.half_width == pytest.approx(0.0, abs=1e-12)


GOOD, BAD = [0.912, 0.935, 0.920, 0.931, 0.928], [0.512, 0.535, 0.520, 0.531, 0.528]


def judged(texts: tuple[str, ...], values: list[list[float]]) -> list[Verdict]:
    return verdicts_of([parse_arm(text) for text in texts], [[result(v, 10**8) for v in one] for one in values], "knn")


@pytest.mark.parametrize(
    ("texts", "values", "expected"),
    [
        (("simclr()", "hcl()"), [FIRST, OTHERS[1]], "No choice of negatives is significantly better on digits."),
        (
            ("simclr()", "hcl()", "debiased()"),
            [FIRST, BAD, OTHERS[1]],
            "No choice of negatives is significantly better on digits; B is significantly worse than A.",
        ),
        (("simclr()", "supcon()"), [FIRST, GOOD], "No two choices of negatives can be compared on digits: only one"),
        (("supcon()", "simclr()", "hcl()"), [GOOD, FIRST, GOOD], "C is significantly better than B on digits: +10.40"),
        (("simclr()", "hcl()"), [FIRST[:2], GOOD[:2]], "No verdict on digits: 2 seeds are fewer than 3."),
    ],
)
def test_the_headline_is_the_answer(texts: tuple[str, ...], values: list[list[float]], expected: str) -> None:
    assert headline(judged(texts, values), "digits").startswith(expected)


def test_the_headline_has_the_gain_and_its_interval() -> None:
    verdicts = judged(("simclr()", "hcl()", "debiased()"), [FIRST, GOOD, OTHERS[1]])
    found = headline(verdicts, "digits")
    assert verdicts[0].half_width is not None
    low, high = (100 * (verdicts[0].difference + side * verdicts[0].half_width) for side in (-1, 1))
    interval = f"95 % interval {low:+.2f} to {high:+.2f}"
    assert found == f"B is significantly better than A on digits: +10.40 points ({interval})."
    best = [value + 0.01 for value in GOOD]
    both = headline(judged(("simclr()", "hcl()", "debiased()"), [FIRST, GOOD, best]), "digits")
    assert both.startswith(
        "B and C are significantly better than A on digits; C has the largest gain: +11.40 points (95 %"
    )


def test_a_difference_of_nothing_has_no_minus(capsys: pytest.CaptureFixture[str]) -> None:
    arms = [parse_arm("simclr()"), parse_arm("hcl()")]
    results = [[result(v, 10**6) for v in (0.80004, 0.80004, 0.8)], [result(v, 10**6) for v in (0.80003, 0.80004, 0.8)]]
    rows, verdicts = rows_of(arms, results, "knn"), verdicts_of(arms, results, "knn")
    assert rows[1].difference is not None
    assert rows[1].difference < 0.0
    summary = {"metric": "knn", "rows": [asdict(row) for row in rows], "sentences": sentences(verdicts), "notes": []}
    summary["headline"] = headline(verdicts, "digits")
    summary["answer"] = answer(verdicts, "kNN accuracy")
    show_comparison(summary, Console(width=120))
    reported = capsys.readouterr().out
    assert "+0.0 ± " in reported
    assert "-0.00" not in reported
    assert " n/a " in reported, "a hardness that nobody knows"
