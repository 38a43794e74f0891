"""Request of a comparison: arms, seeds, shared options, tuning and the deciding metric; and its folder.

``Comparison`` is the value that ``compare`` and the command line build. ``read_tune`` and ``read_options`` parse the
flags ``--tune`` and ``--option``; ``tries_of`` draws the values that are tried for each arm; ``open_folder`` writes
request.json, or checks it when a comparison is resumed.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from hardneg.comparing.arms import Arm
from hardneg.core.errors import ArgumentError, Damaged, FileError, UnknownName, argument_error, warn_once
from hardneg.io.files import read_json, run_again, write_json
from hardneg.training.evaluation.measures import AUTO, MEASURES
from hardneg.training.loop.data_record import check_same_data, is_data_record
from hardneg.training.loop.runs import changes
from hardneg.training.options import RECIPES

SHARED = ("seed", "data", "data_root", "epochs", "evaluate_on", "validation_share", "evaluate_with")
"""Options that are the same for every arm: an arm may not set them, and they are not tuned."""


def why_no_accuracy(result: Mapping[str, Any]) -> str:
    """Return why a finished run has no accuracy, as its result records it."""
    return str(result.get("no_accuracy", "its images have no labels, or are of one class"))


def letter_of(number: int) -> str:
    """Return the short name of an arm in tables and charts: A, B, ... Z, 27, 28 ...

    >>> letter_of(0), letter_of(25), letter_of(26)
    ('A', 'Z', '27')
    """
    return chr(ord("A") + number) if number < 26 else str(number + 1)


Try = dict[str, float]
"""Values of the tuned options of an arm, by name."""


@dataclass(frozen=True)
class Comparison:
    """Arms to compare, seeds, shared options and what is tuned.

    Attributes:
        arms: Arms as text, such as ``"hcl(beta=1)"``; at least two. The first one is the reference of the others.
        seeds: Number of seeds of every arm, which are 0, 1, ...; at least two, and three for a verdict.
        common: Options of ``train`` that all arms share unless an arm writes another value.
        tune: Values to try on a validation split, by the name of an option, of an argument of a paper, or of a field
            of the negatives; together they are a grid. Empty: nothing is tuned.
        metric: Measure that decides, or "auto" for the usual one of the data.
        num_tries: Number of tries of every arm; by default those of the largest grid. A larger grid is sampled, a
            smaller one is filled up with random values between its ends.
        tune_seeds: Number of seeds of every try, which are 0, 1, ...; the best mean is chosen.

    Raises:
        ArgumentError: For fewer than two arms or seeds, equal arms, an unknown metric, or options that contradict
            ``tune``.

    Example:
        >>> Comparison(("simclr()", "hcl(beta=1)"), seeds=3, common={"data": "digits"}).metric
        'auto'
    """

    arms: tuple[str, ...]
    seeds: int
    common: dict[str, Any]
    tune: dict[str, tuple[float, ...]] = field(default_factory=dict)
    metric: str = AUTO
    num_tries: int | None = None
    tune_seeds: int = 1

    def __post_init__(self) -> None:
        if len(self.arms) < 2:
            raise argument_error("compare", "at least two arms", "arms", self.arms, "such as simclr() and hcl()")
        if len(set(self.arms)) < len(self.arms):
            raise argument_error("compare", "distinct arms", "arms", self.arms)
        if self.seeds < 2:
            raise argument_error("compare", "at least two seeds, to estimate the noise", "seeds", self.seeds)
        if self.metric not in (AUTO, *MEASURES):
            raise argument_error(
                "compare", f"--metric to be one of {', '.join((AUTO, *MEASURES))}", "metric", self.metric
            )
        if "seed" in self.common:
            raise argument_error(
                "compare", "the number of --seeds instead of a single seed", "seed", self.common["seed"]
            )
        for name, values in self.tune.items():
            self._check_tune(name, values)
        if self.num_tries is not None and (self.num_tries < 1 or not self.tune):
            what = "a positive number of --tries, together with --tune"
            raise argument_error("compare", what, "tries", self.num_tries)
        if self.tune_seeds < 1 or (self.tune_seeds > 1 and not self.tune):
            what = "a positive number of --tune-seeds, together with --tune"
            raise argument_error("compare", what, "tune_seeds", self.tune_seeds)

    def _check_tune(self, name: str, values: tuple[float, ...]) -> None:
        if name in SHARED:
            what = f"--tune with an option that may differ between arms, not one of {', '.join(SHARED)}"
            raise argument_error("compare", what, "tune", name)
        if name in self.common:
            got = f"--tune {name}=... and {name}={self.common[name]!r}"
            raise ArgumentError("compare", f"{name} to be either tuned or given for all arms", got)
        if len(set(values)) < len(values):
            raise ArgumentError("compare", "distinct values in --tune", repr(values))


def tries_of(arms: Sequence[Arm], comparison: Comparison) -> list[list[Try]]:
    """Return the values to try for each arm, the same number for all of them.

    The grid of an arm is that of its tuned options. If it is larger than the number of tries, it is sampled at random.
    If it is smaller, random values between its smallest and largest are added (log-uniform
    where they are positive), so that an arm with fewer options gets a finer search of those that it has. Arms with the
    same options get the same tries.

    Args:
        arms: The arms.
        comparison: The request with ``tune`` and ``num_tries``.

    Returns:
        For each arm its tries: values by name. Empty lists without tuning.

    Raises:
        UnknownName: If no arm has a tuned option.
        ArgumentError: If an arm has none of them, or too few distinct values are possible.

    Example:
        >>> from hardneg.comparing.arms import parse_arm
        >>> wanted = Comparison(("simclr()", "hcl()"), 3, {}, {"temperature": (0.1, 0.5), "beta": (1.0, 2.0)})
        >>> simclr, hcl = tries_of([parse_arm(text) for text in wanted.arms], wanted)
        >>> len(simclr), hcl[0]
        (4, {'temperature': 0.1, 'beta': 1.0})
    """
    if not comparison.tune:
        return [[] for _ in arms]
    own = [[name for name in comparison.tune if name in arm.tunable()] for arm in arms]
    for name in comparison.tune:
        if not any(name in names for names in own):
            known = {one: None for arm in arms for one in arm.tunable() if one not in SHARED}
            raise UnknownName(name, list(known), "in any arm").within("--tune")
    grids = [
        [dict(zip(names, values, strict=True)) for values in product(*(comparison.tune[name] for name in names))]
        for names in own
    ]
    number = comparison.num_tries or max(map(len, grids))
    found = []
    for arm, names, grid in zip(arms, own, grids, strict=True):
        if not names:
            fix = "tune an option that every arm has as well, such as temperature or learning_rate"
            raise ArgumentError("compare", "a tuned option in every arm", f"{arm.text}, which has none of them", fix)
        rng = random.Random(" ".join(names))
        found.append(rng.sample(grid, number) if len(grid) > number else _filled(arm, grid, number, comparison, rng))
    return found


def _filled(arm: Arm, grid: list[Try], number: int, comparison: Comparison, rng: random.Random) -> list[Try]:
    """Add random tries between the ends of a grid until there are ``number`` distinct ones."""
    tries, present = list(grid), arm.tunable()
    for _ in range(100 * number):
        if len(tries) == number:
            break
        drawn = {}
        for name in grid[0]:
            low, high = min(comparison.tune[name]), max(comparison.tune[name])
            at = rng.random()
            value = math.exp(math.log(low) + at * math.log(high / low)) if low > 0.0 else low + at * (high - low)
            whole = isinstance(present[name], int) and not isinstance(present[name], bool)
            drawn[name] = float(round(value) if whole else f"{value:.3g}")
        tries += [drawn] * (drawn not in tries)
    if len(tries) < number:
        names = " and ".join(grid[0])
        fix = "give more values to --tune, or fewer --tries"
        raise ArgumentError("compare", f"{number} distinct tries of {names} for {arm.text}", str(len(tries)), fix)
    return tries


def tried_arm(arm: Arm, values: Try) -> Arm:
    """Return the arm with these values, evaluated on the validation split and named after them."""
    held_out = arm.tuned(values).with_defaults({"evaluate_on": "validation"})
    return replace(held_out, text=f"{arm.text} {words_of(values)}")


def words_of(values: Try) -> str:
    """Write tuned values, such as "temperature=0.1 beta=2"."""
    return " ".join(f"{name}={value:g}" for name, value in values.items())


def read_tune(texts: Iterable[str]) -> dict[str, tuple[float, ...]]:
    """Parse values of ``--tune``, each the name of an option with the values to try.

    Raises:
        ArgumentError: If a text has no name, a value is not a number, or an option is given twice.

    Example:
        >>> read_tune(["learning-rate=0.1,0.2", "beta=1"])
        {'learning_rate': (0.1, 0.2), 'beta': (1.0,)}
    """
    tune: dict[str, tuple[float, ...]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = _option_name(name)
        if name in tune:
            raise argument_error("compare", f"one --tune for {name}", "tune", texts)
        try:
            tune[name] = tuple(float(value) for value in values.split(","))
        except ValueError:
            raise ArgumentError("compare", "--tune like temperature=0.1,0.2", repr(text)) from None
    return tune


def read_options(texts: Iterable[str]) -> dict[str, Any]:
    """Parse values of ``--option``, each ``name=value``; numbers, true and false are read as JSON.

    Args:
        texts: One text for each option; hyphens in names count as underscores.

    Returns:
        Values by the name of the option. What is not JSON is kept as text.

    Raises:
        UnknownName: If no recipe has the option.
        ArgumentError: If an option is given twice.

    Example:
        >>> read_options(["epochs=3", "encoder=resnet18"])
        {'epochs': 3, 'encoder': 'resnet18'}
    """
    options: dict[str, Any] = {}
    known = {field.name for recipe in RECIPES.values() for field in fields(recipe)}
    for text in texts:
        name, _, value = text.partition("=")
        name = _option_name(name)
        if name not in known:
            raise UnknownName(name, sorted(known)).within("--option")
        if name in options:
            raise argument_error("compare", f"one --option for {name}", "option", texts)
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value.strip()
    return options


def _option_name(text: str) -> str:
    return text.strip().replace("-", "_")


def open_folder(out: Path, comparison: Comparison, data: dict[str, Any], threads: int, allow_other_data: bool) -> int:
    """Write request.json of a new comparison, or check that a resumed one has the same options and data.

    Arms and seeds may be added to a comparison; its other options may not change once a run has started.

    Args:
        out: Folder of the comparison.
        comparison: Request with its metric resolved.
        data: Record of the data (training/loop/data_record.py).
        threads: Number of threads per run, for a new comparison.
        allow_other_data: Accept data that differ from those of the earlier comparison.

    Returns:
        Number of threads of every run: that of the first start, even if ``--jobs`` is different now.

    Raises:
        FileError: If the folder has a comparison with other options.
        DataChanged: If the folder has a comparison with other data.
        Damaged: If request.json cannot be read.
    """
    path = out / "request.json"
    own = ("common", "tune", "metric", "num_tries", "tune_seeds")
    wanted = json.loads(json.dumps({name: getattr(comparison, name) for name in own}))
    begun = any((out / name).exists() for name in ("runs", "tuning", "comparison.json"))
    before = _read_request(path) if begun and path.exists() else {}
    if before and before | wanted != before:
        then, now = (one.get("common", {}) | {name: one.get(name) for name in own[1:]} for one in (before, wanted))
        got = f"which was started with other options ({changes(then, dict.fromkeys(then) | now)})"
        fix = "give the same options, or use another --out"
        raise FileError("compare", "the options of the comparison", path, got, fix)
    if before.get("data") and not allow_other_data:
        check_same_data("compare", out, before["data"], data)
    started_with = before.get("threads")
    if started_with not in (None, threads) and "OMP_NUM_THREADS" in os.environ:
        warn_once(
            "compare.threads",
            f"OMP_NUM_THREADS={threads} has no effect: this comparison was started with {started_with} for each run, "
            "and its results depend on that number. Use another --out to start a new one.",
        )
    write_json(path, wanted | {"threads": started_with or threads, "data": data}, run_again)
    return int(started_with or threads)


def _read_request(path: Path) -> dict[str, Any]:
    advice = "delete it if the comparison is the same, or use another --out"
    found = read_json(path, advice, who="compare")
    threads, data = found.get("threads"), found.get("data")
    common = isinstance(found.get("common", {}), dict)
    if not common or not isinstance(threads, int | None) or not (data is None or is_data_record(data)):
        raise Damaged("compare", "a valid request", path, got="its options, threads or data are not", fix=advice)
    return found
