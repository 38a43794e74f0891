"""Images in memory and both splits of a data set: rows stay together, and wrong values are errors at the door."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError, forget_warnings
from hardneg.training.data.image_sources import Files
from hardneg.training.data.images import ImageData, load, load_splits
from hardneg.training.evaluation.embeddings import evaluate_embeddings
from support.errors import raises, warns
from support.image_folders import random_images, write_folder


def image_data(n: int = 4, **changes: object) -> ImageData:
    fields = {
        "images": torch.zeros(n, 1, 8, 8, dtype=torch.uint8),
        "labels": torch.arange(n) % 2,
        "ids": torch.arange(n),
        "name": "x",
        "classes": ("a", "b"),
    }
    return ImageData(**(fields | changes))


class TestImageData:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"images": torch.zeros(4, 1, 8, 8)}, "uint8 images"),
            ({"images": torch.zeros(4, 8, 8, dtype=torch.uint8)}, "uint8 images"),
            ({"images": torch.zeros(4, 2, 8, 8, dtype=torch.uint8)}, "1 or 3"),
            ({"labels": torch.arange(3)}, "one per image"),
            ({"labels": torch.zeros(4)}, "int64 labels"),
            ({"labels": torch.tensor([0, 1, 2, 0])}, r"labels in \[0, 2\), got labels from 0 to 2"),
            ({"labels": torch.tensor([0, 1, -1, 0])}, "from -1"),
            ({"ids": torch.tensor([0, 1, 1, 1])}, "distinct ids, got 2 repeated"),
        ],
    )
    def test_wrong_values_are_reported(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            image_data(**changes)

    def test_no_images_are_reported(self) -> None:
        with raises(ArgumentError, who="ImageData 'x'", what="one image", got="none"):
            image_data(0, labels=None)

    def test_labels_are_needed_by_who_asks(self) -> None:
        with raises(ArgumentError, who="The probe", got="none in 'x'"):
            image_data(labels=None).labelled("The probe")
        with raises(ArgumentError, who="The probe", got="one in 'x': ('a', 'b')"):
            image_data(labels=torch.zeros(4, dtype=torch.int64)).labelled("The probe")
        assert image_data().labelled("The probe").tolist() == [0, 1, 0, 1]

    def test_take_keeps_rows_together(self) -> None:
        data = load("digits", "all")
        some = data.take(torch.tensor([5, 0, 9]))
        assert some.ids.tolist() == [5, 0, 9]
        assert torch.equal(some.images[0], data.images[5])
        assert some.labels is not None
        assert data.labels is not None
        assert torch.equal(some.labels, data.labels[[5, 0, 9]])

    def test_held_out_is_a_stratified_partition(self) -> None:
        data = load("digits", "train")
        rest, held = data.held_out(0.25, seed=3)
        assert len(held) == 360
        assert sorted([*rest.ids.tolist(), *held.ids.tolist()]) == sorted(data.ids.tolist())
        share = held.labels.bincount() / data.labels.bincount()  # type: ignore[union-attr]
        assert ((share - 0.25).abs() * data.labels.bincount() <= 1.0).all()  # type: ignore[union-attr]
        assert not torch.equal(held.ids, data.held_out(0.25, seed=4)[1].ids)

    def test_held_out_works_without_labels_and_says_when_it_cannot(self) -> None:
        rest, held = image_data(10, labels=None).held_out(0.3)
        assert (len(rest), len(held)) == (7, 3)
        with raises(ArgumentError, who="A split of 0.3", got="1"):
            image_data(1, labels=None).held_out(0.3)
        with pytest.raises(ValueError, match="share"):
            image_data(10).held_out(1.0)


class TestBothSplits:
    def test_are_those_of_load(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "whole.npz", images=random_images(30, 8, 8), labels=np.arange(30) % 3)
        np.savez(
            tmp_path / "split.npz", images=random_images(5, 8, 8), labels=[0, 1, 0, 1, 0],
            test_images=random_images(3, 8, 8, seed=1), test_labels=[1, 0, 1],
        )  # fmt: skip
        for name in ("digits", f"npz:{tmp_path / 'whole.npz'}", f"npz:{tmp_path / 'split.npz'}"):
            for both, one in zip(load_splits(name)[:2], (load(name, "train"), load(name, "test")), strict=True):
                for field in ("images", "labels", "ids"):
                    assert torch.equal(getattr(both, field), getattr(one, field))
                assert both.classes == one.classes

    @pytest.mark.parametrize("split", [True, False])
    def test_decode_each_image_once(self, split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("train", "test") if split else (".",):
            write_folder(tmp_path / name, {"cat": 5, "dog": 5})
        decoded: list[int] = []
        read = Files.read

        def counting(self: Files, position: int) -> bytes:
            decoded.append(position)
            return read(self, position)

        monkeypatch.setattr(Files, "read", counting)
        train, test, _ = load_splits(f"folder:{tmp_path}@8")
        assert train.images.shape[2:] == test.images.shape[2:] == (8, 8)
        assert len(decoded) == len(train) + len(test) == (20 if split else 10)

    def test_of_two_sizes_are_reported(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "x.npz", images=random_images(5, 8, 8), test_images=random_images(2, 9, 9))
        message = r"^data needs train and test images of one size, got \(1, 8, 8\) and \(1, 9, 9\) in 'npz:.*x\.npz'\.$"
        with pytest.raises(ValueError, match=message):
            load_splits(f"npz:{tmp_path / 'x.npz'}")
        with pytest.raises(ValueError, match=message):
            load(f"npz:{tmp_path / 'x.npz'}", "all")

    @pytest.mark.parametrize("kind", ["npz", "folder"])
    def test_classes_of_test_images_only_are_warned_of_once(self, kind: str, tmp_path: Path) -> None:
        if kind == "npz":
            name = f"npz:{tmp_path / 'x.npz'}"
            np.savez(
                tmp_path / "x.npz", images=random_images(5, 8, 8), labels=list("ababa"),
                test_images=random_images(4, 8, 8), test_labels=list("aBBC"),
            )  # fmt: skip
        else:
            name = f"folder:{tmp_path}"
            write_folder(tmp_path / "train", {"a": 3, "b": 2})
            write_folder(tmp_path / "test", {"a": 1, "B": 2, "C": 1})
        forget_warnings()
        with warns("unseen classes", "3 of 4") as reported:
            train, test, _ = load_splits(name)
        assert len(reported) == 1
        assert train.labels is not None
        assert test.labels is not None
        # Training ends with the evaluation of the same labels, which says it no second time: a warning is an error.
        result = evaluate_embeddings(torch.eye(5), train.labels, torch.eye(5)[:4], test.labels, probe="none")
        assert result["num_test"] == 4
