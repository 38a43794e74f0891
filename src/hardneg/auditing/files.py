"""Files in, an audit out: the work of `hardneg audit` for embeddings, a run directory or mined negatives.

``audit_files`` finds out which of these the input is (``kind_of``) and checks the options. A mined file is audited by
``mined.audit_mined``; everything else is read here and measured by ``sampling.audit_pairs``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardneg.auditing.audited_pairs import AuditedPairs
from hardneg.auditing.inputs import (
    WHO,
    Judged,
    check_columns_found,
    is_run,
    judged_lists,
    read_side,
    read_tags,
    rows_by_name,
    split_of_run,
)
from hardneg.auditing.lists import is_mined
from hardneg.auditing.mined import audit_mined
from hardneg.auditing.options import AuditOptions as AuditOptions
from hardneg.auditing.options import check_unused
from hardneg.auditing.prepare import make_audited_pairs
from hardneg.auditing.result import Audit
from hardneg.auditing.rules import given_rules
from hardneg.auditing.sampling import audit_pairs
from hardneg.core.errors import ArgumentError, HardnegError, NoFile
from hardneg.core.types import Keys
from hardneg.io.provenance import environment
from hardneg.io.tables import column_names, read_vectors, suffix_of, vector_suffixes
from hardneg.mining.inputs import StageProgress, quiet
from hardneg.mining.judgements import numbered_both
from hardneg.mining.problem import Side

AuditProgress = Callable[[int, int], None]
"""Called with (anchors done, anchors in all)."""


@contextmanager
def as_audit_errors() -> Iterator[None]:
    """Rename the caller in errors of readers that mining and audits share: "mine" becomes "audit"."""
    try:
        yield
    except HardnegError as error:
        if error.who == "mine":
            error.who = "audit"
            error.args = ("audit", *error.args[1:])
        raise


def audit_files(options: AuditOptions, progress: AuditProgress | None = None, encoding: StageProgress = quiet) -> Audit:
    """Audit embeddings, a run or a mined file, whichever the input is.

    Args:
        options: Paths, rules and settings.
        progress: Called with (anchors done, anchors in all).
        encoding: Progress of encoding texts, as in mining.

    Returns:
        The audit, whose provenance has the command, the versions and the kind of the input.

    Raises:
        NoFile: If an input does not exist, or a run is not finished.
        ArgumentError: If an option does not fit the input.
    """
    with as_audit_errors(), torch.no_grad():
        kind = kind_of(options)
        check_unused(options, kind)
        if kind == "mined":
            found = audit_mined(options, progress, encoding)
        else:
            audited = load_audited_pairs(options, kind)
            found = audit_pairs(audited, given_rules(options.negatives), options.settings, progress=progress)
    return replace(found, provenance={**environment(), "input": options.input, "kind": kind})


def kind_of(options: AuditOptions) -> str:
    """Return ``"embeddings"``, ``"run"`` (a run directory or its embeddings.npz) or ``"mined"``.

    A run is recognised by its four arrays, a mined file by its columns or its manifest, and a table of embeddings by a
    column named embedding or vector.

    Raises:
        NoFile: If the input does not exist or is a run without embeddings.
        ArgumentError: If the columns of a table are none of these.
    """
    path = Path(options.input)
    if not path.exists():
        raise NoFile("audit", "a file or folder that exists", path)
    if options.embedding_column is None and is_run(path):
        return "run"
    if (path / "config.json").exists():
        fix = "give its command again with --resume"
        raise NoFile("audit", "a finished run", path / "embeddings.npz", "which is missing", fix)
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
    raise ArgumentError("audit", what, f"{path} with columns {names}")


def load_audited_pairs(options: AuditOptions, kind: str) -> AuditedPairs:
    """Read embeddings with their labels, groups and judgements, and the corpus if the options name one.

    Args:
        options: Paths and columns.
        kind: ``"embeddings"`` or ``"run"``, from ``kind_of``.
    """
    if kind == "run":
        vectors, known = split_of_run(Path(options.input), options.split or "test")
        anchors = Side(range(len(vectors)), None, vectors, known.tolist(), named=False)
    else:
        anchors = read_side(options, "queries", options.queries, options.input)
    corpus = read_side(options, "corpus", options.corpus, options.corpus_embeddings) if options.has_corpus else None
    candidates = anchors if corpus is None else corpus
    if candidates.vectors is None:
        raise ArgumentError(WHO, "embeddings of the corpus", "none", "give --corpus-embeddings")
    check_columns_found(options, anchors, *([] if corpus is None else [corpus]))
    own, others = _tags(options, anchors, corpus)
    tags = others.get("labels"), others.get("groups")
    keys = None if corpus is None else Keys(candidates.vectors, labels=tags[0], clusters=tags[1])
    assert anchors.vectors is not None
    judged, held_out = (
        _judged(path, anchors, candidates) for path in (options.judgements, options.held_out_judgements)
    )
    audited = make_audited_pairs(
        anchors.vectors,
        keys,
        positives=_own_positives(options, anchors.vectors),
        judgements=judged and judged.relevant,
        judged_negatives=judged and judged.irrelevant,
        held_out_judgements=held_out and held_out.relevant,
        **own,
        normalize=options.similarity != "dot",
        seed=options.settings.seed,
    )
    return replace(audited, names=tuple(candidates.ids) if candidates.named else None)


def _tags(options: AuditOptions, anchors: Side, corpus: Side | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the labels and groups of the anchors and of the corpus, which must have them too if there is one."""
    own: dict[str, Any] = {}
    others: dict[str, Tensor] = {}
    for word, column in (("labels", options.label_column), ("groups", options.group_column)):
        first, path = getattr(anchors, word), getattr(options, word)
        if corpus is None:
            own[word] = first if path is None else read_tags(word, path, column)
        elif first is not None and getattr(corpus, word) is not None:
            sizes = len(anchors), len(corpus)
            own[word], others[word] = numbered_both(word, first, getattr(corpus, word), sizes, WHO)
    if corpus is not None and options.judgements is None and options.held_out_judgements is None and not own:
        what = "judgements (query id, document id) for queries and a corpus, or labels or groups of both"
        raise ArgumentError(WHO, what, "none", "give --judgements, or --label-column")
    return own, others


def _judged(path: str | None, anchors: Side, candidates: Side) -> Judged | None:
    """Read judgements as rows of the candidates; None without a path."""
    if path is None:
        return None
    return judged_lists(path, rows_by_name(anchors.ids), rows_by_name(candidates.ids), len(anchors))


def _own_positives(options: AuditOptions, vectors: Tensor) -> Tensor | str | None:
    """Return the vectors of a second view [a, d], ``"label"``, or None."""
    if options.positives is None or options.positives == "label":
        return options.positives
    views = read_vectors(options.positives, options.embedding_column, WHO)[0]
    if views.shape != vectors.shape:
        got = f"{tuple(views.shape)} in {options.positives}"
        raise ArgumentError(WHO, f"a second view {tuple(vectors.shape)} as positives", got)
    return views
