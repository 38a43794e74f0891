"""Charts of the records over training, one per quantity.

``CURVES`` lists the quantities with their texts; ``curves_of`` draws those that the runs recorded, and is called by
write.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hardneg.pages.charts.axes import Point
from hardneg.pages.charts.lines import Line, line_chart
from hardneg.reporting.contents import ArmRuns, PageContents, known


@dataclass(frozen=True)
class Curve:
    """One quantity over training.

    Attributes:
        key: Name in the records (metrics.jsonl).
        name: Heading of the chart.
        unit: Label of the axis.
        explained: Caption; ``{noun}`` stands for the word for an item.
        show: Formats a value.
        dashed_key: Name of a second quantity, drawn dotted where it differs.
    """

    key: str
    name: str
    unit: str
    explained: str
    show: Callable[[float], str]
    dashed_key: str | None = None


def _short(value: float) -> str:
    return f"{value:.3g}"


def _as_percent(value: float) -> str:
    return f"{100 * value:.3g} %"


CURVES = (
    Curve(
        "loss", "Loss", "loss, nats",
        "The quantity that training minimises. Losses with other temperatures or negatives are on different scales: "
        "compare shapes, not heights.", _short,
    ),
    Curve(
        "hardness", "Hardness of the negatives", "mean cosine similarity",
        "Thick: as the arm weights them. Fine dots, where it differs: all {noun}s of the batch alike.", _short,
        "uniform_hardness",
    ),
    Curve(
        "false_negatives", "False negatives in the batch", "share of the weight",
        "Weight on negatives of the anchor's own class.", _as_percent,
    ),
    Curve(
        "effective_number", "Effective number of negatives", "negatives",
        "How many equally weighted negatives would be as concentrated.", _short,
    ),
    Curve(
        "clamped", "Clamped", "share of pairs",
        "Where the correction for false negatives was clamped to its smallest possible value.", _as_percent,
    ),
    Curve(
        "attracted", "Attracted negatives", "share of negatives",
        "Easy negatives that the loss pulls closer, a side effect of weights that carry a gradient.", _as_percent,
    ),
    Curve(
        "loss_h_scl", "H-SCL and its bound", "loss, nats",
        "Thick: the loss against hard negatives of other classes. Fine dots: against those of all classes (H-UCL), its "
        "bound where Assumption 1 holds.", _short, "loss_h_ucl",
    ),
    Curve(
        "loss_scl", "SCL and UCL", "loss, nats",
        "Thick: the loss against all negatives of other classes. Fine dots: against all (UCL).", _short, "loss_ucl",
    ),
    Curve(
        "assumption", "Assumption 1 of H-SCL", "share of anchors",
        "Where hard negatives of the anchor's own class are more similar than those of others, which bounds the loss.",
        _as_percent,
    ),
    Curve(
        "monitor", "Monitor", "the higher the better",
        "The metric of --monitor on training items: the share that nearest neighbours or retrieval get right, or "
        "Spearman's correlation.", _as_percent,
    ),
    Curve("learning_rate", "Learning rate", "step size", "Set by the schedule.", _short),
    Curve("empty", "Anchors without a negative", "share of anchors", "They do not train the encoder.", _as_percent),
)  # fmt: skip


def curves_of(page: PageContents) -> dict[str, Any]:
    """Return the charts of the page.

    Returns:
        "cards" with (curve, chart), "constant" with the names of quantities that never change, and "instead" with the
        sentence that replaces the charts if there are none.
    """
    records = [one.metrics for one in page.runs if one.metrics]
    if records and max(map(len, records)) == 1:
        return {"instead": _one_record(records, alone=page.kind == "run")}
    cards, constant = [], []
    for curve in CURVES:
        lines = [line for arm in page.arms if (line := _line(curve, arm)) is not None]
        values = [value for line in lines for _, value in line.points]
        if not values:
            continue
        if max(values) - min(values) <= 1e-4 * max(1e-2, *map(abs, values)):
            constant.append(f"{curve.name.lower()} ({curve.show(values[0])})")
            continue
        chart = line_chart(curve.name, lines, curve.unit, curve.show, floor=0.0 if min(values) >= 0.0 else None)
        cards.append((curve, chart))
    if not cards and not constant:
        return {"instead": "No run has records over training (metrics.jsonl)."}
    return {"instead": "", "cards": cards, "constant": ", ".join(constant)}


def _one_record(records: list[list[dict[str, Any]]], alone: bool) -> str:
    """Return the sentence for runs with a single record, which have no curve."""
    steps = sorted({str(of_run[0].get("step", "?")) for of_run in records}, key=len)
    return (
        f"{'The run has' if alone else 'Every run has'} only one record, of step {' or '.join(steps)}, so "
        f"there is no curve to draw. {'--log-every 1' if alone else '--option log_every=1'} records every step."
    )


def _line(curve: Curve, arm: ArmRuns) -> Line | None:
    """Return the line of an arm: its mean, every seed, and the second quantity where it differs."""
    seeds = [points for one in arm.seeds if (points := _points_of(one.metrics, curve.key))]
    if not seeds:
        return None
    mean, dashed = _mean_line(seeds), []
    if curve.dashed_key is not None:
        other = _mean_line([_points_of(one.metrics, curve.dashed_key) for one in arm.seeds])
        differs = any(abs(a[1] - b[1]) > 1e-3 for a, b in zip(mean, other, strict=False))
        dashed = other if differs else []
    return Line(arm.letter, arm.text, arm.number, mean, seeds, dashed)


def _points_of(metrics: list[dict[str, Any]], key: str) -> list[Point]:
    """Return (step, value) of a quantity for all records that have it."""
    return [(float(r["step"]), float(r[key])) for r in metrics if "step" in r and known(r.get(key))]


def _mean_line(seeds: list[list[Point]]) -> list[Point]:
    """Return the mean at each step that most seeds have reached, so that it does not jump where one stops."""
    at: dict[float, list[float]] = {}
    for points in seeds:
        for step, value in points:
            at.setdefault(step, []).append(value)
    most = max((len(values) for values in at.values()), default=0)
    return [(step, sum(values) / len(values)) for step, values in sorted(at.items()) if 2 * len(values) >= most]
