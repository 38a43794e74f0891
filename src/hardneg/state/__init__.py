"""State kept over steps: queue, bank, cache, chain, partition function, clusters, momentum encoder."""

from hardneg.state.cache import Cache as Cache
from hardneg.state.chain import Chain as Chain
from hardneg.state.clusters import Clusters as Clusters
from hardneg.state.metropolis import metropolis_hastings as metropolis_hastings
from hardneg.state.momentum import MomentumEncoder as MomentumEncoder
from hardneg.state.partition import Partition as Partition
from hardneg.state.pools import Bank as Bank
from hardneg.state.pools import Queue as Queue
