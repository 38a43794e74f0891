"""The page of a judgement: rates with bounds, and what further judgements would give."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hardneg.judging.page import judge_page, outlook
from judging.test_judge import RULES, World, judged
from support.html_page import Page


@pytest.fixture(scope="module")
def found() -> Any:
    return judged(World(), budget=150, level=0.3)


def test_the_bound_falls_to_the_level_where_the_certificate_is_expected(found: Any) -> None:
    ahead = outlook(found)
    assert ahead is not None
    rule = next(rule for rule in found.rates if not found.states[rule].certified)
    state = found.states[rule]
    assert ahead.name == found.names[rule]
    assert ahead.bounds[0] == (0, found.rates[rule][2])
    bounds = [bound for _, bound in ahead.bounds]
    assert bounds == sorted(bounds, reverse=True)
    assert ahead.bounds[-1][0] <= state.size - state.judged
    if state.needed is not None:
        assert bounds[0] > found.level >= bounds[-1]
        below = next(more for more, bound in ahead.bounds if bound <= found.level)
        assert below == pytest.approx(state.needed, abs=ahead.bounds[1][0] + 10)


def test_the_chart_is_drawn_from_these_bounds(found: Any) -> None:
    ahead = outlook(found)
    assert ahead is not None
    chart = str(ahead.chart)
    (points,) = re.findall(r'class="mean" points="([^"]*)"', chart)
    assert len(points.split()) == len(ahead.bounds)
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert heights == sorted(heights), "downwards on the page"
    page = judge_page(found, {})
    assert chart in page
    assert "further judgements" in page
    for rule in RULES:
        assert rule.replace("Rank(0, 6)", "Rank(stop=6)") in Page(page).words


def test_nothing_is_drawn_when_everything_is_decided_or_nothing_is_judged() -> None:
    exact = judged(World(), budget=10**6)
    assert outlook(exact) is None
    assert "What more judgements" not in judge_page(exact, {})
    never = judged(World(), confirm=lambda pairs: [True] * len(pairs), above=2)  # no known positive is flagged
    assert never.sensitivity[2] == 0
    assert outlook(never) is None
