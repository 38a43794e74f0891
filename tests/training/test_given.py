"""Images that Python code gives to hn.train: data sets, arrays and paths, with ids and labels or without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import hardneg as hn
from hardneg.core.errors import ArgumentError, DataChanged, UnknownName
from hardneg.training.data.given import Part, give
from hardneg.training.data.images import ImageData, load_splits
from hardneg.training.data.lazy_images import Opening
from support.errors import raises
from support.image_folders import random_images, write_folder
from support.training_runs import assert_same, everything, interrupted

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
pytest.importorskip("accelerate", reason="training needs the extra train")
pytestmark = pytest.mark.filterwarnings("ignore:The run in .* has collapsed")
RUN: dict[str, Any] = {"epochs": 2, "batch_size": 8, "dim": 8, "encoder": "tiny", "device": "cpu", "log_every": 1}


class Items(Dataset[Any]):
    """A data set of what a function returns."""

    def __init__(self, number: int, item: Any) -> None:
        self.number, self.item = number, item

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, row: int) -> Any:
        return self.item(row)


def read(name: str) -> tuple[ImageData, ImageData]:
    train, test, _ = load_splits(name, how=Opening(cache="none"))
    return train, test


@pytest.mark.parametrize("kind", ["paths", "examples"])
def test_trains_like_a_folder(kind: str, tmp_path: Path) -> None:
    """The same images in the same order with the same classes end with the same bits, also when resumed."""
    write_folder(tmp_path / "photos", {"a": 20, "b": 20}, (20, 16, 3))
    paths = sorted((tmp_path / "photos").rglob("*.png"))
    labels = [path.parent.name for path in paths]
    data: Any = paths if kind == "paths" else Items(len(paths), lambda row: (Image.open(paths[row]), labels[row]))
    given = {"labels": labels} if kind == "paths" else {}
    how = {**RUN, "quiet": True, "workers": 1, "cache_images": "none"}
    hn.train("simclr", f"folder:{tmp_path / 'photos'}@16", tmp_path / "folder", **how)
    with interrupted(4):
        hn.train("simclr", data, tmp_path / "given", size=16, **given, **how)
    hn.train("simclr", data, tmp_path / "given", size=16, resume=True, **given, **how)
    found, expected = everything(tmp_path / "given"), everything(tmp_path / "folder")
    assert found["state"].pop("of") != expected["state"].pop("of"), "their names differ"
    for one in (found, expected):  # digests of files, or of pixels
        one["result"]["trained"].pop("data")
    assert_same(found, expected)
    encoder: Any = hn.load_encoder(tmp_path / "given")
    assert encoder.features(torch.rand(2, 3, 16, 16)).shape == (2, 128)
    with raises(DataChanged):
        hn.train("simclr", paths[::-1], tmp_path / "given", size=16, labels=labels[::-1], resume=True, **how)


def test_arrays_have_their_labels_and_ids() -> None:
    images, labels = random_images(10, 3, 8, 8), np.arange(10) % 2
    train, test = read(give("a", Part((torch.from_numpy(images), labels), ids=torch.arange(10) + 100)))
    assert sorted([*train.ids.tolist(), *test.ids.tolist()]) == list(range(100, 110))
    assert np.array_equal(train.images.numpy(), images[train.ids.numpy() - 100])
    assert np.array_equal(train.labels.numpy(), labels[train.ids.numpy() - 100])
    train, test = read(give("b", Part(images, ids=[*range(5, 15)]), Part(images[:4])))
    assert (train.ids.tolist(), test.ids.tolist(), train.labels) == ([*range(5, 15)], [*range(15, 19)], None)
    train, test = read(give("c", Part(images, ["z", "x", "y", "x", "y"] * 2), Part(images, ["y", "z"] * 5)))
    assert (train.classes, train.labels[:3].tolist(), test.labels[:2].tolist()) == (("x", "y", "z"), [2, 0, 1], [1, 2])


def test_ids_decide_the_views(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 4}, (20, 16, 3))
    paths = sorted(tmp_path.rglob("*.png"))
    parts = [read(give("x", Part(paths, ids=ids)) + "@8")[0] for ids in ([7, 8, 9, 10], [10, 9, 8, 7], None)]
    options = hn.training.options.SimCLROptions(augment="cifar")
    views = [part.prepared(options).views(torch.arange(4), 0, 0)[0] for part in parts]
    assert not any(torch.equal(views[0], other) for other in views[1:])
    again = read(give("x", Part(paths[::-1], ids=[10, 9, 8, 7])) + "@8")[0].prepared(options)
    assert torch.equal(again.views(torch.arange(4), 0, 0)[0], views[0].flip(0))


def test_a_data_set_of_the_hub_is_read_lazily() -> None:
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    pictures = [Image.fromarray(pixels) for pixels in random_images(10, 8, 8, 3)]
    rows = datasets.Dataset.from_dict({"image": pictures, "label": [1, 0] * 5}, features=features)
    train, _ = read(give("rows", Part(rows)))
    assert (len(train), train.classes, sorted(train.labels.tolist())) == (8, ("cat", "dog"), [0] * 4 + [1] * 4)


class TestWrongData:
    @pytest.mark.parametrize(
        ("item", "got"),
        [
            (lambda row: torch.rand(3, 8, 8), "float32 in item 0"),
            (lambda row: np.random.rand(8, 8, 3), "float64"),
            (lambda row: "cat", "str in item 0"),
            (lambda row: [][row], "IndexError"),
        ],
    )
    def test_items_that_are_no_images_are_named(self, item: Any, got: str) -> None:
        with raises(ArgumentError, who="data", got=got):
            read(give("x", Part(Items(6, item))))

    def test_random_items_are_refused(self) -> None:
        images = random_images(64, 8, 8, 3)
        with raises(ArgumentError, who="data", what="the same image whenever it is read"):
            give("x", Part(Items(6, lambda row: images[np.random.randint(64)])))

    def test_some_bad_items_can_be_skipped(self) -> None:
        images = random_images(10, 8, 8, 3)
        name = give("x", Part(Items(10, lambda row: (images[row] if row != 3 else None, row % 2))))
        with raises(ArgumentError, who="data", got="NoneType in item 3"):
            read(name)
        with pytest.warns(match="Skipped 1 of 10"):
            train, test, _ = load_splits(name, how=Opening(bad="skip"))
        assert len(train) + len(test) == 9

    def test_wrong_arguments_are_named(self, tmp_path: Path) -> None:
        images = random_images(10, 3, 8, 8)
        with raises(ArgumentError, who="data", got="3 labels and 10 images"):
            hn.train("simclr", images, tmp_path, labels=[0, 1, 0])
        with raises(ArgumentError, who="data", what="a label for every item or for none"):
            hn.train("simclr", images, tmp_path, labels=[0, 1, -1, 0, 1, 0, 1, 0, 1, 0])
        with raises(ArgumentError, what="distinct ids", got="1 repeated"):
            hn.train("simclr", images, tmp_path, ids=[*range(9), 0], quiet=True)
        with raises(ArgumentError, who="data", got="generator"):
            hn.train("simclr", (one for one in images), tmp_path)
        with raises(ArgumentError, who="data", what="images to train and to test on of the same kind"):
            hn.train("simclr", images, tmp_path, test=["a.jpg"])
        with raises(ArgumentError, who="train", what="no labels="):
            hn.train("simclr", "digits", tmp_path, labels=[0])
        with raises(ArgumentError, who="train", what="a recipe among"):
            hn.train("simcler", images, tmp_path)
        with raises(UnknownName, name="epocs"):
            hn.train("simclr", images, tmp_path, epocs=1)
        with raises(ArgumentError, who="data", what="data that this process was given"):
            read("given:another")
