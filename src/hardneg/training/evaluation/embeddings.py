"""Evaluation of labelled embeddings: a linear probe, nearest neighbours, and the geometry of pairs (pairs.py).

Plain seeded functions on tensors, on any device. Features are used as the encoder returns them: the probe standardises
them, kNN and pairs use their directions only. kNN stays on the device of the features, where scikit-learn's
``KNeighborsClassifier`` would copy them to the CPU. Data kinds call ``evaluate_embeddings`` at the end of a run, and
``hardneg evaluate FILE.npz`` calls ``evaluate_file``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardneg.core.errors import argument_error
from hardneg.io.arrays import warn_of_unseen_classes
from hardneg.io.embeddings import EmbeddingRows, Labels, check_split, pack_bits, read_embeddings
from hardneg.training.evaluation.logistic import linear_predict, sklearn_predict
from hardneg.training.evaluation.pairs import MAX_PAIRS, directions, similarity_histograms, uniformity

MAX_SIMILARITIES = 1 << 26
"""Similarities that kNN holds at once: 256 MiB."""

PROBES = ("torch", "sklearn", "none")


def evaluate_embeddings(
    train_x: EmbeddingRows, train_y: Labels, test_x: EmbeddingRows, test_y: Labels, *,
    k: int = 200, temperature: float = 0.5, probe: str = "torch", seed: int = 0, max_pairs: int = MAX_PAIRS,
) -> dict[str, Any]:  # fmt: skip
    """Run all evaluations and return numbers and lists that JSON can hold; accuracies are fractions.

    Args:
        train_x: Features [n, d] that kNN and the probe are fitted to.
        train_y: Their labels [n].
        test_x: Features [m, d] to classify.
        test_y: Their labels [m].
        k: Neighbours that vote. At most the mean class size of the train split, since more votes would have to come
            from other classes; the result has the k that was used.
        temperature: Temperature of the votes' weights.
        probe: Solver of the linear probe: "torch", "sklearn", or "none" to skip the slowest evaluation.
        seed: Seed of the probe's folds and of drawn pairs.
        max_pairs: Pairs of test rows compared at most for uniformity and histograms; more are sampled.

    Returns:
        Accuracies ``knn``, ``1nn`` and ``linear``, packed bits of the correct test rows, and, for two test rows or
        more, ``uniformity`` and ``similarities``.

    Raises:
        ArgumentError: If shapes do not match or the probe is unknown.
    """
    check_split(train_x, train_y, test_x, test_y)
    if probe not in PROBES:
        raise argument_error("evaluate_embeddings", f"a probe among {PROBES}", "probe", probe)
    warn_of_unseen_classes(train_y, test_y)
    k = max(1, min(k, len(train_x) // len(torch.unique(train_y))))
    predicted = {
        "knn": knn_predict(train_x, train_y, test_x, k=k, temperature=temperature),
        "1nn": knn_predict(train_x, train_y, test_x, k=1),
    }
    if probe != "none":
        predict = linear_predict if probe == "torch" else sklearn_predict
        predicted["linear"] = predict(train_x, train_y, test_x, seed=seed)
    result: dict[str, Any] = {name: _accuracy(labels, test_y) for name, labels in predicted.items()}
    result |= {"k": k, "num_train": len(train_x), "num_test": len(test_x)}
    # Comparisons of runs are paired: they need to know which test rows were correct, not only how many.
    result["correct"] = {name: pack_bits((labels.cpu() == test_y.cpu()).numpy()) for name, labels in predicted.items()}
    return result | (geometry(test_x, test_y, max_pairs, seed) if len(test_x) > 1 else {})


def geometry(x: EmbeddingRows, y: Labels, max_pairs: int = MAX_PAIRS, seed: int = 0) -> dict[str, Any]:
    """Return uniformity and the histograms of similarities, as numbers and lists.

    Args:
        x: Features [n, d].
        y: Labels [n].
        max_pairs: Pairs compared at most; more are sampled.
        seed: Seed of the sampled pairs.
    """
    histograms = similarity_histograms(x, y, max_pairs=max_pairs, seed=seed)
    similarities = {name: _plain(value) for name, value in histograms._asdict().items()}
    return {"uniformity": uniformity(x, max_pairs=max_pairs, seed=seed), "similarities": similarities}


def knn_predict(
    train_x: EmbeddingRows,
    train_y: Labels,
    test_x: EmbeddingRows,
    *,
    k: int = 200,
    temperature: float = 0.5,
    block: int = 1024,
) -> Labels:
    """Predict the label with the heaviest vote of the k nearest neighbours by cosine (Wu et al. 2018).

    A vote weighs e^(cosine / temperature).

    Args:
        train_x: Features [n, d] that are searched.
        train_y: Their labels [n].
        test_x: Features [m, d] to classify.
        k: Neighbours that vote; clipped to n.
        temperature: Temperature of the weights.
        block: Test rows compared at once at most; fewer for a large bank, to limit memory.

    Returns:
        Labels [m].

    Raises:
        ArgumentError: If ``k`` or ``temperature`` is not positive.

    Example:
        >>> x, y = torch.eye(2), torch.tensor([0, 1])
        >>> knn_predict(x, y, torch.tensor([[0.9, 0.1], [0.2, 0.8]]), k=1).tolist()
        [0, 1]
    """
    if k < 1 or temperature <= 0:
        raise argument_error(
            "knn_predict", "k of at least 1 and a positive temperature", "(k, temperature)", (k, temperature)
        )
    bank, queries = directions(train_x), directions(test_x)
    classes, targets = torch.unique(train_y.to(bank.device), return_inverse=True)
    k, block = min(k, len(bank)), max(1, min(block, MAX_SIMILARITIES // len(bank)))
    predicted = []
    for start in range(0, len(queries), block):
        similarity, nearest = (queries[start : start + block] @ bank.T).topk(k, dim=1)
        # Subtracting the largest changes no vote and prevents overflow at low temperatures.
        weights = ((similarity - similarity[:, :1]) / temperature).exp()
        votes = weights.new_zeros(len(weights), len(classes)).scatter_add_(1, targets[nearest], weights)
        predicted.append(classes[votes.argmax(1)])
    return torch.cat(predicted)


def evaluate_file(path: str | Path, **options: Any) -> dict[str, Any]:
    """Run ``evaluate_embeddings`` on a saved .npz file.

    Args:
        path: File with train_x, train_y, test_x and test_y, such as a run's embeddings.npz.
        **options: Options of ``evaluate_embeddings``.
    """
    split, classes = read_embeddings(Path(path))
    warn_of_unseen_classes(split[1], split[3], classes)
    return evaluate_embeddings(*split, **options)


def _accuracy(predicted: Labels, y: Labels) -> float:
    return (predicted == y.to(predicted.device)).double().mean().item()


def _plain(value: Tensor | float) -> Any:
    """Convert to a list or a number for JSON; NaN, which JSON lacks, becomes None."""
    if isinstance(value, Tensor):
        return value.tolist()
    return None if math.isnan(value) else value
