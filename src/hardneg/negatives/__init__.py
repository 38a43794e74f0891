"""Distributions of negatives, one small file per idea. Importing this registers them in the grammar."""

from hardneg.negatives.bands import AtMost, BelowPositive, Threshold
from hardneg.negatives.base import Negatives, Product, Uniform, keep, registered_negatives
from hardneg.negatives.clusters import OtherCluster, SameCluster
from hardneg.negatives.gaussian import Gaussian
from hardneg.negatives.grammar import parse, to_text
from hardneg.negatives.hardening import Hardening, assumption_1, register_hardening
from hardneg.negatives.known import Known, KnownPairs
from hardneg.negatives.labels import From, OtherLabel
from hardneg.negatives.tilt import ClippedTilt, Tilt
from hardneg.negatives.windows import Rank, Ring

__all__ = [
    "AtMost",
    "BelowPositive",
    "ClippedTilt",
    "From",
    "Gaussian",
    "Hardening",
    "Known",
    "KnownPairs",
    "Negatives",
    "OtherCluster",
    "OtherLabel",
    "Product",
    "Rank",
    "Ring",
    "SameCluster",
    "Threshold",
    "Tilt",
    "Uniform",
    "assumption_1",
    "keep",
    "parse",
    "register_hardening",
    "registered_negatives",
    "to_text",
]
