"""hardneg chooses the negatives in contrastive learning.

The names below are the public contract. They are imported when first used, so that ``import hardneg`` and
``hardneg --help`` stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_homes = {
    "types": ["NEVER", "Keys", "LogWeights", "Scores"],
    "scoring": [
        "beside",
        "checks",
        "cross_views",
        "from_matrix",
        "more_positives",
        "same_label_positives",
        "score",
        "two_views",
    ],
    "negatives": [
        "BelowPositive",
        "ClippedTilt",
        "From",
        "Hardening",
        "Known",
        "KnownPairs",
        "Negatives",
        "OtherCluster",
        "OtherLabel",
        "Rank",
        "Ring",
        "SameCluster",
        "Threshold",
        "Tilt",
        "Uniform",
        "draw",
        "parse",
        "register_hardening",
        "registered_negatives",
        "to_text",
    ],
    "objectives": ["info_nce", "jsd", "log_expect_exp", "reduce", "sigmoid", "surrogate"],
    "auditing": ["Diagnosis", "assumption_1", "diagnose"],
    "losses": ["ContrastiveLoss"],
    "pools": ["Bank", "Queue"],
    "cache": ["Cache"],
    "chain": ["Chain", "metropolis_hastings"],
    "global_losses": ["EMC2", "SogCLR"],
    "nce": ["CMC", "InstanceDiscrimination", "binary_nce"],
    "neighbours": ["neighbour_nce"],
    "partition": ["Partition"],
    "momentum": ["MomentumEncoder"],
    "clustering": ["Clusters"],
    "distributed": ["gather"],
    "graph": ["ProximityGraph", "build_graph"],
    "walks": ["walk"],
    "planners": ["Guard", "Plan"],
    "refresh": ["Refresh", "encode", "harvested"],
    "sampler": ["PlannedBatchSampler", "ProximityBatchSampler"],
    "mining": ["mine"],
    "audits": ["Audit", "audit"],
}
_home_of = {name: home for home, names in _homes.items() for name in names}
_modules = ["papers", "planners", "schedules"]

__all__ = ["__version__", *_home_of, *_modules]


def __getattr__(name: str) -> Any:
    if name in _home_of:
        return getattr(importlib.import_module(f"hardneg.{_home_of[name]}"), name)
    if name in _modules:
        return importlib.import_module(f"hardneg.{name}")
    raise AttributeError(f"module 'hardneg' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from hardneg import papers as papers
    from hardneg import planners as planners
    from hardneg import schedules as schedules
    from hardneg.auditing import Diagnosis as Diagnosis
    from hardneg.auditing import assumption_1 as assumption_1
    from hardneg.auditing import diagnose as diagnose
    from hardneg.audits import Audit as Audit
    from hardneg.audits import audit as audit
    from hardneg.cache import Cache as Cache
    from hardneg.chain import Chain as Chain
    from hardneg.chain import metropolis_hastings as metropolis_hastings
    from hardneg.clustering import Clusters as Clusters
    from hardneg.distributed import gather as gather
    from hardneg.global_losses import EMC2 as EMC2
    from hardneg.global_losses import SogCLR as SogCLR
    from hardneg.graph import ProximityGraph as ProximityGraph
    from hardneg.graph import build_graph as build_graph
    from hardneg.losses import ContrastiveLoss as ContrastiveLoss
    from hardneg.mining import mine as mine
    from hardneg.momentum import MomentumEncoder as MomentumEncoder
    from hardneg.nce import CMC as CMC
    from hardneg.nce import InstanceDiscrimination as InstanceDiscrimination
    from hardneg.nce import binary_nce as binary_nce
    from hardneg.negatives import BelowPositive as BelowPositive
    from hardneg.negatives import ClippedTilt as ClippedTilt
    from hardneg.negatives import From as From
    from hardneg.negatives import Hardening as Hardening
    from hardneg.negatives import Known as Known
    from hardneg.negatives import KnownPairs as KnownPairs
    from hardneg.negatives import Negatives as Negatives
    from hardneg.negatives import OtherCluster as OtherCluster
    from hardneg.negatives import OtherLabel as OtherLabel
    from hardneg.negatives import Rank as Rank
    from hardneg.negatives import Ring as Ring
    from hardneg.negatives import SameCluster as SameCluster
    from hardneg.negatives import Threshold as Threshold
    from hardneg.negatives import Tilt as Tilt
    from hardneg.negatives import Uniform as Uniform
    from hardneg.negatives import draw as draw
    from hardneg.negatives import parse as parse
    from hardneg.negatives import register_hardening as register_hardening
    from hardneg.negatives import registered_negatives as registered_negatives
    from hardneg.negatives import to_text as to_text
    from hardneg.neighbours import neighbour_nce as neighbour_nce
    from hardneg.objectives import info_nce as info_nce
    from hardneg.objectives import jsd as jsd
    from hardneg.objectives import log_expect_exp as log_expect_exp
    from hardneg.objectives import reduce as reduce
    from hardneg.objectives import sigmoid as sigmoid
    from hardneg.objectives import surrogate as surrogate
    from hardneg.partition import Partition as Partition
    from hardneg.planners import Guard as Guard
    from hardneg.planners import Plan as Plan
    from hardneg.pools import Bank as Bank
    from hardneg.pools import Queue as Queue
    from hardneg.refresh import Refresh as Refresh
    from hardneg.refresh import encode as encode
    from hardneg.refresh import harvested as harvested
    from hardneg.sampler import PlannedBatchSampler as PlannedBatchSampler
    from hardneg.sampler import ProximityBatchSampler as ProximityBatchSampler
    from hardneg.scoring import beside as beside
    from hardneg.scoring import checks as checks
    from hardneg.scoring import cross_views as cross_views
    from hardneg.scoring import from_matrix as from_matrix
    from hardneg.scoring import more_positives as more_positives
    from hardneg.scoring import same_label_positives as same_label_positives
    from hardneg.scoring import score as score
    from hardneg.scoring import two_views as two_views
    from hardneg.types import NEVER as NEVER
    from hardneg.types import Keys as Keys
    from hardneg.types import LogWeights as LogWeights
    from hardneg.types import Scores as Scores
    from hardneg.walks import walk as walk
