"""Options of `hardneg audit`, and which of them each kind of input reads.

``AuditOptions`` is the whole command; ``Settings`` is the part that ``hn.audit`` has too. This module does not import
torch, so that ``--help`` is quick. ``check_unused`` runs once the kind of the input is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from hardneg.core.errors import ArgumentError, argument_error, check_among, check_counts, check_range, check_seed
from hardneg.core.options import argument, make_plain, option, part
from hardneg.mining.options import TEMPERATURE, Columns, Similarity, manifest_of

KNOWN, MINED, RULES, LOOK = "Labels and judgements", "Source of a mined file", "Rules", "Sample and similarity"
PANELS = (KNOWN, MINED, RULES, LOOK)
"""The panels of the help."""

MEASURED = ("tau_plus", "near_duplicate", "num_anchors", "seed", "wanted_false_negatives", "frontier", "memory")
"""The fields of ``Settings`` that are flags; the temperature is an option of the command, since runs have their own."""

# The options that each kind of input reads, for check_unused.
_always = {
    "input",
    "negatives",
    "temperature",
    "settings",
    "columns",
    "similarity",
    "imports",
    "batches",
    "batch_size",
    "judged",
}
_judged = {"judgements", "held_out_judgements"}
_judges = {"labels", "groups", "label_column", "group_column", *_judged}
_of_queries = {"queries", "query_column", "query_id_column", "embedding_column"}
_of_corpus = {"corpus", "corpus_embeddings", "corpus_column", "corpus_id_column"}
_encoders = {"model", "encoder", "cache", "cache_key"}
_reads: dict[str, set[str]] = {
    "a run": {*_judges, "positives", "split"},
    "embeddings": {*_judges, *_of_queries, "positives"},
    "embeddings with a corpus": {*_of_queries, *_of_corpus, *_judged, "label_column", "group_column"},
    "a mined file": {*_of_queries, *_of_corpus, "query_embeddings", *_judged, *_encoders},
    "a mined file without --queries or --corpus": _judged,
    "a mined file with its manifest": {*_judged, *_encoders},
}


@dataclass(frozen=True)
class Settings:
    """How an audit measures: the loss it assumes, and how much of the data it samples.

    Attributes:
        temperature: Temperature of the loss, above 0.
        tau_plus: Share of false negatives that the loss corrects for, in [0, 1).
        near_duplicate: Cosine similarity above which two items count as near-duplicates.
        num_anchors: Number of anchors to measure.
        seed: Seed of the sample.
        wanted_false_negatives: Highest false-negative rate of a suggested rule; None suggests none.
        frontier: Whether to measure a default set of rules.
        memory: GiB for similarities with a corpus on disk.

    Raises:
        ArgumentError: If a value is out of its range.
    """

    temperature: float = TEMPERATURE
    tau_plus: float = option(0.0, "Share of false negatives that the loss corrects for.", RULES)
    near_duplicate: float = option(0.95, "Cosine similarity above which two items count as near-duplicates.", LOOK)
    num_anchors: int = option(512, "Number of anchors to sample.", LOOK)
    seed: int = option(0, "Seed of the sample.", LOOK)
    wanted_false_negatives: float | None = option(
        None, "Suggest the hardest rules with at most this false-negative rate, such as 0.02.", RULES
    )
    frontier: bool = option(True, "Measure a default set of rules.", LOOK, "--frontier/--no-frontier")
    memory: float = option(1.0, "Memory in GiB for similarities with a corpus on disk.", LOOK)

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


@dataclass(frozen=True)
class AuditOptions:
    """All options of `hardneg audit`: paths, columns, rules and settings.

    Raises:
        ArgumentError: If values contradict each other, or a rule cannot be parsed.
    """

    input: str = argument("Embeddings (.npy .npz .safetensors, or a table), a run, or a mined file.")
    negatives: tuple[str, ...] = option((), "Rule to measure, such as 'Tilt(2.0)'; can be repeated.", RULES)
    settings: Settings = field(default_factory=Settings, metadata=part(only=MEASURED))
    temperature: float | None = option(
        None, "Temperature of tilts and of the loss; default: the last one of a run, else 1, as in mine.", RULES
    )
    batches: tuple[str, ...] = option(
        (), "Planner of batches to measure, such as 'proximity()' or 'knn()'; can be repeated.", RULES
    )
    batch_size: int = option(256, "Items per batch, for --batches.", RULES, low=2)
    labels: str | None = option(None, "File of labels: .npy .npz .txt or a table.", KNOWN)
    groups: str | None = option(None, "File of groups; negatives in the anchor's group also count as false.", KNOWN)
    label_column: str | None = option(None, "Column or array of labels.", KNOWN)
    group_column: str | None = option(None, "Column or array of groups.", KNOWN)
    positives: str | None = option(
        None, "Embeddings of a second view, or 'label' to draw a row with the same label.", KNOWN
    )
    judgements: str | None = option(None, "Table of query id, document id, score (qrels).", KNOWN)
    held_out_judgements: str | None = option(
        None, "Judgements not used in mining; they give the false-negative rate.", KNOWN
    )
    judged: str | None = option(
        None, "Folder of hardneg judge on the same data: adds its rules, with their bounds.", KNOWN
    )
    queries: str | None = option(None, "Table with the ids (and texts) of the queries.", MINED)
    query_embeddings: str | None = option(None, "Embeddings of the queries of a mined file.", MINED)
    corpus: str | None = option(None, "Table with the ids (and texts) of the documents.", MINED)
    corpus_embeddings: str | None = option(None, "Embeddings of the documents.", MINED)
    embedding_column: str | None = option(None, "Column or array that holds embeddings.", MINED)
    columns: Columns = field(
        default_factory=Columns, metadata=part("{}_column", ("query", "query_id", "corpus", "corpus_id"), MINED)
    )
    model: str | None = option(None, "Sentence-transformers model for texts without embeddings.", MINED)
    encoder: str | None = option(
        None, "Function from texts to vectors, as module:function or file.py:function, instead of --model.", MINED
    )
    cache: str | None = option(None, "Folder of cached embeddings; default INPUT.embeddings.", MINED)
    cache_key: str | None = option(None, "Version of the --encoder, as in mine.", MINED)
    imports: tuple[str, ...] = option(
        (), "Python file that defines your own distributions; can be repeated.", RULES, "--import"
    )
    similarity: str | None = option(
        None, "Similarity of vectors; default: as in the manifest, else cosine.", LOOK, among=get_args(Similarity)
    )
    split: str | None = option(None, "Split of a run to audit; default: test.", LOOK, among=("train", "test"))

    def __post_init__(self) -> None:
        for name, known in (("similarity", ("cosine", "dot")), ("split", ("train", "test"))):
            if getattr(self, name) is not None:
                check_among("audit", name, getattr(self, name), known)
        if self.model is not None and self.encoder is not None:
            raise ArgumentError("audit", "either a model or an encoder", "both")
        from hardneg.auditing.rules import check_rules, given_rules  # imports torch, which --help must not load
        from hardneg.batching.spec import parse_batches
        from hardneg.io.functions import load_imports

        load_imports(self.imports, "audit")
        check_counts("audit", self, "batch_size", least=2)
        for text in self.batches:
            parse_batches(text)
        check_rules(given_rules(self.negatives), positives=True, labels=True, groups=True)

    def reads(self) -> list[Path]:
        """Return every file and folder that the options name as input."""
        names = (
            "labels", "groups", "judgements", "held_out_judgements", "queries", "query_embeddings", "corpus",
            "corpus_embeddings",
        )  # fmt: skip
        given = [getattr(self, name) for name in names] + [self.positives if self.positives != "label" else None]
        run = Path(self.input) / "embeddings.npz"
        folder = Path(self.judged or "")
        judged = [] if self.judged is None else [folder / "judge.json" if folder.is_dir() else folder]
        paths = [*judged, *(Path(path) for path in given if path is not None)]
        return [run if run.exists() else Path(self.input), *paths]

    @property
    def has_corpus(self) -> bool:
        """Whether the options name a corpus."""
        return self.corpus is not None or self.corpus_embeddings is not None

    @property
    def names_origin(self) -> bool:
        """Whether the options name the queries or the corpus that a file was mined from."""
        return self.has_corpus or self.queries is not None or self.query_embeddings is not None


def check_unused(options: AuditOptions, kind: str) -> None:
    """Raise for the first option that an input of this kind does not read, instead of ignoring it.

    Args:
        options: The options as given.
        kind: ``"embeddings"``, ``"run"`` or ``"mined"``.
    """
    what = {"run": "a run", "mined": "a mined file"}.get(kind, "embeddings")
    if what == "embeddings" and options.has_corpus:
        what = "embeddings with a corpus"
    if what == "a mined file" and not options.names_origin:
        has_manifest = manifest_of(options.input).exists()
        what = "a mined file with its manifest" if has_manifest else "a mined file without --queries or --corpus"
    if options.batches and what not in ("a run", "embeddings"):
        fix = "audit the embeddings of the training items"
        raise ArgumentError("audit", f"no --batches for {what}", f"--batches {options.batches[0]}", fix)
    columns = {f"{name}_column": value for name, value in vars(options.columns).items()}
    for name, value in {**columns, **vars(options)}.items():
        if value is not None and name not in _always | _reads[what]:
            flag = name.replace("_", "-")
            fix = "remove it: it has no effect there"
            raise ArgumentError("audit", f"no --{flag} for {what}", f"--{flag} {value}", fix)
    for column, file in (("label_column", "labels"), ("group_column", "groups")):
        named = getattr(options, column)
        if what == "a run" and named is not None and getattr(options, file) is None:
            raise ArgumentError("audit", f"--{file} together with --{column.replace('_', '-')} {named}", "none")
