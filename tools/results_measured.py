"""The sections of the page of results that are no comparison of one study: the frontier, tilts and two toys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import spearmanr, t

MEASURES = {"linear": "linear probe", "knn": "200-NN", "1nn": "1-NN", "retrieval": "retrieval"}

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


def folded(title: str, text: str) -> str:
    """Return text that a reader unfolds, such as a long table."""
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{text}\n</details>\n'


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
    points = table(
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
    text += folded(f"All {len(shown)} rules and planners", points)
    text += f"\n{here.capitalize()}. On the frontier, from easy to hard: {names}.\n\n"
    return text + f"{result['seconds']:.0f} s. {_provenance(result)}\n\n"


def _share(value: float, error: float | None) -> str:
    """With one standard error, where not every anchor was looked at."""
    return f"{100 * value:.2f} %" + (f" ± {100 * error:.2f}" if error else "")


def tilt(study: dict[str, Any], read: Read) -> tuple[list[Finding], str]:
    """Tilted arms against the plain loss at their effective temperature, by every measure that was recorded."""
    rows, above, below = [], 0, 0
    for one in study["pairs"]:
        for measure, values in _measured(read, one).items():
            plain, matched, tilted = (100.0 * np.array(values[name]) for name in ("plain", "matched", "tilted"))
            mean, half = interval(tilted - matched)
            above += mean - half > 0
            below += mean + half < 0
            means = (f"{part.mean():.2f}" for part in (plain, matched, tilted))
            apart = f"{signed(mean)} ({signed(mean - half)} to {signed(mean + half)})"
            ahead = f"{int((tilted > matched).sum())} of {len(tilted)}"
            rows.append((one["data"], measure, *means, apart, ahead))
    here = f"of {len(rows)} measures {above} above and {below} below, beyond the interval of the seeds"
    head = ("data", "measure", "plain", "plain, matched temperature", "tilted", "tilted - matched", "seeds ahead")
    text = f"{study['about']}\n\n" + table(head, rows) + f"\n{study['remark']}\n\n"
    for one in study["pairs"]:
        result = read(one["result"]) or {}
        commit = result.get("commit") or result["environment"]["commit"]
        file = Path("benchmarks/results/studies", one["result"]).as_posix().replace("studies/../", "")
        text += f"- {one['data']}: `{one['tilted']}` against `{one['matched']}` (`{file}.json`, commit {commit}).\n"
    return [Finding(study["claim"], study["figure"], here, study["judged"])], text


def _measured(read: Read, pair: dict[str, str]) -> dict[str, dict[str, Sequence[float]]]:
    """By the name of each measure, the seeds of the three arms."""
    result = read(pair["result"])
    assert result is not None, pair["result"]
    arms = {name: pair[name] for name in ("plain", "matched", "tilted")}
    if "encoder" in pair:  # simcse.json, by the names of arms
        after = {one["arm"]: one["sts"]["seeds"] for one in result["encoders"][pair["encoder"]]["after"].values()}
        return {"STS": {name: after[arm] for name, arm in arms.items()}}
    names = sorted(result["measures"][pair["plain"]], key=lambda one: one != result["metric"])
    return {MEASURES[one]: {name: result["measures"][arm][one] for name, arm in arms.items()} for one in names}


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
        f"at w = 25 {signed(mean, 4)} nats against all negatives ({signed(mean - half, 4)} to "
        f"{signed(mean + half, 4)}), where the premise of Theorem 3.1 holds for "
        f"{100 * result['premise']['25']:.0f} % of the rows"
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
            "" if w == "0" else f"{100 * result['premise'][w]:.0f} %",
        )
        for w, row in result["results"].items()
    ]
    head = ("w", "each seed", "mean", "over seeds", "one row, over draws", "on trained pairs", "paper", "premise holds")
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
    squared = {name: _last_fifth(curves, "squared_gradient") for name, curves in result["curves"].items()}
    apart = {name: interval(losses - last["SimCLR"]) for name, losses in last.items() if name != "SimCLR"}
    rows = [
        (
            name,
            " ".join(f"{value:.2f}" for value in losses),
            f"{losses.mean():.3f}",
            f"{signed(apart[name][0], 3)} ± {apart[name][1]:.3f}" if name in apart else "",
            f"{squared[name].mean():.3f}",
            _in_words(*_times(squared["SimCLR"], squared[name])) if name in apart else "",
        )
        for name, losses in sorted(last.items(), key=lambda one: one[1].mean())
    ]
    findings = [
        _lower_loss(study, apart[study["method"]]),
        _as_planned(study, last, squared),
        _lower_gradient(study, _times(squared["SimCLR"], squared[study["method"]])),
    ]
    head = ("method", "global loss, each seed", "mean", "against SimCLR", "squared gradient", "SimCLR's / its own")
    text = f"{study['about']}\n\n" + table(head, rows) + "\n"
    text += "".join(f"**{one.verdict.capitalize()}**: {one.claim}: {one.here}.\n\n" for one in findings)
    text += f"{study['narrowed']} {study['remark']}\n\n{result['cpu_seconds']:.0f} s of a CPU. {_provenance(result)}\n"
    return findings, text


def _lower_loss(study: dict[str, Any], apart: tuple[float, float]) -> Finding:
    mean, half = apart
    here = f"{signed(mean, 3)} against SimCLR ({signed(mean - half, 3)} to {signed(mean + half, 3)})"
    verdict = "holds" if mean + half < 0 else "does not hold" if mean - half > 0 else study["open"]
    return Finding(study["claim"], "Fig. 7", here, verdict)


def _as_planned(study: dict[str, Any], last: dict[str, np.ndarray], squared: dict[str, np.ndarray]) -> Finding:
    """The claim before it was narrowed: loss and squared gradient, each below those of every baseline."""
    parts, low, high = [], [], []
    for other in study["planned"]["against"]:
        mean, half = interval(last[study["method"]] - last[other])
        parts.append(f"loss {signed(mean, 3)} against {other} ({signed(mean - half, 3)} to {signed(mean + half, 3)})")
        low.append(mean - half)
        high.append(mean + half)
    for other in study["planned"]["against"]:
        middle, least, most = _times(squared[study["method"]], squared[other])
        parts.append(f"squared gradient {_in_words(middle, least, most)} that of {other}")
        low.append(np.log(least))
        high.append(np.log(most))
    verdict = "does not hold" if max(low) > 0 else "holds" if max(high) < 0 else study["open"]
    return Finding(study["planned"]["claim"], "Fig. 7", "; ".join(parts), verdict)


def _lower_gradient(study: dict[str, Any], times: tuple[float, float, float]) -> Finding:
    _, low, high = times
    verdict = "holds" if low >= 100.0 else "does not hold" if high < 100.0 else study["open"]
    claim = "EMC2 (Algorithm 1): a squared gradient two orders of magnitude below SimCLR's"
    return Finding(claim, "100 times", _in_words(*times), verdict)


def _times(one: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """The ratio of two positive figures over seeds: its geometric mean and the ends of its 95 % interval."""
    mean, half = interval(np.log(one / other))
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))


def _in_words(times: float, low: float, high: float) -> str:
    return f"{times:.2f} times ({low:.2f} to {high:.2f})"


def _last_fifth(curves: list[dict[str, list[float]]], name: str) -> np.ndarray:
    """The mean over the last fifth of each run."""
    return np.array([np.mean(curve[name][-max(len(curve[name]) // 5, 1) :]) for curve in curves])


def _provenance(result: dict[str, Any]) -> str:
    command = f": `{result['command']}`" if "command" in result else ""
    return f"Commit {result['commit']}, {result.get('device', 'cpu')}{command}."


SECTIONS = {"frontier": frontier, "tilt": tilt, "ring": ring, "emc2": emc2}
