"""Planners: ways to choose which instances share a batch, one file per idea.

Uniform, proximity walks (ProSampler), nearest neighbours, k-means strata, communities (B3), Cuthill-McKee (GCBS),
single-source and consecutive batches. To add one, subclass ``Planner`` (base.py).
"""

from hardneg.batching.filling import Guard as Guard
from hardneg.batching.plan import Plan as Plan
from hardneg.batching.planners.base import Planner as Planner
from hardneg.batching.planners.base import registered_planners as registered_planners
from hardneg.batching.planners.communities import Communities as Communities
from hardneg.batching.planners.communities import CuthillMcKee as CuthillMcKee
from hardneg.batching.planners.knn import NearestNeighbours as NearestNeighbours
from hardneg.batching.planners.proximity import Proximity as Proximity
from hardneg.batching.planners.proximity import falling as falling
from hardneg.batching.planners.single_source import SingleSource as SingleSource
from hardneg.batching.planners.strata import Strata as Strata
from hardneg.batching.planners.uniform import Consecutive as Consecutive
from hardneg.batching.planners.uniform import UniformPlanner as UniformPlanner
