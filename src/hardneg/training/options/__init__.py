"""Options of the training recipes: one frozen dataclass per recipe.

The same class is read from the command line (each field is a flag of ``hardneg train RECIPE``), from YAML files of
comparisons, and from Python. Nothing here imports torch, so that ``hardneg train --help`` answers at once.

Read ``base.py`` first: it holds the fields that all recipes share. ``recipes.py`` adds those of the recipes for images
and graphs, ``texts.py`` for texts and pairs, ``banks.py`` those with a memory bank; ``values.py`` checks types and
bounds.
``RECIPES`` maps the name of a recipe to its options.
"""

from hardneg.training.options.banks import CMCOptions, InstanceOptions, LocalAggregationOptions, NegativeCacheOptions
from hardneg.training.options.base import HeadShape as HeadShape
from hardneg.training.options.base import TrainOptions
from hardneg.training.options.recipes import (
    BYOLOptions,
    EMC2Options,
    FNCOptions,
    GraphCLOptions,
    InfoGraphOptions,
    ISogCLROptions,
    MoCoOptions,
    NNCLROptions,
    SimCLROptions,
    SogCLROptions,
    SupervisedOptions,
    SwAVOptions,
)
from hardneg.training.options.texts import CLIPOptions, PairsOptions, QuickThoughtsOptions, SimCSEOptions

RECIPES: dict[str, type[TrainOptions]] = {
    "simclr": SimCLROptions,
    "supervised": SupervisedOptions,
    "simcse": SimCSEOptions,
    "pairs": PairsOptions,
    "clip": CLIPOptions,
    "quick-thoughts": QuickThoughtsOptions,
    "moco": MoCoOptions,
    "byol": BYOLOptions,
    "swav": SwAVOptions,
    "nnclr": NNCLROptions,
    "fnc": FNCOptions,
    "sogclr": SogCLROptions,
    "isogclr": ISogCLROptions,
    "emc2": EMC2Options,
    "instance": InstanceOptions,
    "cmc": CMCOptions,
    "local-aggregation": LocalAggregationOptions,
    "negative-cache": NegativeCacheOptions,
    "graphcl": GraphCLOptions,
    "infograph": InfoGraphOptions,
}
"""The options class of each recipe, by the name of the recipe on the command line."""
