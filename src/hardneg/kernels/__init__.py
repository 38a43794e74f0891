"""The row engine of the losses: row statistics of any distribution, with autograd.

Read in this order:

- ``engine``: the contract of a backend, the choice of the backend that computes a loss, and the backends in plain
  PyTorch: ``Dense`` (matrices) and ``Tiles`` (many tiles).
- ``backends/cpu`` and ``backends/cpu_tiles``: the closed family on a CPU; ``backends/tilted``: uniform and tilted
  negatives of views on a GPU; ``backends/triton``: fused kernels.
- ``plan``: what a sweep over tiles multiplies, in which tiles and in which precision.
- ``sweep``: bounds first, then differentiable passes. ``passes``: the three passes.
- ``cuda_graphs``: compiled functions and graphs, which save launches on a GPU.
- ``triton/``: the kernels, with a map in its ``__init__``.
"""
