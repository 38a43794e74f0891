"""Distributions of negatives: which candidates of a batch or pool count as negatives, and with what weight.

Read ``base`` first: the class ``Negatives`` that all distributions derive from, and their product ``a * b``. Each other
file holds one idea:

- ``tilt`` (with the Gaussian), ``hardening``: weights as a function of the score.
- ``bands``, ``windows``: candidates within a range of similarities or of ranks.
- ``tags``, ``known``: masks by label, cluster or source, and by judged pair.
- ``closed``: what the fused kernels need to know of a distribution. ``grammar``: distributions as text.

Importing this package registers all of them in the grammar.

Example:
    >>> parse("OtherLabel() * Tilt(1.0)")
    OtherLabel() * Tilt(1.0)
"""

from hardneg.negatives.bands import AtMost as AtMost
from hardneg.negatives.bands import BelowPositive as BelowPositive
from hardneg.negatives.bands import Threshold as Threshold
from hardneg.negatives.base import Negatives as Negatives
from hardneg.negatives.base import Product as Product
from hardneg.negatives.base import Uniform as Uniform
from hardneg.negatives.base import keep as keep
from hardneg.negatives.base import registered_negatives as registered_negatives
from hardneg.negatives.grammar import parse as parse
from hardneg.negatives.grammar import to_text as to_text
from hardneg.negatives.hardening import Hardening as Hardening
from hardneg.negatives.hardening import assumption_1 as assumption_1
from hardneg.negatives.hardening import register_hardening as register_hardening
from hardneg.negatives.known import Known as Known
from hardneg.negatives.known import KnownPairs as KnownPairs
from hardneg.negatives.tags import From as From
from hardneg.negatives.tags import OtherCluster as OtherCluster
from hardneg.negatives.tags import OtherLabel as OtherLabel
from hardneg.negatives.tags import SameCluster as SameCluster
from hardneg.negatives.tilt import ClippedTilt as ClippedTilt
from hardneg.negatives.tilt import Gaussian as Gaussian
from hardneg.negatives.tilt import Tilt as Tilt
from hardneg.negatives.windows import Rank as Rank
from hardneg.negatives.windows import Ring as Ring
