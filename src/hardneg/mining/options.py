"""The options of `hardneg mine`, declared once for flags and Python.

This module is imported for ``--help``, so it must not import torch. Checks that need more are in
``checks.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from hardneg.core.errors import check_counts, check_seed
from hardneg.core.options import REQUIRED, argument, make_plain, option, part

inputs = ("queries", "corpus", "judgements", "query_embeddings", "corpus_embeddings")
"""Names of the options that are paths of input files."""

DrawKind = Literal["top", "gumbel", "categorical"]
"""How negatives are chosen from the support of a distribution."""
Fusion = Literal["rrf", "similarity"]
"""Order of the candidates of several retrievers."""
Similarity = Literal["cosine", "dot"]
"""How vectors are compared: scaled to unit length, or as they are."""

TEMPERATURE = 1.0
"""Default divisor of similarities in mining and audits, with which ``Tilt(beta)`` is exp(beta * similarity)."""

INPUT, RULE, SEARCH, OUTPUT, RUN = "Input", "Choice of negatives", "Search", "Output", "Execution"
"""Headings under which ``--help`` groups the options."""


def given_inputs(options: MineOptions) -> dict[str, Path]:
    """Return the paths of the input files that are given, by the name of their option."""
    return {name: Path(path) for name in inputs if (path := getattr(options, name)) is not None}


def manifest_of(out: str | Path) -> Path:
    """Return the path of the manifest that belongs to an output: ``OUT.manifest.json``."""
    return Path(f"{str(out).rstrip('/')}.manifest.json")


@dataclass(frozen=True)
class Columns:
    """Names of columns; None looks for the usual names, and names joined by ``+`` form one text: ``title+text``."""

    query: str | None = option(None, "Column with the text of a query.", INPUT)
    query_id: str | None = option(None, "Column with the id of a query.", INPUT)
    positive: str | None = option(None, "Column with the positives of a query: ids or texts, one or a list.", INPUT)
    corpus: str | None = option(None, "Column with the text of a document; 'title+text' joins two columns.", INPUT)
    corpus_id: str | None = option(None, "Column with the id of a document.", INPUT)
    label: str | None = option(
        None, "Column with labels: class labels in both tables, for OtherLabel(), or labels of pairs.", INPUT
    )


@dataclass(frozen=True)
class MineOptions:
    """All options of `hardneg mine`: the input, the rule, the search and the output.

    The help text of each field describes it; ``hardneg.mining.job.run`` takes an instance.
    """

    queries: str = argument("Queries: a table (.parquet .jsonl .csv .tsv), a data set, or embeddings.")
    out: str = option(REQUIRED, "Output: .parquet, .jsonl, or a folder for Hugging Face datasets.")
    corpus: str | None = option(None, "Documents; default: the positives of all queries.", INPUT)
    judgements: str | None = option(None, "Table of judged pairs (qrels): query id, document id, score.", INPUT)
    positive_label: str | None = option(None, "Label that marks pairs as positive, such as 1.", INPUT)
    judged_negatives: bool = option(
        False,
        "Use documents labelled or graded as not relevant as the first negatives.",
        RULE,
        "--judged-negatives",
    )
    query_embeddings: str | None = option(None, "Embeddings of the queries: .npy .npz .safetensors .parquet.", INPUT)
    corpus_embeddings: str | None = option(None, "Embeddings of the documents, in the same formats.", INPUT)
    embedding_column: str | None = option(None, "Column or array that contains the embeddings.", INPUT)
    columns: Columns = field(default_factory=Columns, metadata=part("{}_column"))
    model: str | None = option(None, "sentence-transformers model that encodes texts.", INPUT)
    encoder: str | None = option(None, "Function from texts to vectors: module:function or file.py:function.", INPUT)
    query_prompt: str | None = option(
        None, "Text to put before each query, or the name of one of the model's prompts.", INPUT
    )
    corpus_prompt: str | None = option(
        None, "Text to put before each document, or the name of one of the model's prompts.", INPUT
    )
    revision: str | None = option(None, "Branch, tag or commit of the model on the hub.", INPUT)
    dtype: str | None = option(None, "Data type of the model: float32, float16 or bfloat16.", INPUT)
    cache_key: str | None = option(
        None, "Version of your own functions; their results are reused only if it is given and unchanged.", RUN
    )
    batch_size: int = option(64, "Number of texts encoded at a time.", INPUT, low=1)
    negatives: str = option(
        "BelowPositive(relative=0.05)",
        "Distribution of the negatives, as an expression such as Tilt(2.0).",
        RULE,
    )
    k: int = option(5, "Number of negatives per query.", RULE, "-k", low=1)
    draw: DrawKind = option("top", "How negatives are drawn.", RULE, among=get_args(DrawKind))
    seed: int = option(0, "Seed of the draws.", RULE)
    temperature: float = option(TEMPERATURE, "Temperature of tilts: exp(beta * similarity / temperature).", RULE)
    similarity: Similarity = option("cosine", "Similarity of vectors.", RULE, among=get_args(Similarity))
    guide: str | None = option(None, "sentence-transformers model that scores pairs for by='guide'.", RULE)
    cross_encoder: str | None = option(None, "CrossEncoder that rescores the candidates.", RULE)
    cross_encoder_use: str = option(
        "rerank",
        "Use of the cross-encoder's scores: rerank the candidates, or veto some of them.",
        RULE,
        among=("rerank", "veto"),
    )
    imports: tuple[str, ...] = option(
        (), "Python file that defines your own distributions; can be repeated.", RULE, "--import"
    )
    near_positive: float | None = option(
        None, "Skip candidates whose cosine with a positive is at least this (near-duplicates).", RULE
    )
    near_negative: float | None = option(
        None, "Skip candidates whose cosine with a negative chosen before is at least this.", RULE
    )
    search: str = option("exact", "Search method.", SEARCH, among=("exact", "flat", "ivf", "hnsw", "bm25"))
    bm25: bool = option(False, "Add candidates that share words with the query (BM25).", SEARCH, "--bm25")
    runs: tuple[str, ...] = option((), "TREC run of another retriever, as name=file; can be repeated.", SEARCH, "--run")
    fusion: Fusion = option("rrf", "Order of the candidates of several retrievers.", SEARCH, among=get_args(Fusion))
    quotas: tuple[str, ...] = option(
        (), "Number of negatives from one retriever, such as bm25=2; can be repeated.", SEARCH, "--quota"
    )
    rescore: str | None = option(
        None, "Function that scores (query, document) pairs: module:function or file.py:function.", SEARCH
    )
    candidates: int = option(
        100, "Candidates per retriever, if there are several or candidates are rescored.", SEARCH, low=1
    )
    format: str = option(
        "triplet", "Row format.", OUTPUT, among=("triplet", "n-tuple", "labeled-pair", "labeled-list", "ids")
    )
    scores: bool = option(False, "Also write the scores.", OUTPUT, "--scores")
    ids: bool = option(False, "Also write the ids, in every format.", OUTPUT, "--ids")
    missing_positives: str = option(
        "error", "What to do with positives that are missing from the corpus.", INPUT, among=("error", "drop")
    )
    cache: str | None = option(None, "Folder where embeddings are cached; default: OUT.embeddings.", INPUT)
    query_block: int = option(0, "Number of queries processed at a time (0 = automatic).", SEARCH, low=0)
    device: str | None = option(None, "Device of the search: cpu, cuda, ...", SEARCH)
    memory: float = option(0.0, "Memory budget per process in GiB (0 = automatic: 2, more on a GPU).", RUN, low=0.0)
    overwrite: bool = option(False, "Replace the output even if mine did not create it.", OUTPUT, "--overwrite")
    engine: str = option("local", "Where the job runs: local processes or a Ray cluster.", RUN, among=("local", "ray"))
    jobs: int = option(0, "Number of processes (0 = one per core).", RUN, low=0)
    ray_address: str | None = option(None, "Address of the Ray cluster; default: start one.", RUN)
    shards: int = option(0, "Parts into which the corpus is split (0 = about 15 seconds of work each).", RUN, low=0)
    part: str | None = option(None, "Compute only part i of n, as i/n with i from 0.", RUN)
    resume: bool = option(
        True,
        "Continue an unfinished run of the same job; --no-resume raises if there is one.",
        RUN,
        "--resume/--no-resume",
    )
    merge: bool = option(
        False, "Run after all --part jobs: compute anything missing and write the output.", RUN, "--merge"
    )

    def __post_init__(self) -> None:
        make_plain(self)
        check_seed("mine", self.seed)
        check_counts("mine", self, "batch_size", "k", "candidates")
        check_counts("mine", self, "query_block", "jobs", "shards", least=0)
