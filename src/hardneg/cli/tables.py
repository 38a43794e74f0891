"""Comparisons and evaluations as tables in the terminal.

`compare_and_show` runs a comparison with a progress bar and prints it; the other functions only print finished results.
"""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hardneg.cli.output import Output
from hardneg.comparing.comparing import carry_out, prepare
from hardneg.comparing.progress import Watcher
from hardneg.comparing.request import Comparison, letter_of, tries_of, why_no_accuracy, words_of
from hardneg.comparing.verdict import before_training
from hardneg.core.text import counted, printable
from hardneg.io.terminal import Terminal
from hardneg.training.evaluation.measures import BEFORE, MEASURES, measure, measures_in, nothing_learnt, unit_of

# A remark on arms whose distribution reads labels: their figures are not comparable with unsupervised arms.
SEES_LABELS = "sees the labels of the training {}s"
LAST_RECORDS = "False negatives, hardness and clamped are means over the last records"


def compare_and_show(
    comparison: Comparison, out: str, jobs: int | None, allow_other_data: bool, output: Output
) -> None:
    """Run a comparison with a progress bar, print its table and write its report.

    Args:
        comparison: Arms, seeds and shared options.
        out: Directory of the comparison; an existing one is resumed.
        jobs: Maximum number of parallel runs; None chooses it from cores and GPUs.
        allow_other_data: Continue even if the data has changed since the comparison started.
        output: Where to print: as text or as JSON.
    """
    from hardneg.reporting import write_report

    prepared = prepare(comparison, out, jobs, allow_other_data)  # before the bar, which would mix with error messages
    tuned = len(tries_of(prepared.arms, comparison)[0])
    runs = len(comparison.arms) * (comparison.seeds + comparison.tune_seeds * tuned)
    log, done_before = Terminal(stderr=output.json, quiet=output.quiet), 0.0
    with output.bars() as bars:
        advance = bars("train", runs)

        def moved(done: float) -> None:
            nonlocal done_before
            advance(done - done_before)
            done_before = done

        watcher = Watcher(
            lambda line: log.print(Text(printable(line), style="dim")),
            prepared.steps,
            moved,
            total=runs,
            epochs=prepared.epochs,
        )
        watcher.show(
            f"{counted(runs, 'run')} of {counted(prepared.epochs, 'epoch')}: {counted(len(comparison.arms), 'arm')}, "
            + counted(comparison.seeds, "seed")
            + (f", and {counted(tuned, 'try', 'tries')} of each arm" if tuned else "")
            + (f" with {comparison.tune_seeds} seeds" if comparison.tune_seeds > 1 else "")
        )
        summary = carry_out(prepared, watcher)
    report = write_report(out)

    def show() -> None:
        console = Terminal()
        show_comparison(summary, console)
        console.print(Text(f"report: {printable(report)}"), soft_wrap=True)

    output.result({**summary, "report": str(report)}, show)


def show_comparison(summary: dict[str, Any], console: Console) -> None:
    """Print a comparison: arms by letter, the table, the headline, each difference, cautions and notes.

    Args:
        summary: Contents of ``comparison.json``.
        console: Terminal to print to.
    """
    for letter, row in zip(_letters(summary), summary["rows"], strict=True):
        console.print(Text(printable(f"{letter}  {row['arm']}{_remarks(summary, row)}")))
    console.print(comparison_table(summary))
    before = before_training(list(zip(_letters(summary), [row.get("before") for row in summary["rows"]], strict=True)))
    console.print(Text(f"{LAST_RECORDS} of all seeds.{before}", style="dim"))
    console.print(Text(printable(summary["headline"]), style="bold"))
    beside = [f"More than the negatives differs: {one}" for one in summary.get("unlike", [])]
    for sentence in [
        *summary["answer"],
        *summary["sentences"],
        *summary.get("cautions", []),
        *summary["notes"],
        *beside,
    ]:
        console.print(Text(printable(sentence)))


def _remarks(summary: dict[str, Any], row: dict[str, Any]) -> str:
    """Return what a reader must know about an arm: its tuned value, use of labels, and collapsed runs."""
    remarks = []
    if summary.get("tuned"):
        remarks.append(f"tuned to {words_of(summary['tuned'][row['arm']])}")
    if row.get("uses_labels"):
        remarks.append(SEES_LABELS.format(summary.get("noun", "image")))
    if row.get("collapsed"):
        remarks.append(f"collapsed in {row['collapsed']} of {len(row['values'])} runs")
    return f"  ({'; '.join(remarks)})" if remarks else ""


def comparison_table(summary: dict[str, Any]) -> Table:
    """Build the table of a comparison, one row per arm; with three seeds it fits 80 columns.

    Args:
        summary: Contents of ``comparison.json``. Accuracies in it are fractions, shown in percent.
    """
    held_out = summary.get("comparison", {}).get("common", {}).get("evaluate_on") == "validation"
    split = " on the validation split" * held_out
    called, unit = measure(summary["metric"], summary.get("k")), unit_of(summary["metric"])
    title = f"{called}{split}, {unit}: every seed, and means with 95 % intervals"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    heads = ("", "\nseeds", "\nmean", "against\nthe first", "eff.\ntemp.", "false\nneg. %", "hard-\nness")
    for name in (*heads, "clam-\nped %", "\nsec."):
        table.add_column(name, justify="right" if name else "left", no_wrap="seeds" not in name)
    for letter, row in zip(_letters(summary), summary["rows"], strict=True):
        table.add_row(
            letter,
            " ".join(f"{100 * value:.1f}" for value in row["values"]),
            _interval(row["mean"], row["half_width"], sign=False),
            "" if row["difference"] is None else _interval(row["difference"], row["difference_half_width"]),
            f"{row['effective_temperature']:.3g}",
            _or_not_available(100 * row["false_negatives"], 1),
            _or_not_available(row["hardness"], 3),
            _or_not_available(100 * row["clamped"], 0),
            _seconds(row["seconds"]),
        )
    return table


def _letters(summary: dict[str, Any]) -> list[str]:
    """Return the letters A, B, ... of the arms."""
    return [letter_of(number) for number in range(len(summary["rows"]))]


def show_evaluation(result: dict[str, Any]) -> None:
    """Print the measures of a run or of embeddings; without any accuracy, print the reason.

    Args:
        result: Contents of ``result.json`` or the result of an evaluation; results on several data sets are a list
            under the key "on". Accuracies are fractions.
    """
    whole = result.get("on", [result])
    each = [part for one in whole for part in (one, one.get(BEFORE)) if part is not None]
    heads = [printable(one.get("data", "")) or "trained" for one in whole]
    heads = [
        part for one, head in zip(whole, heads, strict=True) for part in (head, *["before training"] * (BEFORE in one))
    ]
    table = Table("", *heads, title="evaluation", title_justify="left", show_header=len(each) > 1)
    found = [name for name in MEASURES if any(name in measures_in(one) for one in each)]
    for name in sorted(found, key=lambda one: one != "linear"):  # the linear probe first
        counts = {one["k"] for one in each if "k" in one}
        figures = (f"{100 * one[name]:.2f}{' %' * (unit_of(name) == '%')}" if name in one else "" for one in each)
        table.add_row(measure(name, counts.pop() if len(counts) == 1 else None), *figures)
    for name in ("alignment", "uniformity", "steps", "seconds"):
        if any(name in one for one in each):
            table.add_row(name, *(f"{one[name]:.4g}" if name in one else "" for one in each))
    console = Terminal()
    if table.row_count:
        console.print(table)
    for one in whole:
        if sentence := nothing_learnt(one):
            console.print(Text(printable(sentence)))
        if not measures_in(one) or "no_accuracy" in one:
            on = f" on {one['data']}" if "on" in result else ""
            console.print(Text(printable(f"There is no accuracy{on}: {why_no_accuracy(one)}.")))


def show_text_evaluations(found: dict[str, Any]) -> None:
    """Print the benchmarks of a text encoder, all multiplied by 100.

    Args:
        found: Results under the keys "sts" (Spearman correlations), "retrieval" (nDCG, MRR, recall) and
            "classification" (accuracies); missing keys are skipped.
    """
    console = Terminal()
    if "sts" in found:
        table = Table("STS, Spearman x 100", "all", "mean", "pairs", title_justify="left")
        for task, one in found["sts"]["tasks"].items():
            table.add_row(task, _percent(one["all"]), _percent(one["mean"]), str(one["pairs"]))
        table.add_row("mean of the tasks", _percent(found["sts"]["all"]), _percent(found["sts"]["mean"]), "")
        console.print(table)
        console.print(Text("all: over all pairs of a task; mean: mean over its subsets.", style="dim"))
    if "retrieval" in found:
        table = Table("retrieval", "x 100")
        for name, value in found["retrieval"].items():
            table.add_row(name, str(value) if name.startswith("num_") else _percent(value))
        console.print(table)
    if "classification" in found:
        table = Table("classification", "accuracy, %", "", "skipped")
        for task, one in found["classification"].items():
            how = f"± {100 * one['deviation']:.1f} over {one['folds']} folds" if "folds" in one else "test split"
            how += f", F1 {_percent(one['f1'])}" if "f1" in one else ""
            table.add_row(task, _percent(one["accuracy"]), how, str(one["skipped"]))
        console.print(table)


def _percent(value: float | None) -> str:
    """Format a fraction in percent."""
    return "n/a" if value is None else f"{100 * value:.2f}"


def _interval(value: float, half: float | None, sign: bool = True) -> str:
    """Format a fraction and the half-width of its 95 % interval in percent; ``+z`` avoids a negative zero."""
    width = "" if half is None else f" ± {100 * half:.1f}"
    return f"{100 * value:{'+z' if sign else ''}.1f}{width}"


def _seconds(value: float) -> str:
    """Format seconds; two significant digits below ten."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _or_not_available(value: float, digits: int) -> str:
    """Format a figure, or n/a if an arm has none, for instance without negatives or labels."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "n/a"
