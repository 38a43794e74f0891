"""Evaluation against brute force and scikit-learn, on real and on made-up embeddings."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, HardnegWarning, MissingExtra, forget_warnings
from hardneg.io.embeddings import check_split, load_embeddings
from hardneg.training.data.images import load
from hardneg.training.evaluation import logistic
from hardneg.training.evaluation.embeddings import (
    evaluate_embeddings,
    evaluate_file,
    knn_predict,
)
from hardneg.training.evaluation.logistic import (
    STRENGTHS,
    _chosen,
    _fit_torch,
    folds_of,
    linear_predict,
    sklearn_predict,
)
from hardneg.training.evaluation.pairs import _drawn_of_kind, alignment, similarity_histograms, uniformity
from support.errors import raises
from support.training_runs import FEW_ROWS
from support.vectors import save_embeddings

Split = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def all_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs of other tests have one, in the same process."""
    monkeypatch.setattr(logistic, "MAX_CROSS_VALIDATED", FEW_ROWS)


def accuracy(
    predict: Callable[..., Tensor], train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, **how: Any
) -> float:
    return (predict(train_x, train_y, test_x, **how) == test_y).double().mean().item()


knn_accuracy, linear_probe = partial(accuracy, knn_predict), partial(accuracy, linear_predict)
sklearn_probe = partial(accuracy, sklearn_predict)


@pytest.fixture(scope="module")
def digits() -> Split:
    train, test = load("digits", "train"), load("digits", "test")
    assert train.labels is not None
    assert test.labels is not None
    return train.images.flatten(1) / 255.0, train.labels, test.images.flatten(1) / 255.0, test.labels


def clusters(n: int, seed: int = 0, num: int = 4, spread: float = 0.6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(num, 8, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(num, (n,), generator=generator)
    return centres[labels] + spread * torch.randn(n, 8, generator=generator), labels


class TestNeighbours:
    @pytest.mark.parametrize(("k", "temperature"), [(1, 0.5), (7, 0.5), (30, 0.07), (10_000, 0.5)])
    def test_votes_as_a_loop_does(self, k: int, temperature: float) -> None:
        (x, y), (queries, _) = clusters(120), clusters(25, seed=1)
        y = 10 * y - 7  # labels need not count from 0
        predicted = knn_predict(x, y, queries, k=k, temperature=temperature, block=10)
        unit = x.double() / x.double().norm(dim=1, keepdim=True)
        for i, query in enumerate(queries.double()):
            similarity = unit @ (query / query.norm())
            votes: dict[int, float] = {}
            for j in similarity.argsort(descending=True)[:k].tolist():
                votes[int(y[j])] = votes.get(int(y[j]), 0.0) + math.exp(similarity[j] / temperature)
            assert int(predicted[i]) == max(votes, key=votes.__getitem__)

    def test_nearest_neighbour_agrees_with_sklearn(self, digits: Split) -> None:
        neighbors = pytest.importorskip("sklearn.neighbors")
        train_x, train_y, test_x, test_y = digits
        theirs = neighbors.KNeighborsClassifier(1, metric="cosine").fit(train_x.numpy(), train_y.numpy())
        assert knn_accuracy(*digits, k=1) == pytest.approx(theirs.score(test_x.numpy(), test_y.numpy()), abs=1e-12)

    def test_scale_and_order_do_not_matter(self, digits: Split) -> None:
        train_x, train_y, test_x, test_y = digits
        order = torch.randperm(len(train_x))
        shuffled = (train_x[order] * torch.rand(len(order), 1).add(0.5), train_y[order], 3 * test_x, test_y)
        assert knn_accuracy(*shuffled) == knn_accuracy(*digits)

    def test_a_low_temperature_does_not_overflow(self) -> None:
        x = torch.eye(3).repeat(4, 1)
        y = torch.arange(3).repeat(4)
        assert knn_accuracy(x, y, x[:3], y[:3], k=12, temperature=0.005) == 1.0

    def test_wrong_k_is_reported(self, digits: Split) -> None:
        with raises(ArgumentError, who="knn_predict", got="(k, temperature)=(0, 0.5)"):
            knn_accuracy(*digits, k=0)


def noisy(n: int, dim: int, num: int, noise: float) -> Split:
    """Classes whose features are mostly noise: without a penalty a probe learns the train rows by heart."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(num, (n + 1000,), generator=generator)
    x = torch.randn(num, dim, generator=generator)[labels] + noise * torch.randn(n + 1000, dim, generator=generator)
    return x[:n], labels[:n], x[n:], labels[n:]


class TestProbes:
    @pytest.mark.parametrize(
        ("n", "dim", "num", "noise"), [(400, 300, 2, 8.0), (900, 64, 10, 3.0), (600, 128, 20, 4.0)]
    )
    def test_torch_agrees_with_sklearn_within_a_point(self, n: int, dim: int, num: int, noise: float) -> None:
        split = noisy(n, dim, num, noise)
        assert linear_probe(*split) == pytest.approx(sklearn_probe(*split), abs=0.01)

    def test_the_penalty_is_chosen_as_cross_validation_of_sklearn_does(self) -> None:
        linear_model, search = map(pytest.importorskip, ("sklearn.linear_model", "sklearn.model_selection"))
        train_x, train_y, test_x, test_y = noisy(500, 100, 5, 5.0)
        grid = {"C": STRENGTHS}
        theirs = search.GridSearchCV(linear_model.LogisticRegression(), grid, scoring="neg_log_loss")
        scaled = [(x - train_x.mean(0)) / train_x.std(0, correction=0) for x in (train_x, test_x)]
        theirs.fit(scaled[0].numpy(), train_y.numpy())
        expected = float((theirs.predict(scaled[1].numpy()) == test_y.numpy()).mean())
        assert linear_probe(train_x, train_y, test_x, test_y) == pytest.approx(expected, abs=0.01)
        # Without a choice it is far from it, as the probe was before it chose.
        assert linear_probe(train_x, train_y, test_x, test_y, strengths=(100.0,)) < expected - 0.02

    def test_one_strength_is_sklearns_optimum(self, digits: Split) -> None:
        exact = sklearn_probe(*digits, strengths=(0.1,))
        assert exact > 0.94
        assert linear_probe(*digits, strengths=(0.1,)) == pytest.approx(exact, abs=0.004)

    def test_on_noise_the_strongest_penalties_are_chosen(self) -> None:
        generator = torch.Generator().manual_seed(2)
        x, y = torch.randn(200, 1024, generator=generator), torch.randint(2, (200,), generator=generator)
        # A fit that began with the weights of another fold would know the rows that are held out.
        assert _chosen(_fit_torch, x, y, STRENGTHS, 0) <= 1e-3

    def test_a_rare_class_does_not_switch_the_choice_off(self) -> None:
        x, y, _, _ = noisy(200, 100, 2, 8.0)
        chosen = _chosen(_fit_torch, x, y, STRENGTHS, 0)
        more = torch.cat([x, x[:1]]), torch.cat([y, torch.tensor([2])])
        assert chosen < 1.0
        assert _chosen(_fit_torch, *more, STRENGTHS, 0) < 1.0

    def test_two_classes_have_the_penalty_of_sklearn(self) -> None:
        linear_model = pytest.importorskip("sklearn.linear_model")
        x, y, rows, _ = noisy(100, 8, 2, 3.0)
        theirs = linear_model.LogisticRegression(C=0.01, tol=1e-8).fit(x.numpy(), y.numpy())
        expected = torch.from_numpy(theirs.predict_log_proba(rows.numpy())).float()
        torch.testing.assert_close(_fit_torch(x, y, 0.01)(rows), expected, rtol=1e-2, atol=1e-2)

    def test_folds_share_out_every_class(self) -> None:
        y = torch.tensor([0] * 10 + [1] * 7 + [3] * 5)[torch.randperm(22)]
        folds = folds_of(y, 5, seed=0)
        assert [torch.bincount(folds[y == one], minlength=5).tolist() for one in (0, 3)] == [[2] * 5, [1] * 5]
        assert sorted(torch.bincount(folds[y == 1], minlength=5).tolist()) == [1, 1, 1, 2, 2]
        assert torch.equal(folds, folds_of(y, 5, seed=0))
        assert not torch.equal(folds, folds_of(y, 5, seed=1))

    def test_the_defaults_separate_what_is_separable(self) -> None:
        (x, y), (test_x, test_y) = clusters(500, spread=0.2), clusters(200, seed=1, spread=0.2)
        assert linear_probe(x, y, test_x, test_y) == 1.0

    def test_same_seed_same_result(self) -> None:
        split = noisy(200, 16, 3, 3.0)
        first, same = (linear_predict(*split[:3], seed=5) for _ in range(2))
        assert torch.equal(first, same)

    def test_scale_shift_and_constant_features_do_not_matter(self, digits: Split) -> None:
        train_x, train_y, test_x, test_y = digits
        moved = tuple(torch.cat([100.0 * x + 7.0, torch.full((len(x), 2), 3.3)], dim=1) for x in (train_x, test_x))
        expected = linear_probe(*digits, strengths=(0.1,))
        assert linear_probe(moved[0], train_y, moved[1], test_y, strengths=(0.1,)) == pytest.approx(expected, abs=0.006)

    def test_labels_need_not_count_from_zero(self) -> None:
        train_x, train_y, test_x, test_y = noisy(200, 16, 3, 3.0)
        expected = linear_probe(train_x, train_y, test_x, test_y)
        assert linear_probe(train_x, 5 * train_y - 9, test_x, 5 * test_y - 9) == expected

    def test_works_where_gradients_are_switched_off(self, digits: Split) -> None:
        with torch.no_grad():
            assert linear_probe(*digits, strengths=(0.1,)) > 0.9

    def test_without_sklearn_the_extra_is_named(self, digits: Split, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
        with raises(MissingExtra, who="sklearn_predict", fix="'hardneg[eval]'"):
            sklearn_probe(*digits)


class TestPairs:
    def test_alignment_by_a_loop(self) -> None:
        a, b = torch.randn(2, 20, 6, dtype=torch.float64)
        unit = [x / x.norm(dim=1, keepdim=True) for x in (a, b)]
        expected = sum(float((u - v).norm()) ** 3 for u, v in zip(*unit, strict=True)) / 20
        assert alignment(a, b, exponent=3.0) == pytest.approx(expected, rel=1e-5)
        assert alignment(a, 5 * a) == pytest.approx(0.0, abs=1e-12)
        with raises(ArgumentError, who="alignment", got="second=(5, 6)"):
            alignment(a, b[:5])

    def test_uniformity_is_wang_and_isolas(self) -> None:
        x = torch.randn(60, 5)
        unit = (x / x.norm(dim=1, keepdim=True)).double()
        expected = torch.pdist(unit).square().mul(-2.0).exp().mean().log().item()
        assert uniformity(x) == pytest.approx(expected, rel=1e-5)

    def test_uniformity_of_drawn_pairs_is_near_that_of_all(self) -> None:
        x = torch.randn(300, 5)
        exact = uniformity(x)
        drawn = [uniformity(x, max_pairs=5000, seed=seed) for seed in (0, 0, 1)]
        assert drawn[0] == drawn[1] != drawn[2]
        assert drawn[0] == pytest.approx(exact, abs=0.05)
        assert uniformity(torch.ones(9, 4)) == pytest.approx(0.0, abs=1e-6)

    def test_histograms_of_all_pairs_by_a_loop(self) -> None:
        x, y = clusters(50)
        found = similarity_histograms(x, y, bins=20)
        unit = (x / x.norm(dim=1, keepdim=True)).double()
        values: dict[bool, list[float]] = {True: [], False: []}
        for i in range(50):
            for j in range(i + 1, 50):
                values[bool(y[i] == y[j])].append(float(unit[i] @ unit[j]))
        for kind, counts, mean in [(True, found.same, found.same_mean), (False, found.other, found.other_mean)]:
            expected = np.histogram(values[kind], bins=20, range=(-1, 1))[0]
            assert counts.tolist() == expected.tolist()
            assert mean == pytest.approx(np.mean(values[kind]), abs=1e-6)
        assert found.edges.tolist() == pytest.approx(np.linspace(-1, 1, 21).tolist(), abs=1e-6)

    @pytest.mark.parametrize("same", [True, False])
    def test_drawn_pairs_are_even_over_all_of_their_kind(self, same: bool) -> None:
        y = torch.tensor([5, 1, 1, 5, 5, 2, 1, 5, 9, 9])  # classes of 4, 3, 1 and 2
        drawn = _drawn_of_kind(y, 60_000, same, seed=0)
        assert drawn is not None
        i, j = drawn
        counts = torch.zeros(10, 10).index_put_((i, j), torch.ones(()), accumulate=True)
        allowed = (y[:, None] == y) == same
        allowed.fill_diagonal_(False)
        expected = 60_000 / allowed.sum()
        assert counts[~allowed].sum() == 0
        degrees = int(allowed.sum()) - 1
        chi_squared = ((counts[allowed] - expected) ** 2 / expected).sum()
        assert abs(chi_squared - degrees) < 4 * math.sqrt(2 * degrees)

    def test_histograms_of_drawn_pairs_are_near_those_of_all(self) -> None:
        x, y = clusters(400)
        exact, drawn = similarity_histograms(x, y, bins=10), similarity_histograms(x, y, bins=10, max_pairs=20_000)
        assert (int(drawn.same.sum()), int(drawn.other.sum())) == (20_000, 20_000)
        for all_pairs, some in [(exact.same, drawn.same), (exact.other, drawn.other)]:
            assert (all_pairs / all_pairs.sum() - some / some.sum()).abs().max() < 0.015
        assert drawn.same_mean == pytest.approx(exact.same_mean, abs=0.01)

    def test_no_pair_of_a_kind(self) -> None:
        x = torch.randn(40, 3)
        for max_pairs in (1000, 100):
            found = similarity_histograms(x, torch.arange(40), max_pairs=max_pairs)
            assert found.same.sum() == 0
            assert math.isnan(found.same_mean)
        with raises(ArgumentError, who="similarity_histograms", got="x=(1, 3)"):
            similarity_histograms(x[:1], torch.zeros(1, dtype=torch.int64))


class TestTogether:
    def test_all_evaluations_as_json(self, digits: Split) -> None:
        result = evaluate_embeddings(*digits, probe="sklearn")
        assert json.loads(json.dumps(result, allow_nan=False)) == result
        assert result["knn"] == knn_accuracy(*digits, k=143) != knn_accuracy(*digits)
        assert result["1nn"] == knn_accuracy(*digits, k=1)
        assert result["linear"] == sklearn_probe(*digits)
        assert result["uniformity"] == uniformity(digits[2])
        assert result["similarities"]["same_mean"] > result["similarities"]["other_mean"]
        assert (result["k"], result["num_train"], result["num_test"]) == (143, 1437, 360), (
            "200 is more than a class has"
        )
        assert evaluate_embeddings(*digits, k=20, probe="none")["k"] == 20

    def test_few_rows_clip_k_and_lone_classes_have_no_mean(self) -> None:
        x = torch.randn(5, 3)
        result = evaluate_embeddings(x, torch.arange(5), x, torch.arange(5), probe="none")
        assert result["k"] == 1
        assert result["1nn"] == 1.0
        assert result["similarities"]["same_mean"] is None
        json.dumps(result, allow_nan=False)

    @pytest.mark.parametrize("probe", ["torch", "sklearn"])
    @pytest.mark.parametrize("num_train", [2, 3, 40])
    @pytest.mark.parametrize("test_y", [[0], [0, 0], [0, 1], [7]])
    def test_a_few_rows_are_evaluated_as_far_as_they_go(self, probe: str, num_train: int, test_y: list[int]) -> None:
        train_y = torch.arange(num_train) % 2
        x = torch.eye(2)[train_y] + 0.01 * torch.arange(num_train)[:, None]
        labels = torch.tensor(test_y)
        forget_warnings()
        with pytest.warns(HardnegWarning, match=r"1 of 1 test items .* \(7\)") if 7 in test_y else nullcontext():
            result = evaluate_embeddings(x, train_y, torch.eye(2)[labels % 2], labels, probe=probe)
        assert json.loads(json.dumps(result, allow_nan=False)) == result
        seen = float(7 not in test_y)
        assert (result["1nn"], result["knn"], result["linear"]) == (seen, seen, seen)
        assert (result["num_train"], result["num_test"]) == (num_train, len(test_y))
        assert ("uniformity" in result, "similarities" in result) == (len(test_y) > 1, len(test_y) > 1)
        if len(test_y) > 1:  # a distance of 0 or of sqrt(2)
            assert result["uniformity"] == pytest.approx(-4.0 * (test_y == [0, 1]), abs=1e-6)
            assert sum(result["similarities"]["same"]) + sum(result["similarities"]["other"]) == 1

    def test_saved_embeddings_give_the_same(self, digits: Split, tmp_path: Path) -> None:
        save_embeddings(tmp_path / "x.npz", *digits)
        for saved, part in zip(load_embeddings(tmp_path / "x.npz"), digits, strict=True):
            assert torch.equal(saved, part)
        assert evaluate_file(tmp_path / "x.npz", probe="none", k=5) == evaluate_embeddings(*digits, probe="none", k=5)

    def test_saved_embeddings_that_are_not_are_reported(self, tmp_path: Path) -> None:
        with pytest.raises(
            FileNotFoundError,
            match=r"for each of train_x, train_y, test_x, test_y in an \.npz file, got .*, which is not a file",
        ):
            load_embeddings(tmp_path / "none.npz")
        np.savez(tmp_path / "x.npz", train_x=np.zeros((2, 2)), test_y=np.zeros(2))
        with pytest.raises(ValueError, match=r"got .*x\.npz, which lacks train_y, test_x and has "):
            load_embeddings(tmp_path / "x.npz")
        np.save(tmp_path / "a.npy", np.zeros((2, 2)))
        with pytest.raises(
            ValueError, match=r"a\.npy, which is a \.npy file of one array; write it with np\.savez\(PATH, train_x="
        ):
            evaluate_file(tmp_path / "a.npy")
        for text in ("just a text", "PK"):
            (tmp_path / "text.npz").write_text(text)
            with pytest.raises(
                ValueError, match=r"text\.npz, which is another kind of file; write it with np\.savez"
            ) as error:
                evaluate_file(tmp_path / "text.npz")
            assert "pickle" not in str(error.value)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"test_y": np.array(["a", "b"], object)}, r"objects in test_y of .*; use np\.array\(test_y, dtype=str\)"),
            (
                {"train_x": np.array([[1], None], object)},
                r"objects in train_x of .*; use np\.array.*dtype=float\)",
            ),
            ({"train_x": np.array([["1"], ["2"]])}, "needs numbers in train_x, got <U1 in"),
            ({"train_y": np.array([0.5, 1.0])}, r"got 1 of 2 others, such as 0\.5, in train_y of"),
            ({"train_y": np.array([np.nan, 1.0])}, "integer label"),
            ({"train_y": np.array([7, 7])}, r"two classes in train_y, got only one \(every label is 7\)\.$"),
            ({"train_y": np.array([["a"], ["b"]])}, r"labels \[n\], one for each row"),
            (
                {"test_y": np.array([b"a", b"\xff"])},
                r"^load_embeddings .*UTF-8.* got b'\\xff' in test_y of .*x\.npz",
            ),
            ({"test_y": np.array([0, 2**63], np.uint64)}, r"2\*\*63 - 1, got 1 of 2 .* in test_y of .*x\.npz"),
        ],
    )
    def test_arrays_that_cannot_be_used_are_named(
        self, changes: dict[str, np.ndarray], message: str, tmp_path: Path
    ) -> None:
        arrays = {"train_x": np.eye(2), "train_y": np.arange(2), "test_x": np.eye(2), "test_y": np.arange(2)}
        np.savez(tmp_path / "x.npz", **(arrays | changes))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message) as error:
            evaluate_file(tmp_path / "x.npz")
        assert "pickle" not in str(error.value)

    @pytest.mark.parametrize("dtype", [str, "S1", float, bool, np.uint8, ">i4"])
    def test_labels_of_every_plain_type_are_evaluated(self, dtype: object, tmp_path: Path) -> None:
        train_y, test_y = np.array([1, 0, 1, 0]), np.array([0, 1])
        x = np.eye(2, dtype=">f8")
        np.savez(
            tmp_path / "x.npz", train_x=x[train_y], train_y=train_y.astype(dtype), test_x=x[test_y],
            test_y=test_y.astype(dtype),
        )  # fmt: skip
        assert [part.tolist() for part in load_embeddings(tmp_path / "x.npz")[1::2]] == [[1, 0, 1, 0], [0, 1]]
        result = evaluate_file(tmp_path / "x.npz", probe="none")
        assert (result["1nn"], result["knn"]) == (1.0, 1.0)

    def test_classes_that_training_lacks_are_warned_of_by_name(self, tmp_path: Path) -> None:
        x, names = np.eye(8), np.array(list("abcdefgh"))
        np.savez(tmp_path / "x.npz", train_x=x[:2], train_y=names[:2], test_x=x, test_y=names)
        forget_warnings()
        match = r"^6 of 8 test items belong to classes without training items \(c, d, e, f, g and 1 more\)"
        with pytest.warns(HardnegWarning, match=match) as reported:
            result = evaluate_file(tmp_path / "x.npz", probe="none")
        assert len(reported) == 1
        assert result["1nn"] == 0.25

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({0: torch.zeros(6)}, r"features \[n, d\]"),
            ({1: torch.zeros(5, dtype=torch.int64)}, "label per row"),
            ({1: torch.zeros(6)}, "integer label"),
            ({2: torch.randn(4, 7)}, "test features of width 3"),
            ({0: torch.full((6, 3), torch.nan)}, "finite features, got 18 NaN or infinite values in train_x"),
            ({1: torch.zeros(6, dtype=torch.int64)}, "at least two classes"),
            ({2: torch.zeros(0, 3), 3: torch.zeros(0, dtype=torch.int64)}, "test_x=.0, 3."),
        ],
    )
    def test_wrong_embeddings_are_reported(self, change: dict[int, Tensor], message: str) -> None:
        split = [torch.randn(6, 3), torch.arange(6) % 2, torch.randn(4, 3), torch.arange(4) % 2]
        check_split(*split)
        for position, value in change.items():
            split[position] = value
        with pytest.raises(ValueError, match=message):
            evaluate_embeddings(*split)

    def test_unknown_probe_is_reported(self, digits: Split) -> None:
        with pytest.raises(ValueError, match="a probe among"):
            evaluate_embeddings(*digits, probe="svm")
