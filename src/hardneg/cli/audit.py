"""`hardneg audit`: the arguments of the verb; what it does is in hardneg.auditing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hardneg.cli.errors import errors_for_people

if TYPE_CHECKING:
    from hardneg.auditing.options import AuditOptions
    from hardneg.auditing.result import Audit

_known, _mined, _rule, _look = "What is known", "What it was mined from", "Which rules", "How it looks"


def audit(
    input: Annotated[
        str, typer.Argument(help="Embeddings (.npy .npz .safetensors, or a table), a run, or a mined file.")
    ],
    out: Annotated[str, typer.Option("--out", "-o", help="Folder for audit.html and audit.json.")] = "audit",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also replace files there that audit has not made.")
    ] = False,
    labels: Annotated[
        str | None, typer.Option(help="File of labels: .npy .npz .txt or a table.", rich_help_panel=_known)
    ] = None,
    label_column: Annotated[str | None, typer.Option(help="Column or array of labels.", rich_help_panel=_known)] = None,
    groups: Annotated[
        str | None, typer.Option(help="File of groups; same group is false, too.", rich_help_panel=_known)
    ] = None,
    group_column: Annotated[str | None, typer.Option(help="Column or array.", rich_help_panel=_known)] = None,
    judgements: Annotated[
        str | None, typer.Option(help="Table of query id, document id, score (qrels).", rich_help_panel=_known)
    ] = None,
    positives: Annotated[
        str | None,
        typer.Option(help="Embeddings of a second view, or 'label': a row of the same label.", rich_help_panel=_known),
    ] = None,
    queries: Annotated[
        str | None, typer.Option(help="Table with the ids (and texts) of the queries.", rich_help_panel=_mined)
    ] = None,
    query_embeddings: Annotated[
        str | None, typer.Option(help="Of a mined file's queries.", rich_help_panel=_mined)
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(help="Table with the ids (and texts) of the documents.", rich_help_panel=_mined)
    ] = None,
    corpus_embeddings: Annotated[str | None, typer.Option(help="Of the documents.", rich_help_panel=_mined)] = None,
    embedding_column: Annotated[
        str | None, typer.Option(help="Column or array that holds embeddings.", rich_help_panel=_mined)
    ] = None,
    query_column: Annotated[str | None, typer.Option(help="Text of a query.", rich_help_panel=_mined)] = None,
    query_id_column: Annotated[str | None, typer.Option(rich_help_panel=_mined)] = None,
    corpus_column: Annotated[
        str | None, typer.Option(help="Text of a document; 'title+text' joins.", rich_help_panel=_mined)
    ] = None,
    corpus_id_column: Annotated[str | None, typer.Option(rich_help_panel=_mined)] = None,
    model: Annotated[
        str | None,
        typer.Option(help="sentence-transformers model for texts without embeddings.", rich_help_panel=_mined),
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="module:function from texts to vectors, instead.", rich_help_panel=_mined)
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="Folder of embeddings; default INPUT.embeddings.", rich_help_panel=_mined)
    ] = None,
    expression: Annotated[
        list[str] | None, typer.Option("--expression", "-e", help="In the grammar; repeat it.", rich_help_panel=_rule)
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of the loss.", rich_help_panel=_rule)] = 0.5,
    tau_plus: Annotated[
        float, typer.Option(help="Share of false negatives that the loss corrects for.", rich_help_panel=_rule)
    ] = 0.0,
    wanted_false_negatives: Annotated[
        float | None, typer.Option(help="Suggest rules with at most this share, such as 0.02.", rich_help_panel=_rule)
    ] = None,
    frontier: Annotated[
        bool, typer.Option("--frontier/--no-frontier", help="Measure a default set of rules.", rich_help_panel=_rule)
    ] = True,
    num_anchors: Annotated[int, typer.Option(help="How many anchors are looked at.", rich_help_panel=_look)] = 512,
    seed: Annotated[int, typer.Option(help="Of their draw.", rich_help_panel=_look)] = 0,
    near_duplicate: Annotated[float, typer.Option(help="Cosine of a copy.", rich_help_panel=_look)] = 0.95,
    similarity: Annotated[
        str | None,
        typer.Option(help="cosine or dot; that of a mined file's manifest, else cosine.", rich_help_panel=_look),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="train or test, of a run; else test.", rich_help_panel=_look)
    ] = None,
) -> None:
    """Say how hard and how false negatives are, before anyone trains on them: a table, a page and a JSON file.

    Labels, groups or judgements tell which negatives are false. Without them the audit says how hard the negatives are,
    how concentrated, and how many are near-duplicates.

    Examples:

      hardneg audit embeddings.npy --labels labels.npy -e "Tilt(1.0)" -e "Ring(0.01, 0.1)" -o audit

      hardneg audit runs/simclr --temperature 0.2 --tau-plus 0.1 --wanted-false-negatives 0.02

      hardneg audit first_views.npy --positives second_views.npy --labels labels.npy

      hardneg audit q.npy --queries queries.jsonl --corpus corpus.jsonl --corpus-embeddings d.npy --judgements qrels.tsv

      hardneg audit mined.parquet   (what it was mined from is read from its manifest)

      hardneg audit theirs.jsonl --queries queries.jsonl --corpus corpus.jsonl --corpus-column title+text
    """
    told = dict(locals())
    with errors_for_people():
        options = _options(told)
        _check_out(out, options, overwrite)
        _show(_audit(options), options, out, overwrite)


def _options(told: dict[str, Any]) -> AuditOptions:
    from hardneg.auditing.options import AuditOptions
    from hardneg.auditing.settings import Settings
    from hardneg.mining.problem import Columns

    columns = Columns(**{name: told.pop(f"{name}_column") for name in ("query", "query_id", "corpus", "corpus_id")})
    numbers = ("temperature", "tau_plus", "near_duplicate", "num_anchors", "seed", "wanted_false_negatives", "frontier")
    settings = Settings(**{name: told.pop(name) for name in numbers})
    expressions = tuple(told.pop("expression") or ())
    told.pop("out")
    told.pop("overwrite")
    return AuditOptions(expressions=expressions, settings=settings, columns=columns, **told)


def _check_out(out: str, options: AuditOptions, overwrite: bool) -> None:
    from pathlib import Path

    from hardneg.core.errors import FileError
    from hardneg.io.outputs import check_output, is_sealed_json, is_sealed_page
    from hardneg.mining.options import manifest_of

    if Path(out).exists() and not Path(out).is_dir():
        raise FileError("audit", "a folder as --out", out, "which is a file")
    reads = [*options.reads(), manifest_of(options.input)]
    for name, is_ours in (("audit.json", is_sealed_json), ("audit.html", is_sealed_page)):
        file = Path(out) / name
        check_output("audit", file, reads, overwrite=overwrite, is_ours=lambda f=file, ours=is_ours: ours(f))  # type: ignore[misc]


def _audit(options: AuditOptions) -> Audit:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from hardneg.auditing.files import audit_files

    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*parts, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def looked_at(done: int, total: int) -> None:
            if "anchors" not in tasks:
                tasks["anchors"] = bars.add_task("anchors", total=total)
            bars.advance(tasks["anchors"], done)

        def encoding(what: str, steps: int) -> Any:
            task = bars.add_task(what, total=steps)
            return lambda done: bars.advance(task, done)

        return audit_files(options, looked_at, encoding)


def _show(found: Audit, options: AuditOptions, out: str, overwrite: bool) -> None:
    from pathlib import Path

    from rich.console import Console
    from rich.text import Text

    from hardneg.auditing.terminal import show
    from hardneg.io.files import locked

    console = Console()
    show(found, console)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", "audit", patience=60.0, remove=True):  # both files are of one audit
        _check_out(out, options, overwrite)
        files = (found.write_json(folder / "audit.json"), found.write_html(folder / "audit.html"))
    console.print(Text(f"{files[1]} and {files[0]}"))
