"""What to know of an arm before its accuracy is believed: negatives it did not have, and what its runs warned of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST = 0.5
"""The share of anchors without a negative, or of clamped pairs, above which there is a caution; train warns alike."""
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


def of_all(warned: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """What the runs of all arms warned of, such as of their data, once; and what is left for each arm."""
    shared = set.intersection(*(set(map(_without_numbers, one)) for one in warned))
    left = [[said for said in one if _without_numbers(said) not in shared] for one in warned]
    return _told_once(said for said in warned[0] if _without_numbers(said) in shared), left


def _told_once(warnings: Iterable[str]) -> list[str]:
    """One of those that differ in their numbers only, as those of several seeds do."""
    return list({_without_numbers(one): one for one in reversed(list(warnings))}.values())[::-1]


def _without_numbers(text: str) -> str:
    return re.sub(r"[\d.]+", "#", text)


def _mean(values: Iterable[Any]) -> float:
    there = [float(value) for value in values if value is not None]
    return sum(there) / len(there) if there else 0.0
