"""What is watched while training: a figure of the training items, every so many epochs; it chooses the best weights.

knn          the share of held-out training items whose class the vote of the others gives (needs labels)
retrieval    how often the second view nearest to the first view of a training item is its own
svm          the accuracy of a support vector machine in cross-validation, of 2,000 items at most (needs labels)
sts('FILE')  Spearman's correlation on the dev pairs of an STS file, for encoders of texts

The items that a run is evaluated on at its end are never looked at, so the best weights are not chosen by them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.negatives.grammar import read_expression
from hardneg.training.data.items import retrieved
from hardneg.training.encoders import embed
from hardneg.training.evaluation.embeddings import knn_predict
from hardneg.training.evaluation.logistic import folds_of
from hardneg.training.evaluation.sts import evaluate_sts, read_sts, sts_figures
from hardneg.training.evaluation.svm import svm_accuracy

MOST, FEW = 10_000, 2_000
"""Items at most that are looked at; by a support vector machine."""

K = 200
Monitor = Callable[[Any, Any], float]
"""(items, represent) -> the figure, the higher the better."""


def knn(items: Any, represent: Any) -> float:
    x, y = _some(items, represent, "knn", MOST)
    _, y = torch.unique(y, return_inverse=True)
    held_out = folds_of(y, 5, seed=0) == 0
    k = max(1, min(K, int((~held_out).sum()) // (int(y.max()) + 1)))
    predicted = knn_predict(x[~held_out], y[~held_out], x[held_out], k=k)
    return float((predicted == y[held_out]).double().mean())


def svm(items: Any, represent: Any) -> float:
    return float(svm_accuracy(*_some(items, represent, "svm", FEW))["mean"])


def _some(items: Any, represent: Any, name: str, most: int) -> tuple[Tensor, Tensor]:
    """Features and labels of some of the items, always the same ones."""
    labels = items.labelled(f"--monitor {name}")
    some = torch.randperm(len(items), generator=torch.Generator().manual_seed(0))[:most].to(labels.device)
    return embed(represent.encoder, some, items.plain), labels[some]


def retrieval(items: Any, represent: Any) -> float:
    return float(retrieved(*represent.views(items)).double().mean())


def sts(file: str, split: str = "dev") -> Monitor:
    pairs = read_sts(file, split)

    def look(items: Any, represent: Any) -> float:
        found = sts_figures(evaluate_sts(pairs, lambda texts: represent(items.tokens_of(texts))))
        return float(found["all"] or 0.0)

    return look


LABELLED = ("knn", "svm")
"""Those that read labels."""

MONITORS: dict[str, Callable[..., Monitor]] = {
    "knn": lambda: knn,
    "retrieval": lambda: retrieval,
    "svm": lambda: svm,
    "sts": sts,
}


def check_monitor(text: str, items: Any) -> None:
    """Raises for items that the monitor cannot look at: without labels, or without texts."""
    name = text.partition("(")[0].strip()
    if name in LABELLED:
        items.labelled(f"--monitor {name}")
    if name == "sts" and not hasattr(items, "tokens_of"):
        raise ArgumentError("--monitor sts", "data of texts", f"{items.noun}s")


def check_held_out(options: Any, splits: Any) -> None:
    """Raises where the monitor would choose weights by the labels of the items that the run is evaluated on."""
    name = options.monitor.partition("(")[0].strip()
    if options.monitor_every and name in LABELLED and splits.train is splits.test:
        what = f"a test split that --monitor {name} does not read the labels of"
        fix = f"use --data {options.data}@0/10, or --monitor retrieval"
        raise ArgumentError("train", what, f"--data {options.data}, which is trained and tested on", fix)


def read_monitor(text: str) -> Monitor:
    """The monitor that this text names: ``knn``, or ``sts('sts.tsv')``."""
    found: Monitor = read_expression(f"{text.strip()}()" if text.strip() in MONITORS else text, MONITORS)
    return found
