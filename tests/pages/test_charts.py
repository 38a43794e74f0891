"""What is drawn stays inside its chart, and nothing covers a name."""

from __future__ import annotations

import math
import re
from itertools import combinations

import pytest

from hardneg.pages.charts.arms import Dots, dot_plot
from hardneg.pages.charts.axes import WIDTH
from hardneg.pages.charts.similarities import LETTER, Shares, Spot, histogram_chart, scatter


@pytest.mark.parametrize("same", [0.02, 0.3, 0.6, 0.88, 0.99])
@pytest.mark.parametrize("other", [0.01, 0.5, 0.98])
def test_labels_of_means_stay_inside_the_chart(same: float, other: float) -> None:
    edges, shares = [i / 10 for i in range(11)], [0.1] * 10
    chart = histogram_chart(
        "x", edges, Shares("same-class pairs", shares, same), Shares("other-class pairs", shares, other), 0.1
    )
    labels = re.findall(r'<text class="halo \w+" x="([\d.]+)" y="[\d.]+" text-anchor="(\w+)">(.*?)</text>', chart)
    assert [words for _, _, words in labels] == [f"other-class {other:.2f}", f"same-class {same:.2f}"]
    for at, side, words in labels:
        wide = LETTER * len(words)
        left, right = (float(at) - wide, float(at)) if side == "end" else (float(at), float(at) + wide)
        assert left >= 0
        assert right <= WIDTH


def test_grid_lines_do_not_run_through_names() -> None:
    rows = [
        Dots(f"{letter}  {'long name ' * 6}", letter, i, {0: 1.0 + i}, 1.0 + i, 0.5) for i, letter in enumerate("AB")
    ]
    chart = dot_plot("x", rows, "points", str)
    lines = [(float(a), float(b)) for a, b in re.findall(r'class="grid"[^>]* y1="([\d.]+)" y2="([\d.]+)"', chart)]
    names = [float(y) for y in re.findall(r'class="halo name" x="0" y="([\d.]+)"', chart)]
    assert len(lines) > 2
    assert len(names) == 4
    assert not any(top < baseline and baseline - 11 < bottom for top, bottom in lines for baseline in names)


def test_lines_of_seeds_stay_behind_names() -> None:
    rows = [Dots(f"{letter}  long name", letter, i, {0: 1.0 + i}, 1.0 + i, 0.5) for i, letter in enumerate("AB")]
    chart = dot_plot("x", rows, "points", str)
    assert chart.count('style="width:12ch"/><text class="halo name"') == 2
    assert chart.index('class="pair') < chart.index('<rect class="name"')


@pytest.mark.parametrize(("values", "half"), [((99.0, 99.8), 5.0), ((100.0, 100.0), None), ((0.0, 1.0), 9.0)])
def test_an_axis_of_accuracy_stays_between_0_and_100(values: tuple[float, float], half: float | None) -> None:
    chart = dot_plot("x", [Dots("A", "A", 0, dict(enumerate(values)), sum(values) / 2, half)], "%", str, ceiling=100.0)
    numbers = [float(one) for one in re.findall(r'text-anchor="middle">(-?[\d.]+)<', chart)]
    assert len(numbers) > 1
    assert min(numbers) >= 0.0
    assert max(numbers) <= 100.0


@pytest.mark.parametrize(("width", "named"), [(1080, True), (360, False)])
def test_every_dot_has_a_name_beside_it_or_below(width: int, named: bool) -> None:
    spots = [Spot(i, f"Tilt({i}.0)", "it", 0.5 + 0.001 * i, 0.1, 0.0, 0, False, False) for i in range(1, 12)]
    spots.append(Spot(12, "Ring" * 40, "it", 0.9, 0.3, 0.0, 0, True, False))
    chart = scatter(spots, 0.5, width=width, height=400, named=named, kind="")
    assert all(f"Tilt({i}.0)" in chart for i in range(1, 12))
    below = re.findall(r'class="rule" x="([\d.]+)" y="([\d.]+)"><title>it</title>\d+ ([^<]*)<', chart)
    assert all(float(x) + 6.7 * len(text) <= width for x, _, text in below)
    assert len({(x, y) for x, y, _ in below}) == len(below)
    height = float(re.findall(r'viewBox="0 0 \d+ (\d+)"', chart)[0])
    assert 400 < max(float(y) for _, y, _ in below) < height


def test_a_name_stands_nearest_to_its_own_dot() -> None:
    """Three dots in a row: only the last has room beside it."""
    spots = [Spot(1 + i, f"rule {i}", f"rule {i}", 0.5 + 0.016 * i, 0.1, 0.0, i, False, False) for i in range(3)]
    spots.append(Spot(9, "far", "far", 0.9, 0.3, 0.0, 0, True, False))
    chart = scatter(spots, 0.5, width=700, height=400, named=True, kind="")
    at = {
        int(n): (float(x), float(y) - 3.7)
        for x, y, n in re.findall(r'number" x="([\d.]+)" y="([\d.]+)"[^>]*>(\d)', chart)
    }
    names = re.findall(r'class="rule halo" x="([\d.]+)" y="([\d.]+)"[^>]*>rule (\d)<', chart)
    assert {name for *_, name in names} == {"2"}
    for x, y, name in names:
        near = min(at, key=lambda n: (at[n][0] - float(x)) ** 2 + (at[n][1] - (float(y) - 3.5)) ** 2)
        assert near == int(name) + 1


def test_dots_that_would_cover_each_other_are_moved_apart() -> None:
    """Two rules of an audit at the width of a phone, two at one place, and one alone, which stays."""
    places = [(0.687, 0.402), (0.672, 0.381), (0.5, 0.2), (0.5, 0.2), (0.9, 0.6)]
    spots = [Spot(i, "r", "r", x, y, 0.0, 0, False, False) for i, (x, y) in enumerate(places, 1)]
    chart = scatter(spots, 0.45, width=360, height=380, named=False, kind="")
    dots = [(float(x), float(y)) for x, y in re.findall(r'class="spot" cx="([\d.]+)" cy="([\d.]+)" r="7.0"', chart)]
    assert len(dots) == 5
    assert all(math.dist(*pair) > 13.8 for pair in combinations(dots, 2))
    assert chart.count('class="pointer"') == 4
