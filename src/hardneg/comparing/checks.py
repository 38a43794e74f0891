"""Checks of the arms of a comparison, before anything is trained.

``check_arms`` is called by ``prepare`` (comparing.py). First come checks that need only the options, then those that
read the data, and last those of the encoder and views that "auto" resolves to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import combinations
from typing import Any

import torch

from hardneg.comparing.arms import Arm, canonical_options
from hardneg.comparing.request import SHARED, Comparison
from hardneg.core.errors import ArgumentError, HardnegError, UnknownName
from hardneg.training.checks import check_batch, check_sources, check_words
from hardneg.training.data.items import Items, Splits
from hardneg.training.data_record import data_record
from hardneg.training.evaluation.measures import AUTO
from hardneg.training.options import RECIPES, TrainOptions
from hardneg.training.parts import splits


class CannotTrain(HardnegError, ValueError):
    """An arm cannot be trained.

    Attributes:
        arm: The arm as text.
        cause: The error that its training would raise.
    """

    def __init__(self, arm: str, cause: Exception) -> None:
        super().__init__(arm, "options that can be trained", str(cause))
        self.arm, self.cause = arm, cause
        self.args = (arm, cause)

    def __str__(self) -> str:
        return f"{self.arm} cannot be trained: {self.cause}"


def check_arms(arms: list[Arm], comparison: Comparison) -> tuple[dict[str, Any], str]:
    """Check that the arms differ, and that each one can be trained and judged.

    Args:
        arms: Arms with the common options.
        comparison: The request.

    Returns:
        Record of the data (training/data_record.py), and the name of the metric that decides.

    Raises:
        ArgumentError: If two arms train alike, or options of the arms and the comparison contradict each other.
        CannotTrain: If training an arm would fail.
    """
    for arm in arms:
        _check_options(arm, comparison)
    taken = {one.name for arm in arms for one in fields(RECIPES[arm.recipe])}
    if unused := [name for name in comparison.common if name not in taken]:
        raise ArgumentError("compare", "--option to be an option of at least one arm", repr(unused[0]))
    for one, other in combinations(arms, 2):
        _check_difference(one, other, comparison)
    every = [one for arm in arms for one in (arm, *comparison.tries(arm))]
    for arm in every:
        _naming(arm, check_words)
    record, metric = {}, comparison.metric
    for split in sorted({arm.complete().evaluate_on for arm in every}):
        found, metric = _check_with_data([arm for arm in every if arm.complete().evaluate_on == split], metric)
        if judged := [arm for arm in arms if arm.complete().evaluate_on == split]:
            _check_chosen(judged, found.train)
            _check_held_out(judged[0].complete(), found, comparison)
            record = data_record(found, judged[0].complete().evaluate_with)
    return record, metric


def _check_options(arm: Arm, comparison: Comparison) -> None:
    """Check the options of an arm against those that are shared, tuned or part of its paper."""
    for name in SHARED:
        if name in arm.options:
            got = f"{name}={arm.options[name]!r} in {arm.text!r}"
            raise ArgumentError("compare", f"the same {name} for every arm", got, "set it for the whole comparison")
    for name in arm.own:
        if comparison.common.get(name, arm.options[name]) != arm.options[name]:
            given = f"--option {name}={comparison.common[name]}"
            raise ArgumentError(arm.text, f"its own {name}, {arm.options[name]}", given, "write it in the arms")
    tuned = comparison.tune and comparison.tune[0]
    if tuned and tuned not in (known := [one.name for one in fields(RECIPES[arm.recipe])]):
        raise UnknownName(tuned, known, f"in {arm.recipe}").within("--tune")
    if tuned in arm.options:
        # Every arm gets the same tuned values, so an arm that names one of its own would be mislabelled.
        got = f"{tuned}={arm.options[tuned]!r} in {arm.text!r}"
        raise ArgumentError(
            "compare", f"arms without {tuned}, which --tune sets", got, "remove it from the arm, or do not tune"
        )


def _check_difference(one: Arm, other: Arm, comparison: Comparison) -> None:
    """Raise if two arms train alike, either as they are or with the same tuned value."""
    pairs = [(one, other), *zip(comparison.tries(one), comparison.tries(other), strict=True)]
    if not any(first.trains_like(second) for first, second in pairs):
        return
    tuned = f", apart from the {comparison.tune[0]} that --tune sets" if comparison.tune else ""
    raise _alike(one, other, tuned)


def _alike(one: Arm, other: Arm, tuned: str = "") -> ArgumentError:
    """Return the error for two arms that train alike."""
    got = f"the same options in {one.text!r} and {other.text!r}"
    return ArgumentError("compare", f"distinct arms{tuned}", got)


def _check_held_out(options: TrainOptions, found: Splits, comparison: Comparison) -> None:
    """Raise if values would be tuned on items that also judge the arms."""
    if comparison.tune and found.train is found.test:
        got = f"--data {options.data}, which is trained and tested on"
        fix = f"use --data {options.data}@0/10, or write {comparison.tune[0]} in the arms"
        raise ArgumentError("compare", "a test split that --tune does not use", got, fix)


def _naming(arm: Arm, check: Callable[[TrainOptions], Any]) -> Any:
    """Call the check with the options of the arm; errors name the arm."""
    try:
        return check(arm.complete())
    except (ValueError, ImportError) as error:
        raise CannotTrain(arm.text, error) from error


def _check_with_data(arms: list[Arm], metric: str) -> tuple[Splits, str]:
    """Return the splits and the metric; raise unless it can be measured and every arm has views of the items."""
    shared = arms[0].complete()  # the data is the same for all of them: each split is read once
    found = splits(shared)
    known = found.test.measures(found, shared)
    if metric not in (AUTO, *known):
        raise ArgumentError("compare", f"a metric among {', '.join(known)} for such data", f"metric={metric!r}")
    check_batch(shared, found.train, 1)
    for arm in arms:
        _naming(arm, lambda options: _check_views(options, found.train))
    return found, known[0] if metric == AUTO else metric


def _check_views(options: TrainOptions, data: Items) -> None:
    """Make the views of one item, and check that the recipe and its negatives can use them."""
    first = torch.zeros(1, dtype=torch.int64)
    one = data.take(first).prepared(options)
    one.views(first, 0, options.seed)
    check_sources(options, one)


def _check_chosen(arms: list[Arm], data: Items) -> None:
    """Raise for two arms that differ only by writing what "auto" or the default weight decay resolves to."""

    def choices(options: TrainOptions) -> dict[str, Any]:
        return canonical_options(options.as_dict()) | {"weight_decay": data.decay(options)} | data.chosen(options)

    chosen = [(arm, _naming(arm, choices)) for arm in arms]
    for (one, mine), (other, theirs) in combinations(chosen, 2):
        if one.recipe == other.recipe and mine == theirs:
            raise _alike(one, other)
