"""The pictures of the README and the docs are those that tools/pictures.py draws from the library as it is."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("sklearn", reason="the digits need the extra eval")
pytest.importorskip("PIL", reason="thumbnails need the extra report")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import pictures

    return pictures


def described(svg: str) -> tuple[list[str], list[float]]:
    """The words of the description that every picture has, and its numbers."""
    (label,) = re.findall(r'aria-label="([^"]+)"', svg)
    number = r"-?\d+(?:\.\d+)?"
    return re.split(number, label), [float(each) for each in re.findall(number, label)]


@pytest.mark.parametrize("name", ["one_anchor", "digits"])
def test_a_picture_is_up_to_date(pictures: ModuleType, name: str) -> None:
    drawn = pictures.one_anchor(pictures.example()) if name == "one_anchor" else pictures.frontier()
    words, numbers = described(drawn)
    kept_words, kept_numbers = described((ROOT / "docs" / "figures" / f"{name}.svg").read_text(encoding="utf-8"))
    assert words == kept_words, "run `python tools/pictures.py`"
    assert numbers == pytest.approx(kept_numbers, abs=0.02), "run `python tools/pictures.py`"


def test_the_four_rules_differ_as_the_page_says(pictures: ModuleType) -> None:
    shown = pictures.example()
    uniform, tilt, ring, below = shown.probabilities
    assert uniform.tolist() == pytest.approx([0.125] * 8)
    assert tilt.tolist() == sorted(tilt.tolist(), reverse=True)
    assert (ring > 0).tolist() == [False, *[True] * 4, *[False] * 3]
    assert (below > 0).tolist() == [each < shown.similarities[0] - 0.1 for each in shown.similarities[1:]]
    assert [digit == shown.digits[0] for digit in shown.digits[2:]].count(True) == 2, "two false negatives"
