"""Rates of `hardneg judge` in an audit: further rows of the table, with bounds, and dots of the frontier.

A judged rate is that of the negatives that a rule mines (its ``k`` slots per query), while a row of an audit averages
over the whole distribution of the rule. They are different quantities, so a judged rule has its own row, at the
mean similarity of the negatives that it mined.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from hardneg.auditing.result import Audit, RuleFigures, with_frontier
from hardneg.core.errors import ArgumentError, Damaged, NoFile
from hardneg.io.files import read_json

_fix = "give the --out folder of hardneg judge, or its judge.json"


def judged_file(path: str | Path) -> Path:
    """Return the file of figures in the folder of a judgement."""
    return Path(path) / "judge.json" if Path(path).is_dir() else Path(path)


def with_judged(audit: Audit, judged: Any) -> Audit:
    """Return the audit with a row for each judged rule.

    Args:
        audit: The figures of the other rules, on the same data.
        judged: A result of ``hn.judge``, or the folder of `hardneg judge`.

    Raises:
        NoFile: If there is no judgement.
        Damaged: If it cannot be read.
        ArgumentError: If the audit has no vectors, or the judgement is of another corpus.
    """
    if judged is None:
        return audit
    if not audit.rows:
        raise ArgumentError("audit", "embeddings to compare judged rules with others", "lists only", "give embeddings")
    path: Path | None = None
    if isinstance(judged, (str, Path)):
        path = judged_file(judged)
        if not path.is_file():
            raise NoFile("audit", "a judgement", path, "which is missing", _fix)
        figures = read_json(path, _fix, who="audit")
    elif hasattr(judged, "to_dict"):
        figures = judged.to_dict()
    else:
        raise ArgumentError("audit", "a result of hn.judge or its folder as judged", type(judged).__name__)
    documents = figures.get("documents", audit.num_candidates)
    if documents != audit.num_candidates:
        fix = "audit the data that was judged"
        raise ArgumentError("audit", f"judgements of {audit.num_candidates:,} documents", f"{documents:,}", fix)
    try:
        rows = [_row(one) for one in figures["rules"]]
        spent, confidence = int(figures["judgements"]), float(figures["confidence"])
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged("audit", "the figures of a judgement", path or "judged", repr(error), _fix) from None
    slots = f"the {figures['k']} negatives per query" if "k" in figures else "the negatives"
    note = (
        f"Rows named (judged) have estimated rates of {slots} that each rule mines, from {spent:,} judgements; upper "
        f"bounds have confidence {100 * confidence:g} %. Other rows average over the whole distribution of the rule."
    )
    return replace(audit, rows=with_frontier((*audit.rows, *rows)), notes=(*audit.notes, note))


def _row(figures: dict[str, Any]) -> RuleFigures:
    """Return the row of a judged rule; only its similarity and its rate are known."""
    names = (  # figures that only an audit of the vectors gives
        "similarity_error", "effective_number", "near_duplicates", "hubness", "hub_share", "coverage", "clamped",
        "attracted", "effective_temperature", "without_negatives",
    )  # fmt: skip
    unknown: dict[str, Any] = dict.fromkeys(names, math.nan)
    rate = math.nan if figures["rate"] is None else float(figures["rate"])
    return RuleFigures(
        f"{figures['rule']} (judged)",
        "judged",
        similarity=float(figures["similarity"]),
        false_negatives=rate,
        false_negatives_error=math.nan,
        judged_share=math.nan if math.isnan(rate) else 1.0,
        bounds=(float(figures["low"]), float(figures["high"])),
        **unknown,
    )
