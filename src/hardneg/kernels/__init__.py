"""Losses without a matrix of scores: tiles of rows and columns, recomputed in the backward pass."""
