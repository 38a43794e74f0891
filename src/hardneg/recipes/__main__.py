"""``python -m hardneg.recipes RECIPE OUT OPTIONS_AS_JSON``: one run in a process of its own, resumed if begun."""

from __future__ import annotations

import json
import sys

from hardneg.options import RECIPES
from hardneg.recipes import run_recipe


def main() -> None:
    recipe, out, options = sys.argv[1:]
    run_recipe(recipe, RECIPES[recipe](**json.loads(options)), out, resume=True, quiet=True)


if __name__ == "__main__":
    main()
