"""Runs and comparisons that were made apart, as arms of one page: what they show, and what makes them unlike."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardneg.comparing.cautions import decay_of
from hardneg.core.errors import ArgumentError
from hardneg.reporting.contents import ArmRuns, PageContents, SeedRun
from hardneg.reporting.reading import arm_text, differing_options, one_per_seed, read_story, row_of
from hardneg.training.data_record import count_in


def read_stories(paths: Sequence[Path]) -> PageContents:
    """One story of all paths; runs whose options differ in nothing but the seed are one arm."""
    if not paths:
        raise ArgumentError("report", "at least one run or comparison", "none")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ArgumentError("report", "paths that differ", ", ".join(map(str, paths)))
    parts = [read_story(path) for path in paths]
    if len(parts) == 1:
        return parts[0]
    metric = next((part.metric for part in parts if part.kind != "run"), parts[0].metric)
    arms, copies = _arms(parts, metric)
    missing = [one for part in parts for one in part.missing]
    return PageContents(
        paths[0].parent, "several", metric, arms, missing, {"notes": [*_of_seeds(arms), *copies]}, parts
    )


def _arms(parts: list[PageContents], metric: str) -> tuple[list[ArmRuns], list[str]]:
    """Arms of comparisons keep their names; those of runs are named by the options that differ between all of them.

    Copies of one run count once, which the notes say.
    """
    differing = differing_options([one for part in parts for one in part.runs])
    groups: dict[str, tuple[str, list[SeedRun], dict[str, Any]]] = {}
    for part in parts:
        for arm in part.arms:
            text = arm_text(arm.seeds[0].config, differing) if part.kind != "comparison" else arm.text
            key = _key(arm) if part.kind == "run" else f"{part.path}/{arm.number}"
            row = arm.row if part.kind == "comparison" and part.metric == metric else {}
            groups.setdefault(key, (text, [], row))[1].extend(arm.seeds)
    arms, copies = [], []
    for number, (text, found, row) in enumerate(groups.values()):
        runs = one_per_seed(found)
        for seed, times in Counter(one.seed for one in found).items():
            if times > 1:
                names = ", ".join(one.run.path.name for one in found if one.seed == seed)
                copies.append(f"{text}: seed {seed} is there {times} times ({names}); it counts once.")
        # The first arm of this page is not the one that the differences of a comparison are against.
        statistics = {name: value for name, value in row.items() if not name.startswith("difference")}
        arms.append(ArmRuns(number, text, statistics or row_of(runs, metric), runs))
    return _with_distinct_names(arms), copies


def _key(arm: ArmRuns) -> str:
    """The options except the seed, and what was trained: "auto" may be two networks, and a name two data sets."""
    one = arm.seeds[0]
    trained = one.trained or {}
    options = {name: value for name, value in one.options.items() if name != "seed"}
    options["weight_decay"] = decay_of(options, trained)
    encoder = {name: value for name, value in trained.get("encoder", {}).items() if name != "initial_weights"}
    resolved = [encoder, trained.get("views"), trained.get("data")]
    return json.dumps([one.config.get("recipe"), options, resolved], sort_keys=True)


def _with_distinct_names(arms: list[ArmRuns]) -> list[ArmRuns]:
    """Arms of the same name get the directory of their first run behind it."""
    names = [arm.text for arm in arms]
    for arm in arms:
        if names.count(arm.text) > 1 and arm.seeds:
            where = arm.seeds[0].run.path.resolve()
            folder = where.parent.parent if where.parent.name == "runs" and len(arm.seeds) > 1 else where
            arm.text = f"{arm.text} in {folder.name}"
    return arms


def _of_seeds(arms: list[ArmRuns]) -> list[str]:
    alike = len({tuple(one.seed for one in arm.seeds) for arm in arms}) == 1
    return [] if alike else ["The seeds are not the same in all arms."]


def provenance_of(story: PageContents) -> dict[str, Any]:
    facts = [part.facts for part in story.parts or [story]]
    own = [(arm, _own_options(arm, story.options)) for arm in story.arms if arm.seeds]
    return {
        "commands": [str(one.get("command", "not recorded")) for one in facts],
        "versions": _versions(facts),
        "differing": [(arm, text) for arm, text in own if text],
        "shared": [(name, json.dumps(value)) for name, value in story.options.items()],
        "trained": _trained(story),
        "folders": ", ".join(one.run.path.name for one in story.runs) or "none",
    }


def _versions(facts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The machine and the versions; where the paths differ, all that there were."""
    seen: dict[str, dict[str, None]] = {}
    for one in facts:
        versions = {**one.get("versions", {}), "python": one.get("python"), "commit": one.get("commit")}
        where = {"machine": one.get("machine"), "device": one.get("device"), "threads of a run": one.get("threads")}
        for name, value in {**where, **versions}.items():
            if value:
                seen.setdefault(name, {})[str(value)] = None
    return [(name, ", ".join(values)) for name, values in seen.items()]


def _trained(story: PageContents) -> list[tuple[str, str]]:
    """What the first run with a record trained."""
    options, found = next(((one.options, one.trained) for one in story.runs if one.trained), ({}, None))
    if found is None:
        return []
    encoder, data = found.get("encoder", {}), found.get("data", {})
    splits = [f"{count_in(one)} {split}" for split, one in data.items()]
    return [
        ("encoder", f"{encoder.get('name') or encoder.get('class')}, {encoder.get('parameters')} parameters"),
        ("initial weights", str(encoder.get("initial_weights"))),
        ("views", str(found.get("views"))),
        ("weight decay", str(decay_of(options, found))),
        (f"{story.noun}s", ", ".join(splits)),
    ]


def _own_options(arm: ArmRuns, shared: dict[str, Any]) -> str:
    options = arm.seeds[0].options
    return ", ".join(f"{k}={v!r}" for k, v in options.items() if k not in shared and k != "seed")
