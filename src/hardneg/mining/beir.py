"""A BEIR folder as the input of a job: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hardneg.core.errors import FileError
from hardneg.io.tables import column_names, read_table
from hardneg.mining.options import MineOptions


def from_beir(options: MineOptions) -> MineOptions:
    """The options with the files of the folder, where the queries are one and nothing else is named."""
    folder = Path(options.queries)
    corpus, queries = (_of(folder, name) for name in ("corpus", "queries"))
    if not folder.is_dir() or corpus is None or queries is None:
        return options
    splits = (folder / "qrels" / f"{split}.tsv" for split in ("train", "dev", "test"))  # the one to train on first
    given = options.judgements or next((str(path) for path in splits if path.is_file()), None)
    if given is None:
        raise FileError("mine", "qrels/train.tsv in a BEIR folder", folder, fix="name --judgements")
    columns = options.columns
    documents = options.corpus or str(corpus)
    # The names are those of the first line, and only some of the documents may have a title.
    if columns.corpus is None and ("title" in column_names(documents) or "title" in read_table(documents)):
        columns = replace(columns, corpus="title+text")
    return replace(options, queries=str(queries), corpus=documents, judgements=given, columns=columns)


def _of(folder: Path, name: str) -> Path | None:
    return next((path for suffix in (".jsonl", ".jsonl.gz") if (path := folder / f"{name}{suffix}").is_file()), None)
