"""Comparisons: the same budget, seeds and initial weights for every arm, and what the differences are worth."""

from hardneg.comparing.comparing import compare as compare
from hardneg.comparing.request import Comparison as Comparison
