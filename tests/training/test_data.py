"""Data sets: what is read equals what was written, splits are fixed, and every wrong input is an error at the door."""

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

from hardneg.core.errors import HardnegWarning, UnknownName, forget_warnings
from hardneg.training.data import image_files
from hardneg.training.data.images import ImageData, check_name, from_pairs, load, load_splits
from hardneg.training.data.named import NAMED, default_root
from hardneg.training.evaluation.embeddings import evaluate_embeddings

DATA = Path(os.environ.get("HARDNEG_DATA", "no data"))
needs_cifar = pytest.mark.skipif(
    not (DATA / "cifar10").is_dir(), reason="needs the montages of CIFAR-10 in HARDNEG_DATA"
)


def random_images(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


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
        with pytest.raises(ValueError, match="at least one image"):
            image_data(0, labels=None)

    def test_labels_are_needed_by_who_asks(self) -> None:
        with pytest.raises(ValueError, match="The probe needs labels, got none in 'x'"):
            image_data(labels=None).labelled("The probe")
        with pytest.raises(ValueError, match="at least two classes, got one"):
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
        with pytest.raises(ValueError, match="needs more images, got 1"):
            image_data(1, labels=None).held_out(0.3)
        with pytest.raises(ValueError, match="share"):
            image_data(10).held_out(1.0)


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
        with pytest.raises(ImportError, match=r"pip install 'hardneg\[eval\]'"):
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
        with pytest.raises(ValueError, match="whole IDX file"):
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
        with pytest.raises(pickle.UnpicklingError, match=r"needs arrays in a CIFAR file, got posix\.getcwd"):
            load("cifar10", "test", tmp_path)

    @needs_cifar
    def test_cifar10_montages(self) -> None:
        data = load("cifar10", "test", DATA)
        assert data.images.shape == (10_000, 3, 32, 32)
        assert data.labels.bincount().tolist() == [1000] * 10  # type: ignore[union-attr]
        assert data.classes[int(data.labels[0])] == "cat"  # type: ignore[index]
        assert data.origin == "JPEG copy"
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


class TestFiles:
    @pytest.mark.parametrize("shape", [(10, 6, 7), (10, 6, 7, 3), (10, 3, 6, 7), (10, 1, 6, 7)])
    def test_npz_of_every_layout(self, shape: tuple[int, ...], tmp_path: Path) -> None:
        images = random_images(*shape)
        np.savez(tmp_path / "x.npz", images=images, labels=np.array(list("abababcacb")))
        data = load(f"npz:{tmp_path / 'x.npz'}", "all")
        as_tensor = torch.from_numpy(images)
        expected = {3: lambda x: x[:, None], 4: lambda x: x.permute(0, 3, 1, 2) if x.shape[3] == 3 else x}[len(shape)]
        assert torch.equal(data.images, expected(as_tensor))
        assert data.classes == ("a", "b", "c")
        assert data.labels.tolist() == [0, 1, 0, 1, 0, 1, 2, 0, 2, 1]  # type: ignore[union-attr]

    def test_npz_with_its_own_test_split(self, tmp_path: Path) -> None:
        np.savez(
            tmp_path / "x.npz", images=random_images(5, 8, 8), labels=[3, 4, 3, 4, 3],
            test_images=random_images(2, 8, 8), test_labels=[4, 9],
        )  # fmt: skip
        test = load(f"npz:{tmp_path / 'x.npz'}", "test")
        assert test.ids.tolist() == [5, 6]
        assert test.classes == ("3", "4", "9")
        assert test.labels.tolist() == [1, 2]  # type: ignore[union-attr]
        assert load(f"npz:{tmp_path / 'x.npz'}", "all").ids.tolist() == list(range(7))

    def test_npz_without_labels_can_be_trained_on_but_not_evaluated(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "x.npz", images=random_images(10, 8, 8))
        data = load(f"npz:{tmp_path / 'x.npz'}", "train")
        assert len(data) == 8
        assert data.labels is None

    @pytest.mark.parametrize("missing", [-1, -1.0, np.nan, "-1"])
    def test_labels_below_0_are_all_of_a_split_or_none(self, missing: object, tmp_path: Path) -> None:
        known = np.array([3, 5, 3, 5], dtype=np.array(missing).dtype)
        arrays = {"images": random_images(4, 8, 8), "labels": known, "test_images": random_images(2, 8, 8)}
        np.savez(tmp_path / "x.npz", **arrays, test_labels=[missing] * 2)  # type: ignore[arg-type]
        train, test = load_splits(f"npz:{tmp_path / 'x.npz'}")
        assert test.labels is None
        assert train.labels.tolist() == [0, 1, 0, 1]  # type: ignore[union-attr]
        assert [float(name) for name in train.classes] == [3, 5]
        known[2] = missing
        np.savez(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]
        with pytest.raises(
            ValueError, match=r"got 1 of 4 without one .* in labels of .*x\.npz; leave these images out"
        ):
            load(f"npz:{tmp_path / 'x.npz'}")

    def test_pairs_and_folders_below_0_alike(self, tmp_path: Path) -> None:
        pixels = random_images(3, 8, 8)
        assert from_pairs([(p, -1) for p in pixels], "mine").labels is None
        with pytest.raises(ValueError, match=r"got 2 of 3 without one .* in mine; leave these images out"):
            from_pairs([(p, i - 2) for i, p in enumerate(pixels)], "mine")
        write_folder(tmp_path, {"-1": 4})
        data = load(f"folder:{tmp_path}", "all")
        assert (data.labels, data.classes) == (None, ())
        write_folder(tmp_path, {"cat": 2})
        with pytest.raises(ValueError, match=r"got 4 of 6 without one .* in the class folders of"):
            load(f"folder:{tmp_path}")

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"pictures": random_images(4, 8, 8)}, "array `images`"),
            ({"images": np.zeros((4, 8, 8))}, r"uint8 images .* of float64; use \(images \* 255\)"),
            ({"images": random_images(4, 8, 8, 5)}, "1 or 3 channels"),
            ({"images": random_images(4, 8, 8), "labels": np.zeros(3, int)}, "one per image"),
            (
                {"images": random_images(4, 8, 8), "labels": np.zeros((4, 2), int)},
                r"labels \[n\], one for each row, got labels=\(4, 2\)",
            ),
            (
                {"images": np.array([np.zeros((2, 2)), np.zeros((3, 3))], dtype=object)},
                "in images of .*all images need one",
            ),
            (
                {"images": random_images(4, 8, 8), "labels": np.array(list("abab"), dtype=object)},
                r"plain arrays, got objects in labels of .*x\.npz; np\.array\(labels, dtype=str\)",
            ),
            (
                {"images": random_images(4, 8, 8), "labels": np.array([0, 0.5, 1.5, 1])},
                r"whole numbers or text, got 2 of 4 that are not, such as 0\.5, in labels of",
            ),
            ({"images": random_images(4, 8, 8), "labels": np.array([0, np.inf, 1, 1])}, "got 1 of 4 .* such as inf"),
            ({"images": random_images(4, 8, 8), "labels": np.array([0, np.nan, 1, 1])}, "got 1 of 4 without one"),
            ({"images": random_images(4, 8, 8), "labels": np.zeros(4, "M8[s]")}, "or text, got datetime64"),
            (
                {"images": random_images(4, 8, 8), "labels": np.array([b"a", b"\xe9t\xe9", b"a", b"b"])},
                r"UTF-8 where they are bytes, got b'\\xe9t\\xe9' in labels of .*x\.npz; np\.char\.decode",
            ),
            (
                {"images": random_images(4, 8, 8), "labels": np.array([0, 1, 2**63, 2**64 - 1], np.uint64)},
                r"from -2\*\*63 to 2\*\*63 - 1, got 2 of 4 .* such as 9223372036854775808, in labels of .*x\.npz\.$",
            ),
            ({"images": random_images(4, 8, 8), "labels": np.array([0, 1, 1e30, 2])}, r"got 1 of 4 .* such as 1e\+30"),
        ],
    )
    def test_npz_that_cannot_be_used_is_reported(
        self, arrays: dict[str, np.ndarray], message: str, tmp_path: Path
    ) -> None:
        np.savez(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message) as error:
            load(f"npz:{tmp_path / 'x.npz'}", "all")
        assert "pickle" not in str(error.value)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (
                "npy",
                r"array `images` in an \.npz file, .* which is a \.npy file of one array; np\.savez\(PATH, ",
            ),
            (b"just a text", "which is something else; np.savez"),
            (b"", "which is something else; np.savez"),
            (b"PK", "which is something else; np.savez"),
            (b"PKZIP is what wrote this", "which is something else; np.savez"),
            (b"PK\x03\x04 and then nothing", "a whole .npz file, got .* which is damaged"),
        ],
    )
    def test_files_that_are_no_npz_are_reported(self, content: str | bytes, message: str, tmp_path: Path) -> None:
        path = tmp_path / "x.npz"
        with open(path, "wb") as file:
            if isinstance(content, str):
                np.save(file, random_images(4, 8, 8))
            else:
                file.write(content)
        with pytest.raises(ValueError, match=message) as error:
            load(f"npz:{path}")
        assert "pickle" not in str(error.value)

    def test_a_torn_array_is_reported(self, tmp_path: Path) -> None:
        path = tmp_path / "x.npz"
        np.savez(path, images=random_images(4, 8, 8))
        raw = bytearray(path.read_bytes())
        raw[200] ^= 255  # a pixel: the checksum no longer fits
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=r"a whole \.npz file, got .*x\.npz, whose images is damaged: .*CRC"):
            load(f"npz:{path}")

    @pytest.mark.parametrize(
        ("mark", "offset", "value", "message"),
        [
            (b"PK\x01\x02", 8, 1, "whose images is damaged: .*encrypted"),  # the flags of the member
            (b"PK\x05\x06", 16, 255, "whose images is damaged: "),  # where the list of members begins
            (b"PK\x01\x02", 45, 255, "whose images is damaged: "),  # where the member begins
            ("é".encode(), 1, 0, "which is damaged: "),  # the name of a member, no longer UTF-8
        ],
    )
    def test_torn_lists_of_arrays_are_reported(
        self, mark: bytes, offset: int, value: int, message: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "x.npz"
        np.savez(path, é=np.zeros(1), images=np.zeros((4, 8, 8), np.uint8))
        raw = bytearray(path.read_bytes())
        raw[raw.rindex(mark) + offset] = value
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=r"^data needs a whole \.npz file, got .*x\.npz, " + message):
            load(f"npz:{path}")

    def test_an_npz_without_members_lacks_its_arrays(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "x.npz")
        with pytest.raises(ValueError, match=r"array `images` .*x\.npz, which lacks images\.$"):
            load(f"npz:{tmp_path / 'x.npz'}")

    def test_labels_up_to_the_largest_are_kept_apart(self, tmp_path: Path) -> None:
        """2**63 - 1 and 2**63 - 2 are one number in float64."""
        labels = np.array([2**63 - 1, 2**63 - 2, 0, 2**63 - 1], np.uint64)
        np.savez(tmp_path / "x.npz", images=random_images(4, 8, 8), labels=labels)
        data = load(f"npz:{tmp_path / 'x.npz'}", "all")
        assert data.classes == ("0", "9223372036854775806", "9223372036854775807")
        assert data.labels.tolist() == [2, 1, 0, 2]  # type: ignore[union-attr]

    @pytest.mark.parametrize("dtype", [float, "S1", bool, np.uint8])
    def test_labels_of_other_types_are_whole_numbers_or_text(self, dtype: object, tmp_path: Path) -> None:
        np.savez(tmp_path / "x.npz", images=random_images(4, 8, 8), labels=np.array([0, 1, 1, 0]).astype(dtype))
        data = load(f"npz:{tmp_path / 'x.npz'}", "all")
        assert data.classes == ("0", "1")
        assert data.labels.tolist() == [0, 1, 1, 0]  # type: ignore[union-attr]

    def test_missing_files_are_reported(self, tmp_path: Path) -> None:
        for name in (f"npz:{tmp_path}/none.npz", f"folder:{tmp_path}/none", f"folder:{tmp_path}"):
            with pytest.raises(FileNotFoundError, match="data needs"):
                load(name)

    def test_folder_of_classes(self, tmp_path: Path) -> None:
        images = write_folder(tmp_path, {"cat": 3, "dog": 4})
        data = load(f"folder:{tmp_path}", "all")
        assert data.classes == ("cat", "dog")
        assert data.labels.tolist() == [0, 0, 0, 1, 1, 1, 1]  # type: ignore[union-attr]
        assert np.array_equal(data.images.permute(0, 2, 3, 1).numpy(), images)

    def test_folder_with_splits_shares_classes_and_ids(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "train", {"cat": 3, "dog": 2})
        write_folder(tmp_path / "test", {"bird": 1, "dog": 2})
        test = load(f"folder:{tmp_path}", "test")
        assert test.classes == ("bird", "cat", "dog")
        assert test.labels.tolist() == [0, 2, 2]  # type: ignore[union-attr]
        assert test.ids.tolist() == [5, 6, 7]

    def test_folder_of_unequal_sizes_needs_a_size(self, tmp_path: Path) -> None:
        write_folder(tmp_path, {"cat": 3})
        write_folder(tmp_path, {"dog": 2}, shape=(9, 15, 3))
        with pytest.raises(ValueError, match=r"one size, got \(12, 10\) in .*cat.* and \(9, 15\) in .*dog.*; size=64"):
            load(f"folder:{tmp_path}")
        assert load(f"folder:{tmp_path}", "all", size=8).size == (8, 8)

    def test_folder_with_grey_and_coloured_images_is_coloured(self, tmp_path: Path) -> None:
        write_folder(tmp_path, {"grey": 2}, shape=(12, 10))
        assert load(f"folder:{tmp_path}", "all").in_channels == 1
        write_folder(tmp_path, {"colour": 1})
        forget_warnings()
        with pytest.warns(
            HardnegWarning, match=r"^1 of 3 images are in colour, such as .*colour.*000\.png.* read as RGB"
        ):
            data = load(f"folder:{tmp_path}", "all")
        assert data.in_channels == 3
        assert torch.equal(data.images[1, 0], data.images[1, 2])
        write_folder(tmp_path, {"colour": 3})
        forget_warnings()
        assert load(f"folder:{tmp_path}", "all").in_channels == 3, "a few grey ones among coloured ones are usual"

    @pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
    @pytest.mark.parametrize("size", [None, 8])
    def test_grey_of_16_bits_is_scaled_and_stays_grey(self, suffix: str, size: int | None, tmp_path: Path) -> None:
        image = pytest.importorskip("PIL.Image", reason="needs Pillow")
        deep = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1040  # 0 to 65,520
        image.fromarray(deep).save(tmp_path / f"ramp.{suffix}")
        data = load(f"folder:{tmp_path}", "all", size=size)
        assert data.images.shape == (1, 1, 8, 8)
        assert np.abs(data.images[0, 0].numpy() - deep / 65535 * 255).max() <= 0.5

    @pytest.mark.parametrize(("dtype", "mode"), [(np.int32, "I"), (np.float32, "F")])
    def test_deeper_images_are_refused_by_name(self, dtype: type, mode: str, tmp_path: Path) -> None:
        image = pytest.importorskip("PIL.Image", reason="needs Pillow")
        image.fromarray(np.arange(64, dtype=dtype).reshape(8, 8)).save(tmp_path / "deep.tif")
        with pytest.raises(ValueError, match=rf"8 or 16 bits, got mode '{mode}' in .*deep\.tif.*write it as 8 bits"):
            load(f"folder:{tmp_path}")
        with pytest.raises(ValueError, match="in item 0 of mine"):
            from_pairs([(image.fromarray(np.zeros((8, 8), dtype)), 0)], "mine")

    def test_12_bits_in_a_file_of_16_are_warned_of(self, tmp_path: Path) -> None:
        image = pytest.importorskip("PIL.Image", reason="needs Pillow")
        image.fromarray(np.full((8, 8), 4095, np.uint16)).save(tmp_path / "dark.png")
        forget_warnings()
        with pytest.warns(HardnegWarning, match=r"brightest pixel in .* is 16 of 255, so hardly anything is left"):
            load(f"folder:{tmp_path}", "all")

    @pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "palette alpha", "L key", "RGB key", "1 key", "I;16 key"])
    @pytest.mark.parametrize("size", [None, 8])
    def test_transparent_pixels_are_white(self, mode: str, size: int | None, tmp_path: Path) -> None:
        """Left half transparent over a dark colour, right half opaque of the same colour."""
        image = pytest.importorskip("PIL.Image", reason="needs Pillow")
        shown = write_half_transparent(tmp_path / "x.png", mode)
        with image.open(tmp_path / "x.png") as written:
            assert written.mode == {"palette alpha": "P"}.get(mode, mode.split()[0])
        data = load(f"folder:{tmp_path}", "all", size=size)
        assert data.in_channels == (1 if mode.startswith(("L", "1", "I")) else 3)
        left, right = data.images[0, :, :, :4], data.images[0, :, :, 4:]
        assert (left == 255).all()
        assert (right == torch.tensor(shown, dtype=torch.uint8)[:, None, None]).all()

    def test_half_transparent_pixels_are_mixed_with_white(self) -> None:
        image = pytest.importorskip("PIL.Image", reason="needs Pillow")
        grey, alpha = random_images(8, 8), random_images(8, 8, seed=1)
        layered = image.merge("LA", [image.fromarray(grey), image.fromarray(alpha)])
        for each in (layered, layered.convert("RGBA")):
            found = from_pairs([(each, 0)], "mine").images[0].numpy()
            assert np.abs(found - (255.0 + (grey - 255.0) * (alpha / 255.0))).max() <= 1.0

    def test_folder_without_classes_has_no_labels_and_loose_images_are_reported(self, tmp_path: Path) -> None:
        write_folder(tmp_path, {".": 4})
        assert load(f"folder:{tmp_path}", "all").labels is None
        write_folder(tmp_path, {"cat": 2})
        with pytest.raises(ValueError, match="got 4 beside the class folders"):
            load(f"folder:{tmp_path}")

    def test_hidden_files_and_folders_below_the_root_are_skipped(self, tmp_path: Path) -> None:
        root = tmp_path / ".cache" / "mine"  # what is hidden above the root does not matter
        images = write_folder(root, {"cat": 3, "dog": 2})
        write_folder(root, {"cat/.ipynb_checkpoints": 1, ".thumbs": 1, ".thumbs/small": 1, "dog/far/.deep/down": 1})
        (root / "cat" / "._000.png").write_bytes(b"no image")
        data = load(f"folder:{root}", "all")
        assert (data.classes, data.labels.tolist()) == (("cat", "dog"), [0, 0, 0, 1, 1])  # type: ignore[union-attr]
        assert np.array_equal(data.images.permute(0, 2, 3, 1).numpy(), images)

    def test_hidden_files_take_no_ids_and_are_no_images(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "train", {"cat": 2, "cat/.old": 3})
        write_folder(tmp_path / "test", {"cat": 2, ".old": 1})
        assert load(f"folder:{tmp_path}", "test").ids.tolist() == [2, 3]
        write_folder(tmp_path / "empty", {".old": 3})
        with pytest.raises(FileNotFoundError, match=r"needs images .* got .*empty, where there are none"):
            load(f"folder:{tmp_path / 'empty'}")

    def test_broken_image_is_named(self, tmp_path: Path) -> None:
        write_folder(tmp_path, {"cat": 2})
        (tmp_path / "cat" / "torn.png").write_bytes(b"no image")
        with pytest.raises(ValueError, match=r"readable images, got .*torn\.png"):
            load(f"folder:{tmp_path}")

    @pytest.mark.parametrize("num_broken", [2, 7])
    def test_broken_images_of_both_splits_are_reported_together(self, num_broken: int, tmp_path: Path) -> None:
        for split in ("train", "test"):
            write_folder(tmp_path / split, {"cat": 2, "dog": 1})
        for i in range(1, num_broken):
            (tmp_path / "train" / "dog" / f"torn{i}.png").write_bytes(b"no image")
        whole = (tmp_path / "test" / "cat" / "000.png").read_bytes()
        (tmp_path / "test" / "cat" / "000.png").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=rf"got {num_broken} of {5 + num_broken} that are not in") as error:
            load_splits(f"folder:{tmp_path}")
        message = str(error.value)
        assert "train/dog/torn1.png" in message
        assert ("test/cat/000.png" in message) == (num_broken == 2)
        assert (" and 2 more. " in message) == (num_broken == 7)
        assert "Of the first: data needs readable images, got" in message

    def test_folder_without_pillow_names_the_extra(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_folder(tmp_path, {"cat": 2})
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(ImportError, match=r"pip install 'hardneg\[vision\]'"):
            load(f"folder:{tmp_path}")

    def test_pairs_such_as_a_torchvision_data_set(self) -> None:
        image = pytest.importorskip("PIL.Image")
        pixels = random_images(3, 8, 8, 3)
        data = from_pairs([(image.fromarray(p), i) for i, p in enumerate(pixels)], "mine")
        assert np.array_equal(data.images.permute(0, 2, 3, 1).numpy(), pixels)
        assert data.labels.tolist() == [0, 1, 2]  # type: ignore[union-attr]
        assert from_pairs([(p, 0) for p in pixels], "arrays").images.shape == (3, 3, 8, 8)

    def test_hub_data_through_datasets(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        datasets = pytest.importorskip("datasets", reason="needs the package datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        for split, counts in {"train": {"cat": 3, "dog": 2}, "test": {"cat": 1, "dog": 1}}.items():
            images = write_folder(tmp_path / "images" / split, counts)
        data = load(f"hf:{tmp_path}/images", "test")
        assert np.array_equal(data.images.permute(0, 2, 3, 1).numpy(), images)
        assert data.ids.tolist() == [5, 6]
        assert data.classes == ("cat", "dog")

    def test_hub_rows_without_a_label(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        datasets = pytest.importorskip("datasets", reason="needs the package datasets")
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})

        def found(labels: list[int | None]) -> None:
            rows = {"image": list(random_images(4, 8, 8)), "label": labels}
            split = datasets.Dataset.from_dict(rows, features=features)
            monkeypatch.setattr(datasets, "load_dataset", lambda path: {"train": split})

        found([-1, -1, None, -1])
        assert load("hf:mine", "all").labels is None
        found([0, 1, -1, None])
        with pytest.raises(ValueError, match=r"got 2 of 4 without one .* in label of hf:mine; leave these images out"):
            load("hf:mine", "all")

    def test_hub_without_datasets_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(ImportError, match=r"hardneg\[text\]"):
            load("hf:uoft-cs/cifar10")


class TestBothSplits:
    def test_are_those_of_load(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "whole.npz", images=random_images(30, 8, 8), labels=np.arange(30) % 3)
        np.savez(
            tmp_path / "split.npz", images=random_images(5, 8, 8), labels=[0, 1, 0, 1, 0],
            test_images=random_images(3, 8, 8, seed=1), test_labels=[1, 0, 1],
        )  # fmt: skip
        for name in ("digits", f"npz:{tmp_path / 'whole.npz'}", f"npz:{tmp_path / 'split.npz'}"):
            for both, one in zip(load_splits(name), (load(name, "train"), load(name, "test")), strict=True):
                for field in ("images", "labels", "ids"):
                    assert torch.equal(getattr(both, field), getattr(one, field))
                assert both.classes == one.classes

    @pytest.mark.parametrize("split", [True, False])
    def test_decode_each_image_once(self, split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("train", "test") if split else (".",):
            write_folder(tmp_path / name, {"cat": 5, "dog": 5})
        decoded: list[Path] = []
        read = image_files.read_image

        def counting(path: Path, size: int | None = None) -> np.ndarray:
            decoded.append(path)
            return read(path, size)

        monkeypatch.setattr(image_files, "read_image", counting)
        train, test = load_splits(f"folder:{tmp_path}@8")
        assert (train.size, test.size) == ((8, 8), (8, 8))
        assert len(decoded) == len(set(decoded)) == len(train) + len(test) == (20 if split else 10)

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
        with pytest.warns(HardnegWarning, match=r"^3 of 4 test images are of classes .* \(B, C\)") as reported:
            train, test = load_splits(name)
        assert len(reported) == 1
        assert train.labels is not None
        assert test.labels is not None
        # Training ends with the evaluation of the same labels, which says it no second time: a warning is an error.
        result = evaluate_embeddings(torch.eye(5), train.labels, torch.eye(5)[:4], test.labels, probe="none")
        assert result["num_test"] == 4


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


def write_folder(root: Path, counts: dict[str, int], shape: tuple[int, ...] = (12, 10, 3)) -> np.ndarray:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    pixels = random_images(sum(counts.values()), *shape)
    number = 0
    for label, count in counts.items():
        (root / label).mkdir(parents=True, exist_ok=True)
        for _ in range(count):
            image.fromarray(pixels[number]).save(root / label / f"{number:03}.png")
            number += 1
    return pixels


def write_half_transparent(path: Path, mode: str) -> list[int]:
    """8 x 8 pixels whose left half cannot be seen; returns the colour of the right half."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    alpha = np.zeros((8, 8), np.uint8)
    alpha[:, 4:] = 255
    seen = alpha > 0
    if mode in ("RGBA", "LA"):
        colour = [200, 10, 30][: len(mode) - 1]
        layers = [image.fromarray(np.full((8, 8), value, np.uint8)) for value in colour]
        image.merge(mode, [*layers, image.fromarray(alpha)]).save(path)
        return colour
    if mode.startswith(("P", "palette")):
        indexed = image.fromarray(seen.astype(np.uint8)).convert("P")
        indexed.putpalette([9, 99, 199, 200, 10, 30])
        indexed.save(path, transparency=0 if mode == "P" else bytes([0, 255]))
        return [200, 10, 30]
    if mode == "RGB key":
        pixels = np.where(seen[:, :, None], [200, 10, 30], [9, 99, 199]).astype(np.uint8)
        image.fromarray(pixels).save(path, transparency=(9, 99, 199))
        return [200, 10, 30]
    if mode == "1 key":
        image.fromarray(seen).save(path, transparency=0)
        return [255]
    if mode == "L key":
        image.fromarray(np.where(seen, 60, 20).astype(np.uint8)).save(path, transparency=20)
        return [60]
    image.fromarray(np.where(seen, 60 * 257, 20 * 257 + 3).astype(np.uint16)).save(path, transparency=20 * 257 + 3)
    return [60]
