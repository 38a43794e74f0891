"""Every field of a diagnosis against a loop."""

import math

import pytest
import torch

import hardneg as hn
import support.brute_force as loops

NEGATIVES = [
    "Uniform()",
    "Tilt(1.5)",
    "Tilt(2.0, detach=True)",
    "Threshold(-0.1) * Tilt(0.7)",
    "Ring(0.2, 0.8)",
    "ClippedTilt(1.0)",
    "Tilt(1.0) * Tilt(2.0, detach=True)",
    'Hardening("sigmoid", 2.0)',
]
CASES = ["two views, ids and labels", "several positives", "positives of the label", "cross views"]


def by_hand(q, case, tau_plus, with_graph):
    """One dictionary per anchor."""
    table = loops.weights(q, case.rows)
    repulsion = repulsion_by_autograd(case.rows, table) if with_graph else repulsion_by_slope(case.rows, table)
    lines = zip(case.rows, table, repulsion, strict=True)
    return [of_row(row, line, forces, tau_plus) for row, line, forces in lines]


def repulsion_by_autograd(rows, table):
    """d (sum of all log E) / d s_ij: a clipped tilt lets the closest candidate of one row act on the others."""
    total = torch.zeros((), dtype=torch.float64)
    for row, line in zip(rows, table, strict=True):
        support = [j for j, w in enumerate(line) if w is not None]
        if support:
            mass = sum(line[j] for j in support)
            total = total + (sum(line[j] * row.scores[j].exp() for j in support) / mass).log()
    return [
        [g.item() for g in torch.autograd.grad(total, row.scores, retain_graph=True, materialize_grads=True)]
        for row in rows
    ]


def repulsion_by_slope(rows, table):
    """p + slope (p - q), p being q times e^s."""
    forces = []
    for row, line in zip(rows, table, strict=True):
        w = {j: loops.number(w) for j, w in enumerate(line) if w is not None}
        p = {j: w[j] * math.exp(loops.number(row.scores[j])) for j in w}
        slope = slope_of(row, w) if w else 0.0
        forces.append({j: p[j] / sum(p.values()) * (1 + slope) - slope * w[j] / sum(w.values()) for j in w})
    return forces


def slope_of(row, w):
    """Least squares of log w over s on the support."""
    s = {j: loops.number(row.scores[j]) for j in w}
    mean_s = sum(s.values()) / len(w)
    mean_w = sum(math.log(w[j]) for j in w) / len(w)
    variance = sum((s[j] - mean_s) ** 2 for j in w)
    if variance < 1e-12:
        return 0.0
    return sum((s[j] - mean_s) * (math.log(w[j]) - mean_w) for j in w) / variance


def of_row(row, line, repulsion, tau_plus):
    support = [j for j, w in enumerate(line) if w is not None]
    valid = [j for j, is_valid in enumerate(row.valid) if is_valid]
    temperature = loops.number(row.temperature)
    w = {j: loops.number(line[j]) for j in support}
    mass = sum(w.values())
    similarity = [loops.number(s) * temperature for s in row.scores]
    real = [a is not None for a in row.positives]
    known = row.anchor.label is not None
    if not support:
        answers = dict.fromkeys(
            ("hardness", "effective_number", "false_negatives", "attracted", "effective_temperature"), math.nan
        )
        clamped = [False] * len(real)
    else:
        mean = sum(w[j] * math.exp(loops.number(row.scores[j])) for j in support) / mass
        answers = {
            "hardness": sum(w[j] * similarity[j] for j in support) / mass,
            "effective_number": mass**2 / sum(x**2 for x in w.values()),
            "false_negatives": sum(w[j] for j in support if row.candidates[j].label == row.anchor.label) / mass
            if known
            else math.nan,
            "attracted": sum(repulsion[j] < 0 for j in support) / len(support),
            "effective_temperature": temperature / (1 + slope_of(row, w)),
        }
        clamped = [
            a is not None
            and tau_plus > 0
            and (mean - tau_plus * math.exp(loops.number(a))) / (1 - tau_plus) <= math.exp(-1 / temperature)
            for a in row.positives
        ]
    return {
        **answers,
        "uniform_hardness": sum(similarity[j] for j in valid) / len(valid) if valid else math.nan,
        "clamped": clamped,
        "real_pairs": [is_real and bool(support) for is_real in real],
        "empty": not support,
        "no_positive": not any(real),
        "no_direction": not any(similarity) and not any(loops.number(a) for a in row.positives if a is not None),
    }


@pytest.mark.parametrize("with_graph", [True, False], ids=["graph", "no graph"])
@pytest.mark.parametrize("name", CASES)
def test_every_field(name, with_graph):
    for text in NEGATIVES:
        for tau_plus in (0.0, 0.4):
            q, case = hn.parse(text), loops.CASES[name]()
            if with_graph:
                diagnosis = hn.diagnose(case.scores, q.log_weights(case.scores), tau_plus=tau_plus)
            else:
                with torch.no_grad():
                    diagnosis = hn.diagnose(case.scores, q.log_weights(case.scores), tau_plus=tau_plus)
            expected = by_hand(q, case, tau_plus, with_graph)
            for field, ours in vars(diagnosis).items():
                if field == "counts":
                    continue  # below
                hand = torch.tensor([row[field] for row in expected], dtype=torch.float64)
                torch.testing.assert_close(
                    ours.double(), hand, rtol=1e-6, atol=1e-9, equal_nan=True, msg=f"{text} {field}"
                )
                assert not ours.requires_grad


@pytest.mark.parametrize("name", CASES)
def test_counts_by_similarity(name):
    """Positives, negatives of the support and those of the anchor's label, in ten bins over [-1, 1]."""
    case = loops.CASES[name]()
    for q in (hn.Uniform(), hn.Ring(0.2, 0.8)):
        log_w = q.log_weights(case.scores)
        labelled = case.scores.anchor_tags.labels is not None
        wanted = torch.zeros(len(log_w), 3 if labelled else 2, 10, dtype=torch.float64)
        similarity = case.scores.candidates * case.scores.temperature
        positive = case.scores.positives * case.scores.temperature
        for i in range(len(log_w)):
            for j in range(positive.shape[1]):
                wanted[i, 0, min(9, max(0, int((positive[i, j] + 1) * 5)))] += case.scores.positive_valid[i, j]
            for j in range(log_w.shape[1]):
                if log_w[i, j] != hn.NEVER:
                    place = min(9, max(0, int((similarity[i, j] + 1) * 5)))
                    wanted[i, 1, place] += 1
                    if labelled and case.scores.same_label("the test")[i, j]:
                        wanted[i, 2, place] += 1
        found = hn.diagnose(case.scores, log_w, bins=10)
        assert torch.equal(found.counts.double(), wanted)
        names = ["positives", "negatives", "false_negatives"]
        assert found.similarities() == dict(zip(names, wanted.sum(0).long().tolist(), strict=False))


def test_a_clipped_tilt_is_a_tilt():
    case = loops.CASES["cross views"]()
    beta = 2.0 / case.scores.candidates[case.scores.valid].abs().max().item()
    log_w = hn.negatives.ClippedTilt(1.0).log_weights(case.scores)
    temperature = hn.diagnose(case.scores, log_w).effective_temperature
    torch.testing.assert_close(temperature, torch.full_like(temperature, 0.3 / (1 + beta)))


def test_a_graph_on_the_leaves_is_not_needed():
    z = torch.randn(5, 3, dtype=torch.float64)
    scores = hn.two_views(z, z + 0.1, 0.5)
    with_slope = hn.diagnose(scores, hn.Tilt(2.0).log_weights(scores))
    leaf = hn.two_views(z.clone().requires_grad_(), z + 0.1, 0.5)
    with_graph = hn.diagnose(leaf, hn.Tilt(2.0).log_weights(leaf))
    for field, value in vars(with_slope).items():
        torch.testing.assert_close(value, getattr(with_graph, field), equal_nan=True)
    assert with_slope.attracted.mean() > 0.1


def test_diagnosing_leaves_the_graph_for_the_backward_pass():
    z = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    scores = hn.two_views(z, z + 0.1, 0.5)
    log_w = hn.Tilt(2.0).log_weights(scores)
    loss = hn.info_nce(scores, log_w).mean()
    (expected,) = torch.autograd.grad(loss, z, retain_graph=True)
    hn.diagnose(scores, log_w)
    assert z.grad is None
    loss.backward()
    torch.testing.assert_close(z.grad, expected)


def test_diagnosing_after_the_backward_pass():
    z = torch.randn(5, 3, requires_grad=True)
    scores = hn.two_views(z, z + 0.1, 0.5)
    log_w = hn.Tilt(2.0).log_weights(scores)
    hn.info_nce(scores, log_w).mean().backward()
    assert torch.isfinite(hn.diagnose(scores, log_w).hardness).all()


@pytest.mark.parametrize(("temperature", "beta"), [(0.5, 1.0), (0.1, 5.0)])
def test_effective_temperature_of_a_tilt_in_float32(temperature, beta):
    assert_effective_temperature(temperature, beta)


@pytest.mark.parametrize(("temperature", "beta"), [(0.05, 5.0), (0.1, 20.0), (0.05, 50.0)])
def test_effective_temperature_of_a_strong_tilt_in_float32(temperature, beta):
    assert_effective_temperature(temperature, beta)


def assert_effective_temperature(temperature, beta):
    z1, z2 = torch.nn.functional.normalize(torch.randn(2, 64, 32), dim=-1)
    scores = hn.two_views(z1, z2, temperature)
    found = hn.diagnose(scores, hn.Tilt(beta).log_weights(scores)).effective_temperature
    torch.testing.assert_close(found, torch.full_like(found, temperature / (1 + beta)), rtol=1e-2, atol=0.0)


def test_summary_leaves_out_what_is_not_defined():
    case = loops.CASES["several positives"]()
    log_w = hn.Tilt(1.0).log_weights(case.scores).clone()
    log_w[1:] = hn.NEVER
    diagnosis = hn.diagnose(case.scores, log_w)
    summary = diagnosis.summary()
    assert summary["empty"] == pytest.approx(4 / 5)
    assert summary["no_positive"] == pytest.approx(1 / 5)
    assert summary["hardness"] == pytest.approx(diagnosis.hardness[0].item())
    assert summary["uniform_hardness"] == pytest.approx(diagnosis.uniform_hardness.mean().item())
    assert set(summary) == set(vars(diagnosis)) - {"counts"}


def test_false_negatives_need_labels_of_both_sides():
    z = torch.randn(4, 3)
    for scores in (hn.two_views(z, z, 0.5), hn.two_views(z, z, 0.5, labels=torch.arange(4), extra=torch.randn(2, 3))):
        diagnosis = hn.diagnose(scores, hn.Uniform().log_weights(scores))
        assert diagnosis.false_negatives.isnan().all()
        assert math.isnan(diagnosis.summary()["false_negatives"])


def test_no_temperature_has_the_effect_of_weights_that_fall_faster_than_scores_rise() -> None:
    scores = hn.two_views(*torch.nn.functional.normalize(torch.randn(2, 8, 4), dim=-1), temperature=0.5)
    for beta, expected in ((-0.5, 1.0), (-1.5, None), (-3.0, None)):
        log_w = beta * scores.candidates + hn.Uniform().log_weights(scores)
        found = hn.diagnose(scores, log_w).effective_temperature
        if expected is None:
            assert found.isnan().all()
        else:
            torch.testing.assert_close(found, torch.full_like(found, expected))
