"""hn.audit against plain loops over anchors and candidates in float64: every figure, every kind of rule."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
import support.brute_force as brute_force
from hardneg.auditing import Audit, audit
from hardneg.auditing.measure import EVEN_SHARE
from hardneg.auditing.prepare import number_tags
from hardneg.core.errors import ArgumentError
from support.errors import raises
from support.vectors import make_unit_vectors

N, D = 40, 6
TEMPERATURE = 0.4
EXPRESSIONS = [
    "Uniform()",
    "Tilt(0.5)",
    "Tilt(5.0)",
    "Ring(0.0, 0.25)",
    "Ring(0.1, 0.5)",
    "Rank(0, 5)",
    "Rank(3, 11)",
    "Threshold(0.3)",
    "Threshold(0.85)",
    "OtherLabel() * Tilt(1.0)",
    "BelowPositive(relative=0.1)",
    "BelowPositive(relative=0.05) * Rank(0, 4)",
    "Rank(0, 20) * Tilt(2.0)",
]


def make_data(n: int = N, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Unit vectors in clusters with labels that mostly follow them, and second views."""
    labels = torch.arange(n) % 4
    centres = make_unit_vectors(4, D, seed=seed + 1)
    first = normalize(centres[labels] + 0.9 * make_unit_vectors(n, D, seed=seed + 2), dim=-1)
    second = normalize(first + 0.5 * make_unit_vectors(n, D, seed=seed + 3), dim=-1)
    labels = torch.where(torch.arange(n) % 7 == 0, (labels + 1) % 4, labels)
    return first, second, labels


def q_of(expression: str, z: Tensor, views: Tensor, labels: Tensor) -> list[list[float]]:
    """q of each anchor by loops: weights as in the plain formulas, normalised."""
    ids = torch.arange(len(z))
    keys = hn.Keys(z, ids, labels)
    rows = brute_force.score(keys, views, [keys], TEMPERATURE)
    out = []
    for row in brute_force.weights(hn.parse(expression), rows):
        plain = [0.0 if w is None else brute_force.number(w) for w in row]
        total = sum(plain)
        out.append([w / total if total else 0.0 for w in plain])
    return out


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def loop(q: list[list[float]], z: Tensor, views: Tensor, labels: Tensor, near: float) -> dict[str, float]:
    """Every figure of a row by plain loops."""
    s, own = (z @ z.T).tolist(), (views @ z.T).tolist()
    some = [i for i in range(len(q)) if sum(q[i]) > 0]
    n, pairs = len(z), len(some) * (len(some) - 1)
    collisions = sum(q[i][k] * q[j][k] for i in some for j in some if i != j for k in range(n))
    mass = [sum(q[i][k] for i in some) for k in range(n)]
    top = sorted(mass, reverse=True)[: math.ceil(0.01 * n)]
    is_near = [[s[i][k] >= near or own[i][k] >= near for k in range(n)] for i in range(n)]
    return {
        "similarity": mean([sum(q[i][k] * s[i][k] for k in range(n)) for i in some]),
        "false_negatives": mean([sum(q[i][k] for k in range(n) if labels[k] == labels[i]) for i in some]),
        "effective_number": mean([1 / sum(w * w for w in q[i]) for i in some]),
        "near_duplicates": mean([sum(q[i][k] for k in range(n) if is_near[i][k]) for i in some]),
        "hubness": n * collisions / pairs,
        "hub_share": sum(top) / sum(mass),
        "coverage": mean([float(any(q[i][k] >= EVEN_SHARE / (n - 1) for i in some)) for k in range(n)]),
        "without_negatives": 1 - len(some) / n,
    }


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_figure_is_that_of_a_plain_loop(expression: str) -> None:
    z, views, labels = make_data()
    row = audit(
        z, expression, positives=views, labels=labels, temperature=TEMPERATURE, near_duplicate=0.8, frontier=False
    ).rows[0]
    q = q_of(expression, z, views, labels)
    for name, value in loop(q, z, views, labels, 0.8).items():
        assert getattr(row, name) == pytest.approx(value, abs=1e-9), name
    mass = [sum(each[k] for each in q) for k in range(N)]
    assert [hub.share * sum(mass) for hub in row.hubs] == pytest.approx(sorted(mass, reverse=True)[: len(row.hubs)])
    assert row.hubs[0].times == pytest.approx(max(mass) / sum(mass) * N)
    assert mass[row.hubs[0].id] == pytest.approx(max(mass))
    assert row.false_negatives_error == row.similarity_error == 0.0  # every anchor was looked at


@pytest.mark.parametrize("expression", ["Uniform()", "Tilt(2.0)", "Rank(0, 5)"])
def test_attraction_temperature_and_clamping_are_those_of_diagnose(expression: str) -> None:
    z, views, labels = make_data()
    found = audit(z, expression, positives=views, labels=labels, temperature=0.4, tau_plus=0.1, frontier=False)
    ids = torch.arange(N)
    scores = hn.score(hn.Keys(z, ids, labels), views, hn.Keys(z, ids, labels), 0.4)
    wanted = hn.diagnose(scores, hn.parse(expression).log_weights(scores), tau_plus=0.1).summary()
    row = found.rows[0]
    assert found.num_diagnosed == N
    for name in ("attracted", "effective_temperature", "clamped", "effective_number"):
        assert getattr(row, name) == pytest.approx(wanted[name], abs=1e-9), name
    assert found.random_similarity == pytest.approx(wanted["uniform_hardness"], abs=1e-9)
    assert row.false_negatives == pytest.approx(wanted["false_negatives"], abs=1e-9)


def test_chunks_and_float32_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    z, views, labels = make_data()
    whole = audit(z, positives=views, labels=labels, temperature=TEMPERATURE, tau_plus=0.05)
    monkeypatch.setattr("hardneg.auditing.sampling._chunk", 3 * N)
    parts = audit(z, positives=views, labels=labels, temperature=TEMPERATURE, tau_plus=0.05)
    assert len(whole.rows) == len(parts.rows) > 15
    for one, other in zip(whole.rows, parts.rows, strict=True):
        assert _numbers(one) == pytest.approx(_numbers(other), abs=1e-9, nan_ok=True)
    monkeypatch.undo()
    loss = {"temperature": TEMPERATURE, "tau_plus": 0.05}
    narrow = audit(z.float(), "Tilt(2.0)", positives=views.float(), labels=labels, **loss)
    assert _numbers(narrow.row("Tilt(2.0)")) == pytest.approx(_numbers(whole.row("Tilt(2.0)")), abs=1e-4, nan_ok=True)


def test_a_tilt_over_many_candidates_loses_nothing_in_float32() -> None:
    """Many small weights beside a few large ones: one long sum of float32 would drop them."""
    z = torch.randn(80_000, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.3
    exact, narrow = (
        audit(each, "Tilt(5.0)", temperature=0.25, num_anchors=8, frontier=False).rows[0] for each in (z, z.float())
    )
    assert narrow.similarity == pytest.approx(exact.similarity, abs=3e-6)


def _numbers(row: Any) -> dict[str, float]:
    return {name: value for name, value in vars(row).items() if isinstance(value, float)}


def test_judgements_tell_the_false_negatives() -> None:
    """The first judged document is the positive; the others are what a rule may walk into."""
    queries, corpus = make_unit_vectors(6, D, seed=1), make_unit_vectors(30, D, seed=2)
    judged = [[3, 4, 5], [7], [], [1, 2], [9, 0], [11, 12, 13, 14]]
    ids = torch.arange(100, 130)
    found = audit(
        queries,
        ["Rank(0, 15)", "Rank(0, 1)"],
        corpus=hn.Keys(corpus, ids),
        judgements=[[100 + row for row in own] for own in judged],
        frontier=False,
    )
    known = [i for i, own in enumerate(judged) if own]
    false = []
    for i in known:
        s = (corpus @ queries[i]).tolist()
        others = sorted((k for k in range(30) if k != judged[i][0]), key=lambda k: -s[k])
        false.append(sum(k in judged[i] for k in others[:15]) / 15)
    assert found.num_anchors == len(known) == 5
    row, nearest = found.row("Rank(stop=15)"), found.row("Rank(stop=1)")
    assert row.false_negatives == row.judged_share == pytest.approx(mean(false))
    assert not row.is_rate
    assert not row.on_frontier
    assert nearest.judged_share == 0
    assert math.isnan(nearest.false_negatives)  # no negative of this rule is judged: nothing is known of them
    assert found.judges == ("judgements",)
    assert row.hubs[0].id >= 100
    assert "Queries without a judgement, which are left out: 1." in " ".join(found.notes)


def test_groups_and_labels_are_both_judges_and_what_is_missing_is_neither() -> None:
    z = make_unit_vectors(6, D)
    labels = ["a", "a", None, None, "b", "b"]
    groups = [0, 1, 2, 3, 0, 4]
    found = audit(z, "Uniform()", labels=labels, groups=groups, frontier=False)
    # Anchor 0: 1 (label), 4 (group) of 5; 1: 0; 2, 3: none known by group; 4: 5 (label), 0 (group); 5: 4.
    assert found.rows[0].false_negatives == pytest.approx((2 + 1 + 0 + 0 + 2 + 1) / 6 / 5)
    assert found.judges == ("labels", "groups")
    only = audit(z, "Uniform()", labels=labels, frontier=False)
    assert only.rows[0].false_negatives == pytest.approx(1 / 5)  # over the four that have a label
    assert "2 anchors have no label" in " ".join(only.notes)
    assert number_tags("labels", torch.tensor([3, -1, 3, -1]), 4).tolist() == [3, -3, 3, -5]


def test_labels_of_queries_and_corpus_are_the_same_labels() -> None:
    """Numbers are taken as they are; what is below 0 is like nothing, on either side."""
    queries, corpus = make_unit_vectors(3, D, seed=1), make_unit_vectors(4, D, seed=2)
    keys = hn.Keys(corpus, labels=torch.tensor([7, 5, -1, 7]))
    found = audit(queries, ["Uniform()", "OtherLabel()"], corpus=keys, labels=torch.tensor([7, 5, -1]), frontier=False)
    assert found.row("Uniform()").false_negatives == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert found.row("OtherLabel()").effective_number == pytest.approx((2 + 3 + 4) / 3)
    assert audit(queries, "Uniform()", corpus=keys, labels=[7, 5, None], frontier=False).rows == found.rows[:1]
    with pytest.raises(ArgumentError) as error:
        audit(queries, "Uniform()", corpus=keys, labels=["a", "b", "c"], frontier=False)
    assert error.value.who == "audit"
    assert "integers as labels" in error.value.what
    several = hn.Keys(corpus, clusters=torch.tensor([[1, 2], [3, 4], [5, 2], [-1, -1]]))
    anchors = hn.Keys(queries, clusters=torch.tensor([[9, 2], [-1, -1], [3, 8]]))
    by_group = audit(anchors, "Uniform()", corpus=several, frontier=False)
    assert by_group.rows[0].false_negatives == pytest.approx((2 / 4 + 1 / 4) / 2)


def test_same_label_stands_in_for_the_positive() -> None:
    z, _, labels = make_data()
    found = audit(z, "BelowPositive(relative=0.1)", labels=labels, positives="label", frontier=False)
    again = audit(z, "BelowPositive(relative=0.1)", labels=labels, positives="label", frontier=False)
    assert found == again
    same = [float(z[i] @ z[k]) for i in range(N) for k in range(N) if i != k and labels[i] == labels[k]]
    assert min(same) < found.positive_similarity < max(same)
    alone = torch.tensor([0, 1, 1, 1])
    few = audit(make_unit_vectors(4, D), "Uniform()", labels=alone, positives="label", frontier=False, tau_plus=0.2)
    assert not math.isnan(few.rows[0].clamped)  # of three pairs: the anchor alone in its class has none


def test_a_sample_agrees_with_all_within_its_stated_error() -> None:
    """Twelve draws of anchors: the mean error is that of the standard errors, and none is far outside."""
    z, views, labels = make_data(400, seed=5)
    exact = audit(z, positives=views, labels=labels, num_anchors=400)
    assert exact.exact
    for name in ("Uniform()", "Tilt(5.0)", "Rank(stop=10)", "BelowPositive(relative=0.1) * Rank(stop=10)"):
        off, hubness = [], []
        for seed in range(12):
            part = audit(z, name, positives=views, labels=labels, num_anchors=80, seed=seed, frontier=False)
            row = part.rows[0]
            assert not part.exact
            assert part.num_anchors == 80
            off.append((row.false_negatives - exact.row(name).false_negatives) / row.false_negatives_error)
            hubness.append(row.hubness)
            assert row.coverage <= exact.row(name).coverage
        assert max(abs(each) for each in off) < 4
        assert 0.3 < math.sqrt(mean([each**2 for each in off])) < 1.8  # neither boastful nor timid
        assert mean(hubness) == pytest.approx(exact.row(name).hubness, rel=0.05)  # unbiased


def test_the_frontier_is_what_no_other_rule_beats() -> None:
    z, views, labels = make_data(120)
    found = audit(z, "OtherLabel() * Rank(0, 10)", positives=views, labels=labels)
    own = found.row("OtherLabel() * Rank(stop=10)")
    assert own.false_negatives == 0
    assert own.reads_judge
    assert not own.on_frontier
    rows = [row for row in found.rows if not row.reads_judge]
    for row in rows:
        better = [
            other
            for other in rows
            if other.similarity >= row.similarity
            and other.false_negatives <= row.false_negatives
            and (other.similarity, other.false_negatives) != (row.similarity, row.false_negatives)
        ]
        alike = [o for o in rows if (o.similarity, o.false_negatives) == (row.similarity, row.false_negatives)]
        assert row.on_frontier == (not better and alike[0] is row)
    front = found.frontier()
    assert [row.similarity for row in front] == sorted(row.similarity for row in front)
    assert len(front) > 3
    assert {"Uniform()", "Tilt(1.0)", "Rank(stop=10)", "Ring(outer=0.1)"} <= {row.expression for row in found.rows}
    assert any(row.expression.startswith("Threshold") for row in rows)
    assert any(row.expression.startswith("BelowPositive") for row in rows)


def test_without_judges_and_positives_it_says_what_it_does_not_know() -> None:
    z, _, _ = make_data()
    found = audit(z)
    assert all(math.isnan(row.false_negatives) and math.isnan(row.clamped) for row in found.rows)
    assert not found.frontier()
    assert not any(row.expression.startswith("BelowPositive") for row in found.rows)
    assert len(found.notes) == 2
    loss = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert loss["rows"][0]["false_negatives"] is None
    assert loss["rows"][0]["similarity"] == found.rows[0].similarity


def test_a_batch_takes_milliseconds() -> None:
    z, views, labels = (each[:256] for each in make_data(256))
    audit(z.float(), "Tilt(1.0)", positives=views.float(), labels=labels, frontier=False)
    took = []
    for _ in range(5):
        begun = time.process_time()
        audit(z.float(), "Tilt(1.0)", positives=views.float(), labels=labels, frontier=False)
        took.append(time.process_time() - begun)
    assert min(took) < 0.1


PEAK = """
import resource, torch
import hardneg as hn

def peak(num_anchors):
    z = torch.randn(12_000, 8, generator=torch.Generator().manual_seed(0))
    hn.audit(z, "Tilt(1.0)", labels=torch.arange(12_000) % 10, num_anchors=num_anchors, frontier=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

torch.set_num_threads(1)
print(peak(128), peak(2_048))
"""


def test_memory_does_not_grow_with_the_anchors() -> None:
    """2,048 anchors against 12,000 candidates: their scores alone would take 94 MiB."""
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=300)
    few, many = (int(each) / 1024 for each in out.stdout.split())
    assert few > 50  # MiB: the figure is one of memory
    assert many - few < 30


def test_mined_rows_are_one_more_rule() -> None:
    queries, corpus = make_unit_vectors(5, D, seed=1), make_unit_vectors(25, D, seed=2)
    positives = [[0], [1], [2], [3], [4]]
    mined = hn.mine(hn.Keys(queries), hn.Keys(corpus), positives, "Uniform()", k=3)
    judged = [[i, (i * 5 + 7) % 25] for i in range(5)]
    found = audit(queries, corpus=corpus, positives=positives, held_out_judgements=judged, mined=mined)
    row = found.row("mined")
    counted = [mean([float(k in judged[i]) for k in mined.rows[i].tolist()]) for i in range(5)]
    assert row.false_negatives == pytest.approx(mean(counted))
    assert row.similarity == pytest.approx(float(mined.scores.mean()), abs=1e-6)
    assert row.effective_number == pytest.approx(3)
    assert found.mined is not None
    assert (found.mined.queries, found.mined.negatives, found.mined.short) == (5, 15, 0)
    rank = found.rows[[row.expression for row in found.rows].index("Rank(stop=10)")]
    assert row.similarity > rank.similarity  # the three nearest are nearer than the ten nearest


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "needs embeddings"),
    ({"embeddings": torch.ones(4)}, r"floating point vectors \[n, d\]"),
    ({"embeddings": [["a"]]}, "lists of unequal length or other values"),
    ({"embeddings": torch.zeros(4, 3)}, "audit needs nonzero vectors for the cosine, got 4 zero vectors"),
    ({"embeddings": torch.tensor([[1.0, float("nan")], [0.0, 1.0]])}, "audit needs finite vectors, got NaN"),
    ({"embeddings": torch.ones(0, 3)}, "at least one row"),
    ({"labels": torch.arange(3)}, "for each of 4 rows, got 3 labels"),
    ({"labels": torch.zeros(4, 2, dtype=torch.long)}, "one label for each row"),
    ({"groups": "abcd"}, "one group for each row"),
    ({"positives": torch.rand(3, 3)}, "second view"),
    ({"positives": "labels"}, 'ids or "label"'),
    ({"positives": "label"}, "needs labels of anchors and candidates"),
    ({"positives": torch.tensor([0, 1, 2, 9])}, "audit needs positives that are in the corpus, got id 9"),
    ({"negatives": "BelowPositive(0.1)"}, "needs positives, got embeddings"),
    ({"negatives": "OtherLabel()"}, "needs labels"),
    ({"negatives": "SameCluster()"}, "needs groups"),
    (
        {"negatives": 'BelowPositive(0.1, by="guide")', "positives": torch.rand(4, 3)},
        "need no guide",
    ),
    ({"negatives": "Tilt(linear(1.0, 0.0))"}, "got a schedule"),
    ({"negatives": "ClippedTilt(1.0)"}, "do not depend on a batch"),
    ({"negatives": [3]}, "text or distributions"),
    ({"frontier": False}, "at least one expression"),
    ({"temperature": 0.0}, "temperature above 0"),
    ({"tau_plus": 1.0}, "tau_plus"),
    ({"num_anchors": 0}, "num_anchors of 1 or more"),
    ({"near_duplicate": 2.0}, "near_duplicate"),
    ({"wanted_false_negatives": 0.02}, "needs labels, groups or held-out judgements"),
    ({"corpus": torch.rand(5, 4)}, "dimension, got 3 and 4"),
    ({"corpus": torch.rand(5, 3), "judgements": [[], [], [], []]}, "at least one judged document"),
    ({"mined": torch.tensor([[9], [1], [2], [3]])}, "mined ids that are in the corpus"),
    ({"mined": torch.tensor([[1]])}, "mined negatives of 4 anchors"),
    ({"mined": "nowhere.parquet", "embeddings": None}, "exists"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_wrong_input_is_an_error(arguments: dict[str, Any], message: str) -> None:
    given = {"embeddings": torch.rand(4, 3)} | arguments if arguments else {}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        audit(**given)


def test_extremes() -> None:
    with pytest.raises(ArgumentError) as one:
        audit(torch.ones(1, 3), "Uniform()", labels=[0], frontier=False)
    assert (one.value.what, one.value.got) == ("at least two embeddings, or a corpus", "one embedding and no corpus")
    alone = audit(torch.ones(1, 3), "Uniform()", corpus=hn.Keys(torch.ones(1, 3)), positives=[[0]], frontier=False)
    assert alone.rows[0].without_negatives == 1
    assert math.isnan(alone.rows[0].similarity)
    two = audit(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), labels=[0, 0], wanted_false_negatives=0.5)
    assert two.row("Uniform()").false_negatives == 1
    assert two.row("Uniform()").near_duplicates == 1
    assert all(one.expression is None for one in two.suggestions)
    text = two.table()
    assert "100.00 %" in text
    keys = hn.Keys(make_unit_vectors(6, D), ids=torch.tensor([1, 1, 2, 2, 3, 3]))
    assert audit(keys, "Uniform()", frontier=False).rows[0].effective_number == pytest.approx(4)  # not oneself


@pytest.mark.parametrize("unit", [True, False])
def test_copies_are_near_duplicates_at_a_cosine_of_1(unit: bool) -> None:
    """The cosine of a vector with its copy is 1 but for rounding, in float32 often below."""
    z = torch.randn(150, 37, generator=torch.Generator().manual_seed(0))
    assert not bool(((normalize(z, dim=-1) * normalize(z, dim=-1)).sum(-1) >= 1).all())  # the trap is there
    found = audit(
        torch.cat([z, z]),
        "Rank(0, 1)",
        near_duplicate=1.0,
        frontier=False,
        similarity="cosine" if unit else "dot",
        num_anchors=300,
    )
    nearest = (torch.cat([z, z]) @ torch.cat([z, z]).T).fill_diagonal_(-math.inf).argmax(1)
    copies = float((nearest == (torch.arange(300) + 150) % 300).double().mean())
    assert found.rows[0].near_duplicates == pytest.approx(1.0 if unit else copies)
    twins = audit(z, "Rank(0, 1)", corpus=torch.cat([z, z]), positives=torch.arange(150), near_duplicate=1.0)
    assert twins.row("Rank(stop=1)").near_duplicates == 1  # copies of the positive


def test_two_sets_of_judged_pairs_are_two_rules() -> None:
    """Their texts say how many pairs they know, which is the same; what they do is not."""
    z = make_unit_vectors(6, D)
    keys = hn.Keys(z, torch.arange(6))
    everyone = torch.arange(6)
    one, other = (hn.Known(hn.negatives.KnownPairs(everyone, (everyone + step) % 6)) for step in (1, 2))
    found = audit(keys, [one, other, one, "Uniform()", hn.Uniform()], labels=everyone // 2, frontier=False)
    assert [row.expression for row in found.rows] == [repr(one), f"{other!r} (2)", "Uniform()"]
    # Without their next ones, anchors of even number have no mate of their own label among the four that are left.
    assert [row.false_negatives for row in found.rows] == pytest.approx([0.5 / 4, 1 / 4, 1 / 5])


def test_labels_may_be_numbers_of_any_kind() -> None:
    z = make_unit_vectors(4, D)
    wanted = audit(z, "Uniform()", labels=[0, 0, 1, 1], frontier=False).rows
    for labels in (list(np.array([0, 0, 1, 1])), list(torch.tensor([5, 5, 2, 2])), np.array(["a", "a", "b", "b"])):
        assert audit(z, "Uniform()", labels=labels, frontier=False).rows == wanted
    with raises(ArgumentError, who="audit", got="[0]"):
        audit(z, "Uniform()", labels=[[0], [0], [1], [1]], frontier=False)


def test_arrays_and_text_ids_are_as_good_as_tensors() -> None:
    queries, corpus = make_unit_vectors(6, 8), make_unit_vectors(40, 8, seed=1)
    judged = [[row, row + 7] for row in range(5)] + [[]]
    names = [f"d{row}" for row in range(40)]
    mined = hn.mine(queries, corpus, judged, "Rank(0, 5)", k=3)
    plain = audit(queries, "Tilt(1.0)", corpus=corpus, judgements=judged, mined=mined, frontier=False)
    texts = [[names[row] for row in each] for each in judged]
    named = hn.Keys(corpus, ids=names)
    assert plain.mined is not None
    assert plain.mined.queries_without == 0
    for given, known in ((corpus.numpy(), judged), (named, texts)):
        chosen = mined.ids.numpy() if known is judged else hn.mine(queries, named, texts, "Rank(0, 5)", k=3)
        options = {"corpus": given, "judgements": known, "mined": chosen, "frontier": False}
        found = audit(queries.numpy(), "Tilt(1.0)", **options)
        assert [each.false_negatives for each in found.rows] == [each.false_negatives for each in plain.rows]
        assert found.mined is not None
        first = plain.mined.hubs[0].id
        assert found.mined.hubs[0].id == (first if known is judged else names[first])
    views = audit(queries.numpy(), "BelowPositive(0.1)", positives=queries.flip(0).numpy(), frontier=False)
    same = audit(queries, "BelowPositive(0.1)", positives=queries.flip(0), frontier=False)
    assert views.rows[0].similarity == same.rows[0].similarity


def test_a_corpus_that_is_the_embeddings_has_no_row_against_itself() -> None:
    z, labels = make_unit_vectors(20, 8), torch.arange(20) % 4
    alone = audit(z, "Tilt(1.0)", labels=labels, frontier=False)
    beside = audit(hn.Keys(z, labels=labels), "Tilt(1.0)", corpus=hn.Keys(z, labels=labels), frontier=False)
    assert beside.rows == alone.rows


def test_dot_products_as_they_are() -> None:
    z = torch.tensor([[2.0, 0.0], [4.0, 0.0], [0.0, 3.0]])
    found = audit(z, "Uniform()", similarity="dot", frontier=False, near_duplicate=0.99)
    assert found.rows[0].similarity == pytest.approx((4 + 4 + 0) / 3)
    assert found.rows[0].near_duplicates == pytest.approx((0.5 + 0.5 + 0) / 3)


def test_is_public() -> None:
    assert hn.audit is audit
    assert hn.auditing.Audit is Audit
