"""Objectives, generators and a temperature per image in `hardneg train` and in the arms of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardneg import papers
from hardneg.comparing.arms import parse_arm
from hardneg.core.errors import ArgumentError, HardnegError
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.training.loop.checks import try_negatives
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES, SimCLROptions
from support.training_runs import few_digits, flat, run, short


@pytest.mark.parametrize(
    "arm",
    [
        "rince(q=0.1, lam=0.01)",
        "adnce(mu=0.4)",
        "mochi(num_hardest=8, num_mixed=8, num_with_anchor=4)",
        "simclr(objective='sigmoid(bias=-2.0)')",
        "isogclr(rho=0.2)",
    ],
)
def test_an_arm_of_the_open_sets_trains(arm: str, tmp_path: Path) -> None:
    data = few_digits(tmp_path / "digits.npz", 120)
    chosen = parse_arm(arm)
    result = run(chosen.recipe, tmp_path / "run", short(data, **chosen.options))
    assert result["knn"] > 0.2  # chance is 0.1
    if arm.startswith("isogclr"):
        state = flat(Run(tmp_path / "run").load())
        learnt = next(value for name, value in state.items() if name.endswith("individual.temperatures"))
        assert len(learnt) == 120
        assert learnt.std() > 0


def test_wrong_objectives_and_generators_are_refused_before_the_run(tmp_path: Path) -> None:
    data = few_digits(tmp_path / "digits.npz", 40)
    for wrong in ({"objective": "rinze"}, {"generate": "machi()"}):
        with pytest.raises((HardnegError, ValueError), match="Did you mean"):
            run("simclr", tmp_path / "run", short(data, **wrong))


@pytest.mark.parametrize("name", papers.registered())
def test_every_registered_paper_is_an_arm(name: str) -> None:
    arm, paper = parse_arm(f"{name}()"), papers.registered()[name]
    assert arm.recipe == paper.recipe
    complete = arm.complete().as_dict()
    version = {name: value for name, value in paper.more.items() if name == "version"}  # which has defaults of its own
    usual = RECIPES[arm.recipe](**version).as_dict()
    assert {key: complete[key] for key in paper.options()} == {**paper.options()}
    assert {key for key, value in complete.items() if value != usual[key]} <= set(paper.options())


@pytest.mark.parametrize("recipe", ["simclr", "supervised", "moco"])
@pytest.mark.parametrize(("objective", "instead"), [("isogclr(0.3)", "isogclr"), ("surrogate()", "sogclr or emc2")])
def test_objectives_with_a_recipe_of_their_own_are_refused(recipe: str, objective: str, instead: str) -> None:
    with pytest.raises(ArgumentError) as found:
        try_negatives(parse_arm(f"{recipe}(objective={objective!r})").complete())
    assert (found.value.who, found.value.got) == ("train", f"objective={objective!r}")
    assert found.value.fix == f"use hardneg train {instead}"


@pytest.mark.parametrize(
    ("objective", "beside", "got"),
    [
        ("info_nce(tau_plus=0.2)", {"tau_plus": 0.1}, "objective=info_nce(tau_plus=0.2) and tau_plus=0.1"),
        ("jsd(tau_plus=0.2)", {"tau_plus": 0.3}, "objective=jsd(tau_plus=0.2) and tau_plus=0.3"),
        (
            "info_nce(num_negatives='mass')",
            {"num_negatives": "candidates"},
            "objective=info_nce(num_negatives='mass') and num_negatives='candidates'",
        ),
    ],
)
def test_one_value_inside_the_objective_and_one_beside_it_are_refused(
    objective: str, beside: dict[str, Any], got: str
) -> None:
    with pytest.raises(ArgumentError) as found:
        try_negatives(SimCLROptions(objective=objective, **beside))
    assert (found.value.where, found.value.got) == ("--objective", got)
    with pytest.raises(ArgumentError):
        ContrastiveLoss(objective=objective, **beside)


def test_a_value_inside_the_objective_alone_is_used() -> None:
    for tau_plus in (0.0, 0.2):  # the same value twice is no conflict
        try_negatives(SimCLROptions(objective="info_nce(tau_plus=0.2)", tau_plus=tau_plus))
    z1, z2 = torch.nn.functional.normalize(torch.randn(2, 8, 4), dim=-1)
    assert torch.equal(
        ContrastiveLoss(objective="info_nce(tau_plus=0.2)")(z1, z2), ContrastiveLoss(tau_plus=0.2)(z1, z2)
    )
