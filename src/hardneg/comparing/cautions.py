"""Caveats of a comparison: collapsed runs, missing negatives, warnings, and settings that differ between arms.

``cautions`` and ``shared_warnings`` are about single arms; ``differing_settings`` and ``same_weights`` compare runs.
The callers are comparing.py, for comparison.json, and reporting/contents.py, for runs without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from hardneg.comparing.request import SHARED
from hardneg.training.evaluation.measures import nothing_learnt
from hardneg.training.loop.data_record import count_in, noun_in
from hardneg.training.loop.runs import Warned
from hardneg.training.options import TrainOptions

CAUTION_SHARE = 0.5
"""Share of anchors without a negative, or of clamped pairs, above which there is a caution; train warns at it, too."""
OTHER_OPTIONS = (
    "batch_size", "encoder", "dim", "head", "augment", "optimizer", "learning_rate", "schedule", "weight_decay", "clip",
    "accumulate", "precision", "encode_chunk",
)  # fmt: skip
"""Options that an arm may set and that affect results in addition to its negatives."""
TrainRecord = Mapping[str, Any] | None
"""Record of what a run trained (training/loop/data_record.py); None before training starts."""


def cautions(
    arm: str,
    options: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    warned: Iterable[Warned] = (),
) -> list[str]:
    """Return the cautions of one arm, as sentences.

    Args:
        arm: Name of the arm in the sentences, such as its letter.
        options: Options of its runs.
        results: Results of its runs; their "final" has means over the last records.
        warned: Warnings of its runs.

    Returns:
        One sentence per problem. A warning about a problem that the results already show is left out.
    """
    found: dict[str, str] = {}
    if collapsed := sum(bool(result.get("collapsed")) for result in results):
        found["collapsed"] = (
            f"{arm}: {collapsed} of {len(results)} runs collapsed: all features are nearly the same. Lower the "
            "learning rate or the temperature, or weaken the negatives."
        )
    elif idle := [sentence for sentence in map(nothing_learnt, results) if sentence]:
        found["idle"] = f"{arm}: {len(idle)} of {len(results)} runs are no better than before training. {idle[0]}"
    empty, clamped = (_mean(result.get("final", {}).get(name) for result in results) for name in ("empty", "clamped"))
    if empty > CAUTION_SHARE and options.get("positives_in_denominator") != "all":  # there positives repel
        found["empty"] = (
            f"{arm}: {empty:.0%} of the anchors had no negative in the last records, so they did not train anything. "
            "The accuracy tells little about the negatives: widen them, or use larger batches."
        )
    if clamped > CAUTION_SHARE:
        found["clamped"] = (
            f"{arm}: {clamped:.0%} of its pairs were clamped in the last records, so their negatives had no gradient. "
            "Lower tau_plus or raise the temperature."
        )
    return [*found.values(), *(f"{arm}: {one.text}" for one in _once(warned) if one.kind not in found)]


def shared_warnings(warned: Sequence[Sequence[Warned]]) -> tuple[list[str], list[list[Warned]]]:
    """Separate the warnings that all arms share, such as those about the data.

    Args:
        warned: For every arm the warnings of its runs.

    Returns:
        Texts of the shared warnings, each once, and for every arm its other warnings.
    """
    shared = set.intersection(*(set(map(_kind, one)) for one in warned))
    left = [[one for one in of_arm if _kind(one) not in shared] for of_arm in warned]
    return [one.text for one in _once(one for one in warned[0] if _kind(one) in shared)], left


def differing_settings(
    options: Sequence[Mapping[str, Any]], trained: Sequence[TrainRecord] = ()
) -> dict[str, list[str]]:
    """Return the settings, other than negatives and seed, that differ between runs.

    Encoders, views, weight decay and data are compared as they were resolved, where the runs recorded it: "auto" may
    stand for two networks.

    Args:
        options: Options of every run.
        trained: Record of what each of these runs trained, if known.

    Returns:
        The distinct values by the name of the setting.
    """
    usual = {one.name: one.default for one in fields(TrainOptions)}  # for runs from before an option was added
    values = {
        name: [_shown(one.get(name, usual[name])) for one in options]
        for name in (*SHARED, *OTHER_OPTIONS)
        if name != "seed"
    }
    if trained and all(trained):
        resolved = [_resolved(one) for one in trained if one]
        values |= {"encoder": [one[0] for one in resolved], "augment": [one[1] for one in resolved]}
        values["data"] = [one[2] for one in resolved]
        values["weight_decay"] = [_shown(decay_of(*one)) for one in zip(options, trained, strict=True)]
        del values["data_root"]
    found = {name: list(dict.fromkeys(seen)) for name, seen in values.items()}
    return {name: seen for name, seen in found.items() if len(seen) > 1}


def items_seen(options: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the numbers of items that runs have seen, if they differ.

    The last, smaller batch of an epoch is left out, which costs more items where batches are large. A comparison evens
    that out (``equal_epochs``) unless the batch sizes have no common multiple within the data.

    Args:
        options: Options of every run.
        results: Their results.

    Example:
        >>> items_seen([{"batch_size": 64}, {"batch_size": 256}], [{"steps": 15}, {"steps": 3}])
        {'items seen': ['960', '768']}
    """
    seen = [one["batch_size"] * result["steps"] for one, result in zip(options, results, strict=True)]
    return {} if max(seen) == min(seen) else {"items seen": [f"{n:,}" for n in dict.fromkeys(seen)]}


def decay_of(options: Mapping[str, Any], trained: TrainRecord) -> Any:
    """Return the weight decay of a run; the record has it where the options leave it to the kind of data."""
    return (trained or {}).get("weight_decay", options.get("weight_decay"))


def settings_notes(differing: Mapping[str, list[str]]) -> list[str]:
    """Return a sentence for each setting that differs.

    >>> settings_notes({"epochs": ["2", "9"]})
    ['epochs differs: 2, 9.']
    """
    return [f"{name} differs: {', '.join(values)}." for name, values in differing.items()]


def same_weights(runs: Sequence[tuple[int, TrainRecord]]) -> bool:
    """Return whether runs with the same seed started with the same weights; False if a run has no record of them.

    Args:
        runs: Seed and record of every run.
    """
    begun: dict[int, set[Any]] = {}
    for seed, trained in runs:
        begun.setdefault(seed, set()).add((trained or {}).get("encoder", {}).get("initial_weights"))
    return bool(begun) and all(len(found) == 1 and None not in found for found in begun.values())


def _once(warned: Iterable[Warned]) -> list[Warned]:
    """Return the first warning of each kind; those of several seeds differ in their numbers only."""
    return list({_kind(one): one for one in reversed(list(warned))}.values())[::-1]


def _kind(one: Warned) -> str:
    return one.kind or one.text


def _mean(values: Iterable[Any]) -> float:
    there = [float(value) for value in values if value is not None]
    return sum(there) / len(there) if there else 0.0


def _resolved(trained: Mapping[str, Any]) -> tuple[str, str, str]:
    """Describe the encoder, the views and the data that a run trained."""
    encoder, data = trained.get("encoder", {}), trained.get("data", {})
    name = encoder.get("name") or encoder.get("class")
    parts = [
        f"{count_in(one)} {split} {noun_in(one)}s ({one.get('fingerprint', '')[:8]})" for split, one in data.items()
    ]
    earlier = " after other data" if trained.get("earlier_data") else ""
    return f"{name} of {encoder.get('parameters')} parameters", str(trained.get("views")), " and ".join(parts) + earlier


def _shown(value: Any) -> str:
    """Return the value as text, equal for 1 and 1.0."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
