"""Triton kernels of the closed family: uniform, tilted, banded and ranked negatives, and positives by label.

``kernels/backends/triton.py`` decides what runs here. One loss launches, in this order:

1. ``sides``: checks limits, sorts rows by id or label, and chooses the shapes of blocks. ``blocks`` has the loads and
   masks that all kernels share, and computes norms.
2. ``wide`` and ``edges``, only for more than 256 features or for windows of ranks: cuBLAS multiplies a chunk of rows
   first, and ``edges`` finds the scores at two ranks by counting.
3. ``rows``: the forward sweep. log E_q[e^s], log-mass and support of every row; for two views also the positive, the
   debiasing and the loss. The derivation of both passes is at the top of this file.
4. ``own``: the scores of the anchors' own positives where they are not in the batch.
5. ``labels``, only for positives by label: one more sweep over candidates with the anchor's label.
6. ``gradients``: the backward sweep, one launch for self-similarity and two for anchors against a pool.

``function`` wraps 3 and 6 as one autograd function, ``statistics`` is the call with named arguments, and ``language``
imports Triton if it is installed. ``TRITON_INTERPRET=1`` runs all kernels on CPU tensors.
"""
