"""From files to a miner: tables and embeddings are read, texts encoded, labels numbered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardneg.mining.encode import Encoder, embed, encoder_of_function, encoders_of_model, load_callable
from hardneg.mining.engine import Miner
from hardneg.mining.lexical import Lexical
from hardneg.mining.options import MineOptions
from hardneg.mining.problem import Problem, Side, build_problem, positive_column, side_of_table
from hardneg.mining.ranks import Ranks, device_of_rank
from hardneg.mining.search import Search
from hardneg.mining.tables import column_of_vectors, read_table, read_vectors, suffix_of, vector_suffixes
from hardneg.types import Keys

Progress = Callable[[str, int], Callable[[int], None]]
"""(what is done, how many steps) -> call it with the number of steps done."""


def load_problem(options: MineOptions) -> Problem:
    """Queries, corpus and positives from the files."""
    columns = options.columns
    table = None if suffix_of(Path(options.queries)) in vector_suffixes else read_table(options.queries)
    queries = _side(table, options.queries, options.query_embeddings, options, "queries")
    same = options.corpus == options.queries
    corpus = queries if same else None
    if options.corpus is not None and not same:
        documents = None if suffix_of(Path(options.corpus)) in vector_suffixes else read_table(options.corpus)
        corpus = _side(documents, options.corpus, options.corpus_embeddings, options, "corpus")
    elif options.corpus is None and options.corpus_embeddings is not None:
        corpus = _side(None, options.corpus_embeddings, None, options, "corpus")
    needed = options.judgements is None
    positives = None if table is None else positive_column(table, columns.positive, needed)
    if table is None and needed:
        raise ValueError("mine needs judgements (query id, document id) with embeddings only, got none.")
    judged = [] if options.judgements is None else _judged(options.judgements)
    drop = options.missing_positives == "drop"
    return build_problem(queries, corpus, positives, judged, same=same, drop_missing=drop)


def _side(table: Any, path: str, vectors_path: str | None, options: MineOptions, kind: str) -> Side:
    columns = options.columns
    if table is None:
        vectors, ids = read_vectors(path, options.embedding_column)
        return Side(ids or list(range(len(vectors))), None, vectors)
    text, identity = (columns.query, columns.query_id) if kind == "queries" else (columns.corpus, columns.corpus_id)
    side = side_of_table(table, text, identity, columns.label, kind)
    if vectors_path is not None:
        side.vectors = read_vectors(vectors_path, options.embedding_column)[0]
    elif options.embedding_column is not None and options.embedding_column in table:
        side.vectors = column_of_vectors(table[options.embedding_column], path)
    if side.vectors is not None and len(side.vectors) != len(side):
        raise ValueError(
            f"mine needs one embedding for each row of the {kind}, got {len(side.vectors)} for {len(side)}."
        )
    if side.vectors is None and side.texts is None:
        raise ValueError(f"mine needs texts or embeddings of the {kind}, got columns {sorted(table)}; name one.")
    return side


def _judged(path: str) -> list[tuple[Any, Any]]:
    """(query id, document id) of the rows judged above 0; the usual names, or the first two columns."""
    table = read_table(path)
    names = list(table)
    if len(names) < 2:
        raise ValueError(f"mine needs query ids and document ids in {path}, got columns {names}.")
    query = next((n for n in ("query-id", "query_id", "qid", "query") if n in table), names[0])
    document = next((n for n in ("corpus-id", "corpus_id", "doc_id", "docid", "document_id") if n in table), names[1])
    score = next((n for n in ("score", "relevance", "label") if n in table), None)
    try:
        kept = [True] * len(table[query]) if score is None else [float(value) > 0 for value in table[score]]
    except (TypeError, ValueError) as error:
        raise ValueError(f"mine needs numbers as {score!r} in {path}, got {error}.") from None
    return [(q, d) for q, d, keep in zip(table[query], table[document], kept, strict=True) if keep]


def embeddings(options: MineOptions, problem: Problem, ranks: Ranks, progress: Progress) -> tuple[Tensor, Tensor]:
    """Vectors of the queries and of the corpus, given or encoded."""
    sides = (problem.queries, problem.corpus)
    if options.search == "bm25":  # nothing is compared by vectors; one number stands for each
        return torch.ones(len(sides[0]), 1), torch.ones(len(sides[1]), 1)
    encoders: tuple[Encoder, Encoder] | None = None
    if any(side.vectors is None for side in sides):
        encoders = load_encoders(options)
    cache = Path(options.cache) if options.cache else Path(f"{options.out}.embeddings")
    found = []
    for number, (side, name) in enumerate(zip(sides, ("encoding queries", "encoding corpus"), strict=True)):
        if side.vectors is None:
            assert encoders is not None
            assert side.texts is not None
            side.vectors = embed(side.texts, encoders[number], cache, ranks, progress(name, len(side)))
        found.append(side.vectors)
    if found[0].shape[1] != found[1].shape[1]:
        raise ValueError(
            f"mine needs queries and corpus of the same dimension, got {found[0].shape[1]} and {found[1].shape[1]}."
        )
    return found[0], found[1]


def load_encoders(options: MineOptions) -> tuple[Encoder, Encoder]:
    if options.model is not None:
        return encoders_of_model(options.model, options.batch_size, options.device or device_of_rank())
    if options.encoder is not None:
        encoder = encoder_of_function(options.encoder)
        return encoder, encoder
    raise ValueError("mine needs embeddings, a --model or an --encoder for the texts, got none.")


def make_miner(options: MineOptions, problem: Problem, queries: Tensor, corpus: Tensor) -> Miner:
    if options.similarity == "cosine":
        for name, vectors in (("queries", queries), ("corpus", corpus)):
            _check_directions(name, vectors)
    only_words = options.search == "bm25"
    also: tuple[Lexical, ...] = ()
    if options.bm25 or only_words:
        also = (Lexical(_texts(problem.queries, "BM25"), _texts(problem.corpus, "BM25")),)
    rescore = None if options.rescore is None else _rescorer(options.rescore, problem)
    if only_words and rescore is None:
        rescore = also[0].scores
    search = Search(
        "also" if only_words else options.search,
        options.query_block,
        device=options.device or device_of_rank(),
        candidates=options.candidates,
        cosine=options.similarity == "cosine",
        also=also,
    )
    labels = _numbered(problem)
    return Miner(
        Keys(queries, torch.tensor(problem.own), labels[0]),
        Keys(corpus, torch.arange(len(corpus)), labels[1], source="embedding"),
        problem.positives,
        options.rule(),
        options.temperature,
        options.near_positive,
        search,
        rescore,
    )


def _rescorer(name: str, problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """The user's function of (query text, document text) pairs, as one of positions."""
    function = load_callable(name)
    queries, corpus = _texts(problem.queries, "--rescore"), _texts(problem.corpus, "--rescore")

    def rescore(query: Tensor, rows: Tensor) -> Tensor:
        pairs = [(queries[q], corpus[r]) for q, r in zip(query.tolist(), rows.tolist(), strict=True)]
        return torch.as_tensor(np.asarray(function(pairs), dtype=np.float32)) if pairs else torch.zeros(0)

    return rescore


def _texts(side: Side, who: str) -> list[str]:
    if side.texts is None:
        raise ValueError(f"{who} needs texts, got embeddings only.")
    return side.texts


def _numbered(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """Labels of any kind as numbers; a missing label is a label of its own."""
    sides = (problem.queries.labels, problem.corpus.labels)
    number: dict[Any, int] = {}
    out: list[Tensor | None] = []
    for labels in sides:
        out.append(None if labels is None else torch.tensor([number.setdefault(one, len(number)) for one in labels]))
    return out[0], out[1]


def _check_directions(name: str, vectors: Tensor) -> None:
    for low in range(0, len(vectors), 65536):
        zero = (vectors[low : low + 65536] == 0).all(1)
        if bool(zero.any()):
            raise ValueError(
                f"mine needs vectors with a direction for the cosine, got {int(zero.sum())} zero vectors in {name}, "
                f"first in row {low + int(zero.int().argmax())}; leave those rows out or use --similarity dot."
            )
