"""Checks of the options of a run, before anything is loaded or written; errors name the flag."""

from __future__ import annotations

from dataclasses import fields

import torch

from hardneg.batching import planners
from hardneg.batching.spec import BatchSpec, parse_batches
from hardneg.core.errors import ArgumentError, argument_error, located, warn_once
from hardneg.core.schedules import LONG, Number, Schedule, registered_schedules, value_of
from hardneg.core.scoring import score
from hardneg.core.types import Keys
from hardneg.negatives import parse
from hardneg.negatives.grammar import read_expression, read_generator, read_objective
from hardneg.training.data.items import Items
from hardneg.training.data.kinds import kind_of
from hardneg.training.evaluation.monitors import read_monitor
from hardneg.training.optimisers import read_optimiser, read_rate
from hardneg.training.options import EMC2Options, TrainOptions
from hardneg.training.options.values import Scheduled, check_bounds

OWN_RECIPES = {"isogclr": "isogclr", "surrogate": "sogclr or emc2"}
"""Objectives that mean nothing without the state of a recipe: temperatures or normalisers of every image."""
NEEDED = {
    "nodes": ("infograph", "graphs, whose nodes it compares with them", "use --data graphs:NAME"),
    "pixels": ("cmc", "images, whose lightness and colours it compares", "use hardneg train instance"),
}
"""Of what a recipe needs of its items: which recipe, what it does with it, and what to do without."""


def check_words(options: TrainOptions) -> BatchSpec:
    """Raises for unknown names and expressions; returns who shares a batch."""
    with located("--data"):
        kind = kind_of(options.data)
    if options.evaluate_with is not None and not kind.has_benchmarks:
        what = f"no --evaluate-with for {kind.noun}s, which have no benchmarks"
        raise argument_error("train", what, "evaluate_with", options.evaluate_with)
    if options.needs and options.needs != kind.has:
        who, what, fix = NEEDED[options.needs]
        raise ArgumentError(who, what, f"--data {options.data}, of {kind.noun}s", fix)
    kind.check(options)
    for flag, read in (("optimizer", read_optimiser), ("schedule", read_rate), ("monitor", read_monitor)):
        with located(f"--{flag}"):
            read(getattr(options, flag))
    _check_warmup(options)
    _check_device(options)
    _check_schedules(options)
    try_negatives(options)
    with located("--batches"):
        spec = parse_batches(options.batches)
    for schedules in (parse(options.negatives), spec.planner):
        schedules.at(LONG, LONG)  # where they end
    if spec.planner.needs != "nothing" and spec.warmup >= options.epochs:
        raise ArgumentError(
            "train",
            "more epochs than the warm-up of its batches, which is uniform",
            f"epochs={options.epochs} and warmup={spec.warmup}",
            f"write warmup={options.epochs - 1} into --batches, or train longer",
        )
    if isinstance(options, EMC2Options) and not isinstance(spec.planner, planners.UniformPlanner):
        warn_once(
            "emc2.planned_batches",
            f"The chains of emc2 take their proposals from the batch. With --batches {options.batches} they do not "
            "draw from the softmax over the data set, but from that softmax times how often an image shares a batch "
            "with the anchor. Use --batches 'uniform()' for EMC2 as published.",
        )
    return spec


def check_batch(options: TrainOptions, data: Items, ranks: int) -> None:
    got = f"batch_size={options.batch_size}"
    if options.batch_size > len(data):
        raise ArgumentError("train", f"--batch-size of at most the {len(data)} {data.noun}s of {options.data}", got)
    if options.batch_size % ranks:
        raise ArgumentError("train", f"--batch-size to divide over {ranks} ranks", got)


def check_sources(options: TrainOptions, data: Items) -> None:
    """Raises for negatives of a source that the prepared data does not have, or that a direction does not."""
    if "mined" not in options.sources:
        return
    rest = tuple(source for source in options.sources if source != "mined")
    if data.mined(torch.zeros(1, dtype=torch.int64, device=data.ids.device)) is None:
        what = f"add columns negative_1, negative_2 ... to {data.name}, as hardneg mine writes them"
        try_negatives(options, sources=rest, fix=what)
    elif getattr(options, "directions", "one") == "both":
        try_negatives(options, sources=rest, fix="use --directions one: the other direction has no mined negatives")


def try_negatives(
    options: TrainOptions, labelled: bool = True, sources: tuple[str, ...] | None = None, fix: str = ""
) -> None:
    """Raises for negatives that need what the recipe does not have: clusters, a second model, another source.

    Tried on four rows. labelled: whether the items have labels; before the data is loaded this is unknown, and
    assumed.

    >>> from hardneg.training.options import SimCLROptions
    >>> try_negatives(SimCLROptions(negatives="OtherLabel() * Tilt(1.0)"))
    >>> try_negatives(SimCLROptions(negatives="From('queue')"))
    Traceback (most recent call last):
    hardneg.core.errors.ArgumentError: train needs --negatives for candidates of the batch, got ...: From needs ...
    """
    sources = options.sources if sources is None else sources
    options.check()
    _try_objective(options)
    if (generate := getattr(options, "generate", None)) is not None:
        with located("--generate"):
            read_generator(generate)
    with located("--negatives"):
        negatives = parse(options.negatives)
    rows = torch.arange(4)
    clusters = rows[:, None] if getattr(options, "clusters", 0) else None
    keys = Keys(torch.eye(4), rows, rows % 2 if labelled else None, clusters)
    pools = [keys.changed(source=source) for source in sources]
    scores = score(keys, keys, pools, value_of(number_of(options.temperature), 0, 1))
    try:
        negatives.at(0, 1).log_weights(scores)
    except ValueError as error:
        has = f"candidates of the {' and the '.join(sources)}{'' if labelled else ' without labels'}"
        got = f"negatives={options.negatives!r}: {error}"
        raise ArgumentError("train", f"--negatives for {has}", got, fix) from None


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


def number_of(value: Scheduled) -> Number:
    """The number, or the schedule that a text describes.

    >>> number_of("linear(0.5, 0.1)")(50, 100)
    0.3
    """
    if not isinstance(value, str):
        return value
    # As an argument, which is where the grammar has schedules.
    found = read_expression(f"number({value})", {"number": lambda value: value, **registered_schedules()})
    if not isinstance(found, Schedule):
        raise ArgumentError("train", 'a number or a schedule such as "linear(0.5, 0.1)"', repr(value))
    return found


def _check_warmup(options: TrainOptions) -> None:
    """Raises for a warm-up of the learning rate that lasts the whole run, so that nothing follows it."""
    if (warmup := read_rate(options.schedule).warmup) >= options.epochs:
        what, got = "more epochs than the warm-up of --schedule", f"warmup={warmup:g} and epochs={options.epochs}"
        raise ArgumentError("train", what, got, f"use a warmup below {options.epochs}, or train longer")


def _check_schedules(options: TrainOptions) -> None:
    """Raises for schedules that cannot be read, or begin or end out of bounds."""
    rules = {one.name: one.metadata for one in fields(options)}
    for name in ("temperature", "tau_plus"):
        number = number_of(getattr(options, name))
        if isinstance(number, Schedule):
            for step, when in ((0, "begins"), (LONG, "ends")):
                value = value_of(number, step, LONG)
                got = f"{number!r}, which {when} at {value:g}"
                check_bounds("train", name, value, rules[name], got)


def _check_device(options: TrainOptions) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("train", "a CUDA device", "device='cuda' and none is visible", "use --device cpu")
    has_half = options.device != "cpu" and (torch.cuda.is_available() or torch.backends.mps.is_available())
    if options.precision == "fp16" and not has_half:
        raise ArgumentError("train", "--precision bf16 or no on a CPU, which has no fp16", "precision='fp16'")
