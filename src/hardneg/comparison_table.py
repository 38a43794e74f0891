"""Comparisons and evaluations in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hardneg.comparison import TITLES, Comparison, compare, measure


def compare_and_show(comparison: Comparison, out: Path, jobs: int) -> None:
    """Runs the comparison with a bar, prints the table and writes the report."""
    from rich.progress import Progress

    from hardneg.arms import parse_arm
    from hardneg.report import write_report

    for arm in comparison.arms:
        parse_arm(arm)  # wrong arms are named before anything runs
    console = Console()
    with Progress(console=console) as progress:
        tuned = len(comparison.tune[1]) if comparison.tune else 0
        task = progress.add_task("runs", total=len(comparison.arms) * (comparison.seeds + tuned))

        def show(line: str) -> None:
            progress.console.print(Text(line, style="dim"))
            progress.advance(task)

        summary = compare(comparison, out, jobs=jobs, show=show)
    console.print(comparison_table(summary))
    for sentence in [*summary["sentences"], *summary["notes"]]:
        console.print(Text(sentence))
    console.print(f"report: {write_report(out)}")


def comparison_table(summary: dict[str, Any]) -> Table:
    table = Table(
        title=f"{measure(summary['metric'], summary.get('k'))}, %, every seed and the mean", title_justify="left"
    )
    for name in ("arm", "seeds", "mean", "against the first", "eff. temp.", "false neg.", "hardness", "clamped", "s"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for row in summary["rows"]:
        against = "" if row["difference"] is None else _interval(row["difference"], row["difference_half_width"])
        table.add_row(
            Text(row["arm"]),
            " ".join(f"{100 * value:.1f}" for value in row["values"]),
            _interval(row["mean"], row["half_width"], sign=False),
            against,
            f"{row['effective_temperature']:.3g}",
            f"{100 * row['false_negatives']:.1f} %",
            f"{row['hardness']:.3f}",
            f"{100 * row['clamped']:.0f} %",
            f"{row['seconds']:.0f}",
        )
    return table


def show_evaluation(result: dict[str, Any]) -> None:
    table = Table(title="evaluation", title_justify="left", show_header=False)
    for name in ("linear", "knn", "1nn", "uniformity", "steps", "seconds"):
        if name in result:
            value = result[name]
            share = name in TITLES
            table.add_row(measure(name, result.get("k")), f"{100 * value:.2f} %" if share else f"{value:.4g}")
    Console().print(table)


def _interval(value: float, half: float, sign: bool = True) -> str:
    return f"{100 * value:{'+' if sign else ''}.2f} ± {100 * half:.2f}"
