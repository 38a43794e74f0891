"""The exact command, the versions and the options: how to get the page again."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from hardneg.reporting.figures import badge
from hardneg.reporting.story import ArmRuns, Story


def provenance_section(story: Story) -> str:
    facts = [part.facts for part in story.parts or [story]]
    commands = "\n".join(str(one.get("command", "not recorded")) for one in facts)
    listed = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in _versions(facts)
    )
    shared = "".join(
        f"<tr><th scope=row>{escape(k)}</th><td>{escape(json.dumps(v))}</td></tr>" for k, v in story.options.items()
    )
    own = [(arm, _own_options(arm, story.options)) for arm in story.arms if arm.seeds]
    differ = "".join(f"<tr><th scope=row>{badge(arm)}</th><td>{escape(text)}</td></tr>" for arm, text in own if text)
    differing = f"<h3>Options that differ</h3><table class=plain>{differ}</table>" if differ else ""
    folders = ", ".join(one.run.path.name for arm in story.arms for one in arm.seeds)
    return (
        '<section><h2 class="h">How to get this again</h2>'
        f'<pre tabindex="0"><code id="command">{escape(commands)}</code></pre>'
        f'<div class="two"><div><h3>Versions</h3><table class=plain id="versions">{listed}</table></div>'
        f"<div>{differing}<details><summary>Options of all runs</summary><table class=plain>{shared}</table></details>"
        f'<details><summary>Run directories</summary><p class="small">{escape(folders or "none")}</p></details>'
        "</div></div></section>"
    )


def _versions(facts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The machine and the versions; where the paths differ, all that there were."""
    seen: dict[str, dict[str, None]] = {}
    for one in facts:
        versions = {**(one.get("versions") or {}), "python": one.get("python"), "commit": one.get("commit")}
        where = {"machine": one.get("machine"), "device": one.get("device"), "threads of a run": one.get("threads")}
        for name, value in {**where, **versions}.items():
            if value:
                seen.setdefault(name, {})[str(value)] = None
    return [(name, ", ".join(values)) for name, values in seen.items()]


def _own_options(arm: ArmRuns, shared: dict[str, Any]) -> str:
    options = arm.seeds[0].config.get("options", {})
    return ", ".join(f"{k}={v!r}" for k, v in options.items() if k not in shared and k != "seed")
