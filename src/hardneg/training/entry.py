"""``hn.train``: a recipe on data that is named as on the command line, or given as Python objects."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from hardneg.core.errors import ArgumentError, UnknownName
from hardneg.training.augmentation.augment import MakeImageViews
from hardneg.training.augmentation.views import Augmentation
from hardneg.training.data.given import Part, give
from hardneg.training.options import RECIPES
from hardneg.training.recipes import run_recipe

GivenImages = str | Dataset[Any] | Tensor | np.ndarray[Any, Any] | Sequence[str | os.PathLike[str]] | Any


def train(
    recipe: str,
    data: GivenImages,
    out: str | Path,
    *,
    labels: Any = None,
    ids: Annotated[Any, "n"] = None,
    test: GivenImages | None = None,
    test_labels: Any = None,
    size: int | None = None,
    name: str = "data",
    views: MakeImageViews | Augmentation | None = None,
    resume: bool = False,
    allow_other_data: bool = False,
    quiet: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train a recipe and evaluate its encoder, as ``hardneg train`` does.

    Args:
        recipe: Name of the recipe, such as "simclr".
        data: A name as for ``--data``, such as "cifar10" or "folder:photos@64"; or images: a torch ``Dataset`` of
            images or (image, label), uint8 images [n, c, h, w], a ``datasets.Dataset``, or a list of paths. Items of
            a ``Dataset`` are read once before training, for their sizes, labels and content.
        out: The run directory.
        labels: Class of each image, numbers or text; None takes those of the data set, if it has any.
        ids: Distinct id of each image, int64 [n], on which its views depend; None counts the images.
        test: Images to evaluate on, in the same form; None holds out a fifth of ``data``.
        test_labels: Class of each of them.
        size: Resize images that are no arrays to squares with this side.
        name: Name of given images, for messages and the record of the run.
        views: An augmentation in place of ``augment``, such as ``from_transform(transform)``.
        resume: Continue the run in ``out`` if there is one; give the same data.
        allow_other_data: Continue even if the data has changed.
        quiet: Print nothing and show no progress bar.
        **options: Options of the recipe by their names: ``epochs=10, batch_size=128, negatives="Tilt(1.0)"``.

    Returns:
        The content of result.json.

    Raises:
        ArgumentError: If the recipe, an option or the data cannot be used.
        UnknownName: If the recipe has no such option.
        FileError: If ``out`` holds another run.
        DataChanged: If the data differs from that of the resumed run.

    Example:
        >>> import tempfile, torch, hardneg as hn
        >>> images, labels = torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8), torch.arange(64) % 2
        >>> out = tempfile.mkdtemp() + "/run"
        >>> result = hn.train("simclr", images, out, labels=labels, epochs=1, batch_size=8, quiet=True)
        >>> result["steps"]
        6
    """
    if recipe not in RECIPES:
        raise ArgumentError("train", f"a recipe among {', '.join(RECIPES)}", f"recipe={recipe!r}")
    kind = RECIPES[recipe]
    for option in options:
        if option not in kind.__dataclass_fields__:
            raise UnknownName(option, [*kind.__dataclass_fields__], f"in {recipe}")
    if isinstance(data, str):
        given = {"labels": labels, "ids": ids, "test": test, "test_labels": test_labels, "size": size}
        if wrong := [key for key, value in given.items() if value is not None]:
            what = f"no {wrong[0]}= for data with a name, which has its own"
            raise ArgumentError("train", what, f"data={data!r}", "use --splits and folder:PATH@64 in the name")
    else:
        text = give(name, Part(data, labels, ids), None if test is None else Part(test, test_labels))
        data = text if size is None else f"{text}@{size}"
    how = {"views": views, "resume": resume, "allow_other_data": allow_other_data, "quiet": quiet}
    return run_recipe(recipe, kind(data=data, **options), out, **how)
