"""Recipes: flat files, one method each, on the loop of hardneg.training.loop."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from hardneg.core.errors import ArgumentError
from hardneg.training.options import RECIPES, TrainOptions


def run_recipe(recipe: str, options: TrainOptions, out: str | Path, **how: Any) -> dict[str, Any]:
    """Trains with the recipe of this name; ``how`` is what ``train`` takes: resume, quiet."""
    if recipe not in RECIPES:
        raise ArgumentError("train", f"a recipe among {', '.join(RECIPES)}", f"recipe={recipe!r}")
    module = importlib.import_module(f"hardneg.training.recipes.{recipe.replace('-', '_')}")
    result: dict[str, Any] = module.main(options, out, **how)
    return result
