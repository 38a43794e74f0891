"""Checks of the options of a run before anything is loaded or written; each error names the flag.

``check_words`` runs first: it parses every expression and needs no data. ``check_batch`` and ``check_sources`` run
once the data is loaded, and ``try_negatives`` tries the negatives on four made-up rows. The training loop and
``hardneg compare`` call them.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from hardneg.batching import planners
from hardneg.batching.spec import BatchSpec, parse_batches
from hardneg.core.errors import ArgumentError, argument_error, located, warn_once
from hardneg.core.schedules import LONG, Number, Schedule, adaptive, value_of
from hardneg.core.scoring import score
from hardneg.core.types import Keys
from hardneg.negatives import parse
from hardneg.negatives.grammar import read_generator, read_number, read_objective
from hardneg.theory.class_prior import tau_plus_of_labels
from hardneg.training.data.items import Items
from hardneg.training.data.kinds import kind_of
from hardneg.training.evaluation.monitors import read_monitor
from hardneg.training.loop.optimisers import read_optimiser, read_rate
from hardneg.training.loop.records import Moments
from hardneg.training.normalisation import asks_for_statistics, with_statistics
from hardneg.training.options import EMC2Options, TrainOptions
from hardneg.training.options.values import ESTIMATE, Scheduled, check_bounds
from hardneg.training.weights import check_source

STATEFUL_OBJECTIVES = {"isogclr": "isogclr", "surrogate": "sogclr or emc2"}
"""Objectives that need state of every image, such as temperatures, and the recipes that keep that state."""
REQUIREMENTS = {
    "nodes": ("infograph", "graphs, since it compares their nodes with them", "use --data graphs:NAME"),
    "pixels": ("cmc", "images, since it compares their lightness with their colours", "use hardneg train instance"),
}
"""By the feature that items must have: the recipe that needs it, the requirement, and the fix."""


def check_words(options: TrainOptions) -> BatchSpec:
    """Check names, expressions and combinations of options, without loading data.

    Args:
        options: Options of a recipe.

    Returns:
        How batches are planned, parsed from ``--batches``.

    Raises:
        ArgumentError: If a name is unknown, an expression cannot be parsed, or options contradict each other.
    """
    with located("--data"):
        kind = kind_of(options.data)
    if options.evaluate_with is not None and not kind.has_benchmarks:
        what = f"no --evaluate-with for {kind.noun}s, which have no benchmarks"
        raise argument_error("train", what, "evaluate_with", options.evaluate_with)
    if options.needs and options.needs != kind.has:
        who, what, fix = REQUIREMENTS[options.needs]
        raise ArgumentError(who, what, f"--data {options.data}, of {kind.noun}s", fix)
    kind.check(options)
    for flag, read in (("optimizer", read_optimiser), ("schedule", read_rate), ("monitor", read_monitor)):
        with located(f"--{flag}"):
            read(getattr(options, flag))
    if "global_loss" in Moments.of(options.record, options.record_at).kinds and not options.has_global_loss:
        what = "--record similarities only: this recipe has no loss over pairs of views of all items"
        raise ArgumentError("train", what, repr(options.record))
    if options.patience and not options.monitor_every:
        what = "--monitor-every with --patience, which counts evaluations of the monitor"
        raise ArgumentError("train", what, f"patience={options.patience} and monitor_every=0", "add --monitor-every 1")
    if options.init is not None:
        check_source(options.init)
    _check_warmup(options)
    _check_device(options)
    _check_schedules(options)
    try_negatives(options)
    with located("--batches"):
        spec = parse_batches(options.batches)
    for schedules in (parse(options.negatives), spec.planner):
        schedules.at(LONG, LONG)  # raises if a schedule ends out of bounds
    _check_adaptive(options)
    if spec.planner.needs != "nothing" and spec.warmup >= options.epochs:
        raise ArgumentError(
            "train",
            "more epochs than the warm-up of its batches, during which they are uniform",
            f"epochs={options.epochs} and warmup={spec.warmup}",
            f"write warmup={options.epochs - 1} into --batches, or train longer",
        )
    if isinstance(options, EMC2Options) and not isinstance(spec.planner, planners.UniformPlanner):
        warn_once(
            "emc2.planned_batches",
            f"The Markov chains of emc2 propose images of the batch. With --batches {options.batches} they no longer "
            "sample the softmax over the data set, but that softmax weighted by how often an image shares a batch "
            "with the anchor. Use --batches 'uniform()' for EMC2 as published.",
        )
    return spec


def check_batch(options: TrainOptions, data: Items, ranks: int) -> None:
    """Raise if the batch is larger than the data or an epoch, or cannot be divided among the ranks.

    Args:
        options: Options of a recipe.
        data: The training items.
        ranks: Number of processes.
    """
    got = f"batch_size={options.batch_size}"
    if options.batch_size > len(data):
        raise ArgumentError("train", f"--batch-size of at most the {len(data)} {data.noun}s of {options.data}", got)
    if options.batch_size % ranks:
        raise ArgumentError("train", f"--batch-size to be divisible by the {ranks} ranks", got)
    if 0 < options.items_per_epoch < options.batch_size:
        what = "--items-per-epoch of at least one batch"
        raise ArgumentError("train", what, f"items_per_epoch={options.items_per_epoch} and {got}")


def check_sources(options: TrainOptions, data: Items) -> None:
    """Raise for negatives from a source that the prepared data lacks in one of the directions.

    Only recipes with mined negatives are affected: whether there are any is known once the data is loaded.

    Args:
        options: Options of a recipe.
        data: The prepared training items.
    """
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
    """Raise for negatives that need something the recipe lacks: clusters, labels, a second model, another source.

    The expression is evaluated on four made-up rows, so that a mistake is found before the data is loaded.

    Args:
        options: Options of a recipe; ``options.check()`` is called as well.
        labelled: Whether the items have labels; assumed before the data is loaded.
        sources: Sources of the candidates, by default those of the recipe.
        fix: Advice for the error.

    Raises:
        ArgumentError: If the negatives, the objective or the generator do not fit the recipe.

    Example:
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
    """Raise for an unknown objective, and for one that needs state that only another recipe has."""
    if (text := getattr(options, "objective", None)) is None:
        return
    names = ("num_negatives", "positives_in_denominator")
    more = {name: getattr(options, name) for name in names if hasattr(options, name)}
    with located("--objective"):
        objective = read_objective(text, "train", tau_plus=number_of(_with_some_tau_plus(options).tau_plus), **more)
    if recipe := STATEFUL_OBJECTIVES.get(objective.name):
        what = "an --objective that needs only the embeddings of a batch"
        raise ArgumentError("train", what, f"objective={text!r}", f"use hardneg train {recipe}")


def number_of(value: Scheduled) -> Number:
    """Return a number, or the schedule that a text describes.

    Args:
        value: A number, which is returned as it is, or text such as "linear(0.5, 0.1)".

    Example:
        >>> number_of("linear(0.5, 0.1)")(50, 100)
        0.3
    """
    if value == ESTIMATE:
        what = "a number or a schedule: only tau_plus can be estimated, from the labels of the training items"
        raise ArgumentError("train", what, repr(value))
    return read_number(value, "train")


def with_estimate(options: TrainOptions, data: Items, record: dict[str, Any]) -> tuple[TrainOptions, dict[str, Any]]:
    """Replace what the options leave to the data: tau_plus="estimate" by its labels, mean="data" by its pixels.

    Args:
        options: Options of a recipe.
        data: The training items.
        record: The record of the data of the run.

    Returns:
        The options with a number, and the record with the estimate and its interval, if there is one.

    Raises:
        ArgumentError: If the items have no labels, or those of one class only.
    """
    if data.has == "pixels" and asks_for_statistics(options):
        options = with_statistics(options, data)
    if options.tau_plus != ESTIMATE:
        return options, record
    with located("--tau-plus estimate"):
        if data.labels is None:
            fix = "give a number, such as --tau-plus 0.1"
            raise ArgumentError("train", "labels of the training items", "none", fix)
        found = tau_plus_of_labels(data.labels[data.labels >= 0])
    return replace(options, tau_plus=found.tau_plus), {**record, "tau_plus": found._asdict()}


def _with_some_tau_plus(options: TrainOptions) -> TrainOptions:
    """Return options that can be checked before the data are loaded: with a number instead of an estimate."""
    return replace(options, tau_plus=0.1) if options.tau_plus == ESTIMATE else options


def _check_warmup(options: TrainOptions) -> None:
    """Raise if the warm-up of the learning rate lasts the whole run."""
    if (warmup := read_rate(options.schedule).warmup) >= options.epochs:
        what, got = "more epochs than the warm-up of --schedule", f"warmup={warmup:g} and epochs={options.epochs}"
        raise ArgumentError("train", what, got, f"use a warmup below {options.epochs}, or train longer")


def _check_schedules(options: TrainOptions) -> None:
    """Raise for schedules that cannot be parsed, or whose first or last value is out of bounds."""
    rules = {one.name: one.metadata for one in fields(options)}
    for name in ("temperature", "tau_plus"):
        number = number_of(getattr(_with_some_tau_plus(options), name))
        if isinstance(number, Schedule):
            for step, when in ((0, "begins"), (LONG, "ends")):
                value = value_of(number, step, LONG)
                got = f"{number!r}, which {when} at {value:g}"
                check_bounds("train", name, value, rules[name], got)


def _check_adaptive(options: TrainOptions) -> None:
    """Raise for a schedule that adapts to a monitor that is never evaluated."""
    numbers = [number_of(getattr(_with_some_tau_plus(options), name)) for name in ("temperature", "tau_plus")]
    for schedule in (*parse(options.negatives).schedules(), *numbers):
        if isinstance(schedule, adaptive) and schedule.on == "monitor" and not options.monitor_every:
            what = "--monitor-every with a schedule that adapts to the monitor"
            raise ArgumentError("train", what, f"{schedule!r} and monitor_every=0", "add --monitor-every 1")


def _check_device(options: TrainOptions) -> None:
    """Raise for CUDA without a GPU, and for fp16 on a CPU."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("train", "a CUDA device", "device='cuda' and none is visible", "use --device cpu")
    has_half = options.device != "cpu" and (torch.cuda.is_available() or torch.backends.mps.is_available())
    if options.precision == "fp16" and not has_half:
        raise ArgumentError("train", "--precision bf16 or no on a CPU, which has no fp16", "precision='fp16'")
