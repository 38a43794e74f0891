"""The sections of the page of results that are no comparison of trained encoders: the frontier, and two toys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import spearmanr, t

Read = Callable[[str], dict[str, Any] | None]
"""The result of a name, or None where there is none."""


class Finding(NamedTuple):
    """A line of the table on top."""

    claim: str
    paper: str
    here: str
    verdict: str


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def signed(value: float, digits: int = 2) -> str:
    return f"{value:+z.{digits}f}"


def counted(number: float, word: str) -> str:
    return f"{number:g} {word}{'' if number == 1 else 's'}"


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The mean over seeds and half of its 95 % interval (Student)."""
    error = differences.std(ddof=1) / len(differences) ** 0.5
    return float(differences.mean()), float(t.ppf(0.975, len(differences) - 1) * error)


def frontier(study: dict[str, Any], read: Read) -> tuple[list[Finding], str]:
    """How hard rules and planners are against how false, on each set of embeddings."""
    findings, text = [], f"{study['claim']}. {study['about']}\n\n"
    for data in study["data"]:
        result = read(f"frontier_{data['name']}")
        text += f"### {data['title']}\n\n"
        claim = f"{study['claim']}: {data['title']}"
        if result is None:
            text += f"Not measured: {data['missing']}\n\n"
            findings.append(Finding(claim, study["figure"], "not measured", study["judged"]))
            continue
        rows = [row for row in result["rows"] if not row["reads_judge"]]
        alike = float(spearmanr([row["similarity"] for row in rows], [row["false_negatives"] for row in rows])[0])
        here = f"rank correlation of similarity and falseness {alike:.2f} over {len(rows)} rules and planners"
        findings.append(Finding(claim, study["figure"], here, study["judged"]))
        text += _frontier_of(data, result, here)
    return findings, text


def _frontier_of(data: dict[str, str], result: dict[str, Any], here: str) -> str:
    best = sorted((row for row in result["rows"] if row["on_frontier"]), key=lambda row: row["similarity"])
    text = (
        f"{data['about']} {result['num_anchors']:,} anchors against {result['num_candidates']:,} candidates; batches "
        f"of {result['batch_size']}, {counted(result['plans'], 'plan')} of each planner; temperature "
        f"{result['temperature']:g}. Random candidates have a similarity of {result['random_similarity']:.3f}, "
        f"positives of {result['positive_similarity']:.3f}.\n\n"
    )
    text += f"![Similarity of negatives against the share of false ones](figures/frontier_{data['name']}.svg)\n\n"
    shown = sorted(result["rows"], key=lambda row: row["similarity"])
    text += table(
        ("rule or planner", "similarity", "false negatives", "effective number", "coverage", "frontier"),
        [
            (
                f"`{row['expression']}`" if row["kind"] != "plan" else row["expression"],
                f"{row['similarity']:.3f}",
                _share(row["false_negatives"], row["false_negatives_error"]),
                f"{row['effective_number']:,.0f}",
                f"{100 * row['coverage']:.0f} %",
                "reads the labels" if row["reads_judge"] else "yes" if row["on_frontier"] else "",
            )
            for row in shown
        ],
    )
    names = ", ".join(f"`{row['expression']}`" if row["kind"] != "plan" else row["expression"] for row in best)
    text += f"\n{here.capitalize()}. On the frontier, from easy to hard: {names}.\n\n"
    return text + f"{result['seconds']:.0f} s. {_provenance(result)}\n\n"


def _share(value: float, error: float | None) -> str:
    """With one standard error, where not every anchor was looked at."""
    return f"{100 * value:.2f} %" + (f" ± {100 * error:.2f}" if error else "")


def ring(study: dict[str, Any], read: Read) -> tuple[list[Finding], str]:
    """The bound on mutual information with harder and harder negatives."""
    result = read(study["name"])
    if result is None:
        return [Finding(study["claim"], "Table 5", "not run", study["open"])], f"Not run: {study['missing']}\n"
    bounds = {w: np.array([run["new"] for run in runs]) for w, runs in result["runs"].items()}
    lower = all(bool((bounds[w] < bounds["0"]).all()) for w in bounds if w != "0")
    draws = [row["new_deviation_over_draws"] for row in result["results"].values()]
    steadier = all(after < before for before, after in pairwise(draws))
    verdict = "holds" if lower and steadier else "does not hold"
    mean, half = interval(bounds["25"] - bounds["0"])
    here = (
        f"at w = 25 {signed(mean, 4)} nats against all negatives ({signed(mean - half, 4)} to {signed(mean + half, 4)})"
    )
    rows = [
        (
            "all" if w == "0" else w,
            " ".join(f"{value:.4f}" for value in bounds[w]),
            f"{row['new']:.4f}",
            f"{row['new_deviation_over_seeds']:.1e}",
            f"{row['new_deviation_over_draws']:.1e}",
            f"{row['trained']:.4f}",
            f"{result['paper'][w]:.3g}",
        )
        for w, row in result["results"].items()
    ]
    head = ("w", "each seed", "mean", "over seeds", "one row, over draws", "on trained pairs", "paper")
    text = f"{study['about']} The true value is {result['true']:.5f} nats.\n\n" + table(head, rows)
    text += f"\n**{verdict.capitalize()}**: {study['claim']}: {here}. {study['remark']}\n\n"
    text += f"{result['cpu_seconds']:.0f} s of a CPU. {_provenance(result)}\n"
    return [Finding(study["claim"], "0.01345 to 0.00220 nats at w = 25", here, verdict)], text


def emc2(study: dict[str, Any], read: Read) -> tuple[list[Finding], str]:
    """The exact global loss after training with a batch of 4."""
    result = read(study["name"])
    if result is None:
        return [Finding(study["claim"], "Fig. 7", "not run", study["open"])], f"Not run: {study['missing']}\n"
    last = {name: _last_fifth(curves, "loss") for name, curves in result["curves"].items()}
    squared = {name: _last_fifth(curves, "squared_gradient").mean() for name, curves in result["curves"].items()}
    apart = {name: interval(losses - last["SimCLR"]) for name, losses in last.items() if name != "SimCLR"}
    rows = [
        (
            name,
            " ".join(f"{value:.2f}" for value in losses),
            f"{losses.mean():.3f}",
            f"{signed(apart[name][0], 3)} ± {apart[name][1]:.3f}" if name in apart else "",
            f"{squared[name]:.3f}",
        )
        for name, losses in sorted(last.items(), key=lambda one: one[1].mean())
    ]
    mean, half = apart[study["method"]]
    here = f"{signed(mean, 3)} against SimCLR ({signed(mean - half, 3)} to {signed(mean + half, 3)})"
    verdict = "holds" if mean + half < 0 else "does not hold" if mean - half > 0 else study["open"]
    times = squared["SimCLR"] / squared[study["method"]]
    head = ("method", "global loss, each seed", "mean", "against SimCLR", "squared gradient")
    text = f"{study['about']}\n\n" + table(head, rows)
    text += (
        f"\n**{verdict.capitalize()}**: {study['claim']}: {here}; the squared gradient of SimCLR is {times:.1f} times "
    )
    text += f"that of {study['method']}. {study['remark']}\n\n"
    text += f"{result['cpu_seconds']:.0f} s of a CPU. {_provenance(result)}\n"
    gradient = "holds" if times >= 100.0 else "does not hold"
    return [
        Finding(study["claim"], "Fig. 7", here, verdict),
        Finding("EMC2: a squared gradient two orders of magnitude below", "100 times", f"{times:.1f} times", gradient),
    ], text


def _last_fifth(curves: list[dict[str, list[float]]], name: str) -> np.ndarray:
    """The mean over the last fifth of each run."""
    return np.array([np.mean(curve[name][-max(len(curve[name]) // 5, 1) :]) for curve in curves])


def _provenance(result: dict[str, Any]) -> str:
    command = f": `{result['command']}`" if "command" in result else ""
    return f"Commit {result['commit']}, {result.get('device', 'cpu')}{command}."


SECTIONS = {"frontier": frontier, "ring": ring, "emc2": emc2}
