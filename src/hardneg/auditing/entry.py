"""``hn.audit``: how hard, how false and how concentrated negatives are, for vectors or for a training set.

A training set of sentence-transformers (columns anchor, positive, negatives ...) is embedded first:
its texts become vectors, its rows the positives and the negatives to audit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import torch
from torch import Tensor

from hardneg.auditing.audited_pairs import AuditedPairs
from hardneg.auditing.batches import with_batches
from hardneg.auditing.files import as_audit_errors, audit_files
from hardneg.auditing.findings import find_problems_in_rows
from hardneg.auditing.judged import with_judged
from hardneg.auditing.options import AuditOptions, Settings
from hardneg.auditing.prepare import make_audited_pairs
from hardneg.auditing.result import Audit
from hardneg.auditing.rules import Expressions, given_rules
from hardneg.auditing.sampling import audit_pairs
from hardneg.batching.plan import Plan
from hardneg.core.errors import ArgumentError, argument_error, check_among, check_callable, optional
from hardneg.core.types import Given, Keys
from hardneg.io.functions import loading_model
from hardneg.io.tables import column_of
from hardneg.mining.dataset import as_dataset, is_dataset
from hardneg.mining.encode import vectors_of
from hardneg.mining.judgements import Tag
from hardneg.mining.miner import Mined
from hardneg.mining.options import TEMPERATURE, Similarity
from hardneg.mining.pairs import Positives, RowsOf, numbered_ids


def audit(
    embeddings: Given | Keys | Any = None,
    negatives: Expressions = (),
    *,
    corpus: Given | Keys = None,
    positives: Positives | str | None = None,
    judgements: Positives | None = None,
    judged_negatives: Positives | None = None,
    held_out_judgements: Positives | None = None,
    labels: Tag | None = None,
    groups: Tag | None = None,
    mined: Mined | Annotated[Tensor, "q k"] | str | Path | None = None,
    judged: Any = None,
    batches: str | Plan | Sequence[str | Plan] = (),
    batch_size: int = 256,
    model: Any = None,
    encoder: str | None = None,
    cache: str | Path | None = None,
    temperature: float = TEMPERATURE,
    tau_plus: float = 0.0,
    near_duplicate: float = 0.95,
    num_anchors: int = 512,
    seed: int = 0,
    wanted_false_negatives: float | None = None,
    frontier: bool = True,
    similarity: Similarity = "cosine",
    memory: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Measure how hard and how concentrated the negatives of each expression are, and how many of them are false.

    Args:
        embeddings: Anchors [a, d] as a tensor, an array or Keys. They are also the candidates unless ``corpus`` is
            given. Alternatively a ``datasets.Dataset`` with columns anchor, positive and negatives, or with documents
            and labels 0 and 1; its texts are embedded by ``model``.
        negatives: Rules to measure, as text in the grammar or as distributions, one or several.
        corpus: Candidates [n, d]. Their labels and groups are those of the Keys (``labels``, ``clusters``).
        positives: Vectors of a second view [a, d]; ids of candidates as in ``mine``; or ``"label"``, which draws one
            row with the anchor's label. With None the first judgement of each query is its positive, if there is any.
        judgements: Relevant ids of each query as in ``mine``, the best first. Pairs that are not judged are unknown, so
            shares of false negatives become lower bounds, and rules are neither compared nor suggested by them.
        judged_negatives: Ids of each query that are judged and not relevant.
        held_out_judgements: Relevant ids that mining has not seen. They give the false-negative rate: pairs that are
            not among them count as true negatives, and queries without any are left out.
        labels: Labels of the anchors [a]; a candidate with the anchor's label is a false negative.
        groups: Groups of the anchors [a]; a candidate of the anchor's group is a false negative.
        mined: Negatives of each query, as ``mine`` returns them or as ids [q, k]; or the path of a mined file, which
            then needs no embeddings (see docs/guides/audit.md).
        judged: Result of ``hn.judge`` on the same data, or the folder of `hardneg judge`: each judged rule has a row
            with its estimated rate and bounds.
        batches: Planners of batches to measure, as text (``"proximity()"``) or plans; needs embeddings without a
            corpus. See ``hardneg.auditing.audit_batches``.
        batch_size: Number of items per batch.
        model: Sentence-transformers model, or a function from texts to vectors, for texts without embeddings.
        encoder: ``"module:function"`` or ``"file.py:function"`` to use instead of ``model`` for a mined file.
        cache: Folder of embeddings of a mined file's texts. Nothing in the mined file can choose model, encoder or
            cache.
        temperature: Temperature of the loss; tilts weigh by exp(beta * similarity / temperature), as in ``mine``.
        tau_plus: Share of false negatives that the loss corrects for.
        near_duplicate: Cosine similarity above which a candidate counts as a near-duplicate of the anchor or a
            positive.
        num_anchors: Number of anchors to measure, drawn with ``seed``; all of them if there are no more.
        seed: Seed of the sample of anchors and of positives drawn by label.
        wanted_false_negatives: Search for the hardest rules whose false-negative rate is at most this share.
        frontier: Whether to measure a default set of rules too; False for logging during training.
        similarity: ``"cosine"``, or ``"dot"`` for the dot product of the vectors as they are.
        memory: GiB for the similarities with a corpus of more than 256 MiB, which may be memory-mapped. The corpus is
            read once for as many anchors as fit.
        progress: Called with (anchors done, anchors in all).

    Returns:
        The figures of every rule, with suggestions and findings about the mined negatives where they were requested.

    Raises:
        ArgumentError: If the arguments contradict each other, or a rule needs labels, groups or positives that are
            missing.

    Example:
        >>> z = torch.nn.functional.normalize(torch.randn(64, 8), dim=-1)
        >>> found = audit(z, ["Uniform()", "Tilt(2.0)"], labels=torch.arange(64) % 4, frontier=False)
        >>> round(found.row("Uniform()").false_negatives, 4)  # 15 of the 63 others
        0.2381
        >>> found.row("Tilt(2.0)").similarity > found.random_similarity
        True
    """
    settings = Settings(
        temperature, tau_plus, near_duplicate, num_anchors, seed, wanted_false_negatives, frontier, memory
    )
    check_among("audit", "similarity", similarity, get_args(Similarity))
    rules = given_rules(negatives)
    planners = [batches] if isinstance(batches, (str, Plan)) else list(batches)
    if is_dataset(embeddings):
        embeddings, corpus, positives, mined = read_dataset(embeddings, model)
    if isinstance(mined, (str, Path)):
        if embeddings is not None or corpus is not None:
            fix = "leave the tensors out, or pass the mined ids as a tensor"
            raise ArgumentError("audit", "the path of a mined file or tensors", "both", fix)
        if planners:
            raise ArgumentError("audit", "embeddings for batches", "the path of a mined file", "pass the embeddings")
        texts = tuple(rule.name for rule in rules)
        folder = None if cache is None else str(cache)
        options = AuditOptions(str(mined), texts, settings=settings, model=model, encoder=encoder, cache=folder)
        return with_judged(audit_files(options, progress=progress), judged)
    if embeddings is None:
        raise ArgumentError("audit", "embeddings, or the path of a mined file as mined=...", "neither")
    with as_audit_errors(), torch.no_grad():
        audited = make_audited_pairs(
            embeddings,
            corpus,
            positives=positives,
            judgements=judgements,
            judged_negatives=judged_negatives,
            held_out_judgements=held_out_judgements,
            labels=labels,
            groups=groups,
            normalize=similarity == "cosine",
            seed=seed,
        )
        listed = None if mined is None else listed_rows(audited, mined)
        found = audit_pairs(audited, rules, settings, listed=listed, progress=progress)
        found = with_batches(found, audited, planners, batch_size)
        found = with_judged(found, judged)
        return found if listed is None else replace(found, mined=find_problems_in_rows(audited, listed))


def listed_rows(audited: AuditedPairs, mined: Mined | Tensor) -> Annotated[Tensor, "a k"]:
    """Return the mined negatives of each anchor as rows of the candidates, -1 where a list is shorter.

    Args:
        audited: The anchors and candidates; their ids translate the mined ids to rows.
        mined: What ``mine`` returned, or ids [a, k] with -1 for missing ones.

    Raises:
        ArgumentError: If ``mined`` has another number of rows than there are anchors, or ids that no candidate has.
    """
    if isinstance(mined, Mined):
        rows = mined.rows
    else:
        ids, mined = audited.candidate_tags.ids, numbered_ids(mined, None)
        if not isinstance(mined, Tensor) or mined.ndim != 2 or mined.is_floating_point():
            got = f"{tuple(mined.shape)} of {mined.dtype}" if isinstance(mined, Tensor) else type(mined).__name__
            raise ArgumentError("audit", "mined to be the result of hn.mine or a tensor of integer ids [q, k]", got)
        rows = RowsOf(ids, len(audited.candidates))(mined.cpu().flatten()).view(mined.shape)
        if bool(((rows < 0) & (mined.cpu() != -1)).any()):
            raise ArgumentError("audit", "mined ids that are in the corpus (or -1 for none)", "unknown ids")
    if len(rows) != len(audited.anchors):
        raise ArgumentError("audit", f"mined negatives of {len(audited.anchors)} anchors", str(len(rows)))
    return rows


_labels = ("label", "labels", "score", "scores")


class TrainingSet(NamedTuple):
    """The anchors of a data set, its documents as the corpus, and its positives and explicit negatives.

    Attributes:
        embeddings: Vectors of the anchors; an anchor whose text is also a document has that document's id.
        corpus: Vectors of the documents.
        positives: Rows of the documents that are positives of each anchor.
        mined: Rows of the documents that are negatives of each anchor, padded with -1; None if there are none.
    """

    embeddings: Keys
    corpus: Keys
    positives: list[list[int]]
    mined: Annotated[Tensor, "q k"] | None


def read_dataset(dataset: Any, model: Any) -> TrainingSet:
    """Embed a training set; equal texts are merged, and rows with the same anchor form one query.

    Args:
        dataset: A ``datasets.Dataset`` whose first column has the anchors, the second positives, the others negatives;
            or two columns of texts and a column of labels 0 and 1.
        model: Sentence-transformers model, its path, or a function from texts to vectors.

    Raises:
        ArgumentError: If columns are missing or hold no texts, labels are not 0 and 1, or there is no model.
    """
    dataset = as_dataset(dataset, "audit")
    names = [name for name in dataset.column_names if name not in _labels]
    if len(names) < 2:
        raise ArgumentError("audit", "columns anchor, positive, negatives ...", f"columns {names}")
    if model is None:
        raise ArgumentError("audit", "a model for the texts of a data set", "model=None", "pass model=...")
    if not len(dataset):
        raise ArgumentError("audit", "at least one row", "0 rows")
    columns = [column_of(dataset, name) for name in names]
    documents: dict[str, int] = {}
    own: dict[str, tuple[dict[int, None], dict[int, None]]] = {}
    rows = _labelled(dataset, columns) or zip(*columns, strict=True)
    for anchor, *rest in rows:
        if not isinstance(anchor, str) or not anchor:
            fix = None if isinstance(anchor, str) else _without(names[0])
            raise argument_error("audit", "texts as anchors", names[0], anchor, fix)
        lists = own.setdefault(anchor, ({}, {}))
        for place, text in ((place, text) for place, cell in enumerate(rest) for text in _listed(cell)):
            if text is not None and not isinstance(text, str):
                column = names[min(place + 1, len(names) - 1)]  # labeled pairs have one column for both kinds
                raise argument_error("audit", "texts as documents", column, text, _without(column))
            if text:
                lists[min(place, 1)][documents.setdefault(text, len(documents))] = None
    encode = _encoder(model)
    negatives = [list(each) for _, each in own.values()]
    width = max(map(len, negatives))
    mined = torch.tensor([each + [-1] * (width - len(each)) for each in negatives]) if width else None
    corpus = Keys(encode(list(documents)), torch.arange(len(documents)))
    same = torch.tensor([documents.get(anchor, -1) for anchor in own])  # a document that is the anchor's text
    return TrainingSet(Keys(encode(list(own)), same), corpus, [list(each) for each, _ in own.values()], mined)


def _without(column: str) -> str:
    """Return the advice to drop a column."""
    return f"if it does not contain texts, leave it out: dataset.remove_columns({column!r})"


def _labelled(dataset: Any, columns: list[list[Any]]) -> list[tuple[Any, list[Any], list[Any]]] | None:
    """Return rows of anchor, positives (label 1) and negatives (0); None if the labels have another meaning."""
    name = next((name for name in _labels if name in dataset.column_names), None)
    if name is None or len(columns) > 2:
        return None
    documents, marks = ([_listed(each) for each in column] for column in (columns[1], dataset[name]))
    fits = all(len(own) == len(each) for own, each in zip(documents, marks, strict=True))
    is_score = name.startswith("score")  # scores come in lists, whose first document is the positive
    if (not fits or max(map(len, marks)) < 2) if is_score else _has_fractions(marks):
        got = f"a {name} of each pair, as in STS, which does not mark negatives"
        fix = f"give a label of 1 (positive) or 0 (negative) instead of {name}, or the positive pairs alone without it"
        raise ArgumentError("audit", "positives, or positives and negatives, in a data set", got, fix)
    if is_score:
        marks = [[1, *[0] * (len(each) - 1)] for each in marks]
    elif not fits or {mark for each in marks for mark in each} - {None} != {0, 1}:
        return None  # labels of groups, or ids that `with_ids` has added
    pairs = (pair for row in zip(documents, marks, strict=True) for pair in zip(*row, strict=True))
    if any(text is not None and mark is None for text, mark in pairs):
        raise argument_error("audit", "a label of each document, 0 or 1", name, None)
    sides = (
        [[text for text, mark in zip(*row, strict=True) if mark == side] for row in zip(documents, marks, strict=True)]
        for side in (1, 0)
    )
    return list(zip(columns[0], *sides, strict=True))


def _has_fractions(marks: list[list[Any]]) -> bool:
    """Whether a label is not an integer, as in STS."""
    return any(isinstance(mark, float) and mark % 1 for each in marks for mark in each)


def _listed(cell: Any) -> list[Any]:
    """Return a cell as a list."""
    return list(cell) if isinstance(cell, (list, tuple)) else [cell]


def _encoder(model: Any) -> Callable[[list[str]], Tensor]:
    """Return a function from texts to vectors [n, d]."""
    if isinstance(model, str):
        library = optional("sentence_transformers", "audit(model=...)", extra="text")
        with loading_model("audit", model):
            model = library.SentenceTransformer(model)
    encode = getattr(model, "encode", None)
    if encode is None:
        check_callable("audit", "model", model, "a SentenceTransformer, its path, or a function from texts to vectors")
        return lambda texts: torch.from_numpy(vectors_of(model, texts))
    return lambda texts: torch.as_tensor(encode(texts, convert_to_numpy=True, show_progress_bar=False)).float()
