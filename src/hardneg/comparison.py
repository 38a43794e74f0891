"""Comparisons: the same budget, seeds and initial weights for every arm, and what the difference is worth.

Each run is a directory of its own (runs.py), so a killed comparison goes on with what is finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from hardneg.arms import Arm, parse_arm
from hardneg.data import load
from hardneg.notices import argument_error
from hardneg.options import RECIPES, TrainOptions
from hardneg.runs import LEAVES_WITH_STDIN, Run, environment, write_json

METRIC = "knn"
TITLES = {"knn": "kNN accuracy", "1nn": "1-NN accuracy", "linear": "linear probe"}


def measure(name: str, k: int | None = None) -> str:
    """How a measure is called: kNN by its k, where that is known."""
    return f"{k}-NN accuracy" if name == "knn" and k else TITLES.get(name, name)


class RunFailed(RuntimeError):  # noqa: N818, what it says
    """A run of a comparison ended without figures; the others are kept."""


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


@dataclass(frozen=True)
class Row:
    """One arm's line of the table."""

    arm: str
    values: list[float]
    mean: float
    half_width: float  # of the 95 % interval of the mean
    difference: float | None  # paired, against the first arm
    difference_half_width: float | None
    detectable: float | None  # the smallest difference seen four times in five with so many seeds
    effective_temperature: float
    false_negatives: float
    hardness: float
    clamped: float
    steps: int
    seconds: float


def compare(comparison: Comparison, out: Path, *, jobs: int = 1, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs what is missing and writes comparison.json with the table and the sentences."""
    arms = [_arm(text, comparison) for text in comparison.arms]
    _check_arms(arms, comparison)
    _check_same_comparison(comparison, out)
    tuned = [_tuned(arm, comparison, out, jobs, show) for arm in arms] if comparison.tune else arms
    results = _run_all(tuned, list(range(comparison.seeds)), comparison.common, out, jobs, show)
    rows = _rows(tuned, results, comparison)
    summary = {
        "metric": comparison.metric,
        "k": next(iter(results.values())).get("k"),
        "rows": [asdict(row) for row in rows],
        "sentences": sentences(rows, comparison),
        "notes": temperature_notes(tuned),
        "tuned": {arm.text: arm.options.get(comparison.tune[0]) for arm in tuned} if comparison.tune else None,
        "comparison": asdict(comparison),
        **environment(),
    }
    write_json(out / "comparison.json", summary)
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


def _arm(text: str, comparison: Comparison) -> Arm:
    """The arm with those common options that say which temperature it has in effect."""
    arm = parse_arm(text)
    common = {name: comparison.common[name] for name in ("temperature", "negatives") if name in comparison.common}
    return replace(arm, options=common | arm.options)


def _check_arms(arms: list[Arm], comparison: Comparison) -> None:
    """Raises, before anything is trained, unless the arms differ and what is asked of them can be answered."""
    known = {_folder(arm): arm.text for arm in arms}
    for arm in arms:
        if known[_folder(arm)] != arm.text:
            raise ValueError(
                f"compare needs arms that differ, got the same options in {known[_folder(arm)]!r} and {arm.text!r}."
            )
        if comparison.tune and comparison.tune[0] not in {field.name for field in fields(RECIPES[arm.recipe])}:
            raise argument_error("compare", f"--tune with an option of {arm.recipe}", "tune", comparison.tune[0])
    everything = [arm.complete(**comparison.common) for arm in arms]
    for data, root in {(options.data, options.data_root) for options in everything}:
        load(data, "train", root).labelled("compare")


def _check_same_comparison(comparison: Comparison, out: Path) -> None:
    """A directory holds one comparison; the same one goes on where it stopped, with arms or seeds added at will."""
    path = out / "request.json"
    asked = json.loads(json.dumps({"common": comparison.common, "tune": comparison.tune, "metric": comparison.metric}))
    if path.exists() and json.loads(path.read_text()) != asked:
        raise ValueError(f"{out} holds a comparison with other options ({path}); use another --out.")
    write_json(path, asked)


def _run_all(
    arms: list[Arm], seeds: list[int], common: dict[str, Any], out: Path, jobs: int, show: Callable[[str], None]
) -> dict[tuple[str, int], dict[str, Any]]:
    """Every arm with every seed, ``jobs`` at a time; a finished run is only read."""
    # Arms may become the same by tuning: they share their runs.
    wanted = {(_folder(arm), seed): arm for seed in seeds for arm in arms}
    done = {"n": 0}

    def one(arm: Arm, seed: int) -> dict[str, Any]:
        run = Run(out / "runs" / f"{_folder(arm)}-seed{seed}")
        result = run.result() or _in_a_process(arm.recipe, arm.complete(**common, seed=seed), run, jobs)
        done["n"] += 1
        show(f"[{done['n']}/{len(wanted)}] {arm.text}, seed {seed}")
        return result

    with ThreadPoolExecutor(jobs) as pool:
        futures = {key: pool.submit(one, arm, key[1]) for key, arm in wanted.items()}
        try:
            results = {key: future.result() for key, future in futures.items()}
            return {(arm.text, seed): results[_folder(arm), seed] for seed in seeds for arm in arms}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for lifeline in list(_lifelines):
                _let_go(lifeline)
            raise


_lifelines: set[int] = set()
"""The ends of pipes that runs hold on to: one whose pipe is closed leaves, so that Ctrl-C need not wait for it."""


def _let_go(lifeline: int) -> None:
    try:
        _lifelines.remove(lifeline)
    except KeyError:
        return  # another thread was quicker
    os.close(lifeline)


def _in_a_process(recipe: str, options: TrainOptions, run: Run, jobs: int) -> dict[str, Any]:
    """A run in a process of its own, with its share of the cores; it ends with this one, however this one ends."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    command = [sys.executable, "-m", "hardneg.recipes", recipe, str(run.path), json.dumps(options.as_dict())]
    environ = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, LEAVES_WITH_STDIN: "1"}
    here, there = os.pipe()
    _lifelines.add(there)
    try:
        answer = subprocess.run(command, env=environ, stdin=here, capture_output=True, text=True)
    finally:
        os.close(here)
        _let_go(there)
    result = run.result()
    if answer.returncode or result is None:
        said = (answer.stderr or answer.stdout).strip().splitlines() or ["it said nothing"]
        raise RunFailed(f"{run.path} failed: {said[-1]}")
    return result


def _tuned(arm: Arm, comparison: Comparison, out: Path, jobs: int, show: Callable[[str], None]) -> Arm:
    """The arm with the best of the tuned values on the validation split; every arm gets the same tries."""
    assert comparison.tune is not None
    name, values = comparison.tune
    whole = isinstance(getattr(RECIPES[arm.recipe], name), int)
    tries = [
        replace(arm.with_option(name, int(value) if whole else value), text=f"{arm.text} {name}={value:g}")
        for value in values
    ]
    common = comparison.common | {"evaluate_on": "validation"}
    results = _run_all(tries, [0], common, out / "tuning", jobs, show)
    best = max(tries, key=lambda one: float(results[one.text, 0][comparison.metric]))
    return replace(best, text=arm.text)


def _folder(arm: Arm) -> str:
    """A short name that is the same for the same arm."""
    digest = hashlib.blake2b(json.dumps([arm.recipe, arm.options], sort_keys=True, default=str).encode(), digest_size=4)
    return f"{arm.text.partition('(')[0]}-{digest.hexdigest()}"


def sentences(rows: list[Row], comparison: Comparison) -> list[str]:
    """What each difference is worth, in plain words."""
    first, said = rows[0], []
    for row in rows[1:]:
        assert row.difference is not None
        assert row.difference_half_width is not None
        assert row.detectable is not None
        points, width, seen = (100.0 * value for value in (row.difference, row.difference_half_width, row.detectable))
        side = "above" if points > 0 else "below"
        verdict = (
            f"beyond noise (95 % interval {points - width:+.2f} to {points + width:+.2f})"
            if abs(points) > width
            else f"not beyond noise (with {comparison.seeds} seeds, less than {seen:.2f} points is not seen reliably)"
        )
        where = f"{abs(points):.2f} points {side}" if abs(points) >= 0.005 else "level with"
        said.append(f"{row.arm} is {where} {first.arm}: {verdict}.")
    return said


def temperature_notes(arms: list[Arm]) -> list[str]:
    """A tilt acts like a lower temperature: says which tilted arm lacks its untilted twin."""
    untilted = [(arm.recipe, arm.temperature) for arm in arms if arm.beta == 0.0]
    return [
        f"{arm.text} repels like temperature {arm.effective_temperature:.3g}; no untilted arm has that temperature, so "
        "a gain over the others may be a gain of temperature. Add one, or use --tune temperature=..."
        for arm in arms
        if arm.beta > 0.0
        and not any(
            recipe == arm.recipe and abs(temperature - arm.effective_temperature) < 0.02 * temperature
            for recipe, temperature in untilted
        )
    ]


def paired(values: list[float], against: list[float]) -> tuple[float, float, float]:
    """Mean of the paired differences, half its 95 % interval, and the difference seen with a power of 80 %."""
    from scipy.stats import t

    differences = np.asarray(values) - np.asarray(against)
    n = len(differences)
    error = float(differences.std(ddof=1)) / n**0.5
    half = float(t.ppf(0.975, n - 1)) * error
    return float(differences.mean()), half, half + float(t.ppf(0.8, n - 1)) * error


def _rows(arms: list[Arm], results: dict[tuple[str, int], dict[str, Any]], comparison: Comparison) -> list[Row]:
    rows: list[Row] = []
    for arm in arms:
        of_arm = [results[arm.text, seed] for seed in range(comparison.seeds)]
        values = [float(result[comparison.metric]) for result in of_arm]
        against = paired(values, rows[0].values) if rows else (None, None, None)
        final = [result["final"] for result in of_arm]

        def mean(name: str, final: list[dict[str, float]] = final) -> float:
            return float(np.mean([np.nan if record[name] is None else record[name] for record in final]))

        rows.append(
            Row(
                arm=arm.text,
                values=values,
                mean=float(np.mean(values)),
                half_width=paired(values, [0.0] * len(values))[1],
                difference=against[0],
                difference_half_width=against[1],
                detectable=against[2],
                effective_temperature=arm.effective_temperature,
                false_negatives=mean("false_negatives"),
                hardness=mean("hardness"),
                clamped=mean("clamped"),
                steps=of_arm[0]["steps"],
                seconds=float(np.mean([result["seconds"] for result in of_arm])),
            )
        )
    return rows
