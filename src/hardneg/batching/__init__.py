"""Who shares a batch: graph, walks, planners, plan, sampler, refresh."""

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
