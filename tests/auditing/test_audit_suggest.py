"""Suggestions meet the wished share, and the next harder member of the grid does not."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import pytest
import torch
from test_audit import make_data
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.auditing import Audit, audit
from hardneg.auditing.options import Settings
from hardneg.auditing.prepare import make_audited_pairs
from hardneg.auditing.rules import FRACTIONS, MARGINS, STRENGTHS, Family, GridSearch, _none, beta_of, families
from hardneg.auditing.sampling import audit_chunks, sample_anchors
from hardneg.core.types import Keys
from hardneg.mining.entry import mine_vectors
from hardneg.mining.options import MineOptions
from hardneg.negatives import parse
from support.vectors import make_unit_vectors

N = 300
TEMPERATURE = 0.3


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor, Tensor]:
    return make_data(N, seed=11)


def family(name: str, temperature: float = TEMPERATURE) -> Family:
    return next(one for one in families(temperature, has_positives=True) if one.name == name)


def rates(data: tuple[Tensor, Tensor, Tensor], texts: list[str]) -> list[float]:
    """Each expression audited by itself, on all anchors."""
    z, views, labels = data
    found = audit(z, texts, positives=views, labels=labels, temperature=TEMPERATURE, frontier=False)
    return [found.row(parse(text)).false_negatives for text in texts]


def suggested(data: tuple[Tensor, Tensor, Tensor], wanted: float) -> Audit:
    z, views, labels = data
    return audit(
        z, positives=views, labels=labels, temperature=TEMPERATURE, wanted_false_negatives=wanted, frontier=False,
        negatives="Uniform()",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["Tilt", "Ring(0.0, outer)", "BelowPositive(relative)", "Ring(inner, outer)"])
def test_the_grid_is_what_the_expressions_do(name: str, data: tuple[Tensor, Tensor, Tensor]) -> None:
    z, views, labels = data
    settings = Settings(TEMPERATURE)
    pairs = make_audited_pairs(z, None, positives=views, labels=labels)
    search = GridSearch(pairs, 0.1, TEMPERATURE)
    for chunk in audit_chunks(pairs, sample_anchors(pairs, settings), settings):
        search.add(chunk)
    texts, curve = family(name).texts, search.curve(name)[0]
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
    assert (found["Tilt"].expression is None) == (even > wanted or rates(data, [f"Tilt({_beta(-1)})"])[0] > wanted)
    best = found["Ring(inner, outer)"]
    members = family("Ring(inner, outer)").texts[::5]
    z, views, labels = data
    rows = audit(z, members, positives=views, labels=labels, temperature=TEMPERATURE, frontier=False).rows
    for row in rows:  # no other ring of the grid is as false at most, and harder
        assert not (row.false_negatives <= wanted and row.similarity > best.similarity + 1e-12)


def _beta(step: int) -> float:
    return beta_of(STRENGTHS[step], TEMPERATURE)


def _next_harder(name: str, text: str) -> str | None:
    texts = [repr(parse(each)) for each in family(name).texts]
    at = texts.index(text)
    if name == "Ring(inner, outer)":
        return None
    return texts[at - 1] if at else None


def test_none_comes_with_the_least_that_there_is(data: tuple[Tensor, Tensor, Tensor]) -> None:
    found = suggested(data, 0.0)
    [tilt] = [one for one in found.suggestions if one.family == "Tilt"]
    assert tilt.expression is None
    assert tilt.sentence.startswith("None: the least false member of the grid has ")
    assert f"{100 * rates(data, [f'Tilt({_beta(-1)})'])[0]:.2f} %" in tilt.sentence


def test_everything_is_allowed(data: tuple[Tensor, Tensor, Tensor]) -> None:
    found = {one.family: one for one in suggested(data, 1.0).suggestions}
    assert found["Tilt"].expression == f"Tilt({_beta(0)})"
    assert "hardest that was tried" in found["Tilt"].sentence
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


def test_the_hardest_that_fits_is_suggested_where_the_share_falls_with_hardness() -> None:
    """Every anchor's nearest candidate has another label: the hardest tilt has no false negative, weak ones many."""
    centres = normalize(torch.randn(20, 8, generator=torch.Generator().manual_seed(0)).double(), dim=-1)
    z = normalize(centres.repeat_interleave(2, 0) + 1e-3 * make_unit_vectors(40, 8, seed=1), dim=-1)
    found = audit(z, labels=torch.arange(40) % 2, wanted_false_negatives=0.1, temperature=0.1)
    for one in found.suggestions:
        assert not one.sentence.startswith("None"), one
        assert one.false_negatives <= 0.1
    [tilt] = [one for one in found.suggestions if one.family == "Tilt"]
    assert tilt.expression == f"Tilt({beta_of(STRENGTHS[0], 0.1)})"
    assert "does not grow steadily here: Tilt(" in tilt.sentence
    share = float(tilt.sentence.split()[-2])
    assert share > 10
    rows = audit(
        z, tilt.sentence.split("here: ")[1].split(" is easier")[0], labels=torch.arange(40) % 2, temperature=0.1
    )
    assert 100 * rows.rows[0].false_negatives == pytest.approx(share, abs=0.006)


def test_no_suggestion_contradicts_itself(data: tuple[Tensor, Tensor, Tensor]) -> None:
    """Whatever is wished: either a member that meets it, or a reason that is true."""
    for wanted in (0.0, 0.01, 0.1, 0.2, 0.25, 1 / 3, 0.9):
        for one in suggested(data, wanted).suggestions:
            if one.expression is not None:
                assert one.false_negatives <= wanted
            elif "least false member" in one.sentence:
                assert float(re.findall(r"has ([0-9.]+) %", one.sentence)[0]) > 100 * wanted - 0.005


def test_the_order_of_a_family_and_what_rounding_does() -> None:
    class Flat(GridSearch):
        def curve(self, name: str) -> tuple[list[float], list[float]]:
            size = len(family(name, 1.0).texts)
            return [0.1] * 5 + [0.9] + [0.1] * (size - 6), [0.0] * size

    search = Flat(make_audited_pairs(make_unit_vectors(4, 3), None), 0.2, 1.0)
    tilts = search.allowed(family("Tilt", 1.0))
    assert tilts[0] == f"Tilt({beta_of(STRENGTHS[0], 1.0)})"
    assert f"Tilt({beta_of(STRENGTHS[5], 1.0)})" not in tilts
    assert search.allowed(family("Ring(0.0, outer)"))[0] == f"Ring(0.0, {FRACTIONS[0]})"
    assert "by rounding" in _none(family("Tilt"), search).sentence
    assert len(MARGINS) == 96
    assert torch.tensor(MARGINS).diff().min() > 0


@pytest.mark.parametrize("temperature", [1.0, 0.05])
def test_a_suggestion_has_the_same_effect_in_mine(temperature: float) -> None:
    """The share of judged documents among the drawn negatives is the audit's, and another at another temperature."""
    random = torch.Generator().manual_seed(3)
    topic = torch.arange(600) % 12
    corpus = normalize(torch.randn(12, 12, generator=random)[topic] + torch.randn(600, 12, generator=random), dim=-1)
    queries = normalize(corpus[:120] + 0.2 * torch.randn(120, 12, generator=random), dim=-1)
    own = torch.arange(120)
    judged = [[int(own[i]), *(j for j in range(120, 600) if topic[j] == topic[i])] for i in range(120)]
    found = audit(
        queries, corpus=corpus, positives=own, held_out_judgements=judged, temperature=temperature,
        wanted_false_negatives=0.2, frontier=False, negatives="Uniform()",
    )  # fmt: skip
    tilt = next(one for one in found.suggestions if one.family == "Tilt")
    assert tilt.temperature == temperature
    assert tilt.flags == f"-n '{tilt.expression}' --draw gumbel --temperature {temperature:g}"
    relevant = torch.zeros(120, 600, dtype=torch.bool)
    for row, documents in enumerate(judged):
        relevant[row, documents] = True

    def share(**options: Any) -> float:
        given = {**tilt.options, "draw": "categorical", **options}  # with replacement: exactly the audit's expectation
        rows = mine_vectors(Keys(queries), Keys(corpus), own, k=200, **given).rows
        return float(relevant.gather(1, rows).float().mean())

    assert share() == pytest.approx(tilt.false_negatives, abs=0.01)
    assert abs(share(temperature=temperature * 4) - tilt.false_negatives) > 0.03


def test_mine_and_audit_share_the_default_temperature() -> None:
    assert Settings().temperature == MineOptions("", "").temperature == 1.0
    defaults = [inspect.signature(each).parameters["temperature"].default for each in (audit, mine_vectors)]
    assert defaults == [1.0, 1.0]
