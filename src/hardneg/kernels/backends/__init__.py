"""Fused backends: ``triton`` on a GPU, and ``tilted``, a shortcut for uniform and tilted negatives of views.

``kernels.engine`` has the contract, the choice, and the two backends in plain PyTorch.
"""
