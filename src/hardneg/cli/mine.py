"""`hardneg mine`: the arguments of the verb; what it does is in hardneg.mining."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hardneg.cli.errors import errors_for_people

if TYPE_CHECKING:
    from hardneg.mining.estimate import Estimate
    from hardneg.mining.job import Summary
    from hardneg.mining.options import MineOptions

_input, _rule, _search, _output = "What is mined", "Which negatives", "How candidates are found", "What is written"


def mine(
    queries: Annotated[str, typer.Argument(help="Queries: .parquet .jsonl .csv .tsv, a data set, or embeddings.")],
    out: Annotated[str, typer.Option("--out", "-o", help=".parquet, .jsonl, or a folder for datasets.")],
    corpus: Annotated[str | None, typer.Option(help="Documents; none: the positives.", rich_help_panel=_input)] = None,
    judgements: Annotated[
        str | None, typer.Option(help="Table of query id, document id, score (qrels).", rich_help_panel=_input)
    ] = None,
    query_embeddings: Annotated[
        str | None, typer.Option(help=".npy .npz .safetensors .parquet", rich_help_panel=_input)
    ] = None,
    corpus_embeddings: Annotated[str | None, typer.Option(help="The same.", rich_help_panel=_input)] = None,
    embedding_column: Annotated[
        str | None, typer.Option(help="Column or array that holds embeddings.", rich_help_panel=_input)
    ] = None,
    query_column: Annotated[str | None, typer.Option(help="Text of a query.", rich_help_panel=_input)] = None,
    query_id_column: Annotated[str | None, typer.Option(rich_help_panel=_input)] = None,
    positive_column: Annotated[
        str | None, typer.Option(help="Positives of a query: ids or texts, one or a list.", rich_help_panel=_input)
    ] = None,
    corpus_column: Annotated[
        str | None, typer.Option(help="Text of a document; 'title+text' joins.", rich_help_panel=_input)
    ] = None,
    corpus_id_column: Annotated[str | None, typer.Option(rich_help_panel=_input)] = None,
    label_column: Annotated[
        str | None, typer.Option(help="Labels in both tables, for OtherLabel().", rich_help_panel=_input)
    ] = None,
    missing_positives: Annotated[
        str, typer.Option(help="Positives not in the corpus: error or drop.", rich_help_panel=_input)
    ] = "error",
    model: Annotated[str | None, typer.Option(help="sentence-transformers model.", rich_help_panel=_input)] = None,
    encoder: Annotated[
        str | None, typer.Option(help="module:function from texts to vectors.", rich_help_panel=_input)
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts encoded at a time.", rich_help_panel=_input)] = 64,
    cache: Annotated[
        str | None, typer.Option(help="Folder of embeddings; default OUT.embeddings.", rich_help_panel=_input)
    ] = None,
    negatives: Annotated[
        str, typer.Option("--negatives", "-n", help="Expression of the grammar.", rich_help_panel=_rule)
    ] = "BelowPositive(relative=0.05)",
    k: Annotated[int, typer.Option("-k", min=1, help="Negatives of a query.", rich_help_panel=_rule)] = 5,
    draw: Annotated[str, typer.Option(help="top, gumbel or categorical.", rich_help_panel=_rule)] = "top",
    seed: Annotated[int, typer.Option(help="Of the draws.", rich_help_panel=_rule)] = 0,
    temperature: Annotated[float, typer.Option(help="Of tilts.", rich_help_panel=_rule)] = 1.0,
    similarity: Annotated[str, typer.Option(help="cosine or dot.", rich_help_panel=_rule)] = "cosine",
    near_positive: Annotated[
        float | None, typer.Option(help="Cosine from which a candidate is a copy of a positive.", rich_help_panel=_rule)
    ] = None,
    near_negative: Annotated[
        float | None, typer.Option(help="... of a negative taken before it.", rich_help_panel=_rule)
    ] = None,
    search: Annotated[str, typer.Option(help="exact, flat, ivf, hnsw or bm25.", rich_help_panel=_search)] = "exact",
    bm25: Annotated[bool, typer.Option("--bm25", help="Candidates by words, too.", rich_help_panel=_search)] = False,
    rescore: Annotated[
        str | None, typer.Option(help="module:function from (query, document) pairs.", rich_help_panel=_search)
    ] = None,
    candidates: Annotated[
        int, typer.Option(min=1, help="Of each retriever, with --bm25 or --rescore.", rich_help_panel=_search)
    ] = 100,
    query_block: Annotated[
        int, typer.Option(min=0, help="Queries at a time; 0: what fits.", rich_help_panel=_search)
    ] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda ...", rich_help_panel=_search)] = None,
    format: Annotated[
        str, typer.Option(help="triplet, n-tuple, labeled-pair, labeled-list or ids.", rich_help_panel=_output)
    ] = "triplet",
    scores: Annotated[bool, typer.Option("--scores", help="With scores.", rich_help_panel=_output)] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also replace what mine has not made.", rich_help_panel=_output)
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it will cost.", rich_help_panel=_output)] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what each factor removed.", rich_help_panel=_output)
    ] = False,
) -> None:
    """Turn a data set and its embeddings into training data with hard negatives.

    Examples:

      hardneg mine pairs.jsonl --model all-MiniLM-L6-v2 -o mined.parquet

      hardneg mine queries.jsonl --corpus corpus.jsonl --corpus-column title+text --judgements qrels.tsv
      --model all-MiniLM-L6-v2 -n "BelowPositive(relative=0.05) * Rank(5, 200) * Tilt(2.0)" --draw gumbel -o mined

      hardneg mine q.npy --corpus-embeddings d.npy --judgements pairs.csv --format ids -o mined.parquet

      torchrun --nproc-per-node 8 -m hardneg mine ...   (the same output)
    """
    told = dict(locals())
    with errors_for_people("Run the same command again to go on."):
        options = _options(told)
        if dry_run:
            from hardneg.mining.estimate import estimate

            _print_estimate(estimate(options))
            return
        _mine(options, explain)


def _options(told: dict[str, Any]) -> MineOptions:
    from hardneg.mining.options import MineOptions
    from hardneg.mining.problem import Columns

    names = ("query", "query_id", "positive", "corpus", "corpus_id", "label")
    columns = Columns(**{name: told.pop(f"{name}_column") for name in names})
    for name in ("dry_run", "explain"):
        told.pop(name)
    return MineOptions(columns=columns, **told)


def _mine(options: MineOptions, explain: bool) -> None:
    import os

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from hardneg.mining.job import run

    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*parts, disable=os.environ.get("RANK", "0") != "0", transient=True) as bars:

        def progress(what: str, steps: int) -> Any:
            task = bars.add_task(what, total=steps)
            return lambda done: bars.advance(task, done)

        summary = run(options, progress)
    if summary is not None:
        _print_summary(summary, options, explain)


def _print_summary(summary: Summary, options: MineOptions, explain: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if explain:
        steps = Table(title=f"{summary.explanation.looked_at:,} candidates looked at", title_justify="left")
        for name in ("step", "removed", "queries short because of it"):
            steps.add_column(name, justify="left" if name == "step" else "right")
        for step, gone, short in summary.explanation.rows():
            steps.add_row(Text(step), f"{gone:,}", f"{short:,}")
        console.print(steps)
    similarities = Table(title="similarity", title_justify="left")
    for name in ("", "mean", "5%", "median", "95%"):
        similarities.add_column(name, justify="right")
    for group, row in summary.statistics.items():
        similarities.add_row(group, *(f"{row[name]:.3f}" for name in ("mean", "5%", "median", "95%")))
    console.print(similarities)
    odd = ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in summary.counts.items() if number)
    console.print(Text(odd))
    told = summary.explanation
    console.print(Text(f"{told.short:,} of {told.queries:,} queries have fewer than {options.k} negatives."))
    console.print(Text(f"{summary.rows_written:,} rows in {options.out}, described in {summary.manifest}."))


def _print_estimate(cost: Estimate) -> None:
    counts = ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in cost.counts.items() if number)
    typer.echo(f"{cost.queries:,} queries, {cost.corpus:,} documents ({counts})")
    typer.echo(f"encoding about {_duration(cost.encoding_seconds)}, mining about {_duration(cost.mining_seconds)}")
    typer.echo(f"memory about {cost.peak_bytes / 2**30:.1f} GiB; nothing was written")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
