"""Search primitives on plain vectors, used by mining, graphs, audits and the cache.

``topk`` selects the largest values of each row with a fixed rule for ties. ``nearest`` searches a corpus block by block
or through FAISS; ``exact`` does the same with results that do not depend on block sizes or precision, and
``triton_groups`` is its fast screen on a GPU. ``draws`` samples candidates from log-weights, ``kmeans`` clusters, and
``histogram`` counts similarities.
"""
