"""Images in .npz files: every layout is read, and every wrong file is an error at the door."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError, FileError
from hardneg.training.data.images import load, load_splits
from support.errors import raises
from support.image_folders import random_images


class TestArrays:
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
        assert len(data) == 10  # nothing is held out
        assert data.labels is None

    @pytest.mark.parametrize("missing", [-1, -1.0, np.nan, "-1", ""])
    def test_labels_below_0_are_all_of_a_split_or_none(self, missing: object, tmp_path: Path) -> None:
        known = np.array([3, 5, 3, 5], dtype=np.array(missing).dtype)
        arrays = {"images": random_images(4, 8, 8), "labels": known, "test_images": random_images(2, 8, 8)}
        np.savez(tmp_path / "x.npz", **arrays, test_labels=[missing] * 2)  # type: ignore[arg-type]
        train, test, _ = load_splits(f"npz:{tmp_path / 'x.npz'}")
        assert test.labels is None
        assert train.labels.tolist() == [0, 1, 0, 1]  # type: ignore[union-attr]
        assert [float(name) for name in train.classes] == [3, 5]
        known[2] = missing
        np.savez(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]
        with raises(ArgumentError, who="data", fix="items out"):
            load(f"npz:{tmp_path / 'x.npz'}")

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
                r"plain arrays, got Python objects in labels of .*x\.npz; np\.array\(labels, dtype=str\)",
            ),
            (
                {"images": random_images(4, 8, 8), "labels": np.array([0, 0.5, 1.5, 1])},
                r"integers or text, got 2 of 4 others, such as 0\.5, in labels of",
            ),
            ({"images": random_images(4, 8, 8), "labels": np.array([0, np.inf, 1, 1])}, "got 1 of 4 .* such as inf"),
            ({"images": random_images(4, 8, 8), "labels": np.array([0, np.nan, 1, 1])}, "got 1 of 4 without one"),
            ({"images": random_images(4, 8, 8), "labels": np.zeros(4, "M8[s]")}, "or text, got datetime64"),
            (
                {"images": random_images(4, 8, 8), "labels": np.array([b"a", b"\xe9t\xe9", b"a", b"b"])},
                r"bytes to be UTF-8, got b'\\xe9t\\xe9' in labels of .*x\.npz; .*np\.char\.decode",
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
                r"array `images` in an \.npz file, .* which is a \.npy file of one array; .*np\.savez\(PATH, ",
            ),
            (b"just a text", "which is another kind of file; write it with np.savez"),
            (b"", "which is another kind of file; write it with np.savez"),
            (b"PK", "which is another kind of file; write it with np.savez"),
            (b"PKZIP is what wrote this", "which is another kind of file; write it with np.savez"),
            (b"PK\x03\x04 and then nothing", "an undamaged .npz file, got .* which is damaged"),
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
        with raises(FileError, who="data", path="x.npz", what="npz file", got="Bad CRC"):
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
        with pytest.raises(ValueError, match=r"^data needs an undamaged \.npz file, got .*x\.npz, " + message):
            load(f"npz:{path}")

    def test_an_npz_without_members_lacks_its_arrays(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "x.npz")
        with raises(FileError, who="data", path="x.npz", what="npz file", got="which lacks images and has none"):
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
