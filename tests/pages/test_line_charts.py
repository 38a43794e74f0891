"""Ticks, thinned lines and labels at their ends."""

from __future__ import annotations

import re

import numpy as np

from hardneg.pages.charts.arms import Line, line_chart, thinned
from hardneg.pages.charts.axes import ticks


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.03, 0.27) == [0.05, 0.1, 0.15, 0.2, 0.25]
    assert ticks(89.3, 92.9, 5) == [90.0, 91.0, 92.0]
    assert ticks(0, 9750) == [0, 2000, 4000, 6000, 8000]


def test_long_lines_are_thinned_and_keep_their_end_and_their_mean() -> None:
    points = [(float(i), float(i % 2)) for i in range(1001)]
    thin = thinned(points, 100)
    assert len(thin) <= 100
    assert thin[-1] == points[-1]
    assert all(abs(value - 0.5) < 0.06 for _, value in thin[:-1])
    assert thinned(points[:50], 100) == points[:50]


def test_labels_at_the_ends_of_lines_do_not_cover_each_other() -> None:
    lines = [Line(letter, letter, i, [(0.0, 1.0), (1.0, 0.001 * i)]) for i, letter in enumerate("ABCDE")]
    chart = line_chart("loss", lines, "nats", str)
    places = sorted(float(y) for y in re.findall(r'class="end" x="[\d.]+" y="([\d.]+)"', chart))
    assert len(places) == 5
    assert min(np.diff(places)) >= 12.9
    assert places[-1] <= 216 - 30
