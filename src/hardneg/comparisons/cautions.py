"""What to know of an arm before its accuracy is believed: negatives it did not have, and what its runs warned of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hardneg.runs import Run, go_on, write_json

MOST = 0.5
"""The share of anchors without a negative, or of clamped pairs, above which there is a caution; train warns alike."""
_warning = re.compile(r"^.*\bHardnegWarning: (.+)$", re.MULTILINE)
_at_training = {"empty": "of the anchors have no negative under", "clamped": "of the debiased terms are at their floor"}


def cautions(
    arm: str, options: Mapping[str, Any], finals: Sequence[Mapping[str, Any]], warned: Iterable[str] = ()
) -> list[str]:
    """Sentences on the arm by its last records, one for each seed, and by what its runs warned of."""
    said: dict[str, str] = {}
    empty, clamped = (_mean(final.get(name) for final in finals) for name in ("empty", "clamped"))
    if empty > MOST and options.get("positives_in_denominator") != "all":  # there positives stand against each other
        said["empty"] = (
            f"{arm}: {empty:.0%} of the anchors had no negative in the last batch that was recorded, and taught "
            "nothing. Its accuracy tells little about its negatives: widen them, or use larger batches."
        )
    if clamped > MOST:
        said["clamped"] = (
            f"{arm}: {clamped:.0%} of its pairs were clamped in the last batch that was recorded, and their negatives "
            "pushed no more. Lower tau_plus or raise the temperature."
        )
    warned = [one for one in _told_once(warned) if not any(_at_training[name] in one for name in said)]
    return [*said.values(), *(f"{arm}: {one}" for one in warned)]


def keep_warnings(run: Run, stderr: str) -> None:
    """Puts what a run warned of beside its other files, since what a process says is gone when a comparison goes on."""
    if found := _warning.findall(stderr):
        write_json(run.path / "warnings.json", _told_once([*warnings_of(run), *found]), go_on)


def warnings_of(run: Run) -> list[str]:
    path = run.path / "warnings.json"
    try:
        return [str(one) for one in json.loads(path.read_text())] if path.exists() else []
    except ValueError:
        return []  # nothing that is worth an error


def _told_once(warnings: Iterable[str]) -> list[str]:
    """One of those that differ in their numbers only, as those of several seeds do."""
    return list({re.sub(r"[\d.]+", "#", one): one for one in reversed(list(warnings))}.values())[::-1]


def _mean(values: Iterable[Any]) -> float:
    there = [float(value) for value in values if value is not None]
    return sum(there) / len(there) if there else 0.0
