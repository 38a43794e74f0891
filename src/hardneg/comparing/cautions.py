"""What to know before figures are believed: collapsed runs, missing negatives, warnings, and other differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from hardneg.comparing.request import SHARED
from hardneg.training.data_record import count_in, noun_in
from hardneg.training.options import TrainOptions
from hardneg.training.runs import Warned

MOST = 0.5
"""The share of anchors without a negative, or of clamped pairs, above which there is a caution; train warns, too."""


def cautions(
    arm: str,
    options: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    warned: Iterable[Warned] = (),
) -> list[str]:
    """Sentences on the arm by the figures of its runs, which have means over the last records, and their warnings."""
    found: dict[str, str] = {}
    if collapsed := sum(bool(result.get("collapsed")) for result in results):
        found["collapsed"] = (
            f"{arm}: {collapsed} of {len(results)} runs collapsed: all features are nearly the same. Lower the "
            "learning rate or the temperature, or weaken the negatives."
        )
    empty, clamped = (_mean(result.get("final", {}).get(name) for result in results) for name in ("empty", "clamped"))
    if empty > MOST and options.get("positives_in_denominator") != "all":  # there positives stand against each other
        found["empty"] = (
            f"{arm}: {empty:.0%} of the anchors had no negative in the last records, and taught nothing. Its accuracy "
            "shows little about its negatives: widen them, or use larger batches."
        )
    if clamped > MOST:
        found["clamped"] = (
            f"{arm}: {clamped:.0%} of its pairs were clamped in the last records, and their negatives pushed no more. "
            "Lower tau_plus or raise the temperature."
        )
    return [*found.values(), *(f"{arm}: {one.text}" for one in _once(warned) if one.kind not in found)]


def of_all(warned: Sequence[Sequence[Warned]]) -> tuple[list[str], list[list[Warned]]]:
    """What the runs of all arms warned of, such as of their data, once; and what is left for each arm."""
    shared = set.intersection(*(set(map(_kind, one)) for one in warned))
    left = [[one for one in of_arm if _kind(one) not in shared] for of_arm in warned]
    return [one.text for one in _once(one for one in warned[0] if _kind(one) in shared)], left


def _once(warned: Iterable[Warned]) -> list[Warned]:
    """The first of each kind: those of several seeds differ in their numbers only."""
    return list({_kind(one): one for one in reversed(list(warned))}.values())[::-1]


def _kind(one: Warned) -> str:
    return one.kind or one.text


def _mean(values: Iterable[Any]) -> float:
    there = [float(value) for value in values if value is not None]
    return sum(there) / len(there) if there else 0.0


BESIDE = (
    "encoder", "dim", "augment", "optimizer", "learning_rate", "schedule", "weight_decay", "clip", "accumulate",
    "precision", "encode_chunk",
)  # fmt: skip
"""Options that an arm may set and that affect results in addition to its negatives."""
Trained = Mapping[str, Any] | None
"""The record of what a run trained (training/data_record.py); None before training begins."""


def unlike(options: Sequence[Mapping[str, Any]], trained: Sequence[Trained] = ()) -> dict[str, list[str]]:
    """What differs between runs beside the negatives and the seeds, and its values.

    Encoders, views, weight decay and data are compared as they were trained, where the runs recorded it: "auto" may be
    two networks. ``trained`` has the record of each of the ``options``.
    """
    usual = {one.name: one.default for one in fields(TrainOptions)}  # of runs from before an option was added
    values = {
        name: [_shown(one.get(name, usual[name])) for one in options] for name in (*SHARED, *BESIDE) if name != "seed"
    }
    if trained and all(trained):
        resolved = [_resolved(one) for one in trained if one]
        values |= {"encoder": [one[0] for one in resolved], "augment": [one[1] for one in resolved]}
        values["data"] = [one[2] for one in resolved]
        values["weight_decay"] = [_shown(decay_of(*one)) for one in zip(options, trained, strict=True)]
        del values["data_root"]
    found = {name: list(dict.fromkeys(seen)) for name, seen in values.items()}
    return {name: seen for name, seen in found.items() if len(seen) > 1}


def decay_of(options: Mapping[str, Any], trained: Trained) -> Any:
    """The weight decay of a run, which records it where the options leave it to the kind of data."""
    return (trained or {}).get("weight_decay", options.get("weight_decay"))


def unlike_notes(differing: Mapping[str, list[str]]) -> list[str]:
    return [f"{name} differs: {', '.join(values)}." for name, values in differing.items()]


def same_weights(runs: Sequence[tuple[int, Trained]]) -> bool:
    """Whether all runs with the same seed began with the same weights; False where one has no record of them."""
    begun: dict[int, set[Any]] = {}
    for seed, trained in runs:
        begun.setdefault(seed, set()).add(trained and trained.get("encoder", {}).get("initial_weights"))
    return bool(begun) and all(len(found) == 1 and None not in found for found in begun.values())


def _resolved(trained: Mapping[str, Any]) -> tuple[str, str, str]:
    encoder, data = trained.get("encoder", {}), trained.get("data", {})
    name = encoder.get("name") or encoder.get("class")
    parts = [
        f"{count_in(one)} {split} {noun_in(one)}s ({one.get('fingerprint', '')[:8]})" for split, one in data.items()
    ]
    earlier = " after other data" if trained.get("earlier_data") else ""
    return f"{name} of {encoder.get('parameters')} parameters", str(trained.get("views")), " and ".join(parts) + earlier


def _shown(value: Any) -> str:
    """The same text for 1 and 1.0."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
