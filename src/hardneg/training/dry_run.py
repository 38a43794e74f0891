"""Whether a recipe can weigh its negatives, found on four rows instead of in the first step of a run."""

from __future__ import annotations

import torch

from hardneg.core.errors import ArgumentError, located
from hardneg.core.schedules import value_of
from hardneg.core.scoring import score
from hardneg.core.types import Keys
from hardneg.losses.options import read_generator, read_objective
from hardneg.negatives import parse
from hardneg.training.numbers import number_of
from hardneg.training.options import TrainOptions

OWN_RECIPES = {"isogclr": "isogclr", "surrogate": "sogclr or emc2"}
"""Objectives that mean nothing without the state of a recipe: temperatures or normalisers of every image."""


def try_negatives(options: TrainOptions, labelled: bool = True) -> None:
    """Raises for negatives that need what the recipe does not have: clusters, a second model, another source.

    labelled: whether the images have labels; before the data is loaded this is unknown, and assumed.

    >>> from hardneg.training.options import SimCLROptions
    >>> try_negatives(SimCLROptions(negatives="OtherLabel() * Tilt(1.0)"))
    >>> try_negatives(SimCLROptions(negatives="From('queue')"))
    Traceback (most recent call last):
    hardneg.core.errors.ArgumentError: train needs --negatives for candidates of the batch, got ...: From needs ...
    """
    options.check()
    _try_objective(options)
    if (generate := getattr(options, "generate", None)) is not None:
        with located("--generate"):
            read_generator(generate)
    with located("--negatives"):
        negatives = parse(options.negatives)
    rows = torch.arange(4)
    keys = Keys(torch.eye(4), rows, rows % 2 if labelled else None, source=options.source)
    scores = score(keys, keys, keys, value_of(number_of(options.temperature), 0, 1))
    try:
        negatives.at(0, 1).log_weights(scores)
    except ValueError as error:
        has = f"candidates of the {options.source}{'' if labelled else ' without labels'}"
        got = f"negatives={options.negatives!r}: {error}"
        raise ArgumentError("train", f"--negatives for {has}", got) from None


def _try_objective(options: TrainOptions) -> None:
    if (text := getattr(options, "objective", None)) is None:
        return
    names = ("num_negatives", "positives_in_denominator")
    beside = {name: getattr(options, name) for name in names if hasattr(options, name)}
    with located("--objective"):
        objective = read_objective(text, "train", tau_plus=number_of(options.tau_plus), **beside)
    if recipe := OWN_RECIPES.get(objective.name):
        what = "an --objective of the vectors of a batch alone"
        raise ArgumentError("train", what, f"objective={text!r}", f"use hardneg train {recipe}")
