"""Several runs and comparisons as arms of one page, and the provenance section: commands, versions and options.

``read_all_contents`` merges the contents of several paths, and is also the entry for a single one; ``provenance_of``
lists what is needed to repeat the runs. Both are called by write.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardneg.comparing.cautions import decay_of
from hardneg.core.errors import ArgumentError
from hardneg.reporting.contents import ArmRuns, PageContents, SeedRun
from hardneg.reporting.reading import arm_text, differing_options, one_per_seed, read_contents, row_of
from hardneg.training.data_record import count_in


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
        paths[0].parent, "several", metric, arms, missing, {"notes": [*_of_seeds(arms), *copies]}, parts
    )


def provenance_of(page: PageContents) -> dict[str, Any]:
    """Return what is needed to repeat the runs.

    Returns:
        By name: "commands", "versions", "differing" (options by arm), "shared" (options), "trained" and "folders".
    """
    facts = [part.facts for part in page.parts or [page]]
    own = [(arm, _own_options(arm, page.options)) for arm in page.arms if arm.seeds]
    return {
        "commands": [str(one.get("command", "not recorded")) for one in facts],
        "versions": _versions(facts),
        "differing": [(arm, text) for arm, text in own if text],
        "shared": [(name, json.dumps(value)) for name, value in page.options.items()],
        "trained": _trained(page),
        "folders": ", ".join(one.run.path.name for one in page.runs) or "none",
    }


def _arms(parts: list[PageContents], metric: str) -> tuple[list[ArmRuns], list[str]]:
    """Group the runs of all parts into arms, with notes on copies of a run, which count once.

    Arms of comparisons keep their names; those of runs are named by the options that differ between all of them.
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
                copies.append(f"{text}: seed {seed} appears {times} times ({names}); it counts once.")
        # The first arm of this page is not the one that the differences of a comparison are against.
        statistics = {name: value for name, value in row.items() if not name.startswith("difference")}
        arms.append(ArmRuns(number, text, statistics or row_of(runs, metric), runs))
    return _with_distinct_names(arms), copies


def _key(arm: ArmRuns) -> str:
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


def _of_seeds(arms: list[ArmRuns]) -> list[str]:
    """Return a note if the arms have different seeds."""
    alike = len({tuple(one.seed for one in arm.seeds) for arm in arms}) == 1
    return [] if alike else ["The seeds are not the same in all arms."]


def _versions(facts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the machine and the versions; all values where the paths differ."""
    seen: dict[str, dict[str, None]] = {}
    for one in facts:
        versions = {**one.get("versions", {}), "python": one.get("python"), "commit": one.get("commit")}
        where = {"machine": one.get("machine"), "device": one.get("device"), "threads of a run": one.get("threads")}
        for name, value in {**where, **versions}.items():
            if value:
                seen.setdefault(name, {})[str(value)] = None
    return [(name, ", ".join(values)) for name, values in seen.items()]


def _trained(page: PageContents) -> list[tuple[str, str]]:
    """Describe the first run that recorded what it trained."""
    options, found = next(((one.options, one.trained) for one in page.runs if one.trained), ({}, None))
    if found is None:
        return []
    encoder, data = found.get("encoder", {}), found.get("data", {})
    splits = [f"{count_in(one)} {split}" for split, one in data.items()]
    return [
        ("encoder", f"{encoder.get('name') or encoder.get('class')}, {encoder.get('parameters')} parameters"),
        ("initial weights", str(encoder.get("initial_weights"))),
        ("views", str(found.get("views"))),
        ("weight decay", str(decay_of(options, found))),
        (f"{page.noun}s", ", ".join(splits)),
    ]


def _own_options(arm: ArmRuns, shared: dict[str, Any]) -> str:
    """Write the options that an arm does not share with all others."""
    options = arm.seeds[0].options
    return ", ".join(f"{k}={v!r}" for k, v in options.items() if k not in shared and k != "seed")
