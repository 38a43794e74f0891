"""State that is kept over training steps: candidates from outside the batch, and statistics per instance.

``stateful`` is the base class: all state in buffers, random draws from a seed and a step. ``pools`` has the queue and
the bank, ``cache`` the negative cache, ``clusters`` the cluster of each instance. ``partition`` (SogCLR) and ``chain``
(EMC2; its steps are in ``metropolis``, its kernels in ``triton_chains``) estimate the softmax over the data set.
``momentum`` is MoCo's momentum encoder.
"""

from hardneg.state.cache import Cache as Cache
from hardneg.state.chain import Chain as Chain
from hardneg.state.clusters import Clusters as Clusters
from hardneg.state.metropolis import metropolis_hastings as metropolis_hastings
from hardneg.state.momentum import MomentumEncoder as MomentumEncoder
from hardneg.state.partition import Partition as Partition
from hardneg.state.pools import Bank as Bank
from hardneg.state.pools import Queue as Queue
