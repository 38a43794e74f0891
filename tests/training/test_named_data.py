"""Named data sets: what is read equals what was written, and splits are fixed."""

from __future__ import annotations

import gzip
import os
import pickle
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError, MissingExtra, UnknownName
from hardneg.training.data.images import check_name, load
from hardneg.training.data.named import NAMED, default_root
from support.cifar_files import write_published
from support.errors import raises
from support.image_folders import random_images

DATA = Path(os.environ.get("HARDNEG_DATA", "no data"))


needs_cifar = pytest.mark.skipif(
    not (DATA / "cifar10").is_dir(), reason="needs the montages of CIFAR-10 in HARDNEG_DATA"
)


class TestNamed:
    def test_digits_split_is_fixed(self) -> None:
        train, test = load("digits", "train"), load("digits", "test")
        assert (len(train), len(test)) == (1437, 360)
        assert not set(train.ids.tolist()) & set(test.ids.tolist())
        assert test.ids[:8].tolist() == DIGITS_TEST_IDS
        assert min(test.labels.bincount().tolist()) >= 35  # type: ignore[union-attr]

    def test_digits_pixels_are_those_of_sklearn(self) -> None:
        from sklearn.datasets import load_digits

        data = load("digits", "all")
        assert np.abs(data.images[:, 0].numpy() * (16 / 255) - load_digits().images).max() < 0.04
        assert data.labels.tolist() == load_digits().target.tolist()  # type: ignore[union-attr]

    def test_digits_without_sklearn_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sklearn", None)
        with raises(MissingExtra, who="digits", fix="'hardneg[eval]'"):
            load("digits")

    def test_unknown_names_and_splits_are_reported(self) -> None:
        for name in ("mnist", "folder", "folder:", "digits:x", "zip:x"):
            with pytest.raises(UnknownName, match="Known: digits, fashion-mnist, cifar10, cifar100"):
                check_name(name)
        for name in (*NAMED, "folder:x", "npz:y", "hf:z"):
            check_name(name)
        with pytest.raises(ValueError, match="a split among"):
            load("digits", "valid")
        with pytest.raises(ValueError, match="size"):
            load("digits", size=32)

    @pytest.mark.parametrize("name", ["fashion-mnist", "cifar10", "cifar100"])
    def test_missing_data_says_how_to_get_it(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"apt install|download=True") as error:
            load(name, root=tmp_path)
        assert "--data-root FOLDER (in Python root=FOLDER)" in str(error.value)
        assert str(tmp_path) in str(error.value)

    @pytest.mark.parametrize("packed", [True, False])
    def test_fashion_mnist_reads_idx(self, packed: bool, tmp_path: Path) -> None:
        images = random_images(6, 28, 28)
        labels = np.arange(6).astype(np.uint8)
        write_idx(tmp_path / "train-images-idx3-ubyte", images, packed)
        write_idx(tmp_path / "train-labels-idx1-ubyte", labels, packed)
        data = load("fashion-mnist", "train", tmp_path)
        assert np.array_equal(data.images[:, 0].numpy(), images)
        assert data.classes[data.labels[0]] == "T-shirt/top"  # type: ignore[index]

    def test_fashion_mnist_torn_file_is_reported(self, tmp_path: Path) -> None:
        write_idx(tmp_path / "t10k-images-idx3-ubyte", random_images(6, 28, 28), False)
        write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(6, np.uint8), False)
        path = tmp_path / "t10k-images-idx3-ubyte"
        path.write_bytes(path.read_bytes()[:-5])
        with raises(ArgumentError, who="data", what="IDX file"):
            load("fashion-mnist", "test", tmp_path)

    @pytest.mark.parametrize("packed", [True, False])
    @pytest.mark.parametrize("name", ["cifar10", "cifar100"])
    def test_cifar_reads_the_original_archive(self, name: str, packed: bool, tmp_path: Path) -> None:
        images, labels = write_cifar(tmp_path, name, packed)
        train, test = load(name, "train", tmp_path), load(name, "test", tmp_path)
        assert np.array_equal(torch.cat([train.images, test.images]).flatten(1).numpy(), images)
        assert torch.cat([train.labels, test.labels]).tolist() == labels  # type: ignore[list-item]
        assert test.ids[0] == 50_000
        assert train.classes[1] == "class 1"

    def test_cifar_pickles_run_no_code(self, tmp_path: Path) -> None:
        write_cifar(tmp_path, "cifar10", packed=False)
        (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps({b"data": os.getcwd}))
        with pytest.raises(pickle.UnpicklingError, match=r"arrays only, got posix\.getcwd"):
            load("cifar10", "test", tmp_path)

    @needs_cifar
    def test_cifar10_as_published(self, tmp_path: Path) -> None:
        write_published(DATA / "cifar10", tmp_path, "cifar10")
        data = load("cifar10", "test", tmp_path)
        assert data.images.shape == (10_000, 3, 32, 32)
        assert data.labels.bincount().tolist() == [1000] * 10  # type: ignore[union-attr]
        assert data.classes[int(data.labels[0])] == "cat"  # type: ignore[index]
        mean = data.images.double().mean((0, 2, 3)) / 255
        assert torch.allclose(mean, torch.tensor([0.4942, 0.4851, 0.4504], dtype=torch.float64), atol=2e-3)
        # Neighbouring pixels of a photograph are alike; tiles cut at the wrong place would not be.
        smooth = data.images.double().diff(dim=3).abs().mean((0, 1, 2))
        assert smooth.max() < 1.3 * smooth.mean()


class TestDefaultRoot:
    @pytest.mark.parametrize(
        ("variables", "root"),
        [
            ({"HARDNEG_DATA": "data"}, "data"),
            ({"HARDNEG_DATA": "", "XDG_CACHE_HOME": "cache"}, "cache/hardneg"),
            ({"LOCALAPPDATA": "local"}, "local/hardneg"),
            ({}, "home/.cache/hardneg"),
        ],
    )
    def test_it_is_named_or_in_the_cache_of_the_user(
        self, variables: dict[str, str], root: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("HARDNEG_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(Path, "home", lambda: Path("home"))
        assert default_root() == Path(root)


DIGITS_TEST_IDS = [4, 5, 6, 9, 14, 17, 18, 19]  # results of different versions compare only on one split


def write_idx(path: Path, array: np.ndarray, packed: bool) -> None:
    raw = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()
    path.with_name(path.name + ".gz" * packed).write_bytes(gzip.compress(raw) if packed else raw)


def write_cifar(root: Path, name: str, packed: bool) -> tuple[np.ndarray, list[int]]:
    """The authors' layout with few images: pickles of Python 2, keys as bytes."""
    ten = name == "cifar10"
    folder = root / ("cifar-10-batches-py" if ten else "cifar-100-python")
    folder.mkdir()
    files = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"] if ten else ["train", "test"]
    images, labels = random_images(2 * len(files), 3072), list(range(2 * len(files)))
    labels = [label % 10 for label in labels]
    for i, file in enumerate(files):
        rows = slice(2 * i, 2 * i + 2)
        content = {b"data": images[rows], b"labels" if ten else b"fine_labels": labels[rows]}
        (folder / file).write_bytes(pickle.dumps(content, protocol=2))
    names = {b"label_names" if ten else b"fine_label_names": [b"class %d" % i for i in range(10 if ten else 100)]}
    (folder / ("batches.meta" if ten else "meta")).write_bytes(pickle.dumps(names, protocol=2))
    if packed:
        with tarfile.open(root / f"cifar-{10 if ten else 100}-python.tar.gz", "w:gz") as tar:
            tar.add(folder, folder.name)
        for path in [*folder.iterdir()]:
            path.unlink()
        folder.rmdir()
    return images, labels
