"""Recipes: flat files, one method each, on the loop of hardneg.training.loop."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from hardneg.core.errors import ArgumentError
from hardneg.training.boards import check_boards
from hardneg.training.loop import train
from hardneg.training.options import RECIPES, TrainOptions

METHODS = {
    "simclr": "simclr.SimCLR",
    "supervised": "supervised.Supervised",
    "simcse": "simcse.SimCSE",
    "pairs": "pairs.PairsRecipe",
    "clip": "clip.CLIP",
    "quick-thoughts": "quick_thoughts.QuickThoughts",
    "moco": "moco.moco",
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
"""The recipes by name: the module and what builds the method, which is imported when it is trained."""


def run_recipe(recipe: str, options: TrainOptions, out: str | Path, **how: Any) -> dict[str, Any]:
    """Trains with the recipe of this name; ``how`` is what ``train`` takes: resume, quiet."""
    if recipe not in METHODS:
        raise ArgumentError("train", f"a recipe among {', '.join(METHODS)}", f"recipe={recipe!r}")
    if not isinstance(options, RECIPES[recipe]):
        got, fix = type(options).__name__, f"use RECIPES[{recipe!r}] of hardneg.training.options"
        raise ArgumentError("train", f"{RECIPES[recipe].__name__} for {recipe}", got, fix)
    check_boards()
    module, _, name = METHODS[recipe].partition(".")
    build = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return train(recipe, build, options, out, **how)
