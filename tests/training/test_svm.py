"""The cross-validated support vector machine against scikit-learn's plain pipeline."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError
from hardneg.training.evaluation.svm import svm_accuracy, svm_correct, svm_predict

pytest.importorskip("sklearn", reason="scikit-learn is not installed")
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from support.errors import raises


def blobs(n: int = 60, classes: int = 3, spread: float = 1.5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % classes
    x = torch.randn(n, 5, generator=generator) * spread + 2.0 * torch.nn.functional.one_hot(y, 5)
    return torch.cat([x * torch.tensor([1.0, 10.0, 1.0, 0.1, 1.0]), torch.ones(n, 1)], dim=1), y


def test_predictions_are_those_of_scikit_learn() -> None:
    x, y = blobs()
    scaler = StandardScaler().fit(x[:45].double())
    search = GridSearchCV(
        SVC(gamma=1 / 5),  # the constant column does not count
        {"C": [0.01, 0.1, 1.0, 10.0, 100.0]},
        cv=StratifiedKFold(5, shuffle=True, random_state=3),
    )
    search.fit(scaler.transform(x[:45].double()), y[:45].numpy())
    expected = search.predict(scaler.transform(x[45:].double()))
    assert (expected != y[45:].numpy()).any()
    assert svm_predict(x[:45], y[:45], x[45:], seed=3).tolist() == expected.tolist()


def test_each_row_is_tested_once_by_a_machine_that_did_not_see_it() -> None:
    generator = torch.Generator().manual_seed(0)
    noise, y = torch.randn(200, 20, generator=generator), torch.arange(200) % 2
    assert svm_accuracy(noise, y, repeats=2)["mean"] == pytest.approx(0.5, abs=0.12)  # a leak would be near 1
    x, y = blobs(spread=0.1)
    right = svm_correct(x, y)
    assert right.shape == (60,)
    assert bool(right.all())


def test_repeats_give_a_mean_and_a_deviation() -> None:
    x, y = blobs()
    found = svm_accuracy(x, y, folds=5, repeats=3)
    assert len(set(found["repeats"])) > 1
    assert found["mean"] == pytest.approx(np.mean(found["repeats"]))
    assert found["deviation"] == pytest.approx(np.std(found["repeats"], ddof=1))
    again = svm_accuracy(x, y, folds=5)
    assert again["repeats"] == found["repeats"][:1]
    assert again["deviation"] is None


def test_small_classes_have_fewer_folds_and_too_small_ones_raise() -> None:
    x, y = blobs(12, 3)
    assert 0.0 <= svm_accuracy(x, y)["mean"] <= 1.0  # four folds
    assert svm_correct(x, torch.tensor([0] * 10 + [1] * 2)).shape == (12,)  # of two rows one is left to fit
    with raises(ArgumentError, who="svm", got="rows by class {0: 11, 1: 1}"):
        svm_accuracy(x, torch.tensor([0] * 11 + [1]))
    with pytest.raises(ArgumentError, match="two classes"):
        svm_accuracy(x, torch.zeros(12, dtype=torch.int64))
