"""`hardneg audit`: files in, an audit out. Embeddings, a run directory, or mined negatives."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardneg.audits.asked import asked_by_audit
from hardneg.audits.inputs import (
    Documents,
    judged_lists,
    read_judgements,
    read_tags,
    rows_by_name,
    side_of,
    split_of_run,
)  # fmt: skip
from hardneg.audits.lists import is_mined
from hardneg.audits.prepare import make_subject
from hardneg.audits.result import Audit
from hardneg.audits.rules import check_rules, given_rules
from hardneg.audits.settings import Settings
from hardneg.audits.subject import Subject
from hardneg.audits.tags import numbered_both
from hardneg.audits.work import audit_subject
from hardneg.mining.problem import Columns
from hardneg.mining.tables import read_table, read_vectors, suffix_of, vector_suffixes
from hardneg.notices import optional
from hardneg.runs import environment
from hardneg.types import Keys

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class AuditOptions:
    """Everything that `hardneg audit` is told; paths, what they hold, and how to look."""

    input: str
    expressions: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)
    labels: str | None = None
    groups: str | None = None
    label_column: str | None = None
    group_column: str | None = None
    positives: str | None = None
    judgements: str | None = None
    queries: str | None = None
    query_embeddings: str | None = None
    corpus: str | None = None
    corpus_embeddings: str | None = None
    embedding_column: str | None = None
    columns: Columns = field(default_factory=Columns)
    model: str | None = None
    similarity: str = "cosine"
    split: str = "test"

    def __post_init__(self) -> None:
        for name, known in (("similarity", ("cosine", "dot")), ("split", ("train", "test"))):
            if getattr(self, name) not in known:
                raise ValueError(f"audit needs {name} in {known}, got {name}={getattr(self, name)!r}.")
        check_rules(given_rules(self.expressions), positives=True, labels=True, groups=True)


def audit_files(options: AuditOptions, progress: Progress | None = None) -> Audit:
    """The audit of embeddings, of a run directory or of a mined file, whichever the input is."""
    with asked_by_audit(), torch.no_grad():
        kind = kind_of(options)
        if kind == "mined":
            from hardneg.audits.mined import audit_mined

            found = audit_mined(options, progress)
        else:
            subject = load_subject(options, kind)
            found = audit_subject(subject, given_rules(options.expressions), options.settings, progress=progress)
    return replace(found, provenance={**environment(), "input": options.input, "kind": kind})


def kind_of(options: AuditOptions) -> str:
    """Embeddings, the folder of a run, or a mined file."""
    path = Path(options.input)
    if not path.exists():
        raise FileNotFoundError(f"audit needs a file or folder that exists, got {path}.")
    if path.is_dir() and (path / "embeddings.npz").exists():
        return "run"
    if suffix_of(path) in vector_suffixes:
        return "embeddings"
    names = list(read_table(path)) if path.is_dir() else _column_names(path)
    if options.embedding_column is None and (is_mined(names) or Path(f"{path}.manifest.json").exists()):
        return "mined"
    if options.embedding_column in names or {"embedding", "embeddings", "vector", "vectors"} & set(names):
        return "embeddings"
    what = "embeddings (.npy, .npz, .safetensors, a table with a column of them), a run, or a mined file"
    raise ValueError(f"audit needs {what}, got {path} with columns {names}.")


def _column_names(path: Path) -> list[str]:
    """The columns, without reading a large file twice where its format says them."""
    if suffix_of(path) == ".parquet":
        try:
            return list(optional("pyarrow.parquet", "Parquet", extra="mine").read_schema(path).names)
        except OSError as error:
            raise ValueError(f"audit needs a whole Parquet file, got {path}: {error}") from None
    if suffix_of(path) in (".jsonl", ".json"):
        import gzip

        opener: Any = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            first = next((line for line in file if line.strip()), "{}")
        try:
            row = json.loads(first)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict):
            return list(row)
    return list(read_table(path))


def load_subject(options: AuditOptions, kind: str) -> Subject:
    """Embeddings with what is known of them; a corpus beside them if there is one."""
    if kind == "run":
        vectors, labels = split_of_run(Path(options.input), options.split)
        return make_subject(vectors, None, labels=labels, positives=_own_positives(options, vectors), **_how(options))
    anchors = side_of(options, "queries", options.input, options.queries)
    assert anchors.vectors is not None
    if options.corpus is None and options.corpus_embeddings is None:
        return _alone(options, anchors)
    candidates = side_of(options, "corpus", options.corpus, options.corpus_embeddings)
    if candidates.vectors is None:
        raise ValueError("audit needs embeddings of the corpus, got none; give --corpus-embeddings.")
    keys, own = Keys(candidates.vectors), None
    if anchors.labels is not None and candidates.labels is not None:
        sizes = (len(anchors.vectors), len(candidates.vectors))
        own, others = numbered_both("labels", anchors.labels, candidates.labels, sizes)
        keys = Keys(candidates.vectors, labels=others)
    judged = _judged(options, anchors, candidates)
    subject = make_subject(anchors.vectors, keys, judgements=judged, labels=own, **_how(options))
    return replace(subject, names=tuple(candidates.ids) if candidates.named else None)


def _alone(options: AuditOptions, anchors: Documents) -> Subject:
    """Rows that are each other's candidates."""
    vectors = anchors.vectors
    assert vectors is not None
    labels = anchors.labels if options.labels is None else read_tags("labels", options.labels, options.label_column)
    groups = anchors.groups if options.groups is None else read_tags("groups", options.groups, options.group_column)
    judged = None if options.judgements is None else _judged(options, anchors, anchors)
    subject = make_subject(
        vectors,
        None,
        labels=labels,
        groups=groups,
        judgements=judged,
        positives=_own_positives(options, vectors),
        **_how(options),
    )
    return replace(subject, names=tuple(anchors.ids) if anchors.named else None)


def _judged(options: AuditOptions, anchors: Documents, candidates: Documents) -> list[list[int]]:
    if options.judgements is None:
        raise ValueError(
            "audit needs judgements (query id, document id) for queries and a corpus, got none; give --judgements."
        )
    return judged_lists(
        read_judgements(options.judgements), rows_by_name(anchors), rows_by_name(candidates), len(anchors.ids)
    )


def _own_positives(options: AuditOptions, vectors: Tensor) -> Tensor | str | None:
    """A file of second views, "label", or none."""
    if options.positives is None or options.positives == "label":
        return options.positives
    views = read_vectors(options.positives, options.embedding_column)[0]
    if views.shape != vectors.shape:
        raise ValueError(
            f"audit needs a second view {tuple(vectors.shape)} as positives, got {tuple(views.shape)} in "
            f"{options.positives}."
        )
    return views


def _how(options: AuditOptions) -> dict[str, Any]:
    return {"normalize": options.similarity == "cosine", "seed": options.settings.seed}
