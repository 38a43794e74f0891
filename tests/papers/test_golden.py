"""Parity with the authors' code, value and gradient, in float64.

Not here, because they come with the pools: Ring's neighbour views, and its draws from a bank (``waits_for_pools``).
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg import papers
from hardneg.core.errors import HardnegWarning
from support.golden_inputs import Case, cases_of, families, inputs_of
from support.references import jsd_hard_of_hcl_graph, supcon_of_one_view

Inputs = dict[str, Tensor]
FAMILIES = {
    "simclr_ntxent", "dcl", "hcl", "supcon", "h_scl", "ring",
    "moco", "simcse", "graphcl", "infograph", "quick_thoughts",
}  # fmt: skip
covered: set[str] = set()


def golden(family: str, **hyper: Any) -> pytest.MarkDecorator:
    """Runs a test over the cases of a family, or over those with these hyperparameters, and notes that it does."""
    chosen = [case for case in cases_of(family) if all(case["hyper"].get(key) == hyper[key] for key in hyper)]
    assert chosen, f"no case of {family} with {hyper}"
    covered.update(case["id"] for case in chosen)
    return pytest.mark.parametrize("case", chosen, ids=[case["id"].split("/", 1)[1] for case in chosen])


def assert_agrees(case: Case, loss_of: Callable[..., Tensor], inputs: Inputs | None = None) -> None:
    """Compares the loss, and its gradient by every input that the authors' code has one for."""
    leaves = inputs_of(case) if inputs is None else inputs
    for name in case["grads"]:
        leaves[name] = leaves[name].detach().requires_grad_()
    loss = loss_of(leaves)
    # A clamped DCL or HCL loss is about 1e-10 and compared with atol only; the clamped fraction is compared as well.
    assert loss.item() == pytest.approx(case["loss"], rel=1e-7, abs=1e-9)
    loss.backward()
    for name, expected in case["grads"].items():
        gradient = leaves[name].grad
        assert gradient is not None
        assert gradient.norm().item() == pytest.approx(expected["norm"], rel=1e-7, abs=1e-9), name
        assert gradient.flatten()[:5].tolist() == pytest.approx(expected["first5"], rel=1e-7, abs=1e-9), name


def unit(x: Inputs) -> Inputs:
    """What code that normalises inside sees; without this the value agrees and the gradient does not."""
    return {name: normalize(value, dim=-1) if name in ("z1", "z2", "z3") else value for name, value in x.items()}


def views(x: Inputs) -> tuple[Tensor, Tensor]:
    return x["z1"], x["z2"]


@golden("simclr_ntxent")
def test_simclr_ntxent(case: Case) -> None:
    simclr = papers.simclr(case["hyper"]["temperature"])
    if "googleTF" in case["id"]:  # the sum of both directions
        assert_agrees(case, lambda x: 2.0 * simclr(*views(unit(x))))
    else:
        assert_agrees(case, lambda x: simclr(*views(x)))


@golden("dcl")
def test_dcl(case: Case) -> None:
    heard = check_clamped(case, papers.debiased(**case["hyper"]))
    assert heard == (case["fraction_anchors_clamped"] > 0.5)


@golden("hcl", estimator="hard")
def test_hcl(case: Case) -> None:
    hyper = {name: value for name, value in case["hyper"].items() if name != "estimator"}
    heard = check_clamped(case, papers.hcl(**hyper))
    assert heard == (case["fraction_anchors_clamped"] > 0.5)


@golden("hcl", estimator="easy")
def test_hcl_easy_is_simclr(case: Case) -> None:
    assert_agrees(case, lambda x: papers.simclr(case["hyper"]["temperature"])(*views(x)))


def check_clamped(case: Case, loss: hn.ContrastiveLoss) -> bool:
    """Parity, the clamped share, and whether the warning about it was heard."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert_agrees(case, lambda x: loss(*views(x)))
    diagnosis = loss.diagnose(*views(inputs_of(case)))
    assert diagnosis.clamped.double().mean().item() == pytest.approx(case["fraction_anchors_clamped"])
    return any(issubclass(warning.category, HardnegWarning) for warning in heard)


@pytest.mark.filterwarnings("ignore:.*have no negative")  # one case is a batch of a single class
@golden("supcon", contrast_mode="all", n_views=None)
def test_supcon(case: Case) -> None:
    hyper = case["hyper"]
    factor = hyper["temperature"] / hyper["base_temperature"]
    assert_agrees(case, lambda x: factor * papers.supcon(hyper["temperature"])(*views(x), labels=x["labels"]))


@golden("supcon", contrast_mode="one")
def test_supcon_with_anchors_of_the_first_view_only(case: Case) -> None:
    hyper = case["hyper"]

    def loss_of(x: Inputs) -> Tensor:
        scores = hn.core.scoring.same_label_positives(hn.two_views(*views(x), hyper["temperature"], labels=x["labels"]))
        losses = hn.info_nce(scores, hn.OtherLabel().log_weights(scores), positives_in_denominator="all")
        first_view = torch.cat([torch.ones(len(x["z1"])), torch.zeros(len(x["z2"]))]).double()
        return hyper["temperature"] / hyper["base_temperature"] * hn.reduce(losses, scores, weights=first_view)

    assert_agrees(case, loss_of)


@golden("supcon", n_views=1)
def test_supcon_of_one_view_is_a_reference(case: Case) -> None:
    temperature = case["hyper"]["temperature"]
    assert_agrees(case, lambda x: supcon_of_one_view(x["z1"], x["labels"], temperature))


@golden("supcon", n_views=1)
def test_supcon_of_one_view_against_the_product(case: Case) -> None:
    """The product has no one-view SupCon. Masks over a matrix say it: by the rule for anchors without a positive the
    value is the authors' own, and the pooled mean leaves those anchors out."""
    x, temperature = inputs_of(case), case["hyper"]["temperature"]
    others = ~torch.eye(4, dtype=torch.bool)
    same = (x["labels"][:, None] == x["labels"]) & others
    scores = hn.from_matrix(x["z1"] @ x["z1"].T, same, temperature, valid=others)
    losses = hn.info_nce(scores, hn.Uniform().log_weights(scores), positives_in_denominator="all")
    assert hn.diagnose(scores, hn.Uniform().log_weights(scores)).no_positive.tolist() == [True, False, False, True]
    assert hn.reduce(losses, scores).item() == pytest.approx(case["loss"], rel=1e-7)
    assert hn.reduce(losses, scores, "pairs").item() == pytest.approx(2.0 * case["loss"], rel=1e-7)
    repeated = papers.supcon(temperature)(x["z1"], x["z1"], labels=x["labels"])
    assert repeated.item() != pytest.approx(case["loss"], rel=0.1)


@golden("h_scl", estimator="easy")
def test_h_scl_easy(case: Case) -> None:
    assert_agrees(case, lambda x: papers.scl(case["hyper"]["temperature"])(*views(x), labels=x["labels"]))


@golden("h_scl", estimator="hard", positives="all_same_label")
def test_h_scl(case: Case) -> None:
    hyper = case["hyper"]
    loss = papers.hscl(hyper["temperature"], hyper["beta"], detach=not hyper["grad_through_weights"])
    assert_agrees(case, lambda x: loss(*views(x), labels=x["labels"]))


@golden("h_scl", estimator="hard", positives="other_view_only")
def test_h_scl_with_the_other_view_as_only_positive(case: Case) -> None:
    hyper = case["hyper"]
    tilted = hn.OtherLabel() * hn.Tilt(hyper["beta"], detach=not hyper["grad_through_weights"])
    loss = hn.ContrastiveLoss(tilted, hyper["temperature"], num_negatives="candidates", normalize=False)
    assert_agrees(case, lambda x: loss(*views(x), labels=x["labels"]))


@golden("h_scl", estimator="threshold")
def test_h_scl_threshold(case: Case) -> None:
    hyper = case["hyper"]
    loss = papers.hscl_threshold(hyper["temperature"], hyper["cos_threshold"])
    assert_agrees(case, lambda x: loss(*views(x), labels=x["labels"]))
    x = inputs_of(case)
    kept = loss.negatives.log_weights(loss.scores(*views(x), labels=x["labels"])) != hn.NEVER
    assert kept.sum(-1).tolist() == case["kept_negatives_per_anchor"]


@golden("ring", kind="moco")
def test_moco_of_the_ring_authors(case: Case) -> None:
    assert_agrees(case, lambda x: papers.moco(case["hyper"]["temperature"])(*views(unit(x)), pool=x["queue"]))


@golden("ring", kind="moco_ring", self_negative=True)
def test_ring(case: Case) -> None:
    hyper = case["hyper"]
    loss = papers.ring(hyper["temperature"], hyper["thres_inner"], hyper["thres_outer"], hyper["dynamic_inner"])
    assert_agrees(case, lambda x: loss(*views(unit(x)), pool=x["queue"]))
    check_size_of_ring(case)


@golden("ring", kind="moco_ring", self_negative=False)
def test_ring_without_the_positive_in_the_denominator(case: Case) -> None:
    hyper = case["hyper"]
    ring = hn.Ring(hyper["thres_inner"], hyper["thres_outer"], hyper["dynamic_inner"])
    loss = hn.ContrastiveLoss(ring, hyper["temperature"], positives_in_denominator="none")
    assert_agrees(case, lambda x: loss(x["z1"], x["z2"], pool=x["queue"]))
    check_size_of_ring(case)


def check_size_of_ring(case: Case) -> None:
    x, hyper = inputs_of(case), case["hyper"]
    scores = hn.score(x["z1"], x["z2"], x["queue"], hyper["temperature"])
    ring = hn.Ring(hyper["thres_inner"], hyper["thres_outer"], hyper["dynamic_inner"])
    assert set((ring.log_weights(scores) != hn.NEVER).sum(-1).tolist()) == {case["n_ring"]}


@golden("ring", kind="moco_ball")
def test_ball_is_a_ring_without_a_hole(case: Case) -> None:
    hyper = case["hyper"]
    loss = papers.ring(hyper["temperature"], inner=0.0, outer=hyper["thres_outer"])
    assert_agrees(case, lambda x: loss(*views(unit(x)), pool=x["queue"]))


@golden("moco", version="v2")
def test_moco(case: Case) -> None:
    assert_agrees(case, lambda x: papers.moco(case["hyper"]["temperature"])(*views(unit(x)), pool=x["queue"]))


@golden("moco", version="v3")
def test_moco_v3(case: Case) -> None:
    assert_agrees(case, lambda x: papers.moco_v3(case["hyper"]["temperature"])(*views(unit(x))))


@golden("simcse", hard_negative=True)
def test_simcse(case: Case) -> None:
    hyper = case["hyper"]
    loss = papers.simcse(hyper["temperature"], hyper["hard_negative_weight"])
    assert_agrees(case, lambda x: loss(*views(unit(x)), hard=unit(x)["z3"]))


@golden("graphcl")
def test_graphcl(case: Case) -> None:
    assert_agrees(case, lambda x: papers.graphcl(case["hyper"]["temperature"])(*views(unit(x))))


@golden("infograph", measure="JSD")
def test_infograph(case: Case) -> None:
    assert_agrees(case, lambda x: papers.infograph()(x["l_enc"], x["g_enc"], x["batch"]))


@golden("infograph", measure="JSD_hard")
def test_hcl_on_graphs_is_a_reference(case: Case) -> None:
    hyper = case["hyper"]
    assert_agrees(
        case,
        lambda x: jsd_hard_of_hcl_graph(x["l_enc"], x["g_enc"], x["batch"], hyper["beta"], hyper["tau_plus"]),
    )


@golden("infograph", measure="JSD_hard")
def test_hcl_on_graphs_has_the_sign_of_the_paper(case: Case) -> None:
    """Harder graphs weigh more as beta grows, and the loss grows with it; the authors' code does the opposite."""
    x = inputs_of(case)
    arguments = x["l_enc"], x["g_enc"], x["batch"]
    betas = [0.5, 1.0, 2.0, 5.0, 10.0]
    product = [papers.infograph(hn.negatives.ClippedTilt(beta))(*arguments).item() for beta in betas]
    authors = [jsd_hard_of_hcl_graph(*arguments, beta=beta).item() for beta in betas]
    assert product == sorted(product)
    assert product[0] > papers.infograph()(*arguments).item()
    assert authors == sorted(authors, reverse=True)


@golden("quick_thoughts")
def test_quick_thoughts(case: Case) -> None:
    scale = case["hyper"]["scale"]
    x = inputs_of(case)
    raw = {"u": scale * x["z1"], "v": scale * x["z2"]}
    assert_agrees(case, lambda x: papers.quick_thoughts(case["hyper"]["context_size"])(x["u"], x["v"]), raw)


def test_every_golden_case_is_covered() -> None:
    stored = {case["id"] for family in FAMILIES for case in cases_of(family)}
    assert stored - covered == set()
    assert {case.split("/")[0] for case in covered} == FAMILIES


@pytest.mark.parametrize("family", sorted(set(families()) - FAMILIES))
def test_other_families_are_read_by_other_tests(family: str) -> None:
    others = [path for path in Path(__file__).parents[1].rglob("test_*.py") if path != Path(__file__)]
    assert any(f"{family}.json" in path.read_text() or f'"{family}"' in path.read_text() for path in others)


def waits_for_pools(case: Case) -> bool:
    return case["hyper"].get("kind") == "ir" or bool(case["hyper"].get("neighbor_views"))


def test_stored_cases_are_those_of_the_source() -> None:
    """Nothing is lost between the file of golden values and ours, where that file is at hand."""
    source = Path(os.environ.get("HARDNEG_DATA", "no data")).parent / "golden" / "golden.json"
    if not source.exists():
        pytest.skip(f"needs {source}, the file that the golden values were taken from; set HARDNEG_DATA")
    for family, cases in json.loads(source.read_text())["cases"].items():
        if family not in FAMILIES:
            continue
        stored = {case["id"]: case for case in cases_of(family)}
        assert set(stored) == {case["id"] for case in cases if not waits_for_pools(case)}
        for case in cases:
            if case["id"] in stored:
                ours = stored[case["id"]]
                assert (ours["loss"], ours["hyper"], ours["inputs"]) == (case["loss"], case["hyper"], case["inputs"])
                assert ours["grads"] == {name[5:]: value for name, value in case.items() if name.startswith("grad_")}
