"""Folders of images and data sets of the hub: depth, transparency, hidden and broken files."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError, MissingExtra, NoFile, forget_warnings
from hardneg.training.data.images import load, load_splits
from support.errors import raises, warns
from support.image_folders import random_images, write_folder


class TestFolders:
    def test_folders_below_0_alike(self, tmp_path: Path) -> None:
        write_folder(tmp_path, {"-1": 4})
        data = load(f"folder:{tmp_path}", "all")
        assert (data.labels, data.classes) == (None, ())
        write_folder(tmp_path, {"cat": 2})
        with raises(ArgumentError, who="data", got="4 of 6"):
            load(f"folder:{tmp_path}")

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
        with raises(ArgumentError, who="data", got="(9, 15)") as error:
            load(f"folder:{tmp_path}")
        assert "size=64" in error.value.fix  # type: ignore[attr-defined]
        assert load(f"folder:{tmp_path}", "all", size=8).images.shape[2:] == (8, 8)

    def test_folder_with_grey_and_coloured_images_is_coloured(self, tmp_path: Path) -> None:
        write_folder(tmp_path, {"grey": 2}, shape=(12, 10))
        assert load(f"folder:{tmp_path}", "all").images.shape[1] == 1
        write_folder(tmp_path, {"colour": 1})
        forget_warnings()
        with warns("image_files.colour", "1 of 3", "000."):
            data = load(f"folder:{tmp_path}", "all")
        assert data.images.shape[1] == 3
        assert torch.equal(data.images[1, 0], data.images[1, 2])
        write_folder(tmp_path, {"colour": 3})
        forget_warnings()
        assert load(f"folder:{tmp_path}", "all").images.shape[1] == 3, "a few grey ones among coloured ones are usual"

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
        with pytest.raises(ValueError, match=rf"8 or 16 bits, got mode '{mode}' in .*deep\.tif"):
            load(f"folder:{tmp_path}")

    def test_12_bits_in_a_file_of_16_are_warned_of(self, tmp_path: Path) -> None:
        image = pytest.importorskip("PIL.Image", reason="needs Pillow")
        image.fromarray(np.full((8, 8), 4095, np.uint16)).save(tmp_path / "dark.png")
        forget_warnings()
        with warns("image_files.dark", "16 of 255"):
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
        assert data.images.shape[1] == (1 if mode.startswith(("L", "1", "I")) else 3)
        left, right = data.images[0, :, :, :4], data.images[0, :, :, 4:]
        assert (left == 255).all()
        assert (right == torch.tensor(shown, dtype=torch.uint8)[:, None, None]).all()

    def test_half_transparent_pixels_are_mixed_with_white(self, tmp_path: Path) -> None:
        image = pytest.importorskip("PIL.Image", reason="needs Pillow")
        grey, alpha = random_images(8, 8), random_images(8, 8, seed=1)
        layered = image.merge("LA", [image.fromarray(grey), image.fromarray(alpha)])
        for each in (layered, layered.convert("RGBA")):
            each.save(tmp_path / "x.png")
            found = load(f"folder:{tmp_path}", "all").images[0].numpy()
            assert np.abs(found - (255.0 + (grey - 255.0) * (alpha / 255.0))).max() <= 1.0

    def test_folder_without_classes_has_no_labels_and_loose_images_are_reported(self, tmp_path: Path) -> None:
        write_folder(tmp_path, {".": 4})
        assert load(f"folder:{tmp_path}", "all").labels is None
        write_folder(tmp_path, {"cat": 2})
        with raises(ArgumentError, who="data", got="class folders"):
            load(f"folder:{tmp_path}")

    def test_tiny_imagenet_as_downloaded(self, tmp_path: Path) -> None:
        """Its test images have no classes, in a folder that is no class; those of val are in a table."""
        for name, count in (("n01", 4), ("n02", 4)):
            write_folder(tmp_path / "train" / name, {"images": count})
            (tmp_path / "train" / name / f"{name}_boxes.txt").write_text("x\t0\t0\t9\t9\n")
        write_folder(tmp_path / "test", {"images": 6})
        write_folder(tmp_path / "val", {"images": 3})
        rows = [f"{i:03}.png\t{name}\t0\t0\t9\t9" for i, name in enumerate(("n02", "n01", "n02"))]
        (tmp_path / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
        forget_warnings()
        with warns("image_files.test") as reported:
            train, test, _ = load_splits(f"folder:{tmp_path}")
        assert len(reported) == 1
        assert train.classes == test.classes == ("n01", "n02")
        assert (train.labels.tolist(), test.labels.tolist()) == ([0] * 4 + [1] * 4, [1, 0, 1])  # type: ignore[union-attr]
        assert test.ids.tolist() == [8, 9, 10]
        (tmp_path / "val" / "val_annotations.txt").write_text("\n".join(rows[:2]))
        with raises(ArgumentError, who="data", got="1 without one, such as 002.png"):
            load(f"folder:{tmp_path}", "test")

    @pytest.mark.parametrize("below", ["images", "."])
    def test_a_test_folder_without_classes_has_no_labels(self, below: str, tmp_path: Path) -> None:
        write_folder(tmp_path / "train", {"cat": 3, "dog": 3})
        write_folder(tmp_path / "test", {below: 4})
        train, test, _ = load_splits(f"folder:{tmp_path}")
        assert (train.classes, train.num_labels()) == (("cat", "dog"), 2)
        assert test.labels is None
        assert len(test) == len(load(f"folder:{tmp_path}", "test")) == 4

    @pytest.mark.parametrize("below", [".", "photos"])
    def test_images_that_cannot_be_evaluated_are_all_trained_on(self, below: str, tmp_path: Path) -> None:
        """Of no class, or of one: no accuracy needs images that are held out."""
        write_folder(tmp_path, {below: 10})
        train, test, _ = load_splits(f"folder:{tmp_path}")
        assert len(train) == len(load(f"folder:{tmp_path}", "train")) == 10
        assert len(test) == 2
        write_folder(tmp_path / "labelled", {"cat": 5, "dog": 5})
        assert len(load(f"folder:{tmp_path / 'labelled'}", "train")) == 8

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
        with raises(NoFile, who="data", got="which has none"):
            load(f"folder:{tmp_path / 'empty'}")

    def test_broken_image_is_named(self, tmp_path: Path) -> None:
        write_folder(tmp_path, {"cat": 2})
        (tmp_path / "cat" / "torn.png").write_bytes(b"no image")
        with raises(ArgumentError, who="data", what="readable images"):
            load(f"folder:{tmp_path}")

    @pytest.mark.parametrize("num_broken", [2, 7])
    def test_broken_images_of_both_splits_are_reported_together(self, num_broken: int, tmp_path: Path) -> None:
        for split in ("train", "test"):
            write_folder(tmp_path / split, {"cat": 2, "dog": 1})
        for i in range(1, num_broken):
            (tmp_path / "train" / "dog" / f"torn{i}.png").write_bytes(b"no image")
        whole = (tmp_path / "test" / "cat" / "000.png").read_bytes()
        (tmp_path / "test" / "cat" / "000.png").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=rf"got {num_broken} of {5 + num_broken} that are unreadable") as error:
            load_splits(f"folder:{tmp_path}")
        message = str(error.value)
        assert "train/dog/torn1.png" in message
        assert ("test/cat/000.png" in message) == (num_broken == 2)
        assert (" and 2 more. " in message) == (num_broken == 7)
        assert "The first error: data needs readable images, got" in message

    def test_folder_without_pillow_names_the_extra(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_folder(tmp_path, {"cat": 2})
        monkeypatch.setitem(sys.modules, "PIL", None)
        with raises(MissingExtra, fix="'hardneg[vision]'"):
            load(f"folder:{tmp_path}")


class TestMissing:
    def test_missing_files_are_reported(self, tmp_path: Path) -> None:
        for name in (f"npz:{tmp_path}/none.npz", f"folder:{tmp_path}/none", f"folder:{tmp_path}"):
            with pytest.raises(FileNotFoundError, match="data needs"):
                load(name)


class TestHub:
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
        with raises(ArgumentError, who="data", got="2 of 4"):
            load("hf:mine", "all")

    def test_hub_without_datasets_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(ImportError, match=r"hardneg\[text\]"):
            load("hf:uoft-cs/cifar10")


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
