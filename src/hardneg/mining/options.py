"""Everything that `hardneg mine` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hardneg.core.errors import ArgumentError
from hardneg.io.outputs import check_output
from hardneg.mining.checks import check_rule
from hardneg.mining.output import Layout, check_format
from hardneg.mining.problem import Columns
from hardneg.mining.search import Search
from hardneg.mining.select import Rule
from hardneg.negatives import parse

inputs = ("queries", "corpus", "judgements", "query_embeddings", "corpus_embeddings")
"""The options that name what is read."""


def manifest_of(out: str | Path) -> Path:
    return Path(f"{str(out).rstrip('/')}.manifest.json")


@dataclass(frozen=True)
class MineOptions:
    """Everything that `hardneg mine` is told; paths, the rule, and how to search and write."""

    queries: str
    out: str
    corpus: str | None = None
    judgements: str | None = None
    query_embeddings: str | None = None
    corpus_embeddings: str | None = None
    embedding_column: str | None = None
    columns: Columns = field(default_factory=Columns)
    model: str | None = None
    encoder: str | None = None
    batch_size: int = 64
    negatives: str = "BelowPositive(relative=0.05)"
    k: int = 5
    draw: str = "top"
    seed: int = 0
    temperature: float = 1.0
    similarity: str = "cosine"
    near_positive: float | None = None
    near_negative: float | None = None
    search: str = "exact"
    bm25: bool = False
    rescore: str | None = None
    candidates: int = 100
    format: str = "triplet"
    scores: bool = False
    missing_positives: str = "error"
    cache: str | None = None
    query_block: int = 0
    device: str | None = None
    overwrite: bool = False

    def rule(self) -> Rule:
        return Rule(parse(self.negatives), self.k, self.draw, self.seed, self.near_negative)


def check_options(options: MineOptions) -> None:
    """Everything that can be wrong before any work is done."""
    check_format(Path(options.out))
    reads = [Path(getattr(options, name)) for name in inputs if getattr(options, name) is not None]
    for path in (Path(options.out), manifest_of(options.out), Path(f"{options.out}.work")):
        check_output("mine", path, reads, overwrite=True)
    check_rule(options.rule(), options.temperature, options.near_positive)
    Layout(options.format, scores=options.scores)
    if options.search != "bm25":
        Search(options.search, query_block=options.query_block, candidates=options.candidates)
    elif options.near_positive is not None or options.near_negative is not None:
        raise ArgumentError("mine", "embeddings for near_positive and near_negative", "search='bm25'")
    for name, known in (("similarity", ("cosine", "dot")), ("missing_positives", ("error", "drop"))):
        if getattr(options, name) not in known:
            raise ArgumentError("mine", f"{name} in {known}", f"{name}={getattr(options, name)!r}")
    if options.model and options.encoder:
        raise ArgumentError("mine", "a model or an encoder", "both")
