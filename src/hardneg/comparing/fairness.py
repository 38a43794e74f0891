"""Whether arms differ in more than their negatives: judged by what was trained, not by how the options were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardneg.comparing.request import SHARED

BESIDE = ("encoder", "dim", "augment", "learning_rate", "weight_decay", "precision", "encode_chunk")
"""Options that an arm may set and that affect results in addition to its negatives."""
Trained = Mapping[str, Any] | None
"""The record of what a run trained (training/trained.py); None in runs of older versions."""


def unlike(options: Sequence[Mapping[str, Any]], trained: Sequence[Trained] = ()) -> dict[str, list[str]]:
    """What differs between runs beside the negatives and the seeds, and its values.

    Encoders, views and data are compared as they were trained, where the runs recorded it: "auto" may be two networks.
    """
    values = {name: [_shown(one.get(name)) for one in options] for name in (*SHARED, *BESIDE) if name != "seed"}
    if trained and all(trained):
        resolved = [_resolved(one) for one in trained if one]
        values |= {"encoder": [one[0] for one in resolved], "augment": [one[1] for one in resolved]}
        values["data"] = [one[2] for one in resolved]
        del values["data_root"]
    found = {name: list(dict.fromkeys(seen)) for name, seen in values.items()}
    return {name: seen for name, seen in found.items() if len(seen) > 1}


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
    parts = [f"{one.get('images')} {split} images ({one.get('fingerprint', '')[:8]})" for split, one in data.items()]
    earlier = " after other data" if trained.get("earlier_data") else ""
    return f"{name} of {encoder.get('parameters')} parameters", str(trained.get("views")), " and ".join(parts) + earlier


def _shown(value: Any) -> str:
    """The same text for 1 and 1.0."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
