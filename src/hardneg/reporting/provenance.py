"""The exact command, the versions and the options: how to get the page again."""

from __future__ import annotations

import json
from typing import Any

from hardneg.comparing.cautions import decay_of
from hardneg.reporting.story import ArmRuns, Story
from hardneg.training.trained import count_in


def provenance_of(story: Story) -> dict[str, Any]:
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


def _trained(story: Story) -> list[tuple[str, str]]:
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
