"""Recipes: one flat file per method, trained by the loop in ``training/loop/train.py``.

``METHODS`` maps the name of a recipe to its module and method; ``run_recipe`` is the entry point of ``hardneg
train``, comparisons and ``hn.train``. To read one recipe, start with ``simclr.py``; most others derive from it. To
add one, write a ``Method`` in a new file, its options in ``training/options``, and a line in ``METHODS`` and in
``RECIPES``.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import nn

from hardneg.core.errors import ArgumentError
from hardneg.training.data.items import Items
from hardneg.training.loop.boards import check_boards
from hardneg.training.loop.method import Method
from hardneg.training.loop.train import train
from hardneg.training.options import RECIPES, TrainOptions

METHODS = {
    "simclr": "simclr.SimCLR",
    "supervised": "supervised.Supervised",
    "simcse": "simcse.SimCSE",
    "pairs": "pairs.PairsRecipe",
    "clip": "clip.CLIP",
    "quick-thoughts": "quick_thoughts.QuickThoughts",
    "moco": "moco.moco",
    "byol": "byol.BYOL",
    "swav": "swav.SwAV",
    "nnclr": "nnclr.NNCLR",
    "fnc": "fnc.FNC",
    "sogclr": "sogclr.SogCLRMethod",
    "isogclr": "isogclr.ISogCLRRecipe",
    "emc2": "emc2.EMC2Method",
    "instance": "instance.Instance",
    "cmc": "cmc.CMCRecipe",
    "local-aggregation": "local_aggregation.LocalAggregation",
    "negative-cache": "negative_cache.NegativeCache",
    "graphcl": "graphcl.GraphCL",
    "infograph": "infograph.InfoGraph",
}
"""The module and the constructor of each method, by the name of its recipe; imported when the recipe is trained."""


def run_recipe(recipe: str, options: TrainOptions, out: str | Path, **how: Any) -> dict[str, Any]:
    """Train with the recipe of this name.

    Args:
        recipe: A key of ``METHODS``, such as "simclr".
        options: Options of the recipe, of the class ``RECIPES[recipe]``.
        out: The run directory.
        how: Further arguments of ``train``: ``views``, ``resume``, ``allow_other_data``, ``quiet``.

    Returns:
        The content of result.json.

    Raises:
        ArgumentError: If the recipe is unknown or the options are those of another one.
    """
    if recipe not in METHODS:
        raise ArgumentError("train", f"a recipe among {', '.join(METHODS)}", f"recipe={recipe!r}")
    if not isinstance(options, RECIPES[recipe]):
        got, fix = type(options).__name__, f"use RECIPES[{recipe!r}] of hardneg.training.options"
        raise ArgumentError("train", f"{RECIPES[recipe].__name__} for {recipe}", got, fix)
    check_boards()
    return train(recipe, _method(recipe), options, out, **how)


def encoder_of_recipe(recipe: str, kind: type[Items], record: dict[str, Any], options: TrainOptions) -> nn.Module:
    """Build the encoder of a finished run, with fresh weights; that of an unknown recipe is the one of its data.

    Args:
        recipe: Name of the recipe.
        kind: Kind of the data.
        record: Record of the training items.
        options: Options of the run.
    """
    method = _method(recipe) if recipe in METHODS else Method
    return getattr(method, "rebuilt", Method.rebuilt)(kind, record, options)


def _method(recipe: str) -> Any:
    """Import the constructor of a recipe's method: a class, or a function of several versions."""
    module, _, name = METHODS[recipe].partition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
