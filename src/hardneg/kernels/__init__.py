"""The row engine of the losses: row statistics of any distribution, with autograd.

Read in this order:

- ``engine``: the contract of a backend, and the choice of the backend that computes a loss.
- ``backends/dense``: matrices; ``backends/tiles``: many tiles; ``backends/triton``: fused kernels;
  ``backends/tilted``: a shortcut of the first two for uniform and tilted negatives of views.
- ``plan``: what a sweep over tiles multiplies, in which tiles and in which precision.
- ``sweep``: bounds first, then differentiable passes. ``passes``: the three passes.
- ``cuda_graphs``: compiled functions and graphs, which save launches on a GPU.
- ``triton/``: the kernels, with a map in its ``__init__``.
"""
