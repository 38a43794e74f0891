"""Read runs and comparisons from disk; missing parts are listed on the page instead of raising an error.

The constants describe the expected shapes of the JSON files, against which ``checked`` validates them: a file may be
damaged, or of another version. ``read_contents`` reads one path; ``read_all_contents`` merges the contents of several
paths into the arms of one page, and is also the entry for a single one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hardneg.comparing.arms import Arm, canonical_options, parse_arm
from hardneg.comparing.cautions import decay_of
from hardneg.comparing.runs import folder_of
from hardneg.core.errors import ArgumentError, FileError
from hardneg.core.text import printable
from hardneg.io.files import read_json
from hardneg.reporting.contents import ArmRuns, ContentsTable, PageContents, SeedRun, known, missing_parts
from hardneg.training.evaluation.measures import BEFORE, MEASURES, USUAL, headline_of
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES

MOST_SEEDS = 10_000
"""Maximum number of seeds; more are taken for a damaged file."""
_unreadable = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that options of another version, or of other types, may raise."""

RecordShape = Any
"""A ``FieldKind``, [shape] for a list, {name: shape} for a dict ("*": any other name), or a tuple for a fixed list."""


def _is_number(value: Any) -> bool:
    """True for a finite number of a size that charts can show."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and abs(value) < 1e100 and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    """True for a whole number that can be a count."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1e15


FieldKind = tuple[str, Callable[[Any], bool]]
"""Name of a kind of value for errors, and the test for it."""
NUMBER: FieldKind = ("a number", _is_number)
WHOLE: FieldKind = ("a whole number", _is_whole)
TEXT: FieldKind = ("text", lambda value: isinstance(value, str))
ANYTHING: FieldKind = ("anything", lambda value: True)

_split = {"images": WHOLE, "items": WHOLE, "noun": TEXT, "classes": WHOLE, "fingerprint": TEXT}
TRAINED = {
    "encoder": {"name": TEXT, "class": TEXT, "parameters": WHOLE, "initial_weights": TEXT},
    "views": TEXT,
    "weight_decay": NUMBER,
    "normalisation": {"mean": [NUMBER], "std": [NUMBER]},
    "data": {"*": _split},
    "earlier_data": [{"*": _split}],
}
_machine = {"command": TEXT, "python": TEXT, "commit": TEXT, "machine": TEXT, "device": TEXT, "versions": {"*": TEXT}}
CONFIG = {"recipe": TEXT, "options": {"seed": WHOLE, "*": ANYTHING}, "trained": TRAINED, **_machine}
RECORD = {"step": NUMBER, "epoch": NUMBER, "similarities": {"*": [NUMBER]}, "*": NUMBER}
RESULT = {
    "steps": WHOLE, "seconds": NUMBER, "epochs": NUMBER, "k": WHOLE, "num_test": WHOLE, "num_train": WHOLE,
    "alignment": NUMBER, "uniformity": NUMBER, "no_accuracy": TEXT, "headline": TEXT, "num_items": {"*": WHOLE},
    "epoch_seconds": [NUMBER], "seconds_of": {"*": NUMBER}, "final": {"*": NUMBER}, "trained": TRAINED,
    "correct": {"*": TEXT}, "scores": {"*": TEXT}, BEFORE: {"*": NUMBER},
    "similarities": {
        "edges": [NUMBER], "same": [NUMBER], "other": [NUMBER], "same_mean": NUMBER, "other_mean": NUMBER,
    },
    **dict.fromkeys(MEASURES, NUMBER),
}  # fmt: skip
ROW = {
    "arm": TEXT, "values": [NUMBER], "mean": NUMBER, "half_width": NUMBER, "difference": NUMBER,
    "difference_half_width": NUMBER, "detectable": NUMBER, "effective_temperature": NUMBER, "false_negatives": NUMBER,
    "hardness": NUMBER, "clamped": NUMBER, "steps": WHOLE, "seconds": NUMBER, "collapsed": WHOLE, "before": NUMBER,
}  # fmt: skip
VERDICT = {
    "arm": TEXT, "against": TEXT, "sentence": TEXT, "kind": TEXT, "standing": TEXT, "difference": NUMBER,
    "half_width": NUMBER, "corrected_half_width": NUMBER, "p_value": NUMBER,
}  # fmt: skip
COMPARISON = {
    "metric": TEXT, "k": WHOLE, "num_test": WHOLE, "noun": TEXT, "rows": [ROW], "headline": TEXT, "answer": [TEXT],
    "sentences": [TEXT], "notes": [TEXT], "cautions": [TEXT], "unlike": [TEXT], "threads": WHOLE,
    "verdicts": [VERDICT],
    "tuned": {"*": {"*": NUMBER}}, "tries": {"*": [({"*": NUMBER}, NUMBER)]},
    "comparison": {
        "seeds": WHOLE, "common": {"*": ANYTHING}, "tune": {"*": [NUMBER]}, "num_tries": WHOLE, "tune_seeds": WHOLE,
        "arms": [TEXT],
    },
    **_machine,
}  # fmt: skip
REQUEST = {"metric": TEXT, "common": {"*": ANYTHING}}


def read_contents(path: Path) -> PageContents:
    """Read a run, a comparison, or a comparison that was stopped.

    Args:
        path: Folder with config.json (a run), comparison.json (a comparison) or runs/ (one that was stopped).

    Raises:
        FileError: If the folder has none of these, or a file in it has unexpected contents.
    """
    if (path / "comparison.json").is_file():
        return _read_comparison(path)
    if (path / "config.json").is_file():
        one = read_run(path)
        text = arm_text(one.config, ["negatives", "tau_plus", "batches"])
        metric = headline_of(one.result or {})
        arm = ArmRuns(0, text, row_of([one], metric), [one], alone=True)
        return PageContents(path, "run", metric, [arm], missing_parts([arm], None), one.config)
    if any((path / "runs").glob("*/config.json")):
        return _read_unfinished(path)
    what = "a run (a directory with config.json) or a comparison (one with comparison.json or runs/)"
    raise FileError("report", what, path, None if path.exists() else "which is not there")


def read_run(path: Path) -> SeedRun:
    """Read the files of one run.

    Raises:
        FileError: If one of them has unexpected contents.
    """
    run = Run(path)
    config = checked(run.config(), CONFIG, run.config_path)
    found = run.result()
    result = None if found is None else checked(found, RESULT, run.result_path)
    metrics = checked(run.metrics(), [RECORD], run.metrics_path)
    return SeedRun(int(config.get("options", {}).get("seed", 0)), run, config, result, metrics)


def one_per_seed(runs: Iterable[SeedRun]) -> list[SeedRun]:
    """Return one run per seed, in the order of the seeds; a finished one if there are copies."""
    chosen: dict[int, SeedRun] = {}
    for one in runs:
        before = chosen.get(one.seed)
        if before is None or (before.result is None and one.result is not None):
            chosen[one.seed] = one
    return [chosen[seed] for seed in sorted(chosen)]


def wanted_arm(text: str, facts: dict[str, Any]) -> Arm | None:
    """Return the arm of a row with the common options and its tuned values; None if this version cannot parse it.

    Args:
        text: The arm as text.
        facts: Contents of comparison.json.
    """
    request, tuned = facts.get("comparison", {}), facts.get("tuned")
    try:
        arm = parse_arm(text).with_defaults(request.get("common", {}))
        if tuned and text in tuned:
            arm = arm.tuned(tuned[text])
        arm.complete()
    except _unreadable:
        return None
    return arm


def differing_options(runs: list[SeedRun]) -> list[str]:
    """Return the names of the options, other than the seed, that differ between runs."""
    every = [run.options for run in runs]
    names = dict.fromkeys(name for options in every for name in options)
    return [name for name in names if name != "seed" and any(other.get(name) != every[0].get(name) for other in every)]


def arm_text(config: dict[str, Any], names: list[str]) -> str:
    """Write a run as an arm: its temperature, and the named options that are not the recipe's defaults.

    Args:
        config: Contents of config.json.
        names: Names of options to write.

    Example:
        >>> arm_text({"recipe": "simclr", "options": {"temperature": 0.2, "dim": 16}}, ["dim"])
        'simclr(temperature=0.2, dim=16)'
    """
    recipe, options = config.get("recipe", "run"), config.get("options", {})
    usual = RECIPES[recipe]().as_dict() if recipe in RECIPES else {}
    shown = [name for name in names if name in options and (name not in usual or options[name] != usual[name])]
    shown = [name for name in dict.fromkeys(["temperature", *shown]) if name in options]
    return f"{recipe}({', '.join(f'{name}={options[name]!r}' for name in shown)})"


def row_of(runs: list[SeedRun], metric: str) -> ContentsTable:
    """Return the table row of an arm outside of a finished comparison: means of the finished runs, without intervals.

    Args:
        runs: Runs of the arm; the last records are used if none is finished.
        metric: Name of the metric that decides.
    """
    results = [one.result for one in runs if one.result is not None]
    final = [result.get("final", {}) for result in results]
    if results:
        steps = results[0].get("steps")
    else:  # none is finished: use the records so far
        final = [one.metrics[-1] for one in runs if one.metrics]
        steps = max((record.get("step", 0) for record in final), default=None)

    def mean(values: Iterable[Any]) -> float | None:
        there = [float(v) for v in values if known(v)]
        return sum(there) / len(there) if there else None

    values = [float(result[metric]) for result in results if metric in result]
    row: ContentsTable = {"values": values, "mean": mean(values), "steps": steps}
    row["before"] = mean(result.get(BEFORE, {}).get(metric) for result in results)
    row["seconds"] = mean(result.get("seconds") for result in results)
    names = ("effective_temperature", "false_negatives", "hardness", "clamped")
    return row | {name: mean(record.get(name) for record in final) for name in names}


def checked(value: Any, shape: RecordShape, path: Path, where: str = "", *, needs: tuple[str, ...] = ()) -> Any:
    """Return the value without its nulls, which stand for unknown, after checking its shape.

    Args:
        value: Contents of a JSON file, or a part of them.
        shape: Expected shape.
        path: The file, for the error.
        where: Name of the part, for the error.
        needs: Names that must be present.

    Raises:
        FileError: If the value has another shape.
    """
    if isinstance(shape, dict):
        found = _kind(value, dict, "names and values", path, where)
        for name in needs:
            if found.get(name) is None:
                raise _other(f"{name!r}", path, where, found)
        return {
            name: checked(one, shape.get(name, shape.get("*", ANYTHING)), path, f"{where}.{name}" if where else name)
            for name, one in found.items()
            if one is not None
        }
    if isinstance(shape, list):
        every = _kind(value, list, "a list", path, where)
        return [checked(one, shape[0], path, f"{where}[{i}]") for i, one in enumerate(every) if one is not None]
    if isinstance(shape[0], str) and callable(shape[-1]):
        if not shape[1](value):
            raise _other(shape[0], path, where, value)
        return value
    parts = _kind(value, list, f"a list of {len(shape)}", path, where)
    if len(parts) != len(shape):
        raise _other(f"a list of {len(shape)}", path, where, value)
    pairs = enumerate(zip(parts, shape, strict=True))
    return [None if one is None else checked(one, part, path, f"{where}[{i}]") for i, (one, part) in pairs]


def _read_comparison(path: Path) -> PageContents:
    """Read a finished comparison, and match its runs with the rows of its table."""
    file = path / "comparison.json"
    facts = checked(read_json(file, "run hardneg compare again", who="report"), COMPARISON, file, needs=("rows",))
    rows = [checked(row, ROW, file, f"rows[{i}]", needs=("arm", "values")) for i, row in enumerate(facts["rows"])]
    if not rows or not all(row["values"] for row in rows):
        raise FileError("report", "a comparison with rows and values", file, fix="run hardneg compare again")
    seeds = facts.get("comparison", {}).get("seeds", len(rows[0]["values"]))
    metric = _metric(facts, file)
    if seeds > MOST_SEEDS:
        raise FileError("report", f"at most {MOST_SEEDS} seeds", file, f"which has {seeds}")
    runs = [read_run(one.parent) for one in sorted((path / "runs").glob("*/config.json"))]
    arms = []
    for number, row in enumerate(rows):
        wanted = wanted_arm(row["arm"], facts)
        found = [one for one in runs if wanted is not None and one.seed < seeds and _is_of(one, wanted)]
        arms.append(ArmRuns(number, row["arm"], row, one_per_seed(found)))
    return PageContents(path, "comparison", metric, arms, missing_parts(arms, seeds), facts)


def _read_unfinished(path: Path) -> PageContents:
    """Read the runs of a comparison that was stopped; arms are named by the options that differ."""
    groups: dict[str, list[SeedRun]] = {}
    for one in sorted((path / "runs").glob("*/config.json")):
        groups.setdefault(one.parent.name.rpartition("-seed")[0] or one.parent.name, []).append(read_run(one.parent))
    file = path / "request.json"
    request = checked(read_json(file, "delete it", who="report"), REQUEST, file) if file.is_file() else {}
    metric = _metric(request, file)
    differing = differing_options([run for runs in groups.values() for run in runs])
    arms = []
    for number, runs in enumerate(groups.values()):
        runs = one_per_seed(runs)
        arms.append(ArmRuns(number, arm_text(runs[0].config, differing), row_of(runs, metric), runs))
    seeds = min(MOST_SEEDS, max(one.seed for arm in arms for one in arm.seeds) + 1)
    return PageContents(path, "unfinished", metric, arms, missing_parts(arms, seeds), arms[0].seeds[0].config)


def _metric(facts: dict[str, Any], file: Path) -> str:
    """Return the metric that decides; raise if it is unknown."""
    metric = str(facts.get("metric", USUAL))
    if metric not in MEASURES:
        raise FileError("report", f"a metric among {', '.join(MEASURES)}", file, f"which has {printable(metric, 40)!r}")
    return metric


def _is_of(one: SeedRun, arm: Arm) -> bool:
    """Return whether a run belongs to an arm: by its recipe and options, or by the name of its folder.

    Options that a later version added do not count, and defaults that it changed do not change the name.
    """
    if one.config.get("recipe") != arm.recipe:
        return False
    wanted = json.loads(json.dumps(arm.complete(seed=one.seed).as_dict(), default=str))
    try:
        if one.run.path.name == f"{folder_of(arm)}-seed{one.seed}":
            return True
        mine, theirs = canonical_options(wanted), canonical_options(one.options)
    except _unreadable:  # an expression of another version
        return False
    return all(theirs[name] == value for name, value in mine.items() if name in theirs)


def _kind(value: Any, kind: type, words: str, path: Path, where: str) -> Any:
    """Return the value; raise if it is not of this type."""
    if not isinstance(value, kind):
        raise _other(words, path, where, value)
    return value


def _other(words: str, path: Path, where: str, value: Any) -> FileError:
    """Return the error for a value of another shape."""
    place = f" in {printable(where, 80)}" if where else ""
    return FileError("report", f"{words}{place}", path, f"which has {printable(repr(value), 60)}")


def read_all_contents(paths: Sequence[Path]) -> PageContents:
    """Read all paths into the contents of one page; runs that differ only in the seed become one arm.

    Args:
        paths: Folders of runs and comparisons.

    Raises:
        ArgumentError: If there is no path, or one is given twice.
        FileError: If a path cannot be read.
    """
    if not paths:
        raise ArgumentError("report", "at least one run or comparison", "none")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ArgumentError("report", "distinct paths", ", ".join(map(str, paths)))
    parts = [read_contents(path) for path in paths]
    if len(parts) == 1:
        return parts[0]
    metric = next((part.metric for part in parts if part.kind != "run"), parts[0].metric)
    arms, copies = _arms(parts, metric)
    missing = [one for part in parts for one in part.missing]
    return PageContents(
        paths[0].parent, "several", metric, arms, missing, {"notes": [*_note_on_seeds(arms), *copies]}, parts
    )


def _arms(parts: list[PageContents], metric: str) -> tuple[list[ArmRuns], list[str]]:
    """Group the runs of all parts into arms, with notes on copies of a run, which count once.

    Arms of comparisons keep their names; those of runs are named by the options that differ between all of them.
    """
    differing = differing_options([one for part in parts for one in part.runs])
    groups: dict[str, tuple[str, list[SeedRun], dict[str, Any]]] = {}
    for part in parts:
        for arm in part.arms:
            text = arm_text(arm.seeds[0].config, differing) if part.kind != "comparison" else arm.text
            key = _arm_key(arm) if part.kind == "run" else f"{part.path}/{arm.number}"
            row = arm.row if part.kind == "comparison" and part.metric == metric else {}
            groups.setdefault(key, (text, [], row))[1].extend(arm.seeds)
    arms, copies = [], []
    for number, (text, found, row) in enumerate(groups.values()):
        runs = one_per_seed(found)
        for seed, times in Counter(one.seed for one in found).items():
            if times > 1:
                names = ", ".join(one.run.path.name for one in found if one.seed == seed)
                copies.append(f"{text}: seed {seed} appears {times} times ({names}); it counts once.")
        # The first arm of this page is not the one that the differences of a comparison are against.
        statistics = {name: value for name, value in row.items() if not name.startswith("difference")}
        arms.append(ArmRuns(number, text, statistics or row_of(runs, metric), runs))
    return _with_distinct_names(arms), copies


def _arm_key(arm: ArmRuns) -> str:
    """Return a key that is equal for runs of one arm: all options but the seed, and what "auto" resolved to."""
    one = arm.seeds[0]
    trained = one.trained or {}
    options = {name: value for name, value in one.options.items() if name != "seed"}
    options["weight_decay"] = decay_of(options, trained)
    encoder = {name: value for name, value in trained.get("encoder", {}).items() if name != "initial_weights"}
    resolved = [encoder, trained.get("views"), trained.get("data")]
    return json.dumps([one.config.get("recipe"), options, resolved], sort_keys=True)


def _with_distinct_names(arms: list[ArmRuns]) -> list[ArmRuns]:
    """Add the folder of the first run to names that several arms have."""
    names = [arm.text for arm in arms]
    for arm in arms:
        if names.count(arm.text) > 1 and arm.seeds:
            where = arm.seeds[0].run.path.resolve()
            folder = where.parent.parent if where.parent.name == "runs" and len(arm.seeds) > 1 else where
            arm.text = f"{arm.text} in {folder.name}"
    return arms


def _note_on_seeds(arms: list[ArmRuns]) -> list[str]:
    """Return a note if the arms have different seeds."""
    alike = len({tuple(one.seed for one in arm.seeds) for arm in arms}) == 1
    return [] if alike else ["The seeds are not the same in all arms."]
