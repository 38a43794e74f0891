"""Retrieval: exact search by cosine, scored with relevance judgements (nDCG, MRR, recall; by ir-measures).

The search is the one of mining, which runs on the device of the vectors in bounded memory; ir-measures only scores.
Read ``read_beir`` and ``evaluate_retrieval``; ``retrieval_figures`` does the same from vectors. Callers are
``hardneg evaluate`` and benchmarks.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hardneg.core.errors import ArgumentError, NoFile, optional
from hardneg.io.tables import read_table
from hardneg.mining.judgements import read_grades
from hardneg.search.nearest import Corpus, Nearest, nearest
from hardneg.training.evaluation.texts import TextEncoder, Vectors, as_text_encoder

WHO = "evaluate"
DEPTH = 100
"""Documents retrieved for each query: the largest cutoff of ``MEASURES``."""

MEASURES = {"ndcg@10": "nDCG@10", "mrr@10": "RR@10", "recall@10": "R@10", "recall@100": "R@100"}
"""Our names and those of ir-measures; a document counts as relevant from grade 1."""

Grades = Mapping[str, Mapping[str, int]]
"""Query id -> document id -> grade."""


@dataclass(frozen=True)
class RetrievalSet:
    """Queries with judgements, and the documents to search.

    Attributes:
        queries: Text of each query by id.
        documents: Text of each document by id.
        grades: Grades of the judged documents of each query; 1 or more is relevant.
    """

    queries: dict[str, str]
    documents: dict[str, str]
    grades: Grades


def read_beir(folder: str | Path, split: str = "test") -> RetrievalSet:
    """Read a BEIR folder: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv, each optionally with .gz.

    A document's text is its title followed by its text. Queries without a judgement in the split are left out.

    Args:
        folder: The BEIR folder.
        split: Name of the file of judgements.

    Raises:
        NoFile: If one of the files is missing.
        ArgumentError: If a judged query has no text, or no query has a relevant document.
    """
    folder = Path(folder)
    grades: dict[str, dict[str, int]] = {}
    for grade, query, document in read_grades(str(_file(folder, f"qrels/{split}.tsv")), WHO):
        grades.setdefault(query, {})[document] = int(grade)
    documents, queries = (_texts(_file(folder, f"{name}.jsonl")) for name in ("corpus", "queries"))
    missing = [query for query in grades if query not in queries]
    if missing:
        got = f"none for {missing[0]!r} ({len(missing)} missing in total)"
        raise ArgumentError(WHO, f"a query for each judgement in {folder}", got)
    _with_relevant(grades)  # fail before training a run that could not be evaluated
    return RetrievalSet({query: queries[query] for query in grades}, documents, grades)


def evaluate_retrieval(data: RetrievalSet, encoder: TextEncoder | Any) -> dict[str, float]:
    """Compute nDCG@10, MRR@10, recall@10 and recall@100.

    A document that is its query, by id and text, is excluded from that query's results, as in ArguAna.

    Args:
        data: Queries, documents and judgements.
        encoder: A text encoder or any function of a list of texts.

    Returns:
        Figures by name, with the numbers of queries with and without a relevant document.
    """
    encoder = as_text_encoder(encoder)
    documents = encoder.documents(list(data.documents.values()))
    queries = encoder.queries(list(data.queries.values()))
    place = {document: row for row, document in enumerate(data.documents)}
    texts = enumerate(data.queries.items())
    own = [(row, place[query]) for row, (query, text) in texts if data.documents.get(query) == text]
    return retrieval_figures(queries, documents, list(data.queries), list(data.documents), data.grades, own)


def retrieval_figures(
    queries: Vectors,
    documents: Vectors,
    query_ids: Sequence[str],
    document_ids: Sequence[str],
    grades: Grades,
    excluded: Sequence[tuple[int, int]] = (),
) -> dict[str, float]:
    """Compute retrieval measures from vectors.

    Means are over the queries with a relevant document: no ranking of the others could score above 0.

    Args:
        queries: Vectors [q, d].
        documents: Vectors [n, d].
        query_ids: Id of each query.
        document_ids: Id of each document.
        grades: Grades of judged documents by query.
        excluded: (query, document) row pairs that are not compared.

    Returns:
        Figures by name, with the numbers of queries with and without a relevant document.
    """
    measures = optional("ir_measures", "retrieval", extra="eval")
    relevant = _with_relevant(grades)
    found = _nearest(queries, documents, excluded)
    run = [
        measures.ScoredDoc(query, document_ids[row], float(score))
        for query, rows, scores in zip(query_ids, found.rows.tolist(), found.similarity.tolist(), strict=True)
        for row, score in zip(rows, scores, strict=True)
        if row >= 0 and query in relevant
    ]
    judged = [measures.Qrel(query, document, grade) for query, of in relevant.items() for document, grade in of.items()]
    wanted = {name: measures.parse_measure(text) for name, text in MEASURES.items()}
    values = measures.calc_aggregate(list(wanted.values()), judged, run)
    counts = {"num_queries": len(relevant), "num_without_relevant": len(grades) - len(relevant)}
    return {name: float(values[measure]) for name, measure in wanted.items()} | counts


def _nearest(queries: Vectors, documents: Vectors, excluded: Sequence[tuple[int, int]]) -> Nearest:
    corpus = Corpus(documents, documents.device, block=16_384, cosine=True)
    pairs = torch.tensor(excluded, dtype=torch.long).reshape(-1, 2)
    parts = []
    for low in range(0, len(queries), 512):
        inside = (pairs[:, 0] >= low) & (pairs[:, 0] < low + 512)
        own = pairs[inside, 0] - low, pairs[inside, 1]
        parts.append(nearest(corpus, corpus.prepared(queries[low : low + 512]), DEPTH, own))
    return Nearest(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _with_relevant(grades: Grades) -> Grades:
    """Return the queries that have a relevant document; raise if there are none."""
    found = {query: of for query, of in grades.items() if any(grade > 0 for grade in of.values())}
    if not found:
        raise ArgumentError(WHO, "a query with a relevant document (grade >= 1)", f"{len(grades)} queries without one")
    return found


def _file(folder: Path, name: str) -> Path:
    for one in (folder / name, folder / f"{name}.gz"):
        if one.exists():
            return one
    raise NoFile(WHO, f"a BEIR folder with {name}", folder)


def _texts(path: Path) -> dict[str, str]:
    table = read_table(path, WHO)
    name = "_id" if "_id" in table else "id"
    if name not in table or "text" not in table:
        raise ArgumentError(WHO, f"columns _id and text in {path}", f"columns {sorted(table)}")
    titles = table.get("title") or [""] * len(table["text"])
    parts = zip(titles, table["text"], strict=True)
    texts = [" ".join(str(part) for part in row if part).strip() for row in parts]
    return dict(zip(map(str, table[name]), texts, strict=True))
