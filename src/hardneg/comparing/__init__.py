"""Comparisons: the same budget, seeds and initial weights for every arm, and which differences are beyond noise."""

from hardneg.comparing.comparing import compare as compare
from hardneg.comparing.request import Comparison as Comparison
