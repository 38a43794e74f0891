"""A training set of sentence-transformers (columns anchor, positive, negatives ...) as what ``audit`` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, optional
from hardneg.core.types import Keys

_labels = ("label", "labels", "score", "scores")


class TrainingSet(NamedTuple):
    """The anchors of a data set against its documents, with its positives and explicit negatives."""

    embeddings: Keys
    corpus: Keys
    positives: list[list[int]]
    mined: Annotated[Tensor, "q k"] | None


def read_dataset(dataset: Any, model: Any) -> TrainingSet:
    """Equal texts are one anchor or one document; rows with the same anchor are one list of it.

    model: a sentence-transformers model, its path, or a function from texts to vectors.
    """
    if isinstance(dataset, dict):
        raise ArgumentError("audit", "one data set", f"a dict of {list(dataset)}", "pass one of them")
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
    for anchor, *rest in zip(*columns, strict=True):
        if not isinstance(anchor, str) or not anchor:
            raise argument_error("audit", "texts as anchors", names[0], anchor)
        lists = own.setdefault(anchor, ({}, {}))
        for place, text in ((min(place, 1), text) for place, cell in enumerate(rest) for text in _texts(cell)):
            lists[place][documents.setdefault(text, len(documents))] = None
    encode = _encoder(model)
    negatives = [list(each) for _, each in own.values()]
    width = max(map(len, negatives))
    mined = torch.tensor([each + [-1] * (width - len(each)) for each in negatives]) if width else None
    corpus = Keys(encode(list(documents)), torch.arange(len(documents)))
    same = torch.tensor([documents.get(anchor, -1) for anchor in own])  # a document that is the anchor's text
    return TrainingSet(Keys(encode(list(own)), same), corpus, [list(each) for each, _ in own.values()], mined)


def _texts(cell: Any) -> Iterable[str]:
    cells = cell if isinstance(cell, (list, tuple)) else [cell]
    return [text for text in cells if text]


def _encoder(model: Any) -> Callable[[list[str]], Tensor]:
    if isinstance(model, str):
        model = optional("sentence_transformers", "audit(model=...)", extra="text").SentenceTransformer(model)
    encode = getattr(model, "encode", None)
    if encode is None:
        return lambda texts: torch.as_tensor(model(texts)).float()
    return lambda texts: torch.as_tensor(encode(texts, convert_to_numpy=True, show_progress_bar=False)).float()
