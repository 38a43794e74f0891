"""A training set of sentence-transformers (columns anchor, positive, negatives ...) as the arguments of ``audit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, check_callable, optional
from hardneg.core.types import Keys
from hardneg.io.functions import loading_model
from hardneg.mining.dataset import as_dataset
from hardneg.mining.encode import vectors_of

_labels = ("label", "labels", "score", "scores")


class TrainingSet(NamedTuple):
    """The anchors of a data set, its documents as the corpus, and its positives and explicit negatives.

    Attributes:
        embeddings: Vectors of the anchors; an anchor whose text is also a document has that document's id.
        corpus: Vectors of the documents.
        positives: Rows of the documents that are positives of each anchor.
        mined: Rows of the documents that are negatives of each anchor, padded with -1; None without any.
    """

    embeddings: Keys
    corpus: Keys
    positives: list[list[int]]
    mined: Annotated[Tensor, "q k"] | None


def read_dataset(dataset: Any, model: Any) -> TrainingSet:
    """Embed a training set; equal texts are one anchor or one document, and rows with the same anchor one query.

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
    columns = [list(dataset[name]) for name in names]
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
    return f"if it is no column of texts, leave it out: dataset.remove_columns({column!r})"


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
    """Whether a label is no integer, as in STS."""
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
