"""Sweeps over blocks of pairs that never hold all of them: chunks of rows for every distribution, Triton for the closed family."""
