"""Batch composition: which instances share a batch, and so are each other's in-batch negatives.

Read graph.py (the proximity graph), walks.py (random walks on it), planners/ (ways to choose batches), plan.py (the
batches of an epoch as a value) and sampler.py (a PyTorch batch sampler that follows plans); refresh.py updates the
embeddings that batches are planned from, filling.py guarantees coverage, and spec.py parses ``--batches``.
"""

from hardneg.batching.filling import Guard as Guard
from hardneg.batching.graph import ProximityGraph as ProximityGraph
from hardneg.batching.graph import build_graph as build_graph
from hardneg.batching.plan import Plan as Plan
from hardneg.batching.refresh import Refresh as Refresh
from hardneg.batching.refresh import encode as encode
from hardneg.batching.refresh import harvested as harvested
from hardneg.batching.sampler import PlannedBatchSampler as PlannedBatchSampler
from hardneg.batching.sampler import ProximityBatchSampler as ProximityBatchSampler
from hardneg.batching.walks import walk as walk
