"""The Metropolis-Hastings chains of EMC2 in Triton.

``walks`` is everything that EMC2 does with a batch of chains, in four kernels.
``chain`` is the bare walk with given draws, for ``draws=`` and for tests. ``state.chain`` decides what runs.
"""
