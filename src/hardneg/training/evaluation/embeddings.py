"""How good embeddings are: a linear probe and nearest neighbours, and what pairs.py says of their geometry.

Plain functions on tensors, on any device, and seeded. Features are taken as an encoder gives them: the probe
standardises them, the others use their directions.
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

PROBES = ("torch", "sklearn", "none")


def evaluate_embeddings(
    train_x: EmbeddingRows, train_y: Labels, test_x: EmbeddingRows, test_y: Labels, *,
    k: int = 200, temperature: float = 0.5, probe: str = "torch", seed: int = 0, max_pairs: int = MAX_PAIRS,
) -> dict[str, Any]:  # fmt: skip
    """All of the evaluations, as numbers and lists that JSON can hold; accuracies are fractions.

    ``k`` is at most the mean size of a class in the train split, since a vote of more must go to other classes; the
    result says which k it was. ``probe="none"`` leaves out the slowest. The histograms and uniformity are those of the
    test features: of all pairs, or of ``max_pairs`` drawn ones where there are more. One test row has no pair, and the
    result then has neither.
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
    # Comparisons need to know which test rows were right, not only how many.
    result["correct"] = {name: pack_bits((labels.cpu() == test_y.cpu()).numpy()) for name, labels in predicted.items()}
    return result | (geometry(test_x, test_y, max_pairs, seed) if len(test_x) > 1 else {})


def geometry(x: EmbeddingRows, y: Labels, max_pairs: int = MAX_PAIRS, seed: int = 0) -> dict[str, Any]:
    """Uniformity and the histograms of similarities, as numbers and lists."""
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
    """The label with the heaviest vote of the k nearest by cosine for each test row (Wu et al. 2018).

    A vote weighs e^(cosine / temperature); k is clipped to the number of train rows.
    """
    if k < 1 or temperature <= 0:
        raise argument_error(
            "knn_predict", "k of at least 1 and a positive temperature", "(k, temperature)", (k, temperature)
        )
    bank, queries = directions(train_x), directions(test_x)
    classes, targets = torch.unique(train_y.to(bank.device), return_inverse=True)
    k = min(k, len(bank))
    predicted = []
    for start in range(0, len(queries), block):
        similarity, nearest = (queries[start : start + block] @ bank.T).topk(k, dim=1)
        # Minus the largest, which changes no vote: nothing overflows at a low temperature.
        weights = ((similarity - similarity[:, :1]) / temperature).exp()
        votes = weights.new_zeros(len(weights), len(classes)).scatter_add_(1, targets[nearest], weights)
        predicted.append(classes[votes.argmax(1)])
    return torch.cat(predicted)


def evaluate_file(path: str | Path, **options: Any) -> dict[str, Any]:
    """``evaluate_embeddings`` of a saved .npz file."""
    split, classes = read_embeddings(Path(path))
    warn_of_unseen_classes(split[1], split[3], classes)
    return evaluate_embeddings(*split, **options)


def _accuracy(predicted: Labels, y: Labels) -> float:
    return (predicted == y.to(predicted.device)).double().mean().item()


def _plain(value: Tensor | float) -> Any:
    """A list or a number; None for NaN, which JSON does not have."""
    if isinstance(value, Tensor):
        return value.tolist()
    return None if math.isnan(value) else value
