"""Suggestions meet the wished share, and the next harder member of the grid does not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from conftest import make_unit_vectors
from hardneg.audits import Audit, audit
from hardneg.audits.prepare import make_subject
from hardneg.audits.settings import Settings
from hardneg.audits.suggest import FRACTIONS, MARGINS, STRENGTHS, Search, _ordered, _texts, beta_of
from hardneg.audits.work import chunks, sampled_anchors
from hardneg.negatives import parse
from test_audit import make_data

N = 300
TEMPERATURE = 0.3


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor, Tensor]:
    return make_data(N, seed=11)


def rates(data: tuple[Tensor, Tensor, Tensor], texts: list[str]) -> list[float]:
    """Each expression audited by itself, on all anchors."""
    z, views, labels = data
    found = audit(z, texts, positives=views, labels=labels, temperature=TEMPERATURE, frontier=False)
    return [found.row(parse(text)).false_negatives for text in texts]


def suggested(data: tuple[Tensor, Tensor, Tensor], wanted: float) -> Audit:
    z, views, labels = data
    return audit(
        z, positives=views, labels=labels, temperature=TEMPERATURE, wanted_false_negatives=wanted, frontier=False,
        expressions="Uniform()",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["Tilt", "Ring(0.0, outer)", "BelowPositive(relative)", "Ring(inner, outer)"])
def test_the_grid_is_what_the_expressions_do(name: str, data: tuple[Tensor, Tensor, Tensor]) -> None:
    z, views, labels = data
    settings = Settings(TEMPERATURE)
    subject = make_subject(z, None, positives=views, labels=labels)
    search = Search(subject, 0.1, TEMPERATURE)
    for chunk in chunks(subject, sampled_anchors(subject, settings), settings):
        search.add(chunk)
    texts, curve = _texts(name, TEMPERATURE), search.curve(name)[0]
    some = list(range(0, len(texts), 7))
    assert [curve[i] for i in some] == pytest.approx(rates(data, [texts[i] for i in some]), abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("wanted", [0.15, 0.25, 0.3, 0.5])
def test_suggestions_meet_the_wish_and_are_tight(wanted: float, data: tuple[Tensor, Tensor, Tensor]) -> None:
    found = {one.family: one for one in suggested(data, wanted).suggestions}
    assert set(found) == {
        "Tilt", "Ring(0.0, outer)", "Ring(inner, outer)", "BelowPositive(relative)",
        "BelowPositive(relative) * Rank(0, 10)",
    }  # fmt: skip
    [even] = rates(data, ["Uniform()"])
    for name, one in found.items():
        if one.expression is None:
            assert math.isnan(one.similarity)
            continue
        [rate] = rates(data, [one.expression])
        assert rate == one.false_negatives <= wanted
        harder = _next_harder(name, one.expression)
        if harder is not None:
            assert rates(data, [harder])[0] > wanted, name
    assert (found["Tilt"].expression is None) == (even > wanted or rates(data, [f"Tilt({_beta(0)})"])[0] > wanted)
    best = found["Ring(inner, outer)"]
    members = _texts("Ring(inner, outer)", TEMPERATURE)[::5]
    z, views, labels = data
    rows = audit(z, members, positives=views, labels=labels, temperature=TEMPERATURE, frontier=False).rows
    for row in rows:  # no other ring of the grid is as false at most, and harder
        assert not (row.false_negatives <= wanted and row.similarity > best.similarity + 1e-12)


def _beta(step: int) -> float:
    return beta_of(STRENGTHS[step], TEMPERATURE)


def _next_harder(name: str, text: str) -> str | None:
    texts = [repr(parse(each)) for each in _texts(name, TEMPERATURE)]
    at = texts.index(text)
    if name == "Tilt":
        return texts[at + 1] if at + 1 < len(texts) else None
    if name == "Ring(inner, outer)":
        return None
    return texts[at - 1] if at else None


def test_none_is_said_with_the_least_that_there_is(data: tuple[Tensor, Tensor, Tensor]) -> None:
    found = suggested(data, 0.0)
    [tilt] = [one for one in found.suggestions if one.family == "Tilt"]
    assert tilt.expression is None
    assert tilt.told.startswith("None: the least false member of the grid has ")
    assert f"{100 * rates(data, [f'Tilt({_beta(0)})'])[0]:.2f} %" in tilt.told


def test_everything_is_allowed(data: tuple[Tensor, Tensor, Tensor]) -> None:
    found = {one.family: one for one in suggested(data, 1.0).suggestions}
    assert found["Tilt"].expression == f"Tilt({_beta(-1)})"
    assert "hardest that was tried" in found["Tilt"].told
    assert found["BelowPositive(relative)"].expression == "BelowPositive(relative=0.0)"
    narrowest = next(each for each in FRACTIONS if int(each * (N - 1)))
    assert found["Ring(0.0, outer)"].expression == f"Ring(outer={narrowest})"


def test_what_is_suggested_is_on_the_page_and_in_the_table(data: tuple[Tensor, Tensor, Tensor]) -> None:
    found = suggested(data, 0.3)
    kinds = {row.expression: row.kind for row in found.rows}
    for one in found.suggestions:
        if one.expression is not None and one.expression != "Uniform()":
            assert kinds[one.expression] == "suggested"
    assert "At most 30 % false negatives" in found.table()


def test_first_crossing_counts_where_the_curve_turns_back() -> None:
    """A tilt is suggested only if no weaker one is too false, whatever the stronger ones do."""

    class Turning(Search):
        def curve(self, name: str) -> tuple[list[float], list[float]]:
            false = [0.1] * len(STRENGTHS)
            false[5] = 0.9
            return false, [0.0] * len(STRENGTHS)

    search = Turning(make_subject(make_unit_vectors(4, 3), None), 0.2, 1.0)
    assert _ordered("Tilt", search)[0][0] == f"Tilt({beta_of(STRENGTHS[4], 1.0)})"
    assert len(MARGINS) == 96
    assert torch.tensor(MARGINS).diff().min() > 0
