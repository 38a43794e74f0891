"""The options of `hardneg audit`, light enough for ``--help``, and which of them each kind of input reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from hardneg.core.errors import ArgumentError, argument_error, check_among, check_counts, check_range, check_seed
from hardneg.core.options import argument, make_plain, option, part
from hardneg.mining.options import TEMPERATURE, Columns, manifest_of

RULES, LOOK = "Which rules", "How it looks"


@dataclass(frozen=True)
class Settings:
    """How an audit looks: the loss it has in mind, and how much of the data it looks at."""

    temperature: float = option(TEMPERATURE, "Of tilts and of the loss; as in mine.", RULES)
    tau_plus: float = option(0.0, "Share of false negatives that the loss corrects for.", RULES)
    near_duplicate: float = option(0.95, "Cosine of a copy.", LOOK)
    num_anchors: int = option(512, "Anchors in the sample.", LOOK)
    seed: int = option(0, "Of the sample.", LOOK)
    wanted_false_negatives: float | None = option(None, "Suggest rules with at most this share, such as 0.02.", RULES)
    frontier: bool = option(True, "Measure a default set of rules.", LOOK, "--frontier/--no-frontier")
    memory: float = option(1.0, "GiB for similarities with a corpus on disk.", LOOK)

    def __post_init__(self) -> None:
        make_plain(self)
        check_range("audit", "temperature", self.temperature, 0.0, math.inf, open_high=True)
        if self.temperature == 0:
            raise argument_error("audit", "a temperature above 0", "temperature", self.temperature)
        check_range("audit", "tau_plus", self.tau_plus, 0.0, 1.0, open_high=True)
        check_range("audit", "near_duplicate", self.near_duplicate, -1.0, 1.0)
        check_counts("audit", self, "num_anchors")
        check_seed("audit", self.seed)
        check_range("audit", "memory", self.memory, 0.0, math.inf, open_high=True)
        if self.wanted_false_negatives is not None:
            check_range("audit", "wanted_false_negatives", self.wanted_false_negatives, 0.0, 1.0)


KNOWN, MINED = "What is known", "What it was mined from"
PANELS = (KNOWN, MINED, RULES, LOOK)
"""The panels of the help."""


@dataclass(frozen=True)
class AuditOptions:
    """Paths, what they hold, the rules, and how to look."""

    input: str = argument("Embeddings (.npy .npz .safetensors, or a table), a run, or a mined file.")
    expressions: tuple[str, ...] = option((), "In the grammar; repeat it.", RULES, "--expression", "-e")
    settings: Settings = field(default_factory=Settings, metadata=part())
    labels: str | None = option(None, "File of labels: .npy .npz .txt or a table.", KNOWN)
    groups: str | None = option(None, "File of groups; negatives of the same group are false, too.", KNOWN)
    label_column: str | None = option(None, "Column or array of labels.", KNOWN)
    group_column: str | None = option(None, "Column or array of groups.", KNOWN)
    positives: str | None = option(None, "Embeddings of a second view, or 'label': a row of the same label.", KNOWN)
    judgements: str | None = option(None, "Table of query id, document id, score (qrels).", KNOWN)
    held_out_judgements: str | None = option(
        None, "Judgements that mining has not seen: they give a rate of false negatives.", KNOWN
    )
    queries: str | None = option(None, "Table with the ids (and texts) of the queries.", MINED)
    query_embeddings: str | None = option(None, "Of a mined file's queries.", MINED)
    corpus: str | None = option(None, "Table with the ids (and texts) of the documents.", MINED)
    corpus_embeddings: str | None = option(None, "Of the documents.", MINED)
    embedding_column: str | None = option(None, "Column or array that holds embeddings.", MINED)
    columns: Columns = field(
        default_factory=Columns, metadata=part("{}_column", ("query", "query_id", "corpus", "corpus_id"), MINED)
    )
    model: str | None = option(None, "sentence-transformers model for texts without embeddings.", MINED)
    encoder: str | None = option(None, "module:function or file.py:function, from texts to vectors, instead.", MINED)
    cache: str | None = option(None, "Folder of embeddings; default INPUT.embeddings.", MINED)
    cache_key: str | None = option(None, "As in mine: version of the --encoder.", MINED)
    imports: tuple[str, ...] = option((), "Python file with distributions of yours; repeat it.", RULES, "--import")
    similarity: str | None = option(None, "cosine or dot; that of a mined file's manifest, else cosine.", LOOK)
    split: str | None = option(None, "train or test, of a run; else test.", LOOK)

    def __post_init__(self) -> None:
        for name, known in (("similarity", ("cosine", "dot")), ("split", ("train", "test"))):
            if getattr(self, name) is not None:
                check_among("audit", name, getattr(self, name), known)
        if self.model is not None and self.encoder is not None:
            raise ArgumentError("audit", "a model or an encoder", "both")
        from hardneg.auditing.rules import check_rules, given_rules  # torch, which --help does without
        from hardneg.mining.imports import load_imports

        load_imports(self.imports, "audit")
        check_rules(given_rules(self.expressions), positives=True, labels=True, groups=True)

    def reads(self) -> list[Path]:
        """Every file and folder that the options name as input."""
        names = (
            "labels", "groups", "judgements", "held_out_judgements", "queries", "query_embeddings", "corpus",
            "corpus_embeddings",
        )  # fmt: skip
        given = [getattr(self, name) for name in names] + [self.positives if self.positives != "label" else None]
        run = Path(self.input) / "embeddings.npz"
        return [run if run.exists() else Path(self.input), *(Path(path) for path in given if path is not None)]

    @property
    def has_corpus(self) -> bool:
        return self.corpus is not None or self.corpus_embeddings is not None

    @property
    def names_origin(self) -> bool:
        """Whether the options name the data that a file was mined from."""
        return self.has_corpus or self.queries is not None or self.query_embeddings is not None


_always = {"input", "expressions", "settings", "columns", "similarity", "imports"}
_judged = {"judgements", "held_out_judgements"}
_judges = {"labels", "groups", "label_column", "group_column", *_judged}
_of_queries = {"queries", "query_column", "query_id_column", "embedding_column"}
_of_corpus = {"corpus", "corpus_embeddings", "corpus_column", "corpus_id_column"}
_encoders = {"model", "encoder", "cache", "cache_key"}
_reads: dict[str, set[str]] = {
    "a run": {*_judges, "positives", "split"},
    "embeddings": {*_judges, *_of_queries, "positives"},
    "embeddings beside a corpus": {*_of_queries, *_of_corpus, *_judged, "label_column", "group_column"},
    "a mined file": {*_of_queries, *_of_corpus, "query_embeddings", *_judged, *_encoders},
    "a mined file of which no queries or corpus are named": _judged,
    "a mined file and its manifest": {*_judged, *_encoders},
}


def check_read(options: AuditOptions, kind: str) -> None:
    """Raises for the first option that an input of this kind does not read, instead of ignoring it."""
    what = {"run": "a run", "mined": "a mined file"}.get(kind, "embeddings")
    if what == "embeddings" and options.has_corpus:
        what = "embeddings beside a corpus"
    if what == "a mined file" and not options.names_origin:
        beside = manifest_of(options.input).exists()
        what = "a mined file and its manifest" if beside else "a mined file of which no queries or corpus are named"
    columns = {f"{name}_column": value for name, value in vars(options.columns).items()}
    for name, value in {**columns, **vars(options)}.items():
        if value is not None and name not in _always | _reads[what]:
            flag = name.replace("_", "-")
            raise ArgumentError("audit", f"no --{flag} for {what}", f"--{flag} {value}", "remove it: it has no effect")
    for column, file in (("label_column", "labels"), ("group_column", "groups")):
        named = getattr(options, column)
        if what == "a run" and named is not None and getattr(options, file) is None:
            raise ArgumentError("audit", f"--{file} for --{column.replace('_', '-')} {named}", "none")
