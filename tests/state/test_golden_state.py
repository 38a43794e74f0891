"""Parity of the methods with state with the authors' code, in float64; references where their code is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg import papers
from hardneg.core.types import Keys, Scores
from hardneg.losses.bank import CMC, binary_nce
from hardneg.losses.global_softmax import SogCLR
from hardneg.losses.neighbours import neighbour_nce
from hardneg.state.cache import Cache, cache_loss
from hardneg.state.clusters import Clusters
from hardneg.state.metropolis import metropolis_hastings
from hardneg.state.pools import Bank, Queue
from support.golden_state_inputs import FOLDER, Case, cases_of, inputs_of, steps_of, summary
from support.state_references import (
    emc2_in_batch_terms,
    emc2_sweep,
    gcl_bimodal_mixed_first_visit,
    sogclr_mixed_first_visit,
)

close = {"rel": 1e-7, "abs": 1e-9}


def golden(family: str, **hyper: Any) -> pytest.MarkDecorator:
    chosen = [case for case in cases_of(family) if all(case["hyper"].get(key) == hyper[key] for key in hyper)]
    assert chosen, f"no case of {family} with {hyper}"
    return pytest.mark.parametrize("case", chosen, ids=[case["id"].split("/", 1)[1] for case in chosen])


def leaves(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return inputs["z1"].clone().requires_grad_(), inputs["z2"].clone().requires_grad_()


def assert_golden(recorded: Case, loss: Tensor, z1: Tensor, z2: Tensor, tolerance: dict[str, float] = close) -> None:
    """The loss, and its gradient by each view for which one is recorded."""
    assert loss.item() == pytest.approx(recorded["loss"], **tolerance)
    loss.backward()
    for name, z in (("grad_z1", z1), ("grad_z2", z2)):
        if name in recorded:
            assert z.grad is not None
            assert z.grad.norm().item() == pytest.approx(recorded[name]["norm"], **tolerance), name
            assert z.grad.flatten()[:5].tolist() == pytest.approx(recorded[name]["first5"], **tolerance), name


def filled(vectors: Tensor, momentum: float) -> Bank:
    bank = Bank(len(vectors), vectors.shape[1], momentum)
    bank.push(Keys(vectors, torch.arange(len(vectors))))
    return bank


# SogCLR


def all_new_or_all_known(case: Case) -> list[bool]:
    """For each step, whether the authors' first-visit rule for whole batches agrees with one for each item."""
    seen: set[int] = set()
    agrees = []
    for step in case["inputs"]["steps"]:
        new = [item not in seen for item in step["indices"]]
        agrees.append(all(new) or not any(new))
        seen.update(step["indices"])
    return agrees


@golden("sogclr")
def test_sogclr(case: Case) -> None:
    """Equal to the authors' code up to the first batch that mixes new items with known ones."""
    hyper, bimodal = case["hyper"], case["hyper"]["impl"] == "libauc_v2"
    views_of = "cross" if bimodal else "two"
    loss_of = SogCLR(hyper["N"], hyper["temperature"], hyper["gamma"], views=views_of)
    compared = 0
    for (inputs, recorded), agrees in zip(steps_of(case), all_new_or_all_known(case), strict=True):
        if not agrees:
            break
        z1, z2 = leaves(inputs)
        views = (z1, z2) if bimodal else (normalize(z1, dim=-1), normalize(z2, dim=-1))
        scale = len(z1) - 1 if bimodal else 1  # GCLoss_v2 sums over the candidates
        assert_golden(recorded, scale * loss_of(*views, ids=inputs["indices"]), z1, z2)
        after = recorded["u_after"] if bimodal else {"u": recorded["u_after"]}
        for side, partition in enumerate(loss_of.partitions, start=1):
            expected = torch.tensor(after[f"u{side}" if bimodal else "u"], dtype=torch.float64)
            if bimodal:  # theirs is kept as u e^(-b) beside its shift b
                expected = expected * torch.tensor(after[f"b{side}"], dtype=torch.float64).exp()
            torch.testing.assert_close(partition.log_u.exp(), expected, rtol=1e-7, atol=1e-12)
        compared += 1
    assert compared >= 1


@golden("sogclr")
def test_sogclr_reference_reproduces_mixed_batches(case: Case) -> None:
    """The authors' numbers where new and known items meet: weights of new items are 1 / gamma too large."""
    hyper = case["hyper"]
    if hyper["impl"] == "libauc_v2":
        u = [torch.zeros(hyper["N"], dtype=torch.float64) for _ in range(2)]
        for inputs, recorded in steps_of(case):
            z1, z2 = leaves(inputs)
            options = (u, inputs["indices"], hyper["temperature"], hyper["gamma"])
            assert_golden(recorded, gcl_bimodal_mixed_first_visit(z1, z2, *options), z1, z2)
        return
    u_one = torch.zeros(hyper["N"], dtype=torch.float64)
    for inputs, recorded in steps_of(case):
        z1, z2 = leaves(inputs)
        options_one = (u_one, inputs["indices"], hyper["temperature"], hyper["gamma"])
        assert_golden(
            recorded, sogclr_mixed_first_visit(normalize(z1, dim=-1), normalize(z2, dim=-1), *options_one), z1, z2
        )
        assert u_one.tolist() == pytest.approx(recorded["u_after"], **close)


@golden("sogclr", impl="libauc_v1", N=8)
def test_sogclr_first_visit_is_of_the_item(case: Case) -> None:
    """The right formula in a mixed batch: known items mix old and new, a new item's u is its own mean."""
    (first, before), (second, _), _ = steps_of(case)
    hyper, ids = case["hyper"], second["indices"]
    loss_of = SogCLR(hyper["N"], hyper["temperature"], hyper["gamma"])
    loss_of(first["z1"], first["z2"], ids=first["indices"])
    loss_of(second["z1"], second["z2"], ids=ids)
    o, b = torch.cat([second["z1"], second["z2"]]), len(ids)
    similarity = (o @ o.T / hyper["temperature"]).exp()
    for row, item in enumerate(ids.tolist()):
        others = [j for j in range(2 * b) if j % b != row]
        mean = (similarity[row, others].mean() + similarity[row + b, others].mean()) / 2.0
        old = before["u_after"][item]
        expected = mean if old == 0 else (1 - hyper["gamma"]) * old + hyper["gamma"] * mean
        assert loss_of.partitions[0].log_u[item].exp().item() == pytest.approx(expected.item(), rel=1e-9)


# EMC2


def chain_case(kind: str) -> Case:
    return next(case for case in cases_of("emc2") if case["id"].startswith(f"emc2/{kind}"))


def test_emc2_reference_reproduces_the_sampler() -> None:
    case = chain_case("chain")
    beta = case["hyper"]["beta"]
    states = torch.tensor(case["steps"][0]["states_before"])
    log_scores = torch.tensor(case["steps"][0]["log_scores_before"], dtype=torch.float64)
    for inputs, recorded in steps_of(case):
        z1, z2 = leaves(inputs)
        o = torch.cat([z1, z2])
        uniforms = torch.tensor(recorded["uniforms"], dtype=torch.float64)
        burn_in = recorded["burn_in_P"]
        step = emc2_sweep(o @ o.T, beta, inputs["indices"], states, log_scores, uniforms, burn_in)
        assert sorted(step.pairs) == sorted(map(tuple, recorded["pairs_view1"] + recorded["pairs_view2"]))
        assert step.chain == [recorded["chain_after_view1"], recorded["chain_after_view2"]]
        assert step.states.tolist() == recorded["states_after"]
        assert step.log_scores.tolist() == pytest.approx(recorded["log_scores_after"], **close)
        negative, positive = emc2_in_batch_terms(o, step.pairs, beta, burn_in)
        assert negative.item() == pytest.approx(recorded["loss_terms"][0], **close)
        assert positive.item() == pytest.approx(recorded["loss_terms"][1], **close)
        if recorded["n_out_of_batch_pairs"] == 0:
            assert (negative + positive).item() == pytest.approx(recorded["surrogate_loss"], **close)
        states, log_scores = step.states, step.log_scores


def test_emc2_step_takes_the_authors_decisions_on_their_proposals() -> None:
    """The pure step, given their sweep, their uniforms and their stale scores, walks their path."""
    case = chain_case("chain")
    for inputs, recorded in steps_of(case):
        o = torch.cat([inputs["z1"], inputs["z2"]])
        b, ids = len(inputs["z1"]), inputs["indices"]
        scores = case["hyper"]["beta"] * (o @ o.T)
        own = torch.arange(2 * b) % b == torch.arange(b)[:, None]
        column = torch.full((b,), -1)
        score = torch.tensor(recorded["log_scores_before"], dtype=torch.float64)[ids]
        uniforms = torch.tensor(recorded["uniforms"], dtype=torch.float64)
        proposals = torch.where(own, -1, torch.arange(2 * b).expand(b, -1))
        for view, name in enumerate(("chain_after_view1", "chain_after_view2")):
            rows = slice(view * b, (view + 1) * b)
            draws = uniforms[view * 2 * b : (view + 1) * 2 * b].T
            with_stale = torch.cat([scores[rows], score[:, None]], dim=1)  # the state stands there with its old score
            visits = metropolis_hastings(with_stale, torch.full((b,), 2 * b), proposals, draws.log())
            column = torch.where(visits.accepted.any(1), visits.end, column)
            assert column.tolist() == recorded[name]
            # A chain that moved has the score of where it stands; the others keep the stale one of the other view.
            score = with_stale.gather(1, visits.end[:, None]).squeeze(1)
        assert score.tolist() == pytest.approx(
            torch.tensor(recorded["log_scores_after"], dtype=torch.float64)[ids].tolist(), **close
        )


def test_emc2_acceptance_and_kernel_of_the_paper() -> None:
    """Eq. 9 from the step itself: it moves for uniforms below the acceptance and not above."""
    case = chain_case("acceptance")
    inputs = inputs_of(case)
    o = torch.cat([inputs["z1"], inputs["z2"]])
    n, b = len(o), len(inputs["z1"])
    scores = o @ o.T / case["hyper"]["temperature"]
    state = torch.tensor(case["state_column"])
    acceptance = torch.tensor(case["acceptance"], dtype=torch.float64)
    start = scores.gather(1, state[:, None]).squeeze(1)
    for column in range(n):
        own = torch.arange(n) % b == column % b
        proposals = torch.where(own, -1, column)[:, None]
        for factor in (1 - 1e-9, 1 + 1e-9):
            uniforms = (acceptance[:, column : column + 1] * factor).clamp(min=1e-300)
            moved = metropolis_hastings(scores, state, proposals, uniforms.log()).accepted
            below = factor < 1
            expected = torch.where(own, False, below | (acceptance[:, column] == 1.0) & (start < scores[:, column]))
            assert torch.equal(moved[:, 0], expected), (column, factor)
    columns = torch.tensor(case["kernel_columns"])
    target = torch.softmax(scores[0, columns], 0)
    kernel = torch.tensor(case["mh_kernel_row0_chain"], dtype=torch.float64)
    torch.testing.assert_close(target @ kernel, target)
    torch.testing.assert_close(
        torch.tensor(case["softmax_row0"], dtype=torch.float64)[columns], target, rtol=1e-9, atol=1e-12
    )


# The negative cache


@golden("negative_cache")
def test_negative_cache(case: Case) -> None:
    inputs = inputs_of(case)
    z1, z2 = leaves(inputs)
    cache = Cache(len(inputs["bank"]), inputs["bank"].shape[1])
    cache.push(Keys(inputs["bank"], torch.arange(len(inputs["bank"]))))
    drawn = torch.tensor(case["draws"])[:, None]
    step = cache_loss(Keys(z1), z2, cache, lambda ids: inputs["bank"][ids], case["hyper"]["temperature"], drawn=drawn)
    assert step.real.mean().item() == pytest.approx(case["interpretable_loss"], **close)
    assert_golden(case, step.losses.mean(), z1, z2)


# Local Aggregation


@golden("local_aggregation")
def test_local_aggregation(case: Case) -> None:
    inputs, hyper = inputs_of(case), case["hyper"]
    z1, z2 = leaves(inputs)
    ids, bank = inputs["indices"], filled(inputs["bank"], hyper["m"])
    clusters = Clusters(len(inputs["bank"]), len(inputs["clusters"]))
    clusters.assignments.copy_(inputs["clusters"].T)
    loss = papers.local_aggregation(hyper["temperature"], hyper["k"])(normalize(z1, dim=-1), ids, bank, clusters)
    # Their code adds 1e-7 to the ratio before the logarithm: 1e-7 / ratio on the loss.
    assert_golden(case, loss, z1, z2, tolerance={"rel": 2e-7, "abs": 4e-7})
    bank.push(Keys(normalize(z1.detach(), dim=-1), ids))
    assert summary(bank.of(ids).vectors) == pytest.approx(case["new_memory_checksum"], **close)


@golden("local_aggregation")
def test_local_aggregation_reference_reproduces_epsilon_and_broadcast(case: Case) -> None:
    """Their division of [b] by [b, 1] compares every anchor's numerator with every denominator."""
    inputs, hyper = inputs_of(case), case["hyper"]
    z1, z2 = leaves(inputs)
    weight = (normalize(z1, dim=-1) @ inputs["bank"].T / hyper["temperature"]).exp()
    background = torch.zeros_like(weight).scatter(1, weight.topk(hyper["k"]).indices, 1.0)
    shared = (inputs["clusters"][:, inputs["indices"], None] == inputs["clusters"][:, None, :]).any(0)
    ratio = (weight * background * shared).sum(1) / (weight * background).sum(1, keepdim=True)
    assert_golden(case, -(ratio + 1e-7).log().mean(), z1, z2)


# Ring on a queue with neighbours, and on a bank


@golden("ring", neighbor_views=True)
def test_ring_neighbours(case: Case) -> None:
    inputs, hyper = inputs_of(case), case["hyper"]
    z1, z2 = leaves(inputs)
    pooling = "sum" if hyper["logsumexp_inner"] else "geometric"
    loss_of = papers.ring_neighbours(
        hyper["temperature"], hyper["thres_inner"], hyper["thres_outer"], hyper["dynamic_inner"], pooling
    )
    assert_golden(case, loss_of(normalize(z1, dim=-1), normalize(z2, dim=-1), inputs["queue"]), z1, z2)


def bank_scores(z: Tensor, ids: Tensor, bank: Bank, draws: Tensor, temperature: float, own_ids: bool) -> Scores:
    """Own entry and given draws; without ids an own entry among the draws stays, as in the authors' code."""
    return hn.score(Keys(z, ids if own_ids else None), bank.of(ids).vectors, bank.of(draws), temperature)


@golden("ring", kind="ir")
def test_instance_softmax_on_a_bank(case: Case) -> None:
    inputs, hyper = inputs_of(case), case["hyper"]
    z1, z2 = leaves(inputs)
    ids, bank, draws = inputs["indices"], filled(inputs["bank"], hyper["m"]), torch.tensor(case["draws"])
    anchors = normalize(z1, dim=-1)
    scores = bank_scores(anchors, ids, bank, draws, hyper["temperature"], own_ids=False)
    assert_golden(case, hn.info_nce(scores, hn.Uniform().log_weights(scores)).mean(), z1, z2)
    masked = bank_scores(anchors, ids, bank, draws, hyper["temperature"], own_ids=True)
    assert torch.equal(masked.valid, draws != ids[:, None])  # the right thing: never its own negative
    bank.push(Keys(anchors, ids))
    assert summary(bank.of(ids).vectors) == pytest.approx(case["new_memory_checksum"], **close)


# Instance discrimination and CMC


@golden("instance_nce", Z=449.1115053697137)
def test_instance_discrimination(case: Case) -> None:
    inputs, hyper = inputs_of(case), case["hyper"]
    z1, z2 = leaves(inputs)
    ids, bank, draws = inputs["indices"], filled(inputs["bank"], hyper["m"]), torch.tensor(case["draws"])
    scores = bank_scores(normalize(z1, dim=-1), ids, bank, draws, hyper["temperature"], own_ids=True)
    assert bool(scores.valid.all())  # no own entry among these draws
    losses = binary_nce(
        scores,
        hn.Uniform().log_weights(scores),
        log_z=torch.tensor(hyper["Z"], dtype=torch.float64).log(),
        num_instances=len(inputs["bank"]),
        epsilon=1e-7,
    )
    assert_golden(case, losses.mean(), z1, z2)
    bank.push(Keys(normalize(z1.detach(), dim=-1), ids))
    assert summary(bank.of(ids).vectors) == pytest.approx(case["new_memory_checksum"], **close)


def cmc_by_hand(case: Case, z1: Tensor, z2: Tensor, inputs: dict[str, Tensor], own_is_noise: bool) -> Tensor:
    """The authors' two directions from our parts; with ``own_is_noise`` an instance may be drawn as its own noise."""
    hyper, ids = case["hyper"], inputs["indices"]
    draws, total = torch.tensor(case["draws"])[:, 1:], z1.new_zeros(())
    for z, memory in ((z1, inputs["bank2"]), (z2, inputs["bank"])):
        scores = bank_scores(z, ids, filled(memory, 0.5), draws, hyper["temperature"], own_ids=not own_is_noise)
        log_w = hn.Uniform().log_weights(scores)
        if hyper["loss"] == "softmax":
            total = total + hn.info_nce(scores, log_w).mean()
            continue
        seen = torch.cat([scores.positives.flatten(), scores.candidates[scores.valid]]).detach()
        log_z = seen.exp().mean().mul(len(memory)).log()
        total = total + binary_nce(scores, log_w, log_z=log_z, num_instances=len(memory), epsilon=1e-7).mean()
    return total


@pytest.mark.parametrize("case", [case for case in cases_of("instance_nce") if "cmc" in case["id"]])
def test_cmc(case: Case) -> None:
    inputs, hyper = inputs_of(case), case["hyper"]
    z1, z2 = leaves(inputs)
    assert_golden(case, cmc_by_hand(case, z1, z2, inputs, own_is_noise=True), z1, z2)
    size, dim = inputs["bank"].shape
    kind = "softmax" if hyper["loss"] == "softmax" else "nce"
    loss_of = CMC(size, dim, hyper["K"], hyper["temperature"], hyper["m"], kind, z_momentum=1.0, epsilon=1e-7)
    for bank, memory in zip(loss_of.banks, (inputs["bank"], inputs["bank2"]), strict=True):
        bank.push(Keys(memory, torch.arange(size)))
    ours = loss_of(inputs["z1"], inputs["z2"], inputs["indices"], torch.tensor(case["draws"])[:, 1:])
    right = cmc_by_hand(case, inputs["z1"], inputs["z2"], inputs, own_is_noise=False)
    assert ours.item() == pytest.approx(right.item(), rel=1e-9)
    assert ours.item() != pytest.approx(case["loss"], rel=1e-5)  # an own entry is among the recorded draws
    for bank, name in zip(loss_of.banks, ("memory_l_after", "memory_ab_after"), strict=True):
        assert summary(bank.vectors) == pytest.approx(case[name], **close)


# MoCo's queue


@golden("moco")
def test_moco_queue_after_the_update(case: Case) -> None:
    inputs = inputs_of(case)
    z1, z2 = leaves(inputs)
    queue = Queue(*inputs["queue"].shape)
    queue.push(inputs["queue"])
    loss = papers.moco(case["hyper"]["temperature"])(normalize(z1, dim=-1), normalize(z2, dim=-1), pool=queue)
    queue.push(normalize(z2, dim=-1))
    assert_golden(case, loss, z1, z2)
    assert int(queue.head) == case["queue_ptr_after"]
    assert summary(queue.keys().vectors) == pytest.approx(case["queue_after_checksum"], **close)


def test_stored_cases_are_those_of_the_source() -> None:
    """Nothing is lost between the file of golden values and ours, where that file is at hand."""
    source = Path(os.environ.get("HARDNEG_DATA", "no data")).parent / "golden" / "golden.json"
    if not source.exists():
        pytest.skip(f"no golden values at {source}")
    whole = json.loads(source.read_text())["cases"]
    for path in FOLDER.glob("*.json"):
        theirs = {case["id"]: case for case in whole[path.stem]}
        ours = cases_of(path.stem)
        if path.stem not in ("ring", "moco"):
            assert {case["id"] for case in ours} == set(theirs)
        for case in ours:
            assert case == {name: value for name, value in theirs[case["id"]].items() if name != "note"}


def test_neighbour_nce_against_a_loop() -> None:
    inputs = inputs_of(cases_of("ring")[0])
    scores = hn.score(inputs["z1"], inputs["z2"], inputs["queue"][:7], 0.3)
    log_w = hn.Rank(2).log_weights(scores)
    near = hn.Rank(0, 2).log_weights(scores) != hn.NEVER
    found, means = (neighbour_nce(scores, log_w, near, pooling=pooling).squeeze(1) for pooling in ("sum", "mean"))
    for row in range(len(found)):
        a, s = scores.positives[row, 0].exp(), scores.candidates[row].exp()
        around, close = s[log_w[row] == 0], s[near[row]]
        expected = ((a + around.sum()) / (a + close.sum())).log()
        assert found[row].item() == pytest.approx(expected.item(), rel=1e-12)
        mean = (torch.cat([a[None], around]).mean() / torch.cat([a[None], close]).mean()).log()
        assert means[row].item() == pytest.approx(mean.item(), rel=1e-12)
