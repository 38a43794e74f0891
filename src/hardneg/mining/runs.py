"""Rankings of other retrievers, from TREC run files: ``query Q0 document rank score tag``, one line each.

As trec_eval reads them: the score orders the documents of a query, and the rank decides between equal scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, FileError, NoFile, warn_once
from hardneg.io.tables import open_text
from hardneg.mining.cells import key_of
from hardneg.mining.problem import Side


def split_name(given: str) -> tuple[str, str]:
    """The name and the path of ``name=path``; the stem of the file where there is no name."""
    name, _, path = given.partition("=")
    return (name, path) if path else (Path(given).name.split(".")[0], given)


def read_run(path: str) -> dict[str, list[str]]:
    """The documents of each query, the best first."""
    if not Path(path).is_file():
        raise NoFile("mine", "a TREC run file that exists", path)
    found: dict[str, list[tuple[float, int, str]]] = {}
    with open_text(Path(path), "mine") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                query, entry = _entry(line, number, path)
                found.setdefault(query, []).append(entry)
    if not found:
        raise FileError("mine", "a TREC run with at least one line", path, "which is empty")
    return {query: [name for _, _, name in sorted(entries, key=lambda e: e[:2])] for query, entries in found.items()}


def _entry(line: str, number: int, path: str) -> tuple[str, tuple[float, int, str]]:
    try:
        query, _, document, rank, score, _ = line.split()
        value = float(score)
        if value != value:
            raise ValueError
        return query, (-value, int(rank), document)
    except ValueError:
        got = f"line {number}: {line.strip()[:60]!r}"
        raise FileError("mine", "lines of `query Q0 document rank score tag`", path, got) from None


class RankedRun:
    """One run as a retriever of ``Search(also=...)``; documents and queries that are not there are counted."""

    def __init__(self, name: str, found: Mapping[str, list[str]], queries: Side, corpus: Side) -> None:
        self.name = name
        row_of = {key_of(one): row for row, one in enumerate(corpus.ids)}
        lists = [[row_of.get(one, -1) for one in found.get(key_of(query), ())] for query in queries.ids]
        self.lists = [list(dict.fromkeys(row for row in rows if row >= 0)) for rows in lists]
        listed = sum(map(len, lists))
        if not any(self.lists):
            fix = "check the ids: they are those of the queries and of the corpus"
            raise ArgumentError("mine", f"queries and documents of the run {name!r} among those given", "none", fix)
        missing = sum(row < 0 for rows in lists for row in rows)
        empty = sum(not rows for rows in self.lists)
        if missing or empty:
            warn_once(
                f"run: {name} {missing} {empty}",
                f"The run {name!r} has no documents for {empty:,} of {len(lists):,} queries, and {missing:,} of its "
                f"{listed:,} documents are not in the corpus.",
            )

    def __call__(self, queries: Annotated[Tensor, "b"], size: int) -> Annotated[Tensor, "b size"]:
        rows = [self.lists[query][:size] for query in queries.tolist()]
        width = max(map(len, rows), default=0)
        return torch.tensor([[*each, *[-1] * (width - len(each))] for each in rows], dtype=torch.long).view(-1, width)
