"""How good embeddings are: a linear probe and nearest neighbours, and what pairs.py says of their geometry.

Plain functions on tensors, on any device, and seeded. Features are taken as an encoder gives them: the probe
standardises them, the others use their directions.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hardneg.core.errors import argument_error, optional
from hardneg.io.arrays import warn_of_unseen_classes
from hardneg.io.embeddings import Features, Labels, check_split, pack_bits, read_embeddings
from hardneg.training.evaluation.cuda_graph import InOneLaunch
from hardneg.training.evaluation.pairs import directions, similarity_histograms, uniformity

PROBES = ("torch", "sklearn", "none")


def evaluate_embeddings(
    train_x: Features, train_y: Labels, test_x: Features, test_y: Labels, *,
    k: int = 200, temperature: float = 0.5, probe: str = "torch", seed: int = 0, max_pairs: int = 2_000_000,
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
    if len(test_x) > 1:
        result["uniformity"] = uniformity(test_x, max_pairs=max_pairs, seed=seed)
        histograms = similarity_histograms(test_x, test_y, max_pairs=max_pairs, seed=seed)
        result["similarities"] = {name: _plain(value) for name, value in histograms._asdict().items()}
    return result


def linear_predict(
    train_x: Features, train_y: Labels, test_x: Features, *,
    epochs: int = 100, learning_rate: float = 1e-3, batch_size: int = 256, seed: int = 0,
) -> Labels:  # fmt: skip
    """The label that a logistic regression on frozen, standardised features gives to each test row.

    A linear layer, Adam, mini-batches.
    """
    train, test = _standardised(train_x, test_x)
    classes, targets = torch.unique(train_y, return_inverse=True)
    targets = targets.to(train.device)
    generator = torch.Generator(train.device).manual_seed(seed)
    layer = nn.Linear(train.shape[1], len(classes), device=train.device)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(layer.parameters(), learning_rate, fused=True, capturable=train.is_cuda)

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        cross_entropy(layer(train[rows]), targets[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    one_step = InOneLaunch(step) if train.is_cuda else step
    with torch.enable_grad():
        for _ in range(epochs):
            order = torch.randperm(len(train), generator=generator, device=train.device)
            for rows in order.split(batch_size):  # type: ignore[no-untyped-call]
                one_step(rows)
    with torch.no_grad():
        predicted: Tensor = classes.to(test.device)[layer(test).argmax(1)]
    return predicted


def sklearn_predict(
    train_x: Features, train_y: Labels, test_x: Features, *, strength: float = 1.0, seed: int = 0
) -> Labels:
    """The same by scikit-learn, run to convergence: exact, for thousands of rows.

    ``strength`` is its C, the inverse of the L2 penalty. The seed is not used, the optimum being unique.
    """
    LogisticRegression = optional("sklearn.linear_model", "sklearn_predict", extra="eval").LogisticRegression  # noqa: N806
    train, test = (part.cpu().numpy() for part in _standardised(train_x, test_x))
    model = LogisticRegression(C=strength, max_iter=5000).fit(train, train_y.cpu().numpy())
    return torch.from_numpy(model.predict(test))


def knn_predict(
    train_x: Features, train_y: Labels, test_x: Features, *, k: int = 200, temperature: float = 0.5, block: int = 1024
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


def evaluate_file(path: str | Path, *, device: torch.device | str = "cpu", **options: Any) -> dict[str, Any]:
    """``evaluate_embeddings`` of a saved .npz file."""
    split, classes = read_embeddings(Path(path))
    warn_of_unseen_classes(split[1], split[3], classes)
    return evaluate_embeddings(*(part.to(device) for part in split), **options)


def _standardised(train: Features, test: Features) -> tuple[Tensor, Tensor]:
    """Both splits with the mean and deviation of the train split; a constant feature becomes 0."""
    train, test = train.float(), test.float()
    std, mean = torch.std_mean(train, dim=0, correction=0)
    scale = torch.where(std > 1e-6 * (1.0 + mean.abs()), std, torch.inf)
    return (train - mean) / scale, (test - mean) / scale


def _accuracy(predicted: Labels, y: Labels) -> float:
    return (predicted == y.to(predicted.device)).double().mean().item()


def _plain(value: Tensor | float) -> Any:
    """A list or a number; None for NaN, which JSON does not have."""
    if isinstance(value, Tensor):
        return value.tolist()
    return None if math.isnan(value) else value
