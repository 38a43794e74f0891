"""The options of `hardneg mine`, light enough for ``--help``: the same for flags and Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hardneg.core.errors import check_counts, check_seed
from hardneg.core.options import REQUIRED, argument, make_plain, option, part

inputs = ("queries", "corpus", "judgements", "query_embeddings", "corpus_embeddings")
"""The options that name what is read."""

TEMPERATURE = 1.0
"""What similarities are divided by for tilts, in mining and in audits: ``Tilt(beta)`` is exp(beta * similarity)."""

INPUT, RULE, SEARCH, OUTPUT = "What is mined", "Which negatives", "How candidates are found", "What is written"
RUN = "Where it runs"
"""The panels of the help."""


def given_inputs(options: MineOptions) -> dict[str, Path]:
    return {name: Path(path) for name in inputs if (path := getattr(options, name)) is not None}


def manifest_of(out: str | Path) -> Path:
    return Path(f"{str(out).rstrip('/')}.manifest.json")


@dataclass(frozen=True)
class Columns:
    """Names of columns; None looks for the usual ones. Several joined by ``+`` are one text: ``title+text``."""

    query: str | None = option(None, "Text of a query.", INPUT)
    query_id: str | None = option(None, "Id of a query.", INPUT)
    positive: str | None = option(None, "Positives of a query: ids or texts, one or a list.", INPUT)
    corpus: str | None = option(None, "Text of a document; 'title+text' joins.", INPUT)
    corpus_id: str | None = option(None, "Id of a document.", INPUT)
    label: str | None = option(None, "Labels in both tables, for OtherLabel(); or of pairs.", INPUT)


@dataclass(frozen=True)
class MineOptions:
    """What is mined, the rule, and how to search and write."""

    queries: str = argument("Queries: .parquet .jsonl .csv .tsv, a data set, or embeddings.")
    out: str = option(REQUIRED, ".parquet, .jsonl, or a folder for datasets.", None, "--out", "-o")
    corpus: str | None = option(None, "Documents; none: the positives.", INPUT)
    judgements: str | None = option(None, "Table of query id, document id, score (qrels).", INPUT)
    positive_label: str | None = option(None, "Label of the pairs that are positives, such as 1.", INPUT)
    judged_negatives: bool = option(
        False, "Documents labelled or graded otherwise come first among the negatives.", RULE, "--judged-negatives"
    )
    query_embeddings: str | None = option(None, ".npy .npz .safetensors .parquet", INPUT)
    corpus_embeddings: str | None = option(None, "The same, of the documents.", INPUT)
    embedding_column: str | None = option(None, "Column or array that holds embeddings.", INPUT)
    columns: Columns = field(default_factory=Columns, metadata=part("{}_column"))
    model: str | None = option(None, "sentence-transformers model.", INPUT)
    encoder: str | None = option(None, "module:function or file.py:function, from texts to vectors.", INPUT)
    query_prompt: str | None = option(None, "Text before each query, or a name among the prompts of --model.", INPUT)
    corpus_prompt: str | None = option(None, "The same of each document.", INPUT)
    revision: str | None = option(None, "Of the --model: a branch, tag or commit of the hub.", INPUT)
    dtype: str | None = option(None, "Of the --model: float32, float16 or bfloat16.", INPUT)
    cache_key: str | None = option(None, "Version of your functions; needed to reuse their results.", RUN)
    batch_size: int = option(64, "Texts encoded at a time.", INPUT, low=1)
    negatives: str = option("BelowPositive(relative=0.05)", "Expression of the grammar.", RULE, "--negatives", "-n")
    k: int = option(5, "Negatives of a query.", RULE, "-k", low=1)
    draw: str = option("top", "top, gumbel or categorical.", RULE)
    seed: int = option(0, "Of the draws.", RULE)
    temperature: float = option(TEMPERATURE, "Of tilts: exp(beta * similarity / temperature).", RULE)
    similarity: str = option("cosine", "cosine or dot (hn.mine: dot by default).", RULE)
    guide: str | None = option(None, "sentence-transformers model that by='guide' reads.", RULE)
    cross_encoder: str | None = option(None, "CrossEncoder, a second opinion on candidates.", RULE)
    cross_encoder_use: str = option("rerank", "Its scores rerank the candidates, or veto some.", RULE)
    imports: tuple[str, ...] = option((), "Python file with distributions of yours; repeat it.", RULE, "--import")
    near_positive: float | None = option(None, "Cosine from which a candidate is a copy of a positive.", RULE)
    near_negative: float | None = option(None, "Cosine from which it is a copy of a negative taken before it.", RULE)
    search: str = option("exact", "exact, flat, ivf, hnsw or bm25.", SEARCH)
    bm25: bool = option(False, "Also take candidates that share words.", SEARCH, "--bm25")
    runs: tuple[str, ...] = option((), "TREC run of another retriever, name=file; repeat it.", SEARCH, "--run")
    fusion: str = option("rrf", "Order of several retrievers: rrf or similarity.", SEARCH)
    quotas: tuple[str, ...] = option((), "Negatives of one retriever, bm25=2; repeat it.", SEARCH, "--quota")
    rescore: str | None = option(None, "module:function or file.py:function, from (query, document) pairs.", SEARCH)
    candidates: int = option(100, "Of each retriever, with several or a rescorer.", SEARCH, low=1)
    format: str = option("triplet", "triplet, n-tuple, labeled-pair, labeled-list or ids.", OUTPUT)
    scores: bool = option(False, "Also write the scores.", OUTPUT, "--scores")
    ids: bool = option(False, "Also write ids, in every format.", OUTPUT, "--ids")
    missing_positives: str = option("error", "Positives not in the corpus: error or drop.", INPUT)
    cache: str | None = option(None, "Folder of embeddings; default OUT.embeddings.", INPUT)
    query_block: int = option(0, "Queries at a time; 0: what fits.", SEARCH, low=0)
    device: str | None = option(None, "cpu, cuda ...", SEARCH)
    memory: float = option(0.0, "GiB of a process for scores and lists; 0: 2, on a GPU more.", RUN, low=0.0)
    overwrite: bool = option(False, "Also replace what mine has not made.", OUTPUT, "--overwrite")
    engine: str = option("local", "Processes of this machine, or a Ray cluster.", RUN, among=("local", "ray"))
    workers: int = option(0, "Processes; 0: one for each core.", RUN, low=0)
    ray_address: str | None = option(None, "Of a cluster; none: one is started.", RUN)
    shards: int = option(0, "Pieces of the corpus; 0: of about a quarter of a minute each.", RUN, low=0)
    part: str | None = option(None, "i/n: only this part of the work, i from 0.", RUN)
    merge: bool = option(False, "After the parts: what is left, and the output.", RUN, "--merge")

    def __post_init__(self) -> None:
        make_plain(self)
        check_seed("mine", self.seed)
        check_counts("mine", self, "batch_size", "k", "candidates")
        check_counts("mine", self, "query_block", "workers", "shards", least=0)
