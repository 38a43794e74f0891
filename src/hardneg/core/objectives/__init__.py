"""Objectives: loss functions of a positive's score and a few statistics of its row; one small file per method.

``base.py`` defines the interface and ``reduce``; ``info_nce.py`` is the most used objective. Each method has a class
(``InfoNCE``), which losses use and the grammar finds by name, and most have a plain function of dense scores
(``info_nce``), which returns one loss per pair, [b, p].
"""

from hardneg.core.objectives.base import Function as Function
from hardneg.core.objectives.base import Objective as Objective
from hardneg.core.objectives.base import Row as Row
from hardneg.core.objectives.base import corrects as corrects
from hardneg.core.objectives.base import reduce as reduce
from hardneg.core.objectives.base import reduce_sums as reduce_sums
from hardneg.core.objectives.base import registered_objectives as registered_objectives
from hardneg.core.objectives.info_nce import InfoNCE as InfoNCE
from hardneg.core.objectives.info_nce import NumNegatives as NumNegatives
from hardneg.core.objectives.info_nce import check_num_negatives as check_num_negatives
from hardneg.core.objectives.info_nce import debiased as debiased
from hardneg.core.objectives.info_nce import info_nce as info_nce
from hardneg.core.objectives.jsd import JSD as JSD
from hardneg.core.objectives.jsd import jsd as jsd
from hardneg.core.objectives.rince import RINCE as RINCE
from hardneg.core.objectives.sigmoid import Sigmoid as Sigmoid
from hardneg.core.objectives.sigmoid import sigmoid as sigmoid
from hardneg.core.objectives.surrogate import ISogCLR as ISogCLR
from hardneg.core.objectives.surrogate import Surrogate as Surrogate
from hardneg.core.objectives.surrogate import surrogate as surrogate
from hardneg.core.statistics import log_expect_exp as log_expect_exp
