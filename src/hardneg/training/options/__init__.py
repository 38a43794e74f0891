"""Options of the training recipes: one frozen dataclass per recipe.

The same class is read from the command line (each field is a flag of ``hardneg train RECIPE``), from YAML files of
comparisons, and from Python. Nothing here imports torch, so that ``hardneg train --help`` answers at once.

Read ``base.py`` first: it holds the fields that all recipes share. ``images.py``, ``texts.py``, ``graphs.py`` and
``banks.py`` add those of each recipe, and ``values.py`` checks types and bounds. ``RECIPES`` maps the name of a
recipe to its options.
"""

from hardneg.training.options.banks import CMCOptions, InstanceOptions, LocalAggregationOptions, NegativeCacheOptions
from hardneg.training.options.base import TrainOptions
from hardneg.training.options.graphs import GraphCLOptions, InfoGraphOptions
from hardneg.training.options.images import (
    EMC2Options,
    ISogCLROptions,
    MoCoOptions,
    SimCLROptions,
    SogCLROptions,
    SupervisedOptions,
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
