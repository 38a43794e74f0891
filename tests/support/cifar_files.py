"""Write CIFAR as its authors publish it, from montages of 100 x 100 images: the files of cifar-10-python.tar.gz.

    python tests/support/cifar_files.py ../shared/data data    # data/cifar10 and data/cifar100, for HARDNEG_DATA=data

Each folder of montages has ``train_0.jpg``, ``train_1.jpg`` ..., ``test.jpg`` and the labels in ``labels.npz``.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hardneg.io.arrays import Array

PUBLISHED: dict[str, dict[str, Any]] = {
    "cifar10": {"folder": "cifar-10-batches-py", "names": ("batches.meta", b"label_names", "classes"),
                "labels": {b"labels": "y"}, "train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]},
    "cifar100": {"folder": "cifar-100-python", "names": ("meta", b"fine_label_names", "fine_names"),
                 "labels": {b"fine_labels": "fine"}, "train": ["train"], "test": ["test"]},
}  # fmt: skip


def write_published(montages: Path, out: Path, name: str) -> Path:
    """Write the files of one set, ``cifar10`` or ``cifar100``, into ``out/name``; return the folder of the archive."""
    set_ = PUBLISHED[name]
    folder = out / name / set_["folder"]
    folder.mkdir(parents=True, exist_ok=True)
    with np.load(montages / "labels.npz") as labels:
        file, key, names = set_["names"]
        (folder / file).write_bytes(pickle.dumps({key: [str(each).encode() for each in labels[names]]}))
        for split, files in (("train", set_["train"]), ("test", set_["test"])):
            squares = sorted(montages.glob("train_*.jpg")) if split == "train" else [montages / "test.jpg"]
            images = np.array_split(np.concatenate([tiles(square) for square in squares]), len(files))
            numbers = {
                key: np.array_split(labels[f"{prefix}_{split}"], len(files)) for key, prefix in set_["labels"].items()
            }
            for place, data in enumerate(images):
                batch = {b"data": data, **{key: parts[place].tolist() for key, parts in numbers.items()}}
                (folder / files[place]).write_bytes(pickle.dumps(batch))
    return folder


def tiles(path: Path) -> Array:
    """Return the 10,000 images of a montage, row by row, as [10000, 3072]: all red, then green, then blue pixels."""
    square = np.asarray(Image.open(path).convert("RGB"))
    return square.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(10_000, -1)


if __name__ == "__main__":
    for name in PUBLISHED:
        print(write_published(Path(sys.argv[1]) / name, Path(sys.argv[2]), name))
