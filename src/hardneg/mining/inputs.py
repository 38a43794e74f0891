"""From files to a ``Miner``: read tables and embeddings, encode texts, number labels.

``load_problem`` reads queries, corpus and positives, ``embeddings`` adds their vectors from files,
from the cache or from an encoder, and ``make_miner`` puts both together. Called in this order by
``job.py``, and with a sample by ``estimate.py``; audits of mined files use parts of this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, FileError, spelled
from hardneg.core.types import Keys
from hardneg.io.functions import load_function
from hardneg.io.outputs import same_file
from hardneg.io.tables import Table, aligned, column_names, column_of_vectors, holds_vectors, read_table, read_vectors
from hardneg.mining.checks import check_directions, quotas_of, rule_of
from hardneg.mining.corpus_scores import Rescore
from hardneg.mining.encode import (
    KeyedEncoder,
    cached,
    embed,
    encoder_of_function,
    encoders_of_model,
    key_of_run,
    warn_not_reused,
)
from hardneg.mining.engines import Engine, device_of_rank
from hardneg.mining.fusion import Lexical, RankedRun, read_run, split_name
from hardneg.mining.judgements import numbered_both, read_grades
from hardneg.mining.miner import Miner
from hardneg.mining.options import MineOptions
from hardneg.mining.pair_scores import PairScorer, pair_scorer
from hardneg.mining.problem import Problem, Side, build_problem, texts_of
from hardneg.mining.search import Retriever, Search, SearchKind
from hardneg.mining.table_columns import documents_of_table, side_of_table
from hardneg.mining.table_values import checked_ids

StageProgress = Callable[[str, int], Callable[[int], None]]
"""(name of a stage, number of steps) -> function to call with the number of steps done since its last call."""


def quiet(what: str, steps: int) -> Callable[[int], None]:
    """Show no progress; the default ``StageProgress``."""
    return lambda done: None


def from_beir(options: MineOptions) -> MineOptions:
    """Return the options with the files of a BEIR folder, if ``queries`` is such a folder.

    A BEIR folder contains ``corpus.jsonl`` and ``queries.jsonl``, plain or compressed, and
    ``qrels/{train,dev,test}.tsv``. Explicit options are kept; the judgements are those of the
    first split that exists, in this order. Titles and texts of documents are joined.

    Args:
        options: Options whose ``queries`` may be a folder.

    Raises:
        FileError: If the folder has no judgements and none are given.
    """
    folder = Path(options.queries)
    corpus, queries = (_beir_file(folder, name) for name in ("corpus", "queries"))
    if not folder.is_dir() or corpus is None or queries is None:
        return options
    splits = (folder / "qrels" / f"{split}.tsv" for split in ("train", "dev", "test"))  # the training split first
    given = options.judgements or next((str(path) for path in splits if path.is_file()), None)
    if given is None:
        raise FileError("mine", "qrels/train.tsv in a BEIR folder", folder, fix="name --judgements")
    columns = options.columns
    documents = options.corpus or str(corpus)
    # column_names reads only the first line, and only some documents may have a title.
    if columns.corpus is None and ("title" in column_names(documents) or "title" in read_table(documents)):
        columns = replace(columns, corpus="title+text")
    return replace(options, queries=str(queries), corpus=documents, judgements=given, columns=columns)


def _beir_file(folder: Path, name: str) -> Path | None:
    return next((path for suffix in (".jsonl", ".jsonl.gz") if (path := folder / f"{name}{suffix}").is_file()), None)


def load_problem(options: MineOptions) -> Problem:
    """Read queries, corpus and positives from the files.

    If queries and corpus are the same rows, no row is its own negative: if both come from one file,
    or if two files of embeddings carry ids, by id.

    Args:
        options: Paths, columns and rules for labels and missing positives.

    Returns:
        Queries, documents and positives by row, with counts of everything that was skipped.

    Raises:
        ArgumentError: If columns, ids or positives are missing or contradict each other.
    """
    _check_all_are_read(options)
    table = None if holds_vectors(options.queries) else read_table(options.queries)
    queries = _side(table, options.queries, options.query_embeddings, options, "queries")
    same = _are_the_same(options)
    corpus = _corpus(options, queries, same)
    needed = options.judgements is None
    given = None if table is None else documents_of_table(table, options.columns, needed, options.positive_label)
    if table is None and needed:
        fix = f"give {spelled('mine', 'judgements')}, a table of both ids"
        raise ArgumentError("mine", "judgements (query id, document id) with embeddings only", "none", fix)
    grades = [] if options.judgements is None else read_grades(options.judgements)
    judged = [(query, document) for grade, query, document in grades if grade > 0]
    irrelevant = [(query, document) for grade, query, document in grades if grade <= 0]
    drop = options.missing_positives == "drop"
    if table is None and corpus is not None and corpus.texts is None:
        same = same or (queries.own_ids and corpus.own_ids)
    problem = build_problem(
        queries,
        corpus,
        None if given is None else given.positives,
        judged,
        irrelevant=None if given is None else given.irrelevant,
        judged_irrelevant=irrelevant if options.judged_negatives else (),
        same=same,
        drop_missing=drop,
    )
    if given is not None:
        problem.counts["pairs_without_label"] = given.unlabelled
    if options.judged_negatives and not problem.judged_negatives:
        fix = f"give {spelled('mine', 'positive_label')}, or {spelled('mine', 'judgements')} with grades of 0"
        what = f"documents judged irrelevant to a query for {spelled('mine', 'judged_negatives')}"
        raise ArgumentError("mine", what, "none", fix)
    return problem


def _corpus(options: MineOptions, queries: Side, same: bool) -> Side | None:
    """Return the documents; None if the positives are to be the corpus."""
    if same:
        given, own = options.corpus_embeddings, (options.query_embeddings, options.queries)
        if options.corpus is None or given is None or any(_same_file(given, one) for one in own):
            return queries
        vectors, ids = read_vectors(given, options.embedding_column)  # the same rows, encoded as documents
        return replace(queries, vectors=aligned(vectors, ids, queries.ids, "corpus", given))
    if options.corpus is not None:
        documents = None if holds_vectors(options.corpus) else read_table(options.corpus)
        return _side(documents, options.corpus, options.corpus_embeddings, options, "corpus")
    if options.corpus_embeddings is not None:
        return _side(None, options.corpus_embeddings, None, options, "corpus")
    return None


def _check_all_are_read(options: MineOptions) -> None:
    """Raise if embeddings are given twice for one side, so that one file would be ignored."""
    for name, path, vectors_path in (
        ("queries", options.queries, options.query_embeddings),
        ("corpus", options.corpus, options.corpus_embeddings),
    ):
        if path is not None and vectors_path is not None and holds_vectors(path) and not _same_file(path, vectors_path):
            raise ArgumentError("mine", f"the embeddings of the {name} only once", f"{path} and {vectors_path}")


def _are_the_same(options: MineOptions) -> bool:
    """Return whether queries and corpus are the same column of the same file, however its path is written."""
    if options.corpus is None:
        vectors_path = options.corpus_embeddings
        return any(_same_file(vectors_path, one) for one in (options.queries, options.query_embeddings))
    other = options.columns.corpus is not None and options.columns.corpus != options.columns.query
    return _same_file(options.corpus, options.queries) and not other


def _same_file(first: str | None, second: str | None) -> bool:
    return first is not None and second is not None and same_file(Path(first), Path(second))


def _side(table: Table | None, path: str, vectors_path: str | None, options: MineOptions, kind: str) -> Side:
    """Return queries or documents from a table with optional vectors or, without a table, from a file of vectors."""
    columns = options.columns
    if table is None:
        vectors, ids = read_vectors(path, options.embedding_column)
        if ids is None:
            return Side(range(len(vectors)), None, vectors)
        return Side(checked_ids(ids, "ids", kind, "mine"), None, vectors, own_ids=True)
    text, identity = (columns.query, columns.query_id) if kind == "queries" else (columns.corpus, columns.corpus_id)
    label = columns.label if options.positive_label is None else None  # otherwise they are labels of pairs
    side = side_of_table(table, text, identity, label, kind)
    if vectors_path is not None:
        vectors, ids = read_vectors(vectors_path, options.embedding_column)
        side.vectors = aligned(vectors, ids, side.ids, kind, vectors_path, skipped=_empty(side))
    elif options.embedding_column is not None and options.embedding_column in table:
        values = _with_stand_ins(table[options.embedding_column], _empty(side))
        side.vectors = column_of_vectors(values, path)
    if side.vectors is None and side.texts is None:
        named = spelled("mine", "query_column" if kind == "queries" else "corpus_column")
        fix = f"name the column of texts with {named}, or that of vectors with {spelled('mine', 'embedding_column')}"
        raise ArgumentError("mine", f"texts or embeddings of the {kind}", f"columns {sorted(table)}", fix)
    return side


@dataclass(frozen=True, eq=False)
class Embedded:
    """Vectors of queries and corpus.

    Attributes:
        vectors: Vectors of the queries [q, d] and of the documents [n, d].
        keys: Cache keys of the encoders, by the name of what they encoded.
        guide: Vectors of the guide model for queries [q, e] and documents [n, e], if there is one.
    """

    vectors: tuple[Tensor, Tensor]
    keys: dict[str, str] = field(default_factory=dict)
    guide: tuple[Tensor, Tensor] | None = None


def _empty(side: Side) -> list[bool]:
    """Mark rows with empty texts, which are left out later and need no vector."""
    return [not text.strip() for text in side.texts or ()]


def _with_stand_ins(values: list[Any], empty: list[bool]) -> list[Any]:
    """Fill in any vector for empty texts that have none, so that the column is complete."""
    some = next((value for value in values if value), None)
    lacks = [skip and not value for value, skip in zip(values, empty, strict=False)]
    return [some if lack else value for value, lack in zip(values, lacks, strict=True)] if any(lacks) else values


def embeddings(
    options: MineOptions,
    problem: Problem,
    engine: Engine,
    progress: StageProgress,
    known: Mapping[str, str] | None = None,
) -> Embedded:
    """Return the vectors of queries and corpus, given or encoded, and those of the guide.

    Vectors of an encoder without a key are encoded again in each run, and kept only for the
    processes of that run.

    Args:
        options: Model or encoder, prompts and cache.
        problem: Queries and documents; their ``vectors`` are set.
        engine: Where texts are encoded.
        progress: Called for each side that is encoded.
        known: Cache keys of the encoders from an earlier call; vectors are then read from the cache
            and no encoder is loaded.
    """
    sides = (problem.queries, problem.corpus)
    if options.search == "bm25":  # vectors are not compared; a single number replaces each
        return Embedded((torch.ones(len(sides[0]), 1), torch.ones(len(sides[1]), 1)))
    cache = Path(options.cache) if options.cache else Path(f"{options.out}.embeddings")
    keys = dict(known or {})
    key_of_this_run = once(partial(key_of_run, options.out, cache, engine))

    def encoded(number: int, name: str, load: Callable[[], tuple[KeyedEncoder, KeyedEncoder]], who: str) -> Tensor:
        texts = texts_of(sides[number], who)
        if name in keys and (vectors := cached(texts, keys[name], cache)) is not None:
            return vectors
        encoder = load()[number]
        if encoder.key is None and not known:
            warn_not_reused(f"The output of {options.encoder or options.model} for the {name}")
        keys[name] = keys.get(name) or encoder.key or key_of_this_run()
        return embed(texts, replace(encoder, key=keys[name]), cache, engine, progress(f"encode {name}", len(texts)))

    found, load = [], once(partial(load_encoders, options))
    for number, (side, name) in enumerate(zip(sides, ("queries", "corpus"), strict=True)):
        if side.vectors is None:
            side.vectors = encoded(number, name, load, "mine")
        found.append(side.vectors)
    guide = None
    if options.guide is not None:
        load = once(partial(load_guide, options))
        names = ("queries with the guide", "corpus with the guide")
        guide = encoded(0, names[0], load, "--guide"), encoded(1, names[1], load, "--guide")
    return Embedded((found[0], found[1]), keys, guide)


def load_encoders(options: MineOptions) -> tuple[KeyedEncoder, KeyedEncoder]:
    """Load the encoders of queries and of documents that the options name.

    Raises:
        ArgumentError: If there are neither embeddings nor a model nor an encoder.
    """
    device = options.device or device_of_rank()
    if options.model is not None:
        return encoders_of_model(
            options.model,
            options.batch_size,
            device,
            revision=options.revision,
            dtype=options.dtype,
            prompts=(options.query_prompt, options.corpus_prompt),
            cache_key=options.cache_key,
        )
    if options.encoder is not None:
        encoder = encoder_of_function(options.encoder, options.cache_key)
        return encoder, encoder
    fix = "if the tables have a column of embeddings, name it with --embedding-column"
    raise ArgumentError("mine", "embeddings, a --model or an --encoder for the texts", "none", fix)


def load_guide(options: MineOptions) -> tuple[KeyedEncoder, KeyedEncoder]:
    """Load the guide model's encoders of queries and of documents."""
    assert options.guide is not None
    device = options.device or device_of_rank()
    return encoders_of_model(options.guide, options.batch_size, device, cache_key=options.cache_key)


def make_miner(options: MineOptions, problem: Problem, embedded: Embedded) -> Miner:
    """Build the miner: vectors, labels, retrievers, rescorer and guide.

    Args:
        options: Rule and search.
        problem: Queries, documents and positives.
        embedded: Vectors of ``embeddings``.
    """
    (queries, corpus), device = embedded.vectors, options.device or device_of_rank()
    if options.similarity == "cosine":
        check_directions("queries", queries)
    rescore: Rescore | None = None
    guide: tuple[Tensor, Tensor] | Rescore | None = embedded.guide
    also: list[Retriever] = []
    only_words = options.search == "bm25"
    if options.bm25 or only_words:
        words = Lexical(*_both_texts(problem, "BM25"))
        also, rescore = [words], words.scores if only_words else None
    also += [
        RankedRun(name, read_run(path), problem.queries, problem.corpus) for name, path in map(split_name, options.runs)
    ]
    if options.rescore is not None:
        rescore = PairScorer(load_function(options.rescore, "mine"), *_both_texts(problem, "--rescore"))
    if options.cross_encoder is not None:
        score = pair_scorer(options.cross_encoder, options.batch_size, device)
        scorer = PairScorer(score, *_both_texts(problem, "--cross-encoder"), teaches=True)
        guide, rescore = (scorer, rescore) if options.cross_encoder_use == "veto" else (guide, scorer)
    search = Search(
        "also" if only_words else cast(SearchKind, options.search),
        options.query_block,
        device=device,
        candidates=options.candidates,
        similarity=options.similarity,
        also=tuple(also),
        shards=options.shards,
        fusion=options.fusion,
        quotas=quotas_of(options),
        memory=math.ceil(options.memory * 2**30),
    )
    own, others = problem.queries.labels, problem.corpus.labels
    labels: tuple[Tensor | None, Tensor | None] = (None, None)
    if own is not None and others is not None:  # labels of any kind as numbers; a missing label equals no other
        labels = numbered_both("labels", own, others, (len(own), len(others)))
    return Miner(
        Keys(queries, torch.tensor(problem.own), labels[0]),
        Keys(corpus, torch.arange(len(corpus)), labels[1], source="embedding"),
        problem.positives,
        rule_of(options),
        options.temperature,
        options.near_positive,
        search,
        rescore,
        guide,
    )


def _both_texts(problem: Problem, who: str) -> tuple[list[str], list[str]]:
    return texts_of(problem.queries, who), texts_of(problem.corpus, who)
