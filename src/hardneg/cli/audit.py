"""`hardneg audit`: arguments and output files of the verb; the measurements are in ``hardneg.auditing``.

`audit` reads the options, `_audit` runs with progress bars, and `_show` writes audit.json and audit.html and prints the
table.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hardneg.auditing.options import PANELS, AuditOptions
from hardneg.cli.errors import errors_for_people
from hardneg.cli.flags import (
    CONFIG,
    CONTEXT,
    build,
    flags_of,
    parameter,
    parameters_of,
    with_config_file,
    with_parameters,
)
from hardneg.cli.output import Output

if TYPE_CHECKING:
    from hardneg.auditing.result import Audit

COMMON = (
    "input",
    "negatives",
    "labels",
    "positives",
    "judgements",
    "corpus",
    "corpus_embeddings",
    "temperature",
    "wanted_false_negatives",
    "num_anchors",
    "similarity",
    "out",
    "config",
)
"""Parameters that the short help shows."""


@with_parameters(
    [
        CONTEXT,
        *parameters_of(AuditOptions, PANELS),
        parameter("out", str, "audit", "--out", "-o", help="Folder for audit.html and audit.json."),
        parameter(
            "overwrite",
            bool,
            False,
            "--overwrite",
            help="Replace files there even if hardneg audit did not write them.",
        ),
        CONFIG,
    ],
    COMMON,
)
def audit(ctx: typer.Context, config: Path | None, out: str, overwrite: bool, output: Output, **values: Any) -> None:
    """Measure how hard the negatives are and how many are false: a table, an HTML page and a JSON file.

    Labels, groups or judgements define which negatives are false. Without them the audit shows how hard the negatives
    are, how concentrated, and how many are near-duplicates.

    Examples:
      hardneg audit embeddings.npy --labels labels.npy -n "Tilt(1.0)" -n "Ring(0.01, 0.1)" -o audit

      hardneg audit runs/simclr --tau-plus 0.1 --wanted-false-negatives 0.02

      hardneg audit first_views.npy --positives second_views.npy --labels labels.npy

      hardneg audit q.npy --queries queries.jsonl --corpus corpus.jsonl --corpus-embeddings d.npy --judgements qrels.tsv

      hardneg audit runs/simclr --batches "proximity()" --batches "knn()"   (pairs that share a batch)

      hardneg audit mined.parquet   (the manifest names the data it was mined from)

      hardneg audit mined.parquet --held-out-judgements qrels.tsv   (estimates the false-negative rate)

      hardneg audit theirs.jsonl --queries queries.jsonl --corpus corpus.jsonl --corpus-column title+text
    """
    flags = flags_of(AuditOptions)
    with errors_for_people(flags={"audit": flags, "mine": flags}):
        options = build(AuditOptions, with_config_file(ctx, "audit", config, values, AuditOptions), "audit")
        _check_out(out, options, overwrite)
        _show(_audit(options, output), options, out, overwrite, output)


def _check_out(out: str, options: AuditOptions, overwrite: bool) -> None:
    """Raise unless the output files can be written without overwriting an input or a foreign file."""
    from hardneg.core.errors import FileError
    from hardneg.io.outputs import check_output, is_sealed_json, is_sealed_page
    from hardneg.mining.options import manifest_of

    if Path(out).exists() and not Path(out).is_dir():
        raise FileError("audit", "a folder as --out", out, "which is a file")
    reads = [*options.reads(), manifest_of(options.input)]
    for name, is_ours in (("audit.json", is_sealed_json), ("audit.html", is_sealed_page)):
        file = Path(out) / name
        check_output("audit", file, reads, overwrite=overwrite, is_ours=lambda f=file, ours=is_ours: ours(f))  # type: ignore[misc]


def _audit(options: AuditOptions, output: Output) -> Audit:
    """Run the audit with progress bars."""
    from hardneg.auditing.files import audit_files

    with output.bars() as bars:
        bar = cache(bars)  # the same bar in every call
        return audit_files(options, lambda done, total: bar("audit", total)(done), bars)


def _show(found: Audit, options: AuditOptions, out: str, overwrite: bool, output: Output) -> None:
    """Write audit.json and audit.html, then print the result."""
    from rich.text import Text

    from hardneg.auditing.terminal import show
    from hardneg.io.files import locked
    from hardneg.io.terminal import Terminal

    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", "audit", patience=60.0, remove=True):  # two audits at once must not mix their files
        _check_out(out, options, overwrite)
        files = (found.write_json(folder / "audit.json"), found.write_html(folder / "audit.html"))

    def print_table() -> None:
        console = Terminal()
        show(found, console)
        console.print(Text(f"{files[1]} and {files[0]}"))

    output.result(found.to_dict(), print_table)  # last: the reader of a pipe may stop early, as `head` does
