"""Several retrievers as one ranking: reciprocal-rank fusion, the order of one source, and quotas.

Each retriever returns its best ``candidates`` for a query, after positives and the query itself are
removed; ranks count from 1 in the rest. The candidates are the union of these lists.

- Fused order: by the sum over retrievers of 1 / (60 + rank), largest first; equal sums by row of
  the corpus.
- ``From(name)`` in the expression keeps the candidates that this retriever found, whether or not
  others did, in its order.
- Quotas ((name, number), ...): the first ``number`` of the support in each retriever's own order,
  retriever by retriever; a candidate of several counts for the first. If a retriever has too few,
  the others fill up to k, in the same order.

The expression always reads similarities: fusion only decides the order in which ``draw="top"``
takes the support.

``Lexical`` (BM25) and ``RankedRun`` (a TREC run) are retrievers for ``Search(also=...)``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, FileError, NoFile, optional, spelled, warn_once, written
from hardneg.core.types import NEVER
from hardneg.io.tables import open_text
from hardneg.mining.problem import Side
from hardneg.mining.table_values import key_of
from hardneg.negatives import Negatives
from hardneg.search.topk import top_of_rows

CONSTANT = 60  # of reciprocal-rank fusion, as in Cormack et al. 2009
RankedLists = Sequence[Annotated[Tensor, "b c"]]
"""Rows of the corpus found by each retriever [b, c], best first."""
Quotas = tuple[tuple[Annotated[Tensor, "b m"], int], ...]
"""For each quota, the key that orders the candidates of its retriever [b, m], and the number."""


def named_source(negatives: Negatives, retrievers: Sequence[str]) -> int | None:
    """Return the number of the retriever that ``From`` names; None without ``From``.

    Raises:
        ArgumentError: If the expression names several sources, or an unknown one.
    """
    names = {factor.only_source for factor in negatives.factors if factor.only_source is not None}
    if not names:
        return None
    if len(names) > 1:
        raise ArgumentError("mine", "one source in the expression", " and ".join(sorted(names)), "use quotas")
    return source_number(next(iter(names)), retrievers)


def source_number(name: str, retrievers: Sequence[str]) -> int:
    """Return the position of a retriever; raise if there is none with this name."""
    if name not in retrievers:
        fix = f"add {spelled('mine', 'bm25')} or {spelled('mine', 'runs')}, or leave it out"
        raise ArgumentError("mine", f"a source among {', '.join(retrievers)}", repr(name), fix)
    return list(retrievers).index(name)


def check_quotas(quotas: Sequence[tuple[str, int]], k: int, draw: str, retrievers: Sequence[str]) -> None:
    """Raise for quotas of unknown sources, quotas that exceed k in total, or quotas with a random draw."""
    for name, _ in quotas:
        source_number(name, retrievers)
    total = sum(number for _, number in quotas)
    if total > k:
        raise ArgumentError("mine", f"quotas of at most {written('mine', 'k', k)} in all", str(total))
    if quotas and draw != "top":
        raise ArgumentError("mine", "draw 'top' with quotas", written("mine", "draw", draw))


def compacted(rows: Annotated[Tensor, "b c"], size: int) -> Annotated[Tensor, "b c"]:
    """Return the non-negative entries of each row in their order and without gaps, then -1.

    Args:
        rows: Row numbers [b, c]; negative ones are removed.
        size: Largest number of entries to keep.

    Example:
        >>> compacted(torch.tensor([[7, -1, 3, 5]]), 2).tolist()
        [[7, 3]]
    """
    first = torch.arange(rows.shape[1], 0, -1, device=rows.device).masked_fill(rows < 0, 0)
    best = first.topk(min(size, rows.shape[1]), dim=1)  # ten times faster than a stable sort
    return rows.gather(1, best.indices).masked_fill(best.values == 0, -1)


def ranks_in(found: Annotated[Tensor, "b c"], rows: Annotated[Tensor, "b m"]) -> Annotated[Tensor, "b m"]:
    """Return the rank of each candidate in a retriever's list, from 1; 0 if it is not in the list.

    Args:
        found: Distinct rows of the list [b, c], best first; -1 for none.
        rows: Rows of the candidates [b, m].

    Example:
        >>> ranks_in(torch.tensor([[4, 9, 2]]), torch.tensor([[2, 3, 4]])).tolist()
        [[3, 0, 1]]
    """
    if not found.shape[1]:
        return torch.zeros_like(rows)
    ordered, order = found.sort(dim=1, stable=True)
    place = torch.searchsorted(ordered.contiguous(), rows.contiguous()).clamp(max=found.shape[1] - 1)
    here = (ordered.gather(1, place) == rows) & (rows >= 0)
    return torch.where(here, order.gather(1, place) + 1, 0)


def fused_key(lists: RankedLists, rows: Annotated[Tensor, "b m"]) -> Annotated[Tensor, "b m"]:
    """Return a key that orders candidates by reciprocal-rank fusion, largest first.

    No two keys of a query are equal; candidates in no list get ``NEVER``.

    Args:
        lists: Rows found by each retriever [b, c], best first.
        rows: Rows of the candidates [b, m].
    """
    total = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    for found in lists:
        rank = ranks_in(found, rows)
        total = total + torch.where(rank > 0, 1.0 / (CONSTANT + rank), 0.0)
    by_row = rows.argsort(dim=1, stable=True)
    best = by_row.gather(1, total.gather(1, by_row).argsort(dim=1, descending=True, stable=True))
    place = torch.empty_like(best).scatter_(1, best, torch.arange(rows.shape[1], device=rows.device).expand_as(best))
    return (-place).double().masked_fill(total == 0, NEVER)


def by_quotas(support: Annotated[Tensor, "b m"], quotas: Quotas, wanted: int) -> Annotated[Tensor, "b wanted"]:
    """Return columns of the support in the order in which quotas take them, then -1.

    Args:
        support: Candidates that may be taken [b, m].
        quotas: Key and number of each retriever.
        wanted: Largest number of columns to return.
    """
    last = torch.iinfo(torch.long).max
    place = torch.full(support.shape, last, device=support.device)
    first = 0
    for keys_and_numbers in (quotas, [(key, support.shape[1]) for key, _ in quotas]):
        for key, number in keys_and_numbers:
            left = key.masked_fill(~support | (place < last), NEVER)
            rank = left.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            taken = (rank < number) & (left != NEVER)
            place = torch.where(taken, first + rank, place)
            first += number
    best = place.topk(min(wanted, place.shape[1]), dim=1, largest=False, sorted=True)
    return torch.where(best.values < last, best.indices, -1)


class Lexical:
    """BM25 over the texts of the corpus, as a retriever for ``Search(also=...)``.

    Args:
        queries: Texts of the queries.
        corpus: Texts of the documents.
    """

    name = "bm25"

    def __init__(self, queries: Sequence[str], corpus: Sequence[str]) -> None:
        # bm25s imports JAX if it is installed, and JAX would reserve three quarters of the GPU's memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self.bm25s = optional("bm25s", "BM25", extra="lexical")
        self.queries, self.size = queries, len(corpus)
        tokens = self.bm25s.tokenize(list(corpus), show_progress=False, return_ids=False)
        self.index = self.bm25s.BM25()
        if not any(tokens):
            raise ArgumentError("BM25", "words in the corpus", "none")
        self.index.index(tokens, show_progress=False)

    def scores(self, queries: Annotated[Tensor, "m"], rows: Annotated[Tensor, "m"]) -> Annotated[Tensor, "m"]:
        """Return the BM25 score of each pair of a query and a row [m]."""
        out = torch.zeros(len(rows))
        distinct, place = torch.unique(queries, return_inverse=True)
        for number, words in enumerate(self._tokens(distinct)):
            mine = (place == number).nonzero()[:, 0]
            out[mine] = self._of_words(words)[rows[mine]]
        return out

    def _of_words(self, words: list[str]) -> Annotated[Tensor, "n"]:
        if not words:
            return torch.zeros(self.size)
        return torch.from_numpy(np.asarray(self.index.get_scores(words), dtype=np.float32))

    def _tokens(self, queries: Tensor) -> list[list[str]]:
        texts = [self.queries[int(query)] for query in queries]
        return self.bm25s.tokenize(texts, show_progress=False, return_ids=False)  # type: ignore[no-any-return]

    def __call__(self, queries: Annotated[Tensor, "b"], size: int) -> Annotated[Tensor, "b size"]:
        """Return the rows with the highest BM25 scores, equal scores by row.

        bm25s itself picks any of the equal ones, and other ones for another size.
        """
        rows = torch.full((len(queries), min(size, self.size)), -1)
        for place, words in enumerate(self._tokens(queries)):
            best, found = top_of_rows(self._of_words(words)[None], rows.shape[1])
            rows[place] = torch.where(best > 0, found, -1)[0]
        return rows


def split_name(given: str) -> tuple[str, str]:
    """Return name and path of ``name=path``; without a name, the stem of the file.

    Example:
        >>> split_name("bm25=runs/a.trec"), split_name("runs/dense.trec")
        (('bm25', 'runs/a.trec'), ('dense', 'runs/dense.trec'))
    """
    name, _, path = given.partition("=")
    return (name, path) if path else (Path(given).name.split(".")[0], given)


def read_run(path: str) -> dict[str, list[str]]:
    """Read a TREC run: the documents of each query, best first.

    Raises:
        NoFile: If the file does not exist.
        FileError: If a line is not ``query Q0 document rank score tag``, or if there is none.
    """
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
    """A stored run as a retriever for ``Search(also=...)``.

    Warns, with counts, if queries or documents of the run are not in the data.

    Args:
        name: Name of the retriever.
        found: Document ids of each query id, best first.
        queries: Queries with ids.
        corpus: Documents with ids.
    """

    def __init__(self, name: str, found: Mapping[str, list[str]], queries: Side, corpus: Side) -> None:
        self.name = name
        row_of = {key_of(one): row for row, one in enumerate(corpus.ids)}
        lists = [[row_of.get(one, -1) for one in found.get(key_of(query), ())] for query in queries.ids]
        self.lists = [list(dict.fromkeys(row for row in rows if row >= 0)) for rows in lists]
        listed = sum(map(len, lists))
        if not any(self.lists):
            fix = "check the ids: they are those of the queries and of the corpus"
            raise ArgumentError("mine", f"queries and documents of the run {name!r} that are in the data", "none", fix)
        missing = sum(row < 0 for rows in lists for row in rows)
        empty = sum(not rows for rows in self.lists)
        if missing or empty:
            warn_once(
                f"run: {name} {missing} {empty}",
                f"The run {name!r} has no documents for {empty:,} of {len(lists):,} queries, and {missing:,} of its "
                f"{listed:,} documents are not in the corpus.",
            )

    def __call__(self, queries: Annotated[Tensor, "b"], size: int) -> Annotated[Tensor, "b size"]:
        """Return the first ``size`` documents of each query in the run, padded with -1."""
        rows = [self.lists[query][:size] for query in queries.tolist()]
        width = max(map(len, rows), default=0)
        return torch.tensor([[*each, *[-1] * (width - len(each))] for each in rows], dtype=torch.long).view(-1, width)
