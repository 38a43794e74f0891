"""Sweeps over blocks of pairs that never hold them all: chunks for every distribution, Triton for the closed family."""
