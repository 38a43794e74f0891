"""Charts and tables of the runs: records over training, similarities of pairs, and the results of arms and seeds.

``CURVES`` lists the recorded quantities with their texts; ``curves_of`` draws those that the runs recorded.
``histograms_of`` draws the histograms in result.json, and computes from embeddings.npz how well the classes are
separated. For the table of results, ``heads_of`` chooses the columns for the kind of page and ``cells_of`` fills them;
``dots_of`` draws the dot plot above it. All are called by write.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from torch.nn.functional import normalize

from hardneg.comparing.request import words_of
from hardneg.comparing.verdict import before_training
from hardneg.core.errors import warn_once
from hardneg.io.embeddings import EmbeddingRows, Labels, load_evaluated
from hardneg.pages.charts.arms import Difference, Dots, Line, dot_plot, forest_plot, line_chart
from hardneg.pages.charts.axes import Point
from hardneg.pages.charts.similarities import Shares, histogram_chart
from hardneg.pages.render import csv_link
from hardneg.reporting.contents import (
    ABSENT,
    ArmRuns,
    PageContents,
    SeedRun,
    known,
    measure_in,
    number,
    percent,
    signed,
    two_digits,
)
from hardneg.training.evaluation.measures import MEASURES, unit_of
from hardneg.training.evaluation.pairs import above_diagonal


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
    Curve(
        "global_loss", "Exact loss over the data set", "loss, nats",
        "InfoNCE of all training {noun}s with all others as negatives, at the moments of --record global_loss.", _short,
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
    cards += _against_seconds(page)
    if not cards and not constant:
        return {"instead": "No run has records over training (metrics.jsonl)."}
    return {"instead": "", "cards": cards, "constant": ", ".join(constant)}


def _against_seconds(page: PageContents) -> list[tuple[Curve, Markup]]:
    """Return the card of the monitor over the seconds of training (EMC2, Fig. 1 and 8), if runs have both."""
    lines = []
    for arm in page.arms:
        seeds = [points for one in arm.seeds if (points := _seconds_of_monitor(one))]
        if seeds and len({len(points) for points in seeds}) == 1:
            means = [tuple(sum(axis) / len(seeds) for axis in zip(*at, strict=True)) for at in zip(*seeds, strict=True)]
            lines.append(Line(arm.letter, arm.text, arm.number, [(x, y) for x, y in means], seeds))
    if not lines or max(len(line.points) for line in lines) < 2:
        return []
    explained = "The same values over the seconds of training, without those of the evaluations themselves."
    curve = Curve("monitor", "Monitor against seconds", "the higher the better", explained, _as_percent)
    return [(curve, line_chart(curve.name, lines, curve.unit, curve.show, along="training second"))]


def _seconds_of_monitor(one: SeedRun) -> list[Point]:
    """Return (seconds, value) of the monitor; empty before the run is finished."""
    ends = list(accumulate((one.result or {}).get("epoch_seconds", [])))
    found = [(int(r["epoch"]), float(r["monitor"])) for r in one.metrics if known(r.get("monitor")) and "epoch" in r]
    return [(ends[epoch], value) for epoch, value in found] if all(epoch < len(ends) for epoch, _ in found) else []


def moments_of(page: PageContents) -> list[tuple[ArmRuns, list[tuple[str, Markup]]]]:
    """Return the histograms of the pairs of a batch over training, by arm: (name of the moment, chart)."""
    found = []
    for arm in page.arms:
        counts: dict[int, dict[str, list[float]]] = {}
        for one in arm.seeds:
            for record in one.metrics:
                if _has_pairs(kinds := record.get("similarities", {})):
                    known_kinds = counts.setdefault(int(record["step"]), {})
                    for kind, added in kinds.items():
                        before = known_kinds.get(kind, [0.0] * len(added))
                        known_kinds[kind] = [a + b for a, b in zip(before, added, strict=True)]
        if counts:
            found.append((arm, [(f"step {step:,}", _moment(arm, step, kinds)) for step, kinds in counts.items()]))
    return found


def _has_pairs(kinds: dict[str, list[float]]) -> bool:
    """Return whether a record has positives and negatives, over equal bins."""
    parts = [kinds.get("positives", []), kinds.get("negatives", [])]
    return all(map(sum, parts)) and len({len(part) for part in kinds.values()}) == 1


def _moment(arm: ArmRuns, step: int, kinds: dict[str, list[float]]) -> Markup:
    """Draw the histograms of one moment; the mean of a kind is that of its bins."""
    bins = len(kinds["positives"])
    edges = [2.0 * i / bins - 1.0 for i in range(bins + 1)]
    shares: dict[str, Shares] = {}
    for kind, counts in kinds.items():
        if total := sum(counts):
            mean = sum(count * (low + high) / 2.0 for count, (low, high) in zip(counts, pairwise(edges), strict=True))
            shares[kind] = Shares(kind.replace("_", " "), [count / total for count in counts], mean / total)
    highest = max(max(one.shares) for one in shares.values())
    both = shares["positives"], shares["negatives"]
    return histogram_chart(f"{arm.text}, step {step}", edges, *both, highest, third=shares.get("false_negatives"))


PARTS = ("training", "views", "sampling", "graph", "encoding", "recording")
"""Parts of a run whose seconds are shown, in this order."""


def seconds_of(page: PageContents) -> list[tuple[ArmRuns, list[str]]]:
    """Return the mean seconds of each of ``PARTS`` by arm (ProSampler, Table 11); empty if no run has them."""
    rows = []
    for arm in page.arms:
        found = [result["seconds_of"] for result in arm.finished() if result.get("seconds_of")]
        if found:
            means = [sum(one.get(part, 0.0) for one in found) / len(found) for part in PARTS]
            rows.append((arm, [_short(value) for value in means]))
    return rows


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


MAX_ITEMS = 2000
"""Maximum number of evaluated items whose pairs are compared; of more, a random sample, the same for every run."""


def histograms_of(page: PageContents) -> list[tuple[ArmRuns, str, Markup]]:
    """Return for each arm the sentence on its separation and its chart; empty if no run has labelled pairs."""
    found = [(arm, counts) for arm in page.arms if (counts := _counts(arm)) is not None]
    if not found:
        return []
    low, high = _occupied([counts for _, counts in found])
    shares = [(arm, counts, *_shares(counts, low, high)) for arm, counts in found]
    highest = max(max(*same, *other) for _, _, _, same, other in shares)
    cards = []
    for arm, counts, edges, same, other in shares:
        sentence, many = "", any((result.get("num_test") or 0) > MAX_ITEMS for result in arm.finished())
        if (share := separation_of(arm)) is not None:
            drawn = f", in a random sample of {MAX_ITEMS:,} {page.noun}s" * many
            sentence = (
                f"A same-class pair is more similar than an other-class pair {100 * share:.1f} % of the time{drawn}."
            )
        kinds = (
            Shares("same-class pairs", same, counts["same_mean"]),
            Shares("other-class pairs", other, counts["other_mean"]),
        )
        cards.append((arm, sentence, histogram_chart(arm.text, edges, *kinds, highest)))
    return cards


def _counts(arm: ArmRuns) -> dict[str, Any] | None:
    """Return the counts of all seeds together and the means over them; None without pairs of both kinds."""
    seeds = [found for result in arm.finished() if _valid(found := result.get("similarities", {}))]
    seeds = [one for one in seeds if one["edges"] == seeds[0]["edges"]]
    if not seeds:
        return None
    summed = {
        kind: [sum(column) for column in zip(*(one[kind] for one in seeds), strict=True)] for kind in ("same", "other")
    }
    means = {name: sum(one[name] for one in seeds) / len(seeds) for name in ("same_mean", "other_mean")}
    return {"edges": seeds[0]["edges"], **summed, **means}


def _valid(found: dict[str, Any]) -> bool:
    """Return whether the record has two histograms with pairs, over one set of increasing edges."""
    edges, same, other = (found.get(name, []) for name in ("edges", "same", "other"))
    if not (known(found.get("same_mean")) and known(found.get("other_mean"))):
        return False
    fits = len(edges) > 1 and len(same) == len(other) == len(edges) - 1
    rising = all(low < high for low, high in pairwise(edges))
    return fits and rising and all(min(kind) >= 0 and sum(kind) > 0 for kind in (same, other))


def _occupied(every: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the range of similarities in which any arm has pairs worth drawing."""
    low, high = 1.0, -1.0
    for counts in every:
        for kind in ("same", "other"):
            least = 2e-4 * sum(counts[kind])
            bins = [i for i, count in enumerate(counts[kind]) if count > least]
            low, high = min(low, counts["edges"][bins[0]]), max(high, counts["edges"][bins[-1] + 1])
    return low, high


def _shares(counts: dict[str, Any], low: float, high: float) -> tuple[list[float], list[float], list[float]]:
    """Return the edges inside the range, and the share of same-class and other-class pairs in each bin."""
    edges = counts["edges"]
    inside = [i for i in range(len(edges) - 1) if edges[i] >= low - 1e-9 and edges[i + 1] <= high + 1e-9]
    same, other = ([counts[kind][i] / sum(counts[kind]) for i in inside] for kind in ("same", "other"))
    return [edges[i] for i in inside] + [edges[inside[-1] + 1]], same, other


def separation_of(arm: ArmRuns) -> float | None:
    """Return the mean separation over the seeds of an arm; None without embeddings.

    Each seed counts separately, since similarities of two encoders are not comparable.
    """
    files = [one.run.path / "embeddings.npz" for one in arm.seeds if one.result is not None]
    found = [share for file in files if (share := _of_file(file)) is not None]
    return sum(found) / len(found) if found else None


def _of_file(file: Path) -> float | None:
    """Return the separation of one run; None without a file or labels. A damaged file warns and is left out."""
    if not file.is_file():
        return None
    try:
        features, labels = load_evaluated(file)
    except (OSError, ValueError) as error:
        warn_once(f"damaged embeddings: {file}", f"The separation of the classes leaves out a run: {error}")
        return None
    return None if labels is None else separation(features, labels)


def separation(x: EmbeddingRows, y: Labels) -> float | None:
    """Return the probability that a same-class pair is more similar than an other-class pair (ties count half).

    Args:
        x: Embeddings, shape [n, d]; at most ``MAX_ITEMS`` random rows are used, the same for every run.
        y: Labels, shape [n].

    Returns:
        A probability, or None if there is no pair of one kind.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> separation(x, torch.tensor([0, 0, 1, 1]))
        1.0
    """
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:MAX_ITEMS]
    x, y = normalize(x[order].double(), dim=1), y[order]
    cosines, alike = above_diagonal(x @ x.T), above_diagonal(y[:, None] == y)
    same, other = cosines[alike], cosines[~alike].sort().values
    if not len(same) or not len(other):
        return None
    below, not_above = (torch.searchsorted(other, same, right=right).double() for right in (False, True))
    return float((below + not_above).mean()) / (2.0 * len(other))


@dataclass(frozen=True)
class Cell:
    """One cell of the table.

    Attributes:
        key: Name of the column.
        label: Heading of the column, which narrow screens show in the cell.
        parts: Texts of the cell, each of which may be on its own line.
        tag: Small mark under the text, such as "significant".
        tag_kind: CSS class of the mark: "above", "below" or "alike".
    """

    key: str
    label: str
    parts: list[str]
    tag: str = ""
    tag_kind: str = ""


def dots_of(page: PageContents) -> Markup | None:
    """Return the dot plot with every seed of every arm; None for a single arm or without values."""
    measured = [arm for arm in page.arms if arm.row.get("values")]
    if not measured or len(page.arms) == 1:
        return None
    measure = measure_in(page, page.metric)
    rows = [_dots_of(arm, page) for arm in measured]
    return dot_plot(
        f"{measure} of every seed",
        rows,
        f"{measure}, {unit_of(page.metric)}  (the axis does not start at 0)",
        two_digits,
        ceiling=100.0,
    )


def _dots_of(arm: ArmRuns, page: PageContents) -> Dots:
    """Return the dots of one arm, in percent, with the mean and its interval."""
    values, half = arm.row["values"], arm.row.get("half_width")
    seeds = [one.seed for one in arm.seeds if one.result is not None and page.metric in one.result]
    numbers = seeds if page.kind != "comparison" and len(seeds) == len(values) else range(len(values))
    percents = {seed: 100.0 * value for seed, value in zip(numbers, values, strict=True)}
    wide = 100.0 * half if known(half) else None
    return Dots(f"{arm.letter}  {arm.text}", arm.text, arm.number, percents, 100.0 * sum(values) / len(values), wide)


def forest_of(page: PageContents) -> Markup | None:
    """Return the forest plot of the differences that a comparison has judged; None without any."""
    by_name = {arm.text: arm for arm in page.arms}
    rows = []
    for one in page.facts.get("verdicts", []) if page.kind == "comparison" else []:
        arm, against = by_name.get(one.get("arm")), by_name.get(one.get("against"))
        value, half = one.get("difference"), one.get("half_width")
        if arm is None or against is None or not known(value) or not known(half):
            continue
        wide = one.get("corrected_half_width", half)
        label = f"{arm.letter} vs {against.letter}"
        figures = (100.0 * value, 100.0 * half, 100.0 * wide)
        standing = one.get("standing", "alike")
        rows.append(Difference(label, one.get("sentence", label), (arm.number, against.number), *figures, standing))
    if not rows:
        return None
    measure = measure_in(page, page.metric)
    return forest_plot(f"Differences in {measure}", rows, f"difference in {measure}, points", lambda v: f"{v:+z.2f}")


def heads_of(page: PageContents) -> list[tuple[str, str]]:
    """Return the columns of the table, as (key, heading); they depend on the kind of page."""
    metric, unit = measure_in(page, page.metric), unit_of(page.metric)
    heads = [
        ("arm", "arm"), ("seeds", f"{metric} of every seed, {unit}"), ("mean", f"mean, {unit}"),
        ("against", "against the first, points"), ("temperature", "effective temperature"),
        ("false", "false negatives"), ("hardness", "hardness"),
        ("clamped", "clamped"), ("steps", "steps"), ("seconds", "seconds"),
    ]  # fmt: skip
    if page.kind == "run":
        heads = [(key, f"{metric}, {unit}" if key == "mean" else name) for key, name in heads if key != "seeds"]
    if page.kind in ("run", "several"):
        heads = [(key, name) for key, name in heads if key != "against"]
    return heads


def cells_of(arm: ArmRuns, heads: list[tuple[str, str]], page: PageContents) -> list[Cell]:
    """Return the cells of an arm, without its name.

    Args:
        arm: Arm of the row.
        heads: Columns of the table.
        page: The page. Its first arm is the reference; there is no verdict if only one of the two uses labels.
    """
    row, first = arm.row, page.arms[0]
    half = row.get("half_width")
    against, tag, kind = _against(arm, page)
    if tag and arm.uses_labels != first.uses_labels:
        tag, kind = f"{'sees' if arm.uses_labels else 'without'} labels", "alike"
    runs = f"collapsed in {row.get('collapsed')} of {len(row.get('values', []))} runs"
    texts: dict[str, list[str]] = {
        "seeds": [two_digits(100 * value) for value in row.get("values", [])] or [ABSENT],
        "mean": [percent(row.get("mean"), unit="") + (f" ± {two_digits(100 * half)}" if known(half) else "")],
        "against": [against],
        "temperature": [number(row.get("effective_temperature"), ".3g")],
        "false": [percent(row.get("false_negatives"), 1)],
        "hardness": [number(row.get("hardness"), ".3f")],
        "clamped": [percent(row.get("clamped"), 1)],
        "steps": [number(row.get("steps"), "d")],
        "seconds": [number(row.get("seconds"), ".0f")],
    }
    tags = {"against": (tag, kind), "hardness": (runs if row.get("collapsed") else "", "below")}
    return [Cell(key, label, texts[key], *tags.get(key, ("", ""))) for key, label in heads if key != "arm"]


def _against(arm: ArmRuns, page: PageContents) -> tuple[str, str, str]:
    """Return the difference from the first arm as text, with the tag for its significance and the kind of the tag."""
    value, half = arm.row.get("difference"), arm.row.get("difference_half_width")
    if not known(value):
        return ("" if arm is page.arms[0] else ABSENT), "", ""
    if not known(half):
        return signed(value), "no verdict", "alike"
    pair = (arm.text, page.arms[0].text)
    found = [one for one in page.facts.get("verdicts", []) if (one.get("arm"), one.get("against")) == pair]
    side = found[0].get("standing", "open") if found else "open"
    tag = {"open": "no verdict", "alike": "not significant"}.get(side, "significant")
    return f"{signed(value)} ± {two_digits(100 * half)}", tag, "alike" if side == "open" else side


def table_csv(page: PageContents) -> str:
    """Return the table as a link with CSV data: one line per arm, one column per seed."""
    names = ["mean", "half_width", "before", "difference", "difference_half_width", "effective_temperature"]
    names += ["false_negatives", "hardness", "clamped", "collapsed", "steps", "seconds"]
    seeds = max((len(arm.row.get("values", [])) for arm in page.arms), default=0)
    head = ["arm", *(f"{page.metric} of run {i}" for i in range(seeds)), *names]
    rows = []
    for arm in page.arms:
        values = list(arm.row.get("values", []))
        rows.append([arm.text, *values, *[""] * (seeds - len(values)), *(arm.row.get(name, "") for name in names)])
    return csv_link(head, rows)


def table_note(page: PageContents) -> str:
    """Return the note under the table: what the columns are means of, and how values were tuned."""
    end = "." if page.kind == "run" else "; all are means over the seeds."
    note = f"False negatives, hardness and clamped are means over the last records, seconds those of training{end}"
    note += before_training([(arm.letter or arm.text, arm.row.get("before")) for arm in page.arms])
    tuned = page.facts.get("tuned")
    if page.kind != "comparison" or not tuned:
        return note
    names = " and ".join(page.facts.get("comparison", {}).get("tune", {}))
    chosen = "; ".join(f"{text}: {words_of(values)}" for text, values in tuned.items())
    number = max((len(tries) for tries in page.facts.get("tries", {}).values()), default=0)
    seeds = page.facts.get("comparison", {}).get("tune_seeds", 1)
    of_each = f", each the mean of {seeds} seeds" if seeds > 1 else ""
    note += f" Tuned on a validation split, with {number} tries of {names} for every arm{of_each}; chosen: {chosen}."
    tries_of = page.facts.get("tries", {}).items()
    lost = [f"{text} with {words_of(values)}" for text, tries in tries_of for values, got in tries if got is None]
    return note + (f" Diverged: {', '.join(lost)}." if lost else "")


def tries_in(page: PageContents) -> list[tuple[ArmRuns, list[tuple[str, str]]]]:
    """Return all tries of each arm, the best first: (values, metric on the validation split)."""
    rows = []
    for arm in page.arms:
        if tries := page.facts.get("tries", {}).get(arm.text, []):
            ordered = sorted(tries, key=lambda one: -1.0 if one[1] is None else one[1], reverse=True)
            rows.append((arm, [(words_of(at), "diverged" if x is None else percent(x)) for at, x in ordered]))
    return rows


def measures_of(page: PageContents) -> dict[str, Any] | None:
    """Return the table of other measures, so that the choice does not depend on one; None if there are none."""
    finished = [result for arm in page.arms for result in arm.finished()]
    names = [name for name in (*MEASURES, "alignment", "uniformity") if any(name in result for result in finished)]
    if all(result.get("k") == 1 for result in finished):
        names = [name for name in names if name != "1nn"]  # the vote of one neighbour is the same
    if not names:
        return None
    heads = [measure_in(page, name) + (f", {unit_of(name)}" if name in MEASURES else "") for name in names]
    return {"heads": heads, "rows": [(arm, [_mean_of(arm, name) for name in names]) for arm in page.arms]}


def _mean_of(arm: ArmRuns, name: str) -> str:
    """Return the mean of a measure over finished runs as text."""
    values = [float(r[name]) * (100.0 if name in MEASURES else 1.0) for r in arm.finished() if name in r]
    return f"{sum(values) / len(values):z.2f}" if values else ABSENT
