"""The atlas on the page of results: one picture and one sentence for each question, and the table behind them."""

from __future__ import annotations

import json
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

import yaml
from results_measured import MEASURES, folded, signed, table

ROOT = Path(__file__).parents[1]
PLANS, RESULTS = ROOT / "experiments" / "studies", ROOT / "benchmarks" / "results" / "studies"
FIGURES = ROOT / "docs" / "figures"
ROW, LEFT, WIDTH = 17, 300, 760
"""Height of a line of the picture, width of its names, and width of all of it."""
COLOURS = {"holds": "#137333", "the opposite holds": "#b3261e", "vanishes when tuned": "#9a6700"}

HEAD = """## The atlas

Which choice of negatives is worth it, for which data? Each question is a plan that was committed before its first run
(`experiments/studies`, with the rules of the verdicts); `make worlds study STUDY=g3v2` repeats one. Every arm of a
cell, one data set in one world, has the same tries over a joint grid of temperature and learning rate, on held-out
training pairs. All differences of a question are corrected together (Holm); {0}.

Worlds are kinds of pairs with an encoder that trains in one or two seconds on one core, measured by how often the
second item nearest to a first one is its own (retrieval):

- *vectors*: two linear heads between frozen vectors of all-MiniLM-L6-v2 and of wordllama;
- *halves*: two linear heads over the pixels of the left and of the right half of an image;
- *texts*: one encoder of hashed subwords, from random weights ({2}).

{1}

Not run: images with a convolutional encoder (27 seconds a run gained 6 points by kNN, too little and too long for two
cores), graphs (training gained 1 to 3 points over random weights), adapters (training made them worse), H-SCL over SCL.
"""


def atlas() -> str:
    """Return the section, and write its pictures."""
    plans = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(PLANS.glob("g*.yaml"))}
    results = {
        name: json.loads(path.read_text(encoding="utf-8")) for name in plans if (path := result_of(name)).exists()
    }
    current = [name for name in plans if f"{name}v2" not in plans]
    parts = [question(name, plans[name], results.get(name)) for name in current]
    for name in plans:
        if name not in current and name in results:
            parts[current.index(f"{name}v2")] += "\n" + first_version(plans[name], results[name])
    gains = what_gained({name: (plans[name], results[name]) for name in current if name in results})
    texts = sum(one["world"] == "texts" for name in current for one in results.get(name, {"cells": []})["cells"])
    state = f"{texts} cells were run" if texts else "planned, not run yet"
    return "\n".join([HEAD.format(simulated(), gains, state), *parts, advised()])


def result_of(name: str) -> Path:
    """Return the path of the result of a study."""
    return RESULTS / f"atlas_{name}.json"


def tuned_verdicts(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the verdicts of the tuned cells."""
    return [one for one in result["verdicts"] if not one["untuned"]]


def what_gained(studies: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Return the gains that matter in two data sets or more, or that there are none, and smaller significant ones."""
    gains, smaller, claims, tested = [], [], 0, 0
    for name, (plan, result) in studies.items():
        for number, claim in enumerate(plan["claims"]):
            own = [one for one in tuned_verdicts(result) if one["claim"] == number]
            claims, tested = claims + 1, tested + len(own)
            if claim.get("kind") == "reaches":
                continue
            held = [one for one in own if one["verdict"] == "holds"]
            above = [one for one in own if one["difference"] > one["corrected_half_width"]]
            line = f"{claim['claim']} ({name[:2].upper()})"
            if num_sets(held) >= 2:
                gains.append(f"- {line}: {where(held)}; {len(held)} of {len(own)} cells.")
            elif num_sets(above) >= 2:
                smaller.append(f"{line}: {where(above)}, of {len(own)} cells.")
    if not tested:
        return "Nothing was run yet."
    text = f"**Nothing gained a difference that matters in two data sets** ({claims} claims, {tested} comparisons)."
    if gains:
        text = "**Gains that matter, in two data sets or more** (points; the corrected interval is above 0):\n\n"
        text += "\n".join(gains)
    return " ".join(
        [
            text,
            *(
                f"Mostly smaller, with a corrected interval above 0, which the luck of tuning may explain: {one}"
                for one in smaller
            ),
        ]
    )


def num_sets(verdicts: list[dict[str, Any]]) -> int:
    """Count the data sets, of which a study of hardness has several versions."""
    return len({one["data"].partition("-")[0] for one in verdicts})


def where(verdicts: list[dict[str, Any]]) -> str:
    """List cells with their differences."""
    return ", ".join(f"{one['world']}/{one['data']} {signed(100 * one['difference'])}" for one in verdicts)


def first_version(plan: dict[str, Any], result: dict[str, Any]) -> str:
    """Return the tables of a plan that was replaced, and why it was."""
    why = "Learning rates and sets of this plan were chosen after pilot runs on test pairs, so that it was replaced. "
    return folded(
        "The first version of this plan", f"{why}{plan['remark']}\n\n{verdict_table(plan, result)}\n{source(result)}"
    )


def source(result: dict[str, Any]) -> str:
    """Return where a result is from."""
    missing = f" Not run: {', '.join(result['missing'])}." if result["missing"] else ""
    text = (
        f"Plan {result['digest']} of commit {result['plan_commit']}, at least {result['cpu_seconds']:.0f} CPU seconds."
    )
    return f"{text}{missing} Commit {result['commit']}, {result['device']}.\n"


def simulated() -> str:
    """Return how often the procedure raises a false alarm."""
    path = ROOT / "experiments" / "procedure_simulation.json"
    if not path.exists():
        return "how often that raises a false alarm is not simulated yet (`experiments/procedure_simulation.py`)"
    found = json.loads(path.read_text(encoding="utf-8"))
    shares = found["shares"]
    return (
        f"in {found['times']:,} families of {found['tests']} differences between equal arms, drawn from "
        f"{found['seeds']} real runs of each try on {' and '.join(found['sets'])} and tuned and judged alike, "
        f"{100 * shares['effect']:.1f} % had a verdict that something holds or its opposite does, but "
        f"{100 * shares['significant']:.0f} % a difference that is significant after the correction "
        f"({100 * shares['uncorrected']:.0f} % without it). Tuning by one seed gives equal arms other temperatures, "
        "which no interval here counts. So trust the verdicts, which need a difference that matters, not "
        "significance alone"
    )


def advised() -> str:
    """Return what following the advice of the atlas gained on data of no study."""
    path, text = RESULTS / "advised.json", "### Does the advice help?\n\n"
    if not path.exists():
        return text + "Not run. To run: `python experiments/advised.py`.\n"
    result = json.loads(path.read_text(encoding="utf-8"))
    text += (
        "The first two suggestions of `hardneg advise` (B and C) against the tuned default (A), on data of no study: "
    )
    text += "retrieval in vectors, 5 seeds, `experiments/advised.py`.\n\n"
    for name, one in result["sets"].items():
        arms = ", ".join(f"`{row['arm']}` {100 * row['mean']:.1f}" for row in one["rows"])
        text += f"- {name}: {arms}. {' '.join(one['sentences'][:2])}"
        other = one.get("first_over_second")
        text += f" B - C: {signed(100 * other['value'])} ± {100 * other['half_width']:.2f}.\n" if other else "\n"
    return text + f"\nCommit {result['commit']}, {result['device']}.\n"


def question(name: str, plan: dict[str, Any], result: dict[str, Any] | None) -> str:
    """Return the part of one question."""
    text = f"### {plan['title']}\n\n{plan['asks']}\n\n"
    if result is None:
        return text + f"Not run. To run: `make worlds study STUDY={name}`, {plan['minutes']} minutes.\n"
    tuned = tuned_verdicts(result)
    (FIGURES / f"atlas_{name[:2]}.svg").write_text(picture(plan, tuned), encoding="utf-8")
    for number, claim in enumerate(plan["claims"]):
        own = [one for one in tuned if one["claim"] == number]
        text += f"- {claim['claim']}: {summary(own)}.\n"
    text += f"\n![Differences with corrected intervals](figures/atlas_{name[:2]}.svg)\n\n"
    text += f"Differences below {plan['smallest_effect']:g} points do not matter. {plan['remark']}\n\n"
    text += at_the_end(plan, result)
    tables = f"{verdict_table(plan, result)}\n{arm_table(result)}"
    return text + folded(f"All {len(tuned)} differences and all arms", tables) + "\n" + source(result)


def at_the_end(plan: dict[str, Any], result: dict[str, Any]) -> str:
    """Name the arms that tuning gave the highest temperature of the grid, since a higher one might be better."""
    highest = max(map(float, plan["tune"]["temperature"]))
    cells = [one["arms"] for one in result["cells"] if not one["untuned"]]
    counts = Counter(name for arms in cells for name, arm in arms.items() if arm["tuned"]["temperature"] == highest)
    names = ", ".join(f"{name} in {number}" for name, number in counts.most_common())
    if not names:
        return ""
    text = (
        f"Of {len(cells)} cells, tuning chose the highest temperature of the grid ({highest:g}) for {names}: a higher "
    )
    return f"{text}one might be better for them.\n\n"


def summary(verdicts: list[dict[str, Any]]) -> str:
    """Count the verdicts of a claim, and name the cells where it holds or its opposite does."""
    if not verdicts:
        return "not run"
    parts = []
    for verdict, number in Counter(one["verdict"] for one in verdicts).most_common():
        part = f"{verdict} in {number} of {len(verdicts)}"
        parts.append(part)
    points = sorted(100.0 * one["difference"] for one in verdicts)
    return f"**{'; '.join(parts)}** ({signed(points[0])} to {signed(points[-1])} points)"


def verdict_table(plan: dict[str, Any], result: dict[str, Any]) -> str:
    """Return the table of all differences: one line for each claim and data set."""
    untuned = {(one["world"], one["data"], one["claim"]): one for one in result["verdicts"] if one["untuned"]}
    rows = []
    for one in result["verdicts"]:
        if not one["untuned"]:
            before = untuned.get((one["world"], one["data"], one["claim"]))
            without = "" if before is None else f"{signed(100 * before['difference'])}, {before['verdict']}"
            half, corrected = 100 * one["half_width"], 100 * one["corrected_half_width"]
            interval = f"{signed(100 * one['difference'])} ± {half:.2f} ({corrected:.2f})"
            claim = plan["claims"][one["claim"]]["claim"]
            detectable = f"{100 * one['detectable']:.1f}"
            p = "< 0.001" if one["p_value"] < 0.001 else f"{one['p_value']:.3f}"
            rows.append((claim, f"{one['world']}/{one['data']}", interval, p, detectable, without, one["verdict"]))
    head = ("claim", "data", "points, ± 95 % (corrected)", "p, corrected", "detectable", "untuned", "verdict")
    return table(head, rows)


def arm_table(result: dict[str, Any]) -> str:
    """Return the table of all arms, by every measure."""
    rows = []
    for cell in result["cells"]:
        if not cell["untuned"]:
            for name, arm in cell["arms"].items():
                means = (f"{MEASURES[m]} {100 * sum(x) / len(x):.1f}" for m, x in arm["measures"].items())
                tuned = " ".join(f"{key}={value:g}" for key, value in (arm["tuned"] or {}).items())
                cell_name = f"{cell['world']}/{cell['data']}"
                rows.append((cell_name, name, f"`{arm['text']}`", ", ".join(means), tuned, f"{arm['seconds']:.1f}"))
    return table(("data", "arm", "as written", "means, %", "tuned to", "s a run"), rows)


def picture(plan: dict[str, Any], verdicts: list[dict[str, Any]]) -> str:
    """Draw every difference with its corrected interval; what does not matter is grey, colours are verdicts."""
    reach = max(100.0 * (abs(one["difference"]) + one["corrected_half_width"]) for one in verdicts)
    reach = min(30.0, max(reach, 2.0 * plan["smallest_effect"]))

    def x(points: float) -> float:
        return LEFT + (WIDTH - LEFT - 12) * (min(reach, max(-reach, points)) + reach) / (2.0 * reach)

    smallest, body, y = plan["smallest_effect"], [], 14
    for number, claim in enumerate(plan["claims"]):
        body.append(f'<text x="4" y="{y + 4}" font-weight="bold">{escape(claim["claim"])}</text>')
        for one in (one for one in verdicts if one["claim"] == number):
            y += ROW
            middle, half = 100.0 * one["difference"], 100.0 * one["corrected_half_width"]
            colour = COLOURS.get(one["verdict"], "#5f6368")
            label = f"{one['world']}/{one['data']}: {one['verdict']}"
            body.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{label}</text>')
            ends = f'x1="{x(middle - half):.1f}" x2="{x(middle + half):.1f}" y1="{y}" y2="{y}"'
            body.append(f'<line {ends} stroke="{colour}" stroke-width="2"/>')
            body.append(f'<circle cx="{x(middle):.1f}" cy="{y}" r="3.5" fill="{colour}"/>')
        y += ROW + 5
    band = f'<rect x="{x(-smallest):.1f}" y="0" width="{x(smallest) - x(-smallest):.1f}" height="{y}" fill="#eee"/>'
    zero = f'<line x1="{x(0.0):.1f}" x2="{x(0.0):.1f}" y1="0" y2="{y}" stroke="#999"/>'
    ticks = "".join(
        f'<text x="{x(at):.1f}" y="{y + 12}" text-anchor="middle">{signed(at, 0)}</text>'
        for at in (-0.9 * reach, -smallest, 0.0, smallest, 0.9 * reach)
    )
    style = 'font-family="system-ui, sans-serif" font-size="11"'
    box = f'viewBox="0 0 {WIDTH} {y + 18}" width="{WIDTH}" height="{y + 18}"'
    back = f'<rect width="{WIDTH}" height="{y + 18}" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>{back}{band}{zero}{"".join(body)}{ticks}</svg>\n'
