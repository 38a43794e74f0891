"""Losses as modules: ContrastiveLoss, SogCLR, EMC2, losses against a bank, neighbours, GradCache."""

from hardneg.losses.bank import CMC as CMC
from hardneg.losses.bank import InstanceDiscrimination as InstanceDiscrimination
from hardneg.losses.bank import binary_nce as binary_nce
from hardneg.losses.contrastive import ContrastiveLoss as ContrastiveLoss
from hardneg.losses.global_softmax import EMC2 as EMC2
from hardneg.losses.global_softmax import SogCLR as SogCLR
from hardneg.losses.grad_cache import GradCache as GradCache
from hardneg.losses.individual import IndividualTemperatures as IndividualTemperatures
from hardneg.losses.neighbours import neighbour_nce as neighbour_nce
