"""Comparisons: the same budget, seeds and initial weights for every arm, and what the differences are worth."""

from hardneg.comparisons.asked import Comparison as Comparison
from hardneg.comparisons.comparing import compare as compare
