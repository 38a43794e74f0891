"""Run a comparison: the same budget, seeds and initial weights for every arm, then the statistics and comparison.json.

``compare`` is the public function. It is ``prepare`` (check everything before training) followed by ``carry_out``
(tune, train, judge, write); the command line calls the two separately, to show errors before its progress bar. Each run
has its own folder (runs.py), so a killed comparison resumes and keeps finished runs.

``check_arms`` first runs the checks that need only the options, then those that read the data, and last those of the
encoder and views that "auto" resolves to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hardneg.comparing.arms import Arm, canonical_options, parse_arm
from hardneg.comparing.cautions import cautions, differing_settings, items_seen, settings_notes, shared_warnings
from hardneg.comparing.progress import Watcher
from hardneg.comparing.request import SHARED, Comparison, Try, letter_of, open_folder, tried_arm, tries_of, words_of
from hardneg.comparing.runs import RunSettings, run_all, run_of, started_options, usual_jobs, usual_threads
from hardneg.comparing.verdict import (
    Verdict,
    answer,
    data_name,
    headline,
    rows_of,
    sentences,
    temperature_notes,
    verdicts_of,
)
from hardneg.core.errors import ArgumentError, HardnegError, optional
from hardneg.core.text import html_table
from hardneg.io.files import output_folder, run_again, write_json
from hardneg.io.provenance import environment
from hardneg.training.data.items import Items, Splits
from hardneg.training.evaluation.measures import AUTO, measure, measures_in, unit_of
from hardneg.training.loop.boards import check_boards
from hardneg.training.loop.checks import check_batch, check_sources, check_words
from hardneg.training.loop.data_record import count_in, data_record, noun_in
from hardneg.training.loop.parts import splits
from hardneg.training.options import RECIPES, TrainOptions

ArmResults = list[list[dict[str, Any]]]
"""For every arm the results of its seeds."""
Tries = list[tuple[Try, float | None]]
"""Tried values of an arm with the metric on the validation split, the mean over seeds; None if a seed diverged."""


class AllDiverged(HardnegError, OSError):
    """Every tuned value of an arm diverged."""


class ComparisonSummary(dict[str, Any]):
    """Contents of comparison.json, with a table in notebooks."""

    def __repr__(self) -> str:
        """Return the answer on one line; ``dict(summary)`` has everything."""
        return f"ComparisonSummary({len(self['rows'])} arms: {' '.join(self['answer'])})"

    def _repr_html_(self) -> str:
        """Show the arms with their means and differences, and the answer below."""

        def percent(value: float | None, half_width: float | None) -> str:
            if value is None:
                return ""
            return f"{100 * value:.2f}" + ("" if half_width is None else f" ± {100 * half_width:.2f}")

        rows = [
            (
                letter_of(number),
                row["arm"],
                percent(row["mean"], row["half_width"]),
                percent(row["difference"], row["difference_half_width"]),
            )
            for number, row in enumerate(self["rows"])
        ]
        title = f"{measure(self['metric'], self.get('k'))}, {unit_of(self['metric'])}: means with 95 % intervals"
        columns = ("", "arm", "mean", "difference to the first")
        return html_table(title, columns, rows, [*self["answer"], *self["sentences"]])


def compare(
    comparison: Comparison,
    out: str | Path,
    *,
    jobs: int | None = None,
    allow_other_data: bool = False,
    show: Callable[[str], None] = print,
) -> ComparisonSummary:
    """Run a comparison and write comparison.json with its table and conclusions.

    Finished runs in the folder are kept, so the same call resumes a comparison that was stopped.

    Args:
        comparison: Arms, seeds, shared options and tuning.
        out: Folder of the comparison.
        jobs: Maximum number of parallel runs; by default one for each core, or two for each GPU. Fewer run where memory
            does not suffice.
        allow_other_data: Continue an earlier comparison although its data have changed; then there is no verdict.
        show: Called with a line of text for every run that ends.

    Returns:
        Contents of comparison.json, as a dict.

    Raises:
        ArgumentError: If the arms cannot be compared.
        CannotTrain: If an arm cannot be trained.
        RunFailed: If a run ends without a result.
    """
    prepared = prepare(comparison, out, jobs, allow_other_data)
    return ComparisonSummary(carry_out(prepared, Watcher(show, prepared.steps)))


@dataclass(frozen=True)
class Prepared:
    """A checked comparison: every arm can be trained, and folder, parallel runs and threads are chosen.

    Attributes:
        comparison: The request, with its metric resolved.
        arms: The arms with the common options.
        out: Folder of the comparison.
        how: Number of parallel runs and threads.
        steps: Number of training steps of the longest run.
    """

    comparison: Comparison
    arms: list[Arm]
    out: Path
    how: RunSettings
    steps: int

    @property
    def epochs(self) -> int:
        """Number of epochs of every run."""
        return self.arms[0].complete().epochs


def prepare(
    comparison: Comparison, out: str | Path, jobs: int | None = None, allow_other_data: bool = False
) -> Prepared:
    """Check a comparison before anything is trained or shown, and write its request.

    Args:
        comparison: Arms, seeds, shared options and tuning.
        out: Folder of the comparison.
        jobs: Maximum number of parallel runs; None: chosen for the machine.
        allow_other_data: Accept data that differ from those of the runs in the folder.

    Raises:
        ArgumentError: If the arms cannot be compared.
        CannotTrain: If an arm cannot be trained.
        FileError: If the folder has another comparison.
        MissingExtra: Without the extra ``train``.
    """
    optional("psutil", "compare", extra="train")
    check_boards()
    arms = [parse_arm(text).with_defaults(comparison.common) for text in comparison.arms]
    out = output_folder(out)
    data, metric = check_arms(arms, comparison)
    comparison = replace(
        comparison, metric=metric, common=comparison.common | equal_epochs(arms, count_in(data["train"]))
    )
    arms = [arm.with_defaults(comparison.common) for arm in arms]
    # Results depend on the threads in their last bits, and bits grow: all runs have the same number.
    threads = open_folder(out, comparison, data, usual_threads(arms, comparison.seeds, jobs), allow_other_data)
    if not (allow_other_data or comparison.tune):
        for run in (run_of(arm, seed, out) for arm in arms for seed in range(comparison.seeds)):
            if run.config_path.exists():
                run.check_data(data)
    options = [arm.complete() for arm in arms]
    items = count_in(data["train"])
    steps = max(one.epochs * (min(items, one.items_per_epoch or items) // one.batch_size) for one in options)
    return Prepared(comparison, arms, out, RunSettings(jobs, threads, allow_other_data), max(1, steps))


def equal_epochs(arms: Sequence[Arm], num_items: int) -> dict[str, int]:
    """Return the option by which arms of different batch sizes see equally many items in each epoch.

    Args:
        arms: The arms with the common options.
        num_items: Number of training items.

    Returns:
        ``items_per_epoch``, the largest common multiple of the batch sizes up to ``num_items``. Nothing if all sizes
        are equal, an arm or the caller has set the option, or there is no such multiple.

    Example:
        >>> equal_epochs([parse_arm("simclr(batch_size=64)"), parse_arm("simclr(batch_size=256)")], 1437)
        {'items_per_epoch': 1280}
    """
    options = [arm.complete() for arm in arms]
    sizes = {one.batch_size for one in options}
    common = math.lcm(*sizes)
    if len(sizes) == 1 or common > num_items or any(one.items_per_epoch for one in options):
        return {}
    return {"items_per_epoch": num_items - num_items % common}


def carry_out(prepared: Prepared, watcher: Watcher) -> dict[str, Any]:
    """Tune, train and judge a prepared comparison, and write comparison.json.

    Args:
        prepared: The comparison, as ``prepare`` returns it.
        watcher: Is notified of every run that ends.

    Returns:
        Contents of comparison.json: rows, measures, answer, verdicts, notes, cautions, and the environment.

    Raises:
        AllDiverged: If an arm diverges with every tuned value.
        RunFailed: If a run ends without a result.
    """
    comparison, arms, out = prepared.comparison, prepared.arms, prepared.out
    tries = _tries(prepared, watcher)
    chosen = _best(arms, tries)
    tuned = [arm.tuned(values) for arm, values in zip(arms, chosen, strict=True)]
    results = run_all(tuned, list(range(comparison.seeds)), out, prepared.how, watcher)
    rows = rows_of(tuned, results, comparison.metric)
    verdicts = verdicts_of(tuned, results, comparison.metric)
    # As the runs were started: those of an older version may have had other defaults.
    options = [
        arm.complete(seed=seed).as_dict() | started_options(run_of(arm, seed, out))
        for arm in tuned
        for seed in range(comparison.seeds)
    ]
    every = [result for of_arm in results for result in of_arm]
    differing = differing_settings(options, [result.get("trained") for result in every])
    differing |= items_seen(options, every)
    if "data" in differing:  # only with --allow-other-data
        verdicts = [one.without_verdict("the runs have different data") for one in verdicts]
        rows = [replace(row, difference_half_width=None) for row in rows]
    summary = {
        "metric": comparison.metric,
        "k": results[0][0].get("k"),
        "num_test": results[0][0].get("num_test"),
        "noun": noun_in((results[0][0].get("trained") or {}).get("data", {}).get("test", {})),
        "rows": [asdict(row) for row in rows],
        # Every accuracy of an arm with every seed, also those that do not decide.
        "measures": {
            arm.text: {name: [result[name] for result in of_arm] for name in measures_in(of_arm[0])}
            for arm, of_arm in zip(tuned, results, strict=True)
        },
        "headline": headline(verdicts, data_name(arms[0].complete().data)),
        "answer": answer(verdicts, measure(comparison.metric, results[0][0].get("k"))),
        "verdicts": [_as_json(one) for one in verdicts],
        "sentences": sentences(verdicts),
        "notes": temperature_notes(tuned, tuned="temperature" in comparison.tune),
        "cautions": _cautions(tuned, results, out),
        "unlike": settings_notes(differing),
        "tuned": {arm.text: values for arm, values in zip(arms, chosen, strict=True)} if comparison.tune else None,
        "tries": {arm.text: tried for arm, tried in zip(arms, tries, strict=True)} if comparison.tune else None,
        "comparison": asdict(comparison),
        "jobs": prepared.how.jobs or usual_jobs(tuned, comparison.seeds),  # the seconds of a run depend on it
        "threads": prepared.how.threads,
        **environment(),
    }
    write_json(out / "comparison.json", summary, run_again)
    return summary


def _as_json(verdict: Verdict) -> dict[str, Any]:
    """Return the fields of a verdict with its standing and its sentence."""
    return asdict(verdict) | {"standing": verdict.standing, "sentence": verdict.sentence()}


def _cautions(arms: list[Arm], results: ArmResults, out: Path) -> list[str]:
    """Collect the warnings common to all arms, then the cautions of each arm."""
    seeds = range(len(results[0]))
    shared, warned = shared_warnings(
        [[one for seed in seeds for one in run_of(arm, seed, out).warned()] for arm in arms]
    )
    lines = [f"All arms: {one}" for one in shared]
    for number, (arm, of_arm, own) in enumerate(zip(arms, results, warned, strict=True)):
        lines += cautions(letter_of(number), arm.complete().as_dict(), of_arm, own)
    return lines


def _tries(prepared: Prepared, watcher: Watcher) -> list[Tries]:
    """Evaluate the same number of tries for every arm with the same seeds; one that diverges loses."""
    comparison = prepared.comparison
    every = tries_of(prepared.arms, comparison)
    if not comparison.tune:
        return [[] for _ in every]
    runs = [tried_arm(arm, values) for arm, tries in zip(prepared.arms, every, strict=True) for values in tries]
    seeds, folder = list(range(comparison.tune_seeds)), prepared.out / "tuning"
    results = run_all(runs, seeds, folder, prepared.how, watcher, may_diverge=True)
    reached = (_mean([one.get(comparison.metric) for one in of_try]) for of_try in results)
    return [list(zip(tries, islice(reached, len(tries)), strict=True)) for tries in every]


def _mean(values: list[float | None]) -> float | None:
    """Return the mean; None if a value is missing."""
    present = [value for value in values if value is not None]
    return fmean(present) if len(present) == len(values) else None


def _best(arms: list[Arm], tries: list[Tries]) -> list[Try]:
    """Return the best values of each arm, the first of several; without tuning, no values."""
    chosen: list[Try] = []
    for arm, tried in zip(arms, tries, strict=True):
        values, reached = max(tried, key=lambda one: -math.inf if one[1] is None else one[1], default=({}, 0.0))
        if reached is None:
            got = ", ".join(words_of(one) for one, _ in tried)
            raise AllDiverged(arm.text, "tuned values with which it does not diverge", got, "try others")
        chosen.append(values)
    return chosen


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
        Record of the data (training/loop/data_record.py), and the name of the metric that decides.

    Raises:
        ArgumentError: If two arms train alike, or options of the arms and the comparison contradict each other.
        CannotTrain: If training an arm would fail.
    """
    for arm in arms:
        _check_options(arm, comparison)
    taken = {one.name for arm in arms for one in fields(RECIPES[arm.recipe])}
    if unused := [name for name in comparison.common if name not in taken]:
        raise ArgumentError("compare", "--option to be an option of at least one arm", repr(unused[0]))
    tried = [
        [tried_arm(arm, values) for values in tries]
        for arm, tries in zip(arms, tries_of(arms, comparison), strict=True)
    ]
    for one, other in combinations(zip(arms, tried, strict=True), 2):
        _check_difference(*one, *other, comparison)
    every = [one for arm, tries in zip(arms, tried, strict=True) for one in (arm, *tries)]
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
    for name in comparison.tune:
        if name in arm.options or name in arm.written:
            # Every arm gets the same tuned values, so an arm that names one of its own would be mislabelled.
            got = f"{name}={arm.options[name]!r} in {arm.text!r}" if name in arm.options else repr(arm.text)
            fix = "remove it from the arm, or do not tune"
            raise ArgumentError("compare", f"arms without {name}, which --tune sets", got, fix)


def _check_difference(one: Arm, mine: list[Arm], other: Arm, theirs: list[Arm], comparison: Comparison) -> None:
    """Raise if two arms train alike, either as they are or with the same tuned values."""
    names, others = ([name for name in comparison.tune if name in arm.tunable()] for arm in (one, other))
    pairs = [(one, other), *(zip(mine, theirs, strict=True) if names == others else ())]
    if not any(first.trains_like(second) for first, second in pairs):
        return
    tuned = f", apart from the {' and '.join(comparison.tune)} that --tune sets" if comparison.tune else ""
    raise _alike(one, other, tuned)


def _alike(one: Arm, other: Arm, tuned: str = "") -> ArgumentError:
    """Return the error for two arms that train alike."""
    got = f"the same options in {one.text!r} and {other.text!r}"
    return ArgumentError("compare", f"distinct arms{tuned}", got)


def _check_held_out(options: TrainOptions, found: Splits, comparison: Comparison) -> None:
    """Raise if values would be tuned on items that also judge the arms."""
    if comparison.tune and found.train is found.test:
        got = f"--data {options.data}, which is trained and tested on"
        fix = f"use --data {options.data}@0/10, or write {' and '.join(comparison.tune)} in the arms"
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
    for arm in arms:
        check_batch(arm.complete(), found.train, 1)
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
