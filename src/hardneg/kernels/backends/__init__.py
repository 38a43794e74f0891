"""Fused backends of the closed family: ``triton`` on a GPU, ``cpu`` on a CPU, ``tilted`` for small batches of views.

``kernels.engine`` has the contract, the choice, and the two backends in plain PyTorch. ``cpu`` and ``tilted`` have no
name of their own: those two try them first.
"""
