"""Accuracy of each class: which classes gain or lose by a choice of negatives.

``classes_of`` counts the correct test items that the runs recorded, by the labels in embeddings.npz.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hardneg.core.errors import warn_once
from hardneg.io.embeddings import load_evaluated, unpack_bits
from hardneg.reporting.contents import ArmRuns, PageContents, SeedRun, class_name

FEW_CLASSES = 20
"""Number of classes up to which the table is open."""


@dataclass(frozen=True)
class ClassTable:
    """Accuracy of each class.

    Attributes:
        arms: The arms, which are the columns.
        rows: Name of the class, number of its items, and the mean accuracy of each arm over its seeds, in percent.
        is_long: Whether the table is long enough to be folded.
    """

    arms: list[ArmRuns]
    rows: list[tuple[str, int, list[str]]]
    is_long: bool


def classes_of(page: PageContents, names: tuple[str, ...]) -> ClassTable | None:
    """Return the accuracy of each class; None if no run recorded labels and correct items.

    Args:
        page: Contents of the page.
        names: Names of the classes; empty where the data could not be read, then their numbers are shown.
    """
    found = {arm.number: [one for seed in arm.seeds if (one := _correct(seed, page.metric)) is not None]
             for arm in page.arms}  # fmt: skip
    every = [one for seeds in found.values() for one in seeds]
    if not every or any(not np.array_equal(labels, every[0][0]) for labels, _ in every):
        return None
    labels = every[0][0]
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes) < 2:
        return None
    arms = [arm for arm in page.arms if found[arm.number]]
    shares = {
        arm.number: np.mean([[right[labels == one].mean() for one in classes] for _, right in runs], axis=0)
        for arm in arms
        if (runs := found[arm.number])
    }
    rows = [
        (class_name(int(one), names), int(count), [f"{100.0 * shares[arm.number][i]:.1f}" for arm in arms])
        for i, (one, count) in enumerate(zip(classes, counts, strict=True))
    ]
    return ClassTable(arms, rows, len(rows) > FEW_CLASSES)


def _correct(one: SeedRun, metric: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]] | None:
    """Return the label of each evaluated item and whether the run has it right; None where this is not recorded."""
    file, packed = one.run.path / "embeddings.npz", ((one.result or {}).get("correct") or {}).get(metric)
    if packed is None or not file.is_file():
        return None
    try:
        labels = load_evaluated(file)[1]
    except (OSError, ValueError) as error:
        warn_once(f"damaged embeddings: {file}", f"The accuracy of the classes leaves out a run: {error}")
        return None
    right = None if labels is None else unpack_bits(packed, len(labels))
    return None if labels is None or right is None else (labels.numpy(), right)
