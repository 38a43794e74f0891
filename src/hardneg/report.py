"""One self-contained HTML page about a run or a comparison, for people who have not read the papers.

Everything on the page is read from the run directories (runs.py) and comparison.json; nothing is trained, and nothing
is fetched: the charts are inline SVG, the images data URIs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import torch
from torch import Tensor

from hardneg.arms import Arm, parse_arm
from hardneg.charts import STYLE, Dots, Line, Point, dot_plot, histogram_chart, line_chart
from hardneg.comparison import METRIC, TITLES, paired
from hardneg.data import ImageData, load
from hardneg.evaluate import load_embeddings
from hardneg.pairs import directions
from hardneg.png import thumbnail
from hardneg.runs import Run, write_atomically

Table = dict[str, Any]
"""One line of the table, as comparison.json has it."""

NUM_ANCHORS, NUM_NEAREST, NUM_OTHER = 6, 8, 4
ABSENT = "n/a"
COUNTED = 10  # neighbours of every test image whose classes are counted


@dataclass(frozen=True)
class SeedRun:
    """What is on disk of one arm with one seed."""

    seed: int
    run: Run
    config: dict[str, Any]
    result: dict[str, Any] | None
    metrics: list[dict[str, Any]]


@dataclass
class ArmRuns:
    """One arm: its letter on the page, its line of the table, and its runs."""

    number: int
    text: str
    row: Table
    seeds: list[SeedRun] = field(default_factory=list)
    alone: bool = False  # a single run has no letter

    @property
    def letter(self) -> str:
        if self.alone:
            return ""
        return chr(ord("A") + self.number) if self.number < 26 else str(self.number + 1)

    def finished(self) -> list[dict[str, Any]]:
        return [one.result for one in self.seeds if one.result is not None]


@dataclass(frozen=True)
class Story:
    """All that the page tells."""

    path: Path
    kind: str  # "run", "comparison", or "unfinished" for a comparison without comparison.json
    metric: str
    arms: list[ArmRuns]
    missing: list[str]
    facts: dict[str, Any]  # comparison.json, or config.json of a single run

    @property
    def options(self) -> dict[str, Any]:
        """Those that all runs share."""
        every = [one.config.get("options", {}) for arm in self.arms for one in arm.seeds]
        if not every:
            return dict(self.facts.get("comparison", {}).get("common", {}))
        return {k: v for k, v in every[0].items() if all(k in other and other[k] == v for other in every)}


def write_report(path: str | Path, out: str | Path | None = None) -> Path:
    """Writes one HTML page about a run directory or a comparison directory, and returns where it is."""
    path = Path(path)
    story = read_story(path)
    file = path / "report.html" if out is None else Path(out)
    if file.is_dir():
        file = file / "report.html"
    text = page(story)
    write_atomically(file, lambda stream: stream.write(text.encode()))
    return file


# What is on disk


def read_story(path: Path) -> Story:
    """What is there of a run or a comparison; parts that are missing are named, not fatal."""
    if (path / "comparison.json").is_file():
        return _read_comparison(path)
    if (path / "config.json").is_file():
        one = _read_run(path)
        arm = ArmRuns(0, _arm_text(one.config, None), _row_of([one], METRIC), [one], alone=True)
        return Story(path, "run", METRIC, [arm], _missing_parts([arm], None), one.config)
    if any((path / "runs").glob("*/config.json")):
        return _read_unfinished(path)
    what = "a run (a directory with config.json) or a comparison (one with comparison.json or runs/)"
    raise ValueError(f"report needs {what}, got path={str(path)!r}.")


def _read_comparison(path: Path) -> Story:
    facts = _read_json(path / "comparison.json")
    if not isinstance(facts, dict) or not isinstance(facts.get("rows"), list) or not facts["rows"]:
        raise ValueError(f"report needs a comparison.json with rows, got {path / 'comparison.json'}; compare again.")
    runs = [_read_run(one.parent) for one in sorted((path / "runs").glob("*/config.json"))]
    seeds = int(facts.get("comparison", {}).get("seeds", len(facts["rows"][0]["values"])))
    arms = []
    for number, row in enumerate(facts["rows"]):
        wanted = _wanted(row["arm"], facts)
        found = [one for one in runs if wanted is not None and one.seed < seeds and _is_of(one, wanted, facts)]
        arms.append(ArmRuns(number, row["arm"], row, sorted(found, key=lambda one: one.seed)))
    return Story(path, "comparison", facts.get("metric", METRIC), arms, _missing_parts(arms, seeds), facts)


def _read_unfinished(path: Path) -> Story:
    """Runs of a comparison that was stopped: what is finished, under names made of the options that differ."""
    groups: dict[str, list[SeedRun]] = {}
    for one in sorted((path / "runs").glob("*/config.json")):
        groups.setdefault(one.parent.name.rpartition("-seed")[0] or one.parent.name, []).append(_read_run(one.parent))
    request = _read_json(path / "request.json") if (path / "request.json").is_file() else {}
    metric = request.get("metric", METRIC) if isinstance(request, dict) else METRIC
    every = [run.config.get("options", {}) for runs in groups.values() for run in runs]
    differing = [
        name for name in every[0] if name != "seed" and any(other.get(name) != every[0][name] for other in every)
    ]
    arms = []
    for number, runs in enumerate(groups.values()):
        runs = sorted(runs, key=lambda one: one.seed)
        arms.append(ArmRuns(number, _arm_text(runs[0].config, differing), _row_of(runs, metric), runs))
    seeds = max(one.seed for arm in arms for one in arm.seeds) + 1
    return Story(path, "unfinished", metric, arms, _missing_parts(arms, seeds), arms[0].seeds[0].config)


def _read_run(path: Path) -> SeedRun:
    run = Run(path)
    config = _read_json(run.config_path)
    result = _read_json(run.result_path) if run.result_path.is_file() else None
    return SeedRun(int(config.get("options", {}).get("seed", 0)), run, config, result, run.metrics())


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"report needs JSON in {path}, got a file that cannot be read ({error}).") from None


def _wanted(text: str, facts: dict[str, Any]) -> Arm | None:
    """The arm with its tuned value; None where this version cannot read it."""
    try:
        arm = parse_arm(text)
    except (ValueError, TypeError):
        return None
    tune, tuned = facts.get("comparison", {}).get("tune"), facts.get("tuned")
    return arm.with_option(tune[0], tuned[text]) if tune and tuned and text in tuned else arm


def _is_of(one: SeedRun, arm: Arm, facts: dict[str, Any]) -> bool:
    """Whether the run has the recipe and the options of the arm; options that a later version added do not count."""
    common = facts.get("comparison", {}).get("common", {})
    try:
        wanted = json.loads(json.dumps(arm.complete(**common, seed=one.seed).as_dict(), default=str))
    except (ValueError, TypeError):
        return False
    options = one.config.get("options", {})
    return one.config.get("recipe") == arm.recipe and all(options[k] == v for k, v in wanted.items() if k in options)


def _arm_text(config: dict[str, Any], names: list[str] | None) -> str:
    options = config.get("options", {})
    names = ["temperature", "negatives", "tau_plus", "batches"] if names is None else names
    return f"{config.get('recipe', 'run')}({', '.join(f'{n}={options[n]!r}' for n in names if n in options)})"


def _row_of(runs: list[SeedRun], metric: str) -> Table:
    """The line of an arm outside of a finished comparison: means of what is there, and no intervals."""
    results = [one.result for one in runs if one.result is not None]
    final = [result["final"] for result in results if "final" in result]

    def mean(values: Iterable[Any]) -> float | None:
        known = [float(v) for v in values if _known(v)]
        return sum(known) / len(known) if known else None

    values = [float(result[metric]) for result in results if metric in result]
    row: Table = {"values": values, "mean": mean(values), "steps": results[0].get("steps") if results else None}
    row["seconds"] = mean(result.get("seconds") for result in results)
    names = ("effective_temperature", "false_negatives", "hardness", "clamped")
    return row | {name: mean(record.get(name) for record in final) for name in names}


def _missing_parts(arms: list[ArmRuns], seeds: int | None) -> list[str]:
    """Which runs are not there or not finished, and which have lost a part that the page would show."""
    said = []
    for arm in arms:
        there = {one.seed: one for one in arm.seeds}
        for seed in range(seeds) if seeds is not None else there:
            name = f"{arm.text}, seed {seed}"
            if seed not in there:
                said.append(f"{name}: no run directory with these options")
            elif there[seed].result is None:
                steps = there[seed].metrics[-1].get("step", 0) if there[seed].metrics else 0
                said.append(f"{name}: not finished (last record at step {steps})")
            elif not there[seed].metrics:
                said.append(f"{name}: no records over training (metrics.jsonl)")
    return said


# The page


def page(story: Story) -> str:
    """The whole page as text."""
    title = _title(story)
    sections = [
        _answer(story, title),
        _results(story),
        _words(story),
        _curves(story),
        _histograms(story),
        _pictures(story),
        _provenance(story),
    ]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main></body></html>\n"
    )


def _title(story: Story) -> str:
    data = Path(str(story.options.get("data", "this data")).rpartition(":")[2]).name
    if story.kind == "run":
        return f"One run of {story.facts.get('recipe', 'train')} on {data}"
    return f"Which negatives are best for {data}?"


def _answer(story: Story, title: str) -> str:
    parts = [f"<header><h1>{escape(title)}</h1>", f'<p class="lead">{_verdict(story)}</p>', _setting(story)]
    if story.missing:
        listed = "".join(f"<li>{escape(one)}</li>" for one in story.missing)
        parts.append(
            '<div class="box warn" role="note"><h2>Not complete</h2><p>This page shows what is there.</p>'
            f"<ul>{listed}</ul></div>"
        )
    said = _sentences(story) + [twins.sentence() for twins in _twins(story)]
    if said:
        rows = "".join(f"<li>{one}</li>" for one in said)
        many = (
            f'<p class="small">Each interval stands for itself: each of the {len(said)} comparisons has a chance of '
            "one in twenty to look real when nothing is.</p>"
            if len(story.arms) > 2
            else ""
        )
        parts.append(f'<div class="box"><h2>The answer, arm by arm</h2><ul class="said">{rows}</ul>{many}</div>')
    if story.facts.get("notes"):
        rows = "".join(f"<li>{escape(one)}</li>" for one in story.facts["notes"])
        parts.append(f'<div class="box warn" role="note"><h2>Mind the temperature</h2><ul>{rows}</ul></div>')
    return "".join(parts) + "</header>"


def _sentences(story: Story) -> list[str]:
    """Those of comparison.json as they are, each behind the letter of its arm."""
    said, arms = story.facts.get("sentences", []), story.arms[1:]
    badges = [f"{_badge(arm)} " for arm in arms] if len(said) == len(arms) else [""] * len(said)
    return [badge + escape(one) for badge, one in zip(badges, said, strict=True)]


def _verdict(story: Story) -> str:
    """The answer in one or two sentences."""
    first, measure = story.arms[0], escape(TITLES.get(story.metric, story.metric))
    if story.kind == "unfinished":
        return "This comparison is not finished, so there is no answer yet. Below is what is measured so far."
    if story.kind == "run":
        if not _known(first.row["mean"]):
            return "There is no accuracy: the run is not finished, or its data has no labels."
        return f"On images that it was not trained on, {measure}: <b>{_percent(first.row['mean'])}</b>."
    groups: dict[str, list[ArmRuns]] = {"above": [], "below": [], "alike": []}
    for arm in story.arms[1:]:
        groups[_standing(arm.row)].append(arm)
    said = [f"Against {_named(first)}, in {measure}, with {len(first.row['values'])} seeds:"]
    for side, word in SIDES.items():
        if groups[side]:
            points = [f"{_named(a)} ({100 * a.row['difference']:+.2f} points)" for a in groups[side]]
            said.append(f'<span class="side">{word}: {_listed(points)}.</span>')
    for twins in _twins(story):
        if twins.arm in groups["above"] and not twins.beyond_noise:
            said.append(
                f"But {_badge(twins.arm)} gains nothing clear over {_badge(twins.plain)}, which has its effective "
                "temperature: a lower temperature may do as much."
            )
    return " ".join(said)


SIDES = {"above": "Better beyond noise", "below": "Worse beyond noise", "alike": "No difference beyond noise"}


def _standing(row: Table) -> str:
    if abs(row["difference"]) <= row["difference_half_width"]:
        return "alike"
    return "above" if row["difference"] > 0 else "below"


def _setting(story: Story) -> str:
    """What was done, for a reader who has not read the papers."""
    options, first = story.options, story.arms[0]
    known = next((result for arm in story.arms for result in arm.finished()), {})
    measures = {
        "knn": f"each test image takes the class that its {known.get('k', 200)} nearest training images vote for",
        "1nn": "each test image takes the class of its nearest training image",
        "linear": "a logistic regression is fitted to the features, which stay as they are",
    }
    held = ' <span class="small">(the one that the others are held against)</span>' if len(story.arms) > 1 else ""
    arms = "".join(f"<li>{_named(arm)}{held if arm is first else ''}</li>" for arm in story.arms)
    budget = [
        f"{options['epochs']} passes over the training images" if "epochs" in options else "",
        f"batches of {options['batch_size']}" if "batch_size" in options else "",
    ]
    same = " Data, budget, seeds and initial weights are the same for all." if len(story.arms) > 1 else ""
    return (
        "<p>Contrastive learning trains an encoder of images by pulling two altered views of one image together and "
        "pushing other images, its <em>negatives</em>, away. Which images are the negatives, and how hard each of them "
        f"pushes, is what is chosen here.{same}</p>"
        f'<ul class="arms">{arms}</ul>'
        f"<p>Training: {escape(', '.join(part for part in budget if part) or 'see the options below')}. "
        f"Measured by {escape(TITLES.get(story.metric, story.metric))}: {escape(measures.get(story.metric, ''))}.</p>"
    )


@dataclass(frozen=True)
class Twins:
    """A tilted arm beside an untilted one that repels alike: what is left is not a matter of temperature."""

    arm: ArmRuns
    plain: ArmRuns
    temperature: float
    difference: float
    half_width: float

    @property
    def beyond_noise(self) -> bool:
        return abs(self.difference) > self.half_width

    def sentence(self) -> str:
        verdict = "beyond noise" if self.beyond_noise else "not beyond noise"
        return (
            f"{_badge(self.arm)} and {_badge(self.plain)} repel alike (effective temperature {self.temperature:.3g}): "
            f"{_badge(self.arm)} is {_points(self.difference, self.half_width)} points from {_badge(self.plain)}, "
            f"{verdict}. That is what is left when the temperature is taken into account."
        )


def _twins(story: Story) -> list[Twins]:
    if story.kind != "comparison":
        return []
    parsed = [(arm, _wanted(arm.text, story.facts)) for arm in story.arms]
    found = []
    for arm, tilted in parsed:
        for other, plain in parsed:
            if other is story.arms[0] or tilted is None or plain is None or tilted.recipe != plain.recipe:
                continue  # against the first arm there is a sentence already
            ratio = tilted.effective_temperature / plain.effective_temperature
            if tilted.beta > 0.0 and plain.beta == 0.0 and abs(ratio - 1.0) < 0.02:
                difference, half, _ = paired(arm.row["values"], other.row["values"])
                found.append(Twins(arm, other, plain.effective_temperature, difference, half))
    return found


def _results(story: Story) -> str:
    several = len(story.arms) > 1
    figures = _table(story)
    measured = [arm for arm in story.arms if arm.row["values"]]
    if measured and several:
        measure = TITLES.get(story.metric, story.metric)
        rows = [_dots_of(arm, story) for arm in measured]
        plot = dot_plot(f"{measure} of every seed", rows, f"{measure}, %  (the axis does not start at 0)", _two)
        figures += (
            f'<figure class="card wide">{plot}<figcaption>Every dot is one seed, the upright bar the mean, the flat '
            "bar its 95 % interval (it may go on beyond the picture). Thin lines join runs with the same seed, which "
            "began with the same weights: what counts is whether they lean the same way.</figcaption></figure>"
        )
    title = "Every arm, every seed" if several else "Figures"
    return f'<section><h2 class="h">{title}</h2>{figures}{_measures(story)}</section>'


def _dots_of(arm: ArmRuns, story: Story) -> Dots:
    values, half = arm.row["values"], arm.row.get("half_width")
    seeds = [s.seed for s in arm.seeds if s.result is not None and story.metric in s.result]
    numbers = seeds if story.kind != "comparison" and len(seeds) == len(values) else range(len(values))
    percents = {seed: 100.0 * value for seed, value in zip(numbers, values, strict=True)}
    wide = 100.0 * half if _known(half) else None
    name = arm.text if len(arm.text) <= 38 else f"{arm.text[:35]}..."  # as much as a phone has room for
    return Dots(f"{arm.letter}  {name}", arm.text, arm.number, percents, 100.0 * arm.row["mean"], wide)


def _table(story: Story) -> str:
    """The table of the comparison; on a narrow screen every arm becomes a card."""
    metric = TITLES.get(story.metric, story.metric)
    heads = [
        ("arm", "arm"), ("seeds", f"{metric} of every seed, %"), ("mean", "mean, %"),
        ("against", "against the first, points"), ("temperature", "effective temperature"),
        ("false", "false negatives"), ("hardness", "hardness"),
        ("clamped", "clamped"), ("steps", "steps"), ("seconds", "seconds"),
    ]  # fmt: skip
    if story.kind == "run":
        heads = [
            (key, f"{metric}, %" if key == "mean" else name) for key, name in heads if key not in ("seeds", "against")
        ]
    head = "".join(f'<th scope="col" role="columnheader">{escape(name)}</th>' for _, name in heads)
    body = ""
    for arm in story.arms:
        cells = _cells(arm)
        first, *rest = heads
        body += f'<tr role="row"><th scope="row" role="rowheader">{cells[first[0]]}</th>' + "".join(
            f'<td role="cell" class="{key}" data-label="{escape(name, quote=True)}">{cells[key]}</td>'
            for key, name in rest
        )
        body += "</tr>"
    tuned = story.facts.get("tuned")
    tried = story.facts.get("comparison", {}).get("tune")
    note = (
        "False negatives, hardness and clamped are those of the last batch that was recorded, seconds those of training"
        + ("." if story.kind == "run" else "; all are means over the seeds.")
    )
    if tuned and tried:
        chosen = ", ".join(f"{text}: {value}" for text, value in tuned.items())
        tries = ", ".join(map(str, tried[1]))
        note += f" Tuned on a validation split, with the same tries for all: {tried[0]} of {tries}; taken: {chosen}."
    return (
        f'<div class="scroll"><table role="table" id="results"><thead><tr role="row">{head}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><p class="small">{escape(note)}</p>'
    )


def _cells(arm: ArmRuns) -> dict[str, str]:
    row = arm.row
    half, against = row.get("half_width"), row.get("difference")
    mean = _percent(row["mean"], unit="") + (f" ± {_two(100 * half)}" if _known(half) else "")
    return {
        "arm": f'<span class="row">{_named(arm)}</span>',
        "seeds": " ".join(f"<span>{_two(100 * value)}</span>" for value in row["values"]) or ABSENT,
        "mean": f"<b>{mean}</b>",
        "against": _against(row) if _known(against) else ("" if arm.number == 0 else ABSENT),
        "temperature": f"{row['effective_temperature']:.3g}" if _known(row.get("effective_temperature")) else ABSENT,
        "false": _percent(row.get("false_negatives"), 1),
        "hardness": f"{row['hardness']:.3f}" if _known(row.get("hardness")) else ABSENT,
        "clamped": _percent(row.get("clamped"), 1),
        "steps": ABSENT if row.get("steps") is None else f"{row['steps']}",
        "seconds": f"{row['seconds']:.0f}" if _known(row.get("seconds")) else ABSENT,
    }


def _against(row: Table) -> str:
    side = _standing(row)
    tag = f'<span class="tag {side}">{"within" if side == "alike" else "beyond"} noise</span>'
    return f"<span>{_points(row['difference'], row['difference_half_width'])} {tag}</span>"


def _measures(story: Story) -> str:
    """The other evaluations, so that one measure does not decide alone."""
    names = [n for n in (*TITLES, "uniformity") if any(n in r for arm in story.arms for r in arm.finished())]
    if not names:
        return ""
    head = "".join(f'<th scope="col">{escape(TITLES.get(n, n))}{", %" if n in TITLES else ""}</th>' for n in names)
    body = ""
    for arm in story.arms:
        cells = ""
        for name in names:
            values = [float(r[name]) * (100.0 if name in TITLES else 1.0) for r in arm.finished() if name in r]
            cells += f"<td>{sum(values) / len(values):.2f}</td>" if values else f"<td>{ABSENT}</td>"
        body += f'<tr><th scope="row">{_badge(arm) or "this run"}</th>{cells}</tr>'
    return (
        '<h3>Other measures of the same features</h3><table class="plain" id="measures"><thead><tr>'
        f'<th scope="col">arm</th>{head}</tr></thead><tbody>{body}</tbody></table>'
        f'<p class="small">{"" if story.kind == "run" else "Means over the seeds that are finished. "}'
        "Uniformity says how evenly the features fill the sphere of directions: lower is more even.</p>"
    )


NOISE = "± and noise"
WORDS = {
    "Negative": "An image that another image, the <em>anchor</em>, is pushed away from.",
    "Hardness": "How alike an anchor and its negatives are: the mean cosine similarity, weighted as the arm weights "
    "them. 1 is the same direction, 0 is unrelated. Hard negatives teach finer differences, easy ones teach little.",
    "False negative": "A negative of the anchor's own class. It is pushed away although it belongs near. The harder "
    "the negatives, the more of them tend to be false. Labels are used to count them.",
    "Effective temperature": "Similarities are divided by a temperature; the lower it is, the more the nearest "
    "negatives push. Preferring hard negatives by a tilt <em>beta</em> pushes much like the temperature divided by "
    "(1 + beta). So a tilted arm is only worth its name if it beats a plain one at that lower temperature.",
    "Clamped": "Some arms subtract an estimate of the false negatives (<em>tau_plus</em>). Where that would leave less "
    "than is possible, the result is clamped to the least possible value, and the negatives of that pair push no more.",
    "Effective number of negatives": "How many equally weighted negatives would be as concentrated (1 / sum of the "
    "squared weights). Close to the number in the batch: all count. Small: a few decide.",
    NOISE: "95 % intervals over the seeds. A difference is taken seed by seed; it is beyond noise where its "
    "interval leaves out 0.",
}


def _words(story: Story) -> str:
    told = {word: WORDS[word] for word in WORDS if story.kind != "run" or word != NOISE}
    rows = "".join(f"<div><dt>{escape(word)}</dt><dd>{meaning}</dd></div>" for word, meaning in told.items())
    return f'<section><h2 class="h">The words on this page</h2><dl class="words">{rows}</dl></section>'


# Curves


@dataclass(frozen=True)
class Curve:
    """One record over training, and how it is drawn and explained."""

    key: str
    name: str
    unit: str
    told: str
    show: Callable[[float], str]
    beside: str | None = None  # drawn dashed where it differs


def _short(value: float) -> str:
    return f"{value:.3g}"


def _as_percent(value: float) -> str:
    return f"{100 * value:.3g} %"


CURVES = (
    Curve(
        "loss", "Loss", "loss, nats",
        "What training makes smaller. Losses of arms with other temperatures or negatives are on different scales: "
        "compare shapes, not heights.", _short,
    ),
    Curve(
        "hardness", "Hardness of the negatives", "mean cosine similarity",
        "Solid: as the arm weights them. Dotted, where it differs: all images of the batch alike.", _short,
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
        "Where the correction for false negatives was cut off.", _as_percent,
    ),
    Curve(
        "attracted", "Attracted negatives", "share of negatives",
        "Easy negatives that the loss pulls closer, a side effect of weights that carry a gradient.", _as_percent,
    ),
    Curve("empty", "Anchors without a negative", "share of anchors", "They teach nothing.", _as_percent),
)  # fmt: skip


def _curves(story: Story) -> str:
    cards, constant = [], []
    for curve in CURVES:
        lines = [line for arm in story.arms if (line := _line(curve, arm)) is not None]
        values = [value for line in lines for _, value in line.points]
        if not values:
            continue
        if max(values) - min(values) <= 1e-4 * max(1e-2, *map(abs, values)):
            constant.append(f"{curve.name.lower()} ({curve.show(values[0])})")
            continue
        chart = line_chart(curve.name, lines, curve.unit, curve.show, floor=0.0 if min(values) >= 0.0 else None)
        cards.append(_card(curve.name, curve.told, chart))
    if not cards and not constant:
        return _said_instead("Over training", "No run has records over training (metrics.jsonl).")
    shown = f'<p class="small">Not drawn, as it never changes: {escape(", ".join(constant))}.</p>' if constant else ""
    seeds = "" if story.kind == "run" else "Thick: the mean over seeds; thin: every seed. "
    told = f"{seeds}Long runs are averaged over neighbouring records."
    return (
        f'<section><h2 class="h">Over training</h2>{_legend(story)}<p class="small">{told}</p>'
        f'<div class="grid">{"".join(cards)}</div>{shown}</section>'
    )


def _line(curve: Curve, arm: ArmRuns) -> Line | None:
    seeds = [points for one in arm.seeds if (points := _points_of(one.metrics, curve.key))]
    if not seeds:
        return None
    mean, dashed = _mean_line(seeds), []
    if curve.beside is not None:
        beside = _mean_line([_points_of(one.metrics, curve.beside) for one in arm.seeds])
        differs = any(abs(a[1] - b[1]) > 1e-3 for a, b in zip(mean, beside, strict=False))
        dashed = beside if differs else []
    return Line(arm.letter, arm.text, arm.number, mean, seeds, dashed)


def _points_of(metrics: list[dict[str, Any]], key: str) -> list[Point]:
    return [(float(r["step"]), float(r[key])) for r in metrics if "step" in r and _known(r.get(key))]


def _mean_line(seeds: list[list[Point]]) -> list[Point]:
    """The mean over the seeds at every step that most of them have reached, so that it has no jump where one stops."""
    at: dict[float, list[float]] = {}
    for points in seeds:
        for step, value in points:
            at.setdefault(step, []).append(value)
    most = max((len(values) for values in at.values()), default=0)
    return [(step, sum(values) / len(values)) for step, values in sorted(at.items()) if 2 * len(values) >= most]


# Histograms


def _histograms(story: Story) -> str:
    found = [(arm, counts) for arm in story.arms if (counts := _counts(arm)) is not None]
    title = "Do the features keep classes apart?"
    if not found:
        return _said_instead(title, "No finished run has similarities of labelled pairs.")
    low, high = _occupied([counts for _, counts in found])
    shares = [(arm, counts, *_shares(counts, low, high)) for arm, counts in found]
    highest = max(max(*same, *other) for _, _, _, same, other in shares)
    cards = []
    for arm, counts, edges, same, other in shares:
        told = (
            f"A same-class pair is more alike than an other-class pair {100 * _separation(counts):.1f} % of the time."
        )
        chart = histogram_chart(arm.text, edges, same, other, (counts["other_mean"], counts["same_mean"]), highest)
        cards.append(_card(_named(arm), told, chart, plain=False))
    key = (
        '<p class="legend"><span class="key same"></span> same class <span class="key other"></span> other classes</p>'
    )
    return (
        f'<section><h2 class="h">{title}</h2><p>How alike pairs of test images are in the trained features. The '
        f"less the two overlap, the better. Labels only tell which pairs are which.</p>{key}"
        f'<div class="grid">{"".join(cards)}</div></section>'
    )


def _counts(arm: ArmRuns) -> dict[str, Any] | None:
    """The counts of all seeds together, and the means over them."""
    seeds = [result["similarities"] for result in arm.finished() if result.get("similarities")]
    seeds = [one for one in seeds if _known(one.get("same_mean")) and _known(one.get("other_mean"))]
    seeds = [one for one in seeds if one["edges"] == seeds[0]["edges"]]
    if not seeds:
        return None
    summed = {
        kind: [sum(column) for column in zip(*(one[kind] for one in seeds), strict=True)] for kind in ("same", "other")
    }
    means = {name: sum(one[name] for one in seeds) / len(seeds) for name in ("same_mean", "other_mean")}
    return {"edges": seeds[0]["edges"], **summed, **means}


def _occupied(every: list[dict[str, Any]]) -> tuple[float, float]:
    """The range of similarities in which any arm has pairs worth drawing."""
    low, high = 1.0, -1.0
    for counts in every:
        for kind in ("same", "other"):
            least = 2e-4 * sum(counts[kind])
            bins = [i for i, count in enumerate(counts[kind]) if count > least]
            low, high = min(low, counts["edges"][bins[0]]), max(high, counts["edges"][bins[-1] + 1])
    return low, high


def _shares(counts: dict[str, Any], low: float, high: float) -> tuple[list[float], list[float], list[float]]:
    edges = counts["edges"]
    inside = [i for i in range(len(edges) - 1) if edges[i] >= low - 1e-9 and edges[i + 1] <= high + 1e-9]
    same, other = ([counts[kind][i] / sum(counts[kind]) for i in inside] for kind in ("same", "other"))
    return [edges[i] for i in inside] + [edges[inside[-1] + 1]], same, other


def _separation(counts: dict[str, Any]) -> float:
    """How often a same-class pair is more alike than an other-class pair; pairs in one bin count half."""
    below, wins = 0.0, 0.0
    for same, other in zip(counts["same"], counts["other"], strict=True):
        wins += same * (below + 0.5 * other)
        below += other
    return float(wins / (sum(counts["same"]) * sum(counts["other"])))


# Pictures


@dataclass(frozen=True, eq=False)
class Neighbours:
    """What is near in one arm's features."""

    arm: ArmRuns
    similarity: Annotated[Tensor, "anchors n"]
    near: float  # share of the nearest images, over all of the test images, that are of the same class


def _pictures(story: Story) -> str:
    title = "The hardest negatives, seen"
    arms = _arms_to_show(story)
    if not arms:
        return _said_instead(title, "No images are shown: no finished run has saved its embeddings (embeddings.npz).")
    options = arms[0][1].config.get("options", {})
    try:
        data = _evaluated_images(options)
        anchors = _anchors(data)
        shown = [_neighbours(arm, one, data, anchors) for arm, one in arms]
    except (ValueError, OSError, ImportError) as error:
        return _said_instead(title, f"No images are shown: {error}")
    assert data.labels is not None
    chance = float(torch.bincount(data.labels).double().square().sum() - len(data)) / (len(data) * (len(data) - 1))
    near = _listed([f"{100 * one.near:.0f} %{_in(one.arm)}" for one in shown])
    cards = "".join(_anchor_card(i, int(anchor), data, shown) for i, anchor in enumerate(anchors))
    return (
        f'<section><h2 class="h">{title}</h2><p>For some test images, those that are nearest in the trained features: '
        "these are the hardest negatives that a batch could hold. Those in a red frame with a cross are false "
        f"negatives: they are of the same class. Among the {COUNTED} nearest of a test image, {near} are of "
        f"its own class; among random ones {100 * chance:.0f} %. That is why harder negatives are also falser ones.</p>"
        f'<div class="anchors">{cards}</div></section>'
    )


def _arms_to_show(story: Story) -> list[tuple[ArmRuns, SeedRun]]:
    """The first arm and the best of the others, each with its first seed that has embeddings."""
    there = []
    for arm in story.arms:
        runs = [one for one in arm.seeds if (one.run.path / "embeddings.npz").is_file() and one.result is not None]
        if runs:
            there.append((arm, runs[0]))
    others = sorted(there[1:], key=lambda one: -(one[0].row["mean"] or 0.0))
    return there[:1] + others[:1]


def _evaluated_images(options: dict[str, Any]) -> ImageData:
    name, root = options.get("data", "digits"), options.get("data_root")
    if options.get("evaluate_on") == "validation":
        return load(name, "train", root).held_out()[1]
    return load(name, "test", root)


def _anchors(data: ImageData) -> Tensor:
    """One image of each of some classes, the same for every report of this data."""
    labels = data.labelled("The section of images")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    classes = torch.unique(labels)
    chosen = classes[torch.linspace(0, len(classes) - 1, min(NUM_ANCHORS, len(classes))).round().long()]
    return torch.stack([order[labels[order] == label][0] for label in chosen])


def _neighbours(arm: ArmRuns, one: SeedRun, data: ImageData, anchors: Tensor) -> Neighbours:
    _, _, features, labels = load_embeddings(one.run.path / "embeddings.npz")
    if data.labels is None or not torch.equal(labels, data.labels):
        raise ValueError(
            f"the embeddings of {one.run.path.name} are not of the images of {data.name!r} as they are now."
        )
    x = directions(features)
    sample = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[:2000]
    similarity = x[sample] @ x.T
    similarity[torch.arange(len(sample)), sample] = -2.0
    nearest = similarity.topk(min(COUNTED, len(x) - 1), dim=1).indices
    near = float((labels[nearest] == labels[sample, None]).double().mean())
    return Neighbours(arm, x[anchors] @ x.T, near)


def _anchor_card(row: int, anchor: int, data: ImageData, shown: list[Neighbours]) -> str:
    assert data.labels is not None
    other = data.labels != data.labels[anchor]
    strips = []
    for one in shown:
        similarity = one.similarity[row].clone()
        similarity[anchor] = -2.0
        nearest = similarity.argsort(descending=True)[: min(NUM_NEAREST, len(data) - 1)]
        true = similarity.masked_fill(~other, -2.0).argsort(descending=True)[: min(NUM_OTHER, int(other.sum()))]
        strips.append(_strip(f"{_badge(one.arm)} nearest", data, anchor, nearest, one.similarity[row]))
        strips.append(_strip(f"{_badge(one.arm)} nearest of other classes", data, anchor, true, one.similarity[row]))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(anchor + 1))
    strips.append(_strip("random", data, anchor, order[order != anchor][:NUM_NEAREST], None))
    name = escape(data.classes[int(data.labels[anchor])])
    return (
        f'<div class="anchor"><div class="who">{_thumb(data, anchor, "shown", f"anchor of class {name}")}'
        f"<span>{name}</span></div><div class=strips>{''.join(strips)}</div></div>"
    )


def _strip(head: str, data: ImageData, anchor: int, index: Tensor, similarity: Tensor | None) -> str:
    assert data.labels is not None
    images = []
    for i in index.tolist():
        false = bool(data.labels[i] == data.labels[anchor])
        name = escape(data.classes[int(data.labels[i])], quote=True)
        near = "" if similarity is None else f", similarity {float(similarity[i]):.2f}"
        told = f"class {name}{near}{', false negative' if false else ''}"
        image = _thumb(data, i, "false" if false else "true", told)
        images.append(f'<figure class="{"false" if false else "true"}">{image}<figcaption>{name}</figcaption></figure>')
    return f'<div class="strip"><h4>{head}</h4><div>{"".join(images)}</div></div>'


def _thumb(data: ImageData, index: int, kind: str, told: str) -> str:
    tiny = " tiny" if max(data.size) <= 32 else ""
    return f'<img class="{kind}{tiny}" src="{thumbnail(data.images[index])}" alt="{told}" title="{told}">'


# The rest


def _provenance(story: Story) -> str:
    facts = story.facts
    versions = {**(facts.get("versions") or {}), "python": facts.get("python"), "commit": facts.get("commit")}
    rows = [("machine", facts.get("machine")), ("device", facts.get("device"))]
    rows += versions.items()
    listed = "".join(f"<tr><th scope=row>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>" for k, v in rows if v)
    shared = "".join(
        f"<tr><th scope=row>{escape(k)}</th><td>{escape(json.dumps(v))}</td></tr>" for k, v in story.options.items()
    )
    own = [(arm, _own_options(arm, story.options)) for arm in story.arms if arm.seeds]
    differ = "".join(f"<tr><th scope=row>{_badge(arm)}</th><td>{escape(text)}</td></tr>" for arm, text in own if text)
    differing = f"<h3>Options that differ</h3><table class=plain>{differ}</table>" if differ else ""
    folders = ", ".join(one.run.path.name for arm in story.arms for one in arm.seeds)
    return (
        '<section><h2 class="h">How to get this again</h2>'
        f'<pre tabindex="0"><code id="command">{escape(str(facts.get("command", "not recorded")))}</code></pre>'
        f'<div class="two"><div><h3>Versions</h3><table class=plain id="versions">{listed}</table></div>'
        f"<div>{differing}<details><summary>Options of all runs</summary><table class=plain>{shared}</table></details>"
        f'<details><summary>Run directories</summary><p class="small">{escape(folders or "none")}</p></details>'
        "</div></div></section>"
    )


def _own_options(arm: ArmRuns, shared: dict[str, Any]) -> str:
    options = arm.seeds[0].config.get("options", {})
    return ", ".join(f"{k}={v!r}" for k, v in options.items() if k not in shared and k != "seed")


def _card(name: str, told: str, chart: str, plain: bool = True) -> str:
    head = escape(name) if plain else name
    return f'<figure class="card"><h3>{head}</h3>{chart}<figcaption>{escape(told)}</figcaption></figure>'


def _said_instead(title: str, sentence: str) -> str:
    return f'<section><h2 class="h">{escape(title)}</h2><p>{escape(sentence)}</p></section>'


def _legend(story: Story) -> str:
    if len(story.arms) == 1:
        return ""
    keys = "".join(f"<span>{_named(arm)}</span>" for arm in story.arms)
    return f'<p class="legend">{keys}</p>'


def _badge(arm: ArmRuns) -> str:
    if not arm.letter:
        return ""
    return f'<span class="badge b{arm.number % 8}" title="{escape(arm.text, quote=True)}">{arm.letter}</span>'


def _named(arm: ArmRuns) -> str:
    return f"{_badge(arm)} <code>{escape(arm.text)}</code>"


def _in(arm: ArmRuns) -> str:
    return f" in {_badge(arm)}" if arm.letter else ""


def _known(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _two(value: float) -> str:
    return f"{value:.2f}"


def _percent(value: Any, digits: int = 2, unit: str = " %") -> str:
    return f"{100 * value:.{digits}f}{unit}" if _known(value) else ABSENT


def _points(value: float, half: float) -> str:
    return f"{100 * value:+.2f} ± {100 * half:.2f}"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
