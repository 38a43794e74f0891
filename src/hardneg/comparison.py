"""Comparisons: the same budget, seeds and initial weights for every arm, and what the difference is worth.

Each run is a directory of its own (runs.py), so a killed comparison goes on with what is finished.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hardneg.arms import Arm, parse_arm
from hardneg.comparison_runs import run_all
from hardneg.comparison_verdict import rows_of, sentences, temperature_notes
from hardneg.notices import argument_error
from hardneg.options import RECIPES, TrainOptions
from hardneg.runs import environment, go_on, write_json
from hardneg.training_setup import check_batch, check_words, splits

METRIC = "knn"
SHARED = ("seed", "data", "data_root", "epochs", "batch_size", "evaluate_on")
"""What is the same for every arm, and therefore neither an arm's nor to be tuned."""
TITLES = {"knn": "kNN accuracy", "1nn": "1-NN accuracy", "linear": "linear probe"}


def measure(name: str, k: int | None = None) -> str:
    """How a measure is called: kNN by its k, where that is known."""
    return f"{k}-NN accuracy" if name == "knn" and k else TITLES.get(name, name)


@dataclass(frozen=True)
class Comparison:
    """What is to be run: arms, seeds, the options they share, and what is tuned."""

    arms: tuple[str, ...]
    seeds: int
    common: dict[str, Any]
    tune: tuple[str, tuple[float, ...]] | None = None
    metric: str = METRIC

    def __post_init__(self) -> None:
        if len(self.arms) < 2:
            raise argument_error("compare", "at least two arms", "arms", self.arms)
        if len(set(self.arms)) < len(self.arms):
            raise argument_error("compare", "arms that differ", "arms", self.arms)
        if self.seeds < 2:
            raise argument_error("compare", "at least two seeds, to tell a difference from noise", "seeds", self.seeds)
        if self.metric not in TITLES:
            raise argument_error("compare", f"a metric among {tuple(TITLES)}", "metric", self.metric)
        if "seed" in self.common:
            raise argument_error("compare", "--seeds, how many, and no seed of its own", "seed", self.common["seed"])
        if self.tune and self.tune[0] in SHARED:
            what = f"--tune with an option that arms may differ in, not one of {', '.join(SHARED)}"
            raise argument_error("compare", what, "tune", self.tune[0])


def compare(
    comparison: Comparison, out: Path, *, jobs: int | None = None, show: Callable[[str], None] = print
) -> dict[str, Any]:
    """Runs what is missing and writes comparison.json with the table and the sentences.

    At most ``jobs`` runs go side by side, by default one for each core or two for each GPU; fewer where memory does not
    allow it.
    """
    arms = [parse_arm(text).under(comparison.common) for text in comparison.arms]
    check_arms(arms, comparison)
    _check_same_comparison(comparison, out)
    tuned = _tuned(arms, comparison, out, jobs, show)
    results = run_all(tuned, list(range(comparison.seeds)), out, jobs, show)
    rows = rows_of(tuned, results, comparison.metric)
    summary = {
        "metric": comparison.metric,
        "k": results[0][0].get("k"),
        "num_test": results[0][0].get("num_test"),
        "rows": [asdict(row) for row in rows],
        "sentences": sentences(rows),
        "notes": temperature_notes(tuned),
        "tuned": {arm.text: arm.options.get(comparison.tune[0]) for arm in tuned} if comparison.tune else None,
        "comparison": asdict(comparison),
        **environment(),
    }
    write_json(out / "comparison.json", summary, go_on)
    return summary


def letter_of(number: int) -> str:
    """The short name of an arm in tables and charts: A, B, ... Z, 27, 28 ..."""
    return chr(ord("A") + number) if number < 26 else str(number + 1)


def read_tune(text: str) -> tuple[str, tuple[float, ...]]:
    """``temperature=0.1,0.2`` as an option and its values."""
    name, _, values = text.partition("=")
    try:
        return name.strip(), tuple(float(value) for value in values.split(","))
    except ValueError:
        raise argument_error("compare", "--tune like temperature=0.1,0.2", "tune", text) from None


def read_options(texts: list[str]) -> dict[str, Any]:
    """``name=value`` as options of train; numbers and true or false are read as such."""
    options: dict[str, Any] = {}
    known = {field.name for recipe in RECIPES.values() for field in fields(recipe)}
    for text in texts:
        name, _, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known:
            raise argument_error("compare", f"--option among {', '.join(sorted(known))}", "option", text)
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value.strip()
    return options


def check_arms(arms: list[Arm], comparison: Comparison) -> None:
    """Raises, before anything is trained, unless the arms differ and what is asked of them can be answered."""
    for arm in arms:
        _check_arm(arm, comparison)
    for number, arm in enumerate(arms):
        for other in arms[:number]:
            if arm.trains_like(other):
                raise ValueError(
                    f"compare needs arms that differ, got the same options in {other.text!r} and {arm.text!r}."
                )
    taken = {one.name for arm in arms for one in fields(RECIPES[arm.recipe])}
    if unused := [name for name in comparison.common if name not in taken]:
        raise argument_error("compare", "--option that one of the arms takes", "option", unused[0])
    every = [one.complete() for arm in arms for one in [arm, *_tries(arm, comparison)]]
    for options in every:
        check_words(options)
    _check_data(every)


def _check_arm(arm: Arm, comparison: Comparison) -> None:
    for name in SHARED:
        if name in arm.options:
            got = f"{name}={arm.options[name]!r} in {arm.text!r}"
            raise ValueError(f"compare needs the same {name} for every arm, got {got}; give it to compare, if at all.")
    for name in arm.own:
        if comparison.common.get(name, arm.options[name]) != arm.options[name]:
            told = f"--option {name}={comparison.common[name]}"
            raise ValueError(f"{arm.text} needs its own {name}, {arm.options[name]}, got {told}; write it in the arms.")
    if comparison.tune and comparison.tune[0] not in {one.name for one in fields(RECIPES[arm.recipe])}:
        raise argument_error("compare", f"--tune with an option of {arm.recipe}", "tune", comparison.tune[0])


def _check_data(every: list[TrainOptions]) -> None:
    """Raises unless both splits have labels and the train split a batch; each split is read once."""
    for evaluate_on in sorted({options.evaluate_on for options in every}):
        options = next(one for one in every if one.evaluate_on == evaluate_on)  # the data is the same for all of them
        train, test = splits(options)
        train.labelled("compare")
        test.labelled(f"compare, of its {evaluate_on} images,")
        check_batch(options, train, 1)


def _check_same_comparison(comparison: Comparison, out: Path) -> None:
    """A directory holds one comparison; the same one goes on where it stopped, with arms or seeds added at will."""
    path = out / "request.json"
    asked = json.loads(json.dumps({"common": comparison.common, "tune": comparison.tune, "metric": comparison.metric}))
    if path.exists() and json.loads(path.read_text()) != asked:
        raise ValueError(f"{out} holds a comparison with other options ({path}); use another --out.")
    write_json(path, asked, go_on)


def _tuned(
    arms: list[Arm], comparison: Comparison, out: Path, jobs: int | None, show: Callable[[str], None]
) -> list[Arm]:
    """The arms with the best of the tuned values on the validation split; every arm gets the same tries."""
    if comparison.tune is None:
        return arms
    name, tries = comparison.tune[0], [_tries(arm, comparison) for arm in arms]
    results = iter(run_all([one for tried in tries for one in tried], [0], out / "tuning", jobs, show))
    best = []
    for tried in tries:
        reached = [float(result[comparison.metric]) for (result,) in islice(results, len(tried))]
        best.append(tried[reached.index(max(reached))].options[name])
    return [arm.with_option(name, value) for arm, value in zip(arms, best, strict=True)]


def _tries(arm: Arm, comparison: Comparison) -> list[Arm]:
    """The arm with each of the tuned values, evaluated on a validation split."""
    if comparison.tune is None:
        return []
    name, values = comparison.tune
    whole = isinstance(getattr(RECIPES[arm.recipe], name), int)
    tried = [int(value) if whole and float(value).is_integer() else value for value in values]
    held_out = arm.under({"evaluate_on": "validation"})
    return [replace(held_out.with_option(name, value), text=f"{arm.text} {name}={value:g}") for value in tried]
