"""Audits of planned batches against loops over the pairs, from Python and from the command line."""

import json
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize
from typer.testing import CliRunner

import hardneg as hn
from hardneg.auditing import audit_batches
from hardneg.batching.plan import Plan
from hardneg.cli.app import app
from hardneg.core.errors import ArgumentError, UnknownName


def data(n=40, d=6, classes=4, noise=0.5):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % classes
    centres = torch.randn(classes, d, generator=generator)
    z = normalize(centres[labels] + noise * torch.randn(n, d, generator=generator), dim=-1)
    return z, normalize(z + 0.2 * torch.randn(n, d, generator=generator), dim=-1), labels


def test_the_figures_are_those_of_a_loop():
    z, views, labels = data()
    labels[3] = -1  # unknown
    groups = torch.arange(40) // 10
    plan = Plan.from_batches([[0, 1, 2, 3, 4], [5, 9, 13, 17], [8, 12, 3]], 40, 5)
    found = audit_batches(z, plan, labels=labels, groups=groups, positives=views)
    false, negatives, positives = [], [], []
    for batch in plan:
        positives += [float(z[i] @ views[i]) for i in batch]
        for i, j in combinations(batch.tolist(), 2):
            same = (labels[i] == labels[j] and labels[i] >= 0) or groups[i] == groups[j]
            (false if same else negatives).append(float(z[i] @ z[j]))
    for counted, values in (
        (found.similarities.false, false),
        (found.similarities.negatives, negatives),
        (found.similarities.positives, positives),
    ):
        assert sum(counted.counts) == len(values)
        assert counted.mean == pytest.approx(sum(values) / len(values), abs=1e-6)
        edges = found.similarities.edges
        for low, high, number in zip(edges, edges[1:], counted.counts, strict=False):
            assert abs(sum(low <= value < high for value in values) - number) <= 1  # a value on an edge
    assert found.false_negatives == pytest.approx(len(false) / (len(false) + len(negatives)))
    assert found.similarity == pytest.approx(sum(false + negatives) / len(false + negatives), abs=1e-6)
    every = [
        (labels[i] == labels[j] and labels[i] >= 0) or groups[i] == groups[j] for i, j in combinations(range(40), 2)
    ]
    assert found.uniform_false_negatives == pytest.approx(sum(map(bool, every)) / len(every))


def test_harder_planners_have_more_similar_and_more_false_pairs():
    z, _, labels = data(200, noise=1.0)
    planners = ("knn()", "proximity(num_candidates=50, num_neighbours=10)", "uniform()")
    knn, walks, even = (audit_batches(z, text, 20, labels=labels) for text in planners)
    assert knn.similarity > walks.similarity > even.similarity
    assert knn.false_negatives > walks.false_negatives > even.false_negatives
    assert even.false_negatives == pytest.approx(even.uniform_false_negatives, abs=0.03)
    assert knn.coverage == walks.coverage == even.coverage == 1.0
    assert audit_batches(z, planners[1], 20, seed=3) == audit_batches(z, planners[1], 20, seed=3)


def test_a_schedule_is_that_of_the_epoch():
    z, _, _ = data(200, noise=1.0)
    text = "proximity(num_candidates=50, num_neighbours=10, restart=linear(0.9, 0.01))"
    first, last = (audit_batches(z, text, 20, epoch=epoch, epochs=10) for epoch in (0, 9))
    assert first.similarity > last.similarity


def test_without_labels_all_pairs_are_negatives():
    z, _, _ = data()
    found = audit_batches(z, "uniform()", 10)
    assert math.isnan(found.false_negatives)
    assert found.similarities.false is None
    assert found.similarities.positives is None
    assert sum(found.similarities.negatives.counts) == 4 * 45


def test_as_part_of_an_audit():
    z, views, labels = data()
    audited = hn.audit(
        z,
        labels=labels,
        positives=views,
        batches=["knn()", "uniform()"],
        batch_size=8,
        frontier=False,
        negatives="Uniform()",
    )
    assert [one.batches for one in audited.batches] == ["knn()", "uniform()"]
    assert audited.batches[0] == audit_batches(z, "knn()", 8, labels=labels, positives=views)
    assert "Pairs that share a batch of 8" in audited.table()


def test_from_the_command_line(tmp_path: Path):
    z, views, labels = data()
    for name, array in (("z", z), ("views", views), ("labels", labels)):
        np.save(tmp_path / f"{name}.npy", array.numpy())
    result = CliRunner().invoke(
        app,
        [
            "audit", str(tmp_path / "z.npy"), "--labels", str(tmp_path / "labels.npy"), "--positives",
            str(tmp_path / "views.npy"), "--batches", "knn()", "--batches", "uniform()", "--batch-size", "8",
            "-o", str(tmp_path / "out"),
        ],
        env={"COLUMNS": "200"},
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "knn()" in result.output
    stored = json.loads((tmp_path / "out" / "audit.json").read_text())["batches"]
    expected = audit_batches(z, "knn()", 8, labels=labels, positives=views)
    assert stored[0]["false_negatives"] == pytest.approx(expected.false_negatives)
    assert stored[0]["similarities"]["positives"]["counts"] == list(expected.similarities.positives.counts)
    page = (tmp_path / "out" / "audit.html").read_text()
    assert page.count('<figure class="card"><h3><code>knn()</code>') == 2
    assert page.count('id="batches"') == 1


@pytest.mark.parametrize(
    "flags", [["--batches", "nearby()"], ["--batch-size", "1"], ["--batches", "knn()", "--batch-size", "100"]]
)
def test_wrong_flags_are_told_before_or_at_the_plan(flags, tmp_path):
    np.save(tmp_path / "z.npy", data()[0].numpy())
    result = CliRunner().invoke(app, ["audit", str(tmp_path / "z.npy"), "-o", str(tmp_path / "out"), *flags])
    assert result.exit_code == 2


def test_wrong_input():
    z, views, labels = data()
    for call in (
        lambda: audit_batches(z, "knn()", 41),
        lambda: audit_batches(z, "knn()", 1),
        lambda: audit_batches(z, "knn()", 8, labels=labels[:3]),
        lambda: audit_batches(z, "knn()", 8, positives=views[:3]),
        lambda: audit_batches(z[:1], "knn()", 8),
        lambda: audit_batches(z / 0.0, "knn()", 8),
        lambda: audit_batches(z, Plan.from_batches([[0, 1]], 2, 2)),
        lambda: hn.audit(z, corpus=views, batches="knn()", negatives="Uniform()", labels=None, positives=None),
    ):
        with pytest.raises(ArgumentError):
            call()
    with pytest.raises(UnknownName):
        audit_batches(z, "nearby()", 8)
