"""The options of the recipes: plain dataclasses, light enough for ``--help``, the same for flags, YAML and Python."""

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
