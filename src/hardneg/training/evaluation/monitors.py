"""Monitors: a figure of the training items, computed every few epochs, that chooses the best weights.

knn          the accuracy of kNN on a held-out fifth of the training items (needs labels)
retrieval    the share of training items whose first view is closest to their own second view
svm          the cross-validated accuracy of a support vector machine on at most 2,000 items (needs labels)
sts('FILE')  Spearman's correlation on the dev pairs of an STS file, for text encoders

The test items of a run are never used, so the choice of weights does not depend on them. The loop calls
``read_monitor`` for ``--monitor`` and the result every ``--monitor-every`` epochs. Only the choice of items is made
here: the figures are those of embeddings.py, svm.py and sts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.negatives.grammar import read_expression
from hardneg.training.evaluation.embeddings import knn_predict
from hardneg.training.evaluation.logistic import folds_of
from hardneg.training.evaluation.sts import evaluate_sts, read_sts, sts_figures
from hardneg.training.evaluation.svm import svm_accuracy

MAX_ITEMS, MAX_SVM_ITEMS = 10_000, 2_000
"""Items that kNN and the support vector machine use at most, to limit the time of a monitor."""

K = 200
"""Neighbours that vote; fewer where the classes are smaller."""

Monitor = Callable[[Any, Any], float]
"""(items, represent) -> the figure; higher is better."""


def knn(items: Any, represent: Any) -> float:
    """Return the kNN accuracy on a held-out fifth of the training items.

    Args:
        items: The training items, with labels.
        represent: The features of the encoder, ``encoders.Represent``.
    """
    x, y = _some(items, represent, "knn", MAX_ITEMS)
    _, y = torch.unique(y, return_inverse=True)
    held_out = folds_of(y, 5, seed=0) == 0
    k = max(1, min(K, int((~held_out).sum()) // (int(y.max()) + 1)))
    predicted = knn_predict(x[~held_out], y[~held_out], x[held_out], k=k)
    return float((predicted == y[held_out]).double().mean())


def svm(items: Any, represent: Any) -> float:
    """Return the cross-validated accuracy of a support vector machine on the training items.

    Args:
        items: The training items, with labels.
        represent: The features of the encoder, ``encoders.Represent``.
    """
    return float(svm_accuracy(*_some(items, represent, "svm", MAX_SVM_ITEMS))["mean"])


def _some(items: Any, represent: Any, name: str, most: int) -> tuple[Tensor, Tensor]:
    """Return features and labels of a fixed random subset of at most ``most`` items."""
    labels = items.labelled(f"--monitor {name}")
    some = torch.randperm(len(items), generator=torch.Generator().manual_seed(0))[:most].to(labels.device)
    return represent.items(items, some), labels[some]


def retrieval(items: Any, represent: Any) -> float:
    """Return the share of training items whose first view is closest to their own second view.

    Args:
        items: The training items.
        represent: The features of the encoder, ``encoders.Represent``.
    """
    return float(items.retrieved(*represent.views(items)).double().mean())


def sts(file: str, split: str = "dev") -> Monitor:
    """Return a monitor of Spearman's correlation on the pairs of an STS file.

    Args:
        file: The STS file or folder, see ``read_sts``.
        split: Split of the pairs.
    """
    pairs = read_sts(file, split)

    def look(items: Any, represent: Any) -> float:
        found = sts_figures(evaluate_sts(pairs, lambda texts: represent(items.tokens_of(texts))))
        return float(found["all"] or 0.0)

    return look


LABELLED = ("knn", "svm")
"""Monitors that read labels."""

MONITORS: dict[str, Callable[..., Monitor]] = {
    "knn": lambda: knn,
    "retrieval": lambda: retrieval,
    "svm": lambda: svm,
    "sts": sts,
}


def check_monitor(text: str, items: Any) -> None:
    """Raise if the monitor cannot be computed on these items: they lack labels, or are not texts.

    Args:
        text: The value of ``--monitor``.
        items: The training items.
    """
    name = text.partition("(")[0].strip()
    if name in LABELLED:
        items.labelled(f"--monitor {name}")
    if name == "sts" and not hasattr(items, "tokens_of"):
        raise ArgumentError("--monitor sts", "data of texts", f"{items.noun}s")


def check_held_out(options: Any, splits: Any) -> None:
    """Raise if the monitor would choose weights by the labels of the items that the run is evaluated on.

    Args:
        options: The options of the run.
        splits: The splits of the run.
    """
    name = options.monitor.partition("(")[0].strip()
    if options.monitor_every and name in LABELLED and splits.train is splits.test:
        what = f"a test split whose labels --monitor {name} does not read"
        fix = f"use --data {options.data}@0/10, or --monitor retrieval"
        raise ArgumentError("train", what, f"--data {options.data}, whose items are in both splits", fix)


def read_monitor(text: str) -> Monitor:
    """Parse ``--monitor``: a name such as ``knn``, or a call such as ``sts('sts.tsv')``."""
    found: Monitor = read_expression(f"{text.strip()}()" if text.strip() in MONITORS else text, MONITORS)
    return found
