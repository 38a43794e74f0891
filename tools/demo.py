"""Prints what the two comparisons of `make demo` found, in sentences that need no statistics.

python tools/demo.py runs/demo-text runs/demo
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

JUDGED = {
    "above": "That is better than chance explains",
    "below": "That is worse than chance explains",
    "alike": "That may be chance",
    "open": "Too few seeds to tell",
}


def difference(found: dict[str, Any], arm: str) -> str:
    """The difference of an arm from the first, with its interval and what to think of it."""
    one = next(one for one in found["verdicts"] if (one["arm"], one["against"]) == (arm, found["rows"][0]["arm"]))
    points = 100.0 * one["difference"]
    if one["half_width"] is None:
        return f"{JUDGED['open']} ({points:+.1f} points)."
    low, high = (points + side * 100.0 * one["half_width"] for side in (-1, 1))
    return f"{JUDGED[one['standing']]}: {points:+.1f} points (95 % interval {low:+.1f} to {high:+.1f})."


def percent(row: dict[str, Any]) -> str:
    return f"{100 * row['mean']:.1f} %"


def about_texts(found: dict[str, Any]) -> str:
    plain, tilted = found["rows"]
    return (
        f"Texts: given the name of a function, which of {found['num_test']} sentences describes it? With the usual "
        f"negatives the model is right for {percent(plain)} of the names; if close negatives count more, for "
        f"{percent(tilted)}. {difference(found, tilted['arm'])} Both had the same texts, model and number of steps, "
        "and each its best temperature by held-out training texts, the mean of three seeds."
    )


def about_digits(found: dict[str, Any]) -> str:
    plain, tilted, labelled = found["rows"]
    return (
        f"Digits: with the usual negatives {percent(plain)} of the images are recognised by their neighbours; if close "
        f"negatives count more, {percent(tilted)}. {difference(found, tilted['arm'])} With the labels, "
        f"{percent(labelled)}."
    )


def main(texts: str, digits: str) -> None:
    for folder, about in ((texts, about_texts), (digits, about_digits)):
        found = json.loads((Path(folder) / "comparison.json").read_text(encoding="utf-8"))
        print(f"\n{about(found)}\nreport: {folder}/report.html")


if __name__ == "__main__":
    main(*sys.argv[1:])
