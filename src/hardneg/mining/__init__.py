"""Offline mining with the same negatives as in training."""

from hardneg.mining.engine import Mined, MinedBlock, Miner, mine
from hardneg.mining.explain import Explanation
from hardneg.mining.search import Retriever, Search
from hardneg.mining.select import Rule

__all__ = ["Explanation", "Mined", "MinedBlock", "Miner", "Retriever", "Rule", "Search", "mine"]
