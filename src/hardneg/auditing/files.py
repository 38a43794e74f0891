"""`hardneg audit`: files in, an audit out. Embeddings, a run directory, or mined negatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardneg.auditing.inputs import (
    WHO,
    Documents,
    check_columns_found,
    is_run,
    judged_lists,
    read_tags,
    rows_by_name,
    side_of,
    split_of_run,
)  # fmt: skip
from hardneg.auditing.lists import is_mined
from hardneg.auditing.options import AuditOptions as AuditOptions
from hardneg.auditing.options import check_read
from hardneg.auditing.prepare import make_subject
from hardneg.auditing.request import as_audit_errors
from hardneg.auditing.result import Audit
from hardneg.auditing.rules import given_rules
from hardneg.auditing.subject import Subject
from hardneg.auditing.survey import audit_subject
from hardneg.core.errors import ArgumentError, NoFile
from hardneg.core.types import Keys
from hardneg.io.provenance import environment
from hardneg.io.tables import column_names, read_vectors, suffix_of, vector_suffixes
from hardneg.mining.inputs import Progress as Encoding
from hardneg.mining.judgements import numbered_both, read_judgements

Progress = Callable[[int, int], None]


def audit_files(options: AuditOptions, progress: Progress | None = None, encoding: Encoding | None = None) -> Audit:
    """The audit of embeddings, of a run or of a mined file, whichever the input is.

    progress: called with (anchors done, anchors in all). encoding: as in mining, for texts that must be encoded.
    """
    with as_audit_errors(), torch.no_grad():
        kind = kind_of(options)
        check_read(options, kind)
        if kind == "mined":
            from hardneg.auditing.mined import audit_mined

            found = audit_mined(options, progress, encoding)
        else:
            subject = load_subject(options, kind)
            found = audit_subject(subject, given_rules(options.expressions), options.settings, progress=progress)
    return replace(found, provenance={**environment(), "input": options.input, "kind": kind})


def kind_of(options: AuditOptions) -> str:
    """Embeddings, a run (its directory, or the embeddings.npz in it), or a mined file."""
    path = Path(options.input)
    if not path.exists():
        raise NoFile("audit", "a file or folder that exists", path)
    if options.embedding_column is None and is_run(path):
        return "run"
    if suffix_of(path) in vector_suffixes:
        return "embeddings"
    names = column_names(path, WHO)
    if options.embedding_column in names:
        return "embeddings"
    if is_mined(names) or Path(f"{path}.manifest.json").exists():
        return "mined"
    if {"embedding", "embeddings", "vector", "vectors"} & set(names):
        return "embeddings"
    what = "embeddings (.npy, .npz, .safetensors, a table with a column of them), a run, or a mined file"
    raise ArgumentError("audit", str(what), f"{path} with columns {names}")


def load_subject(options: AuditOptions, kind: str) -> Subject:
    """Embeddings with what is known of them; a corpus beside them if there is one."""
    if kind == "run":
        vectors, labels = split_of_run(Path(options.input), options.split or "test")
        return _alone(options, Documents(range(len(vectors)), False, None, vectors, labels.tolist()))
    anchors = side_of(options, "queries", options.input, options.queries)
    if options.has_corpus:
        return _beside(options, anchors, side_of(options, "corpus", options.corpus, options.corpus_embeddings))
    return _alone(options, anchors)


def _beside(options: AuditOptions, anchors: Documents, candidates: Documents) -> Subject:
    """Queries against a corpus: judgements, or labels or groups of both sides, define which negatives are false."""
    assert anchors.vectors is not None
    if candidates.vectors is None:
        raise ArgumentError("audit", "embeddings of the corpus", "none", "give --corpus-embeddings")
    check_columns_found(options, anchors, candidates)
    sizes = (len(anchors.vectors), len(candidates.vectors))
    own: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    for word in ("labels", "groups"):
        first, second = getattr(anchors, word), getattr(candidates, word)
        if first is not None and second is not None:
            own[word], others[word] = numbered_both(word, first, second, sizes, WHO)
    if options.judgements is None and not own:
        raise ArgumentError(
            "audit",
            ("judgements (query id, document id) for queries and a corpus, or labels or groups of both"),
            "none",
            "give --judgements, or --label-column",
        )
    keys = Keys(candidates.vectors, labels=others.get("labels"), clusters=others.get("groups"))
    judged = None if options.judgements is None else _judged(options.judgements, anchors, candidates)
    subject = make_subject(
        anchors.vectors, keys, judgements=judged, labels=own.get("labels"), groups=own.get("groups"), **_how(options)
    )
    return replace(subject, names=tuple(candidates.ids) if candidates.named else None)


def _alone(options: AuditOptions, anchors: Documents) -> Subject:
    """Rows that are each other's candidates."""
    vectors = anchors.vectors
    assert vectors is not None
    check_columns_found(options, anchors)
    labels = anchors.labels if options.labels is None else read_tags("labels", options.labels, options.label_column)
    groups = anchors.groups if options.groups is None else read_tags("groups", options.groups, options.group_column)
    judged = None if options.judgements is None else _judged(options.judgements, anchors, anchors)
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


def _judged(path: str, anchors: Documents, candidates: Documents) -> list[list[int]]:
    pairs = read_judgements(path, WHO)
    return judged_lists(pairs, rows_by_name(anchors), rows_by_name(candidates), len(anchors.ids))


def _own_positives(options: AuditOptions, vectors: Tensor) -> Tensor | str | None:
    """A file of second views, "label", or none."""
    if options.positives is None or options.positives == "label":
        return options.positives
    views = read_vectors(options.positives, options.embedding_column, WHO)[0]
    if views.shape != vectors.shape:
        raise ArgumentError(
            "audit",
            f"a second view {tuple(vectors.shape)} as positives",
            f"{tuple(views.shape)} in {options.positives}",
        )
    return views


def _how(options: AuditOptions) -> dict[str, Any]:
    return {"normalize": options.similarity != "dot", "seed": options.settings.seed}
