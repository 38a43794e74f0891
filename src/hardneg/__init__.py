"""hardneg chooses the negatives in contrastive learning: hard, debiased, banded, supervised or sampled.

The public names are those imported below, usually used as ``import hardneg as hn``. Start with:

- ``ContrastiveLoss``: a loss module for training, with negatives, objective and pools as options.
- ``Tilt``, ``Rank``, ``Threshold`` and the other distributions of negatives; ``parse`` reads their expressions.
- ``two_views``, ``cross_views``, ``score``: dense scores, for ``info_nce`` and the other plain functions.
- ``mine``, ``audit``, ``diagnose``: hard negatives of a corpus, and false negatives in data or batches.

Names are imported when first used, so that ``import hardneg`` and ``hardneg --help`` stay fast. Everything else is in
the package it belongs to (``hardneg.state.Chain``).
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:  # the only list of public names: read by type checkers, and by _names() at run time
    from hardneg import auditing as auditing
    from hardneg import batching as batching
    from hardneg import core as core
    from hardneg import judging as judging
    from hardneg import losses as losses
    from hardneg import mining as mining
    from hardneg import negatives as negatives
    from hardneg import papers as papers
    from hardneg import state as state
    from hardneg import theory as theory
    from hardneg.auditing import audit as audit
    from hardneg.batching.graph import build_graph as build_graph
    from hardneg.batching.sampler import ProximityBatchSampler as ProximityBatchSampler
    from hardneg.batching.walks import walk as walk
    from hardneg.core import schedules as schedules
    from hardneg.core.diagnose import diagnose as diagnose
    from hardneg.core.objectives import info_nce as info_nce
    from hardneg.core.objectives import jsd as jsd
    from hardneg.core.objectives import reduce as reduce
    from hardneg.core.objectives import sigmoid as sigmoid
    from hardneg.core.objectives import surrogate as surrogate
    from hardneg.core.scoring import cross_views as cross_views
    from hardneg.core.scoring import from_matrix as from_matrix
    from hardneg.core.scoring import score as score
    from hardneg.core.scoring import two_views as two_views
    from hardneg.core.types import NEVER as NEVER
    from hardneg.core.types import Keys as Keys
    from hardneg.core.types import Scores as Scores
    from hardneg.judging import judge as judge
    from hardneg.losses.contrastive import ContrastiveLoss as ContrastiveLoss
    from hardneg.losses.global_softmax import EMC2 as EMC2
    from hardneg.losses.global_softmax import SogCLR as SogCLR
    from hardneg.mining import mine as mine
    from hardneg.negatives import AtMost as AtMost
    from hardneg.negatives import BelowPositive as BelowPositive
    from hardneg.negatives import ClippedTilt as ClippedTilt
    from hardneg.negatives import From as From
    from hardneg.negatives import Gaussian as Gaussian
    from hardneg.negatives import Hardening as Hardening
    from hardneg.negatives import Known as Known
    from hardneg.negatives import OtherCluster as OtherCluster
    from hardneg.negatives import OtherLabel as OtherLabel
    from hardneg.negatives import Rank as Rank
    from hardneg.negatives import Ring as Ring
    from hardneg.negatives import SameCluster as SameCluster
    from hardneg.negatives import Threshold as Threshold
    from hardneg.negatives import Tilt as Tilt
    from hardneg.negatives import Uniform as Uniform
    from hardneg.negatives import parse as parse
    from hardneg.negatives import registered_negatives as registered_negatives
    from hardneg.search.draws import draw as draw
    from hardneg.state.pools import Bank as Bank
    from hardneg.state.pools import Queue as Queue
    from hardneg.theory.gradients import global_loss as global_loss
    from hardneg.theory.gradients import gradient_error as gradient_error
    from hardneg.theory.information import mutual_information as mutual_information
    from hardneg.training.entry import train as train
    from hardneg.training.trained import load_encoder as load_encoder


def _names() -> dict[str, str]:
    """Return each public name with its module, parsed from the imports for type checkers above."""
    listed = next(
        node for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body if isinstance(node, ast.If)
    )
    imports = [node for node in listed.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_home_of = _names()
__all__ = ["__version__", *_home_of]


def __getattr__(name: str) -> Any:
    if name not in _home_of:
        raise AttributeError(f"module 'hardneg' has no attribute {name!r}")
    home = _home_of[name]
    if home in ("hardneg", "hardneg.core"):
        return importlib.import_module(f"{home}.{name}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
