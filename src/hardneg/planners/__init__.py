"""Who shares a batch: uniform, proximity walks (ProSampler), kNN, k-means strata, communities, single-source."""

from hardneg.planners.base import Epoch as Epoch
from hardneg.planners.base import Planner as Planner
from hardneg.planners.base import registered_planners as registered_planners
from hardneg.planners.communities import Communities as Communities
from hardneg.planners.knn import NearestNeighbours as NearestNeighbours
from hardneg.planners.plan import Plan as Plan
from hardneg.planners.plan import PlanDescription as PlanDescription
from hardneg.planners.plan import Segment as Segment
from hardneg.planners.proximity import Proximity as Proximity
from hardneg.planners.proximity import falling as falling
from hardneg.planners.room import Guard as Guard
from hardneg.planners.sources import SingleSource as SingleSource
from hardneg.planners.strata import Strata as Strata
from hardneg.planners.uniform import Uniform as Uniform
