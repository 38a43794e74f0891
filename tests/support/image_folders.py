"""Folders of random images, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


def random_images(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


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


def write_photos(folder: Path, count: int = 24, classes: int = 2) -> str:
    """JPEG files of different sizes; their name as data of 16 x 16 pixels."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    random = np.random.RandomState(0)
    for number in range(count):
        place = folder / f"class{number % classes}"
        place.mkdir(parents=True, exist_ok=True)
        small = random_images(4, 4, 3, seed=number)
        size = tuple(int(side) for side in random.randint(20, 60, 2))
        image.fromarray(small).resize(size, image.Resampling.BICUBIC).save(place / f"{number:03}.jpg")
    return f"folder:{folder}@16"
