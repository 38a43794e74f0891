"""Losses as modules.

``contrastive`` is the main loss: any distribution of negatives, objective and backend. Losses with state of their own
are ``global_softmax`` (SogCLR, EMC2), ``bank`` (instance discrimination, CMC) and ``individual`` (a temperature per
instance); ``neighbours`` adds close candidates to the positives. ``grad_cache`` encodes batches that are larger than
memory, and ``paper`` is the registry behind ``hardneg.papers``.
"""

from hardneg.losses.bank import CMC as CMC
from hardneg.losses.bank import InstanceDiscrimination as InstanceDiscrimination
from hardneg.losses.bank import binary_nce as binary_nce
from hardneg.losses.contrastive import ContrastiveLoss as ContrastiveLoss
from hardneg.losses.global_softmax import EMC2 as EMC2
from hardneg.losses.global_softmax import SogCLR as SogCLR
from hardneg.losses.grad_cache import GradCache as GradCache
from hardneg.losses.individual import IndividualTemperatures as IndividualTemperatures
from hardneg.losses.neighbours import neighbour_nce as neighbour_nce
