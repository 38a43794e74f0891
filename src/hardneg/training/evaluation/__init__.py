"""Evaluation of embeddings: frozen features in, figures out.

embeddings.py is the entry for labelled features (linear probe, kNN, geometry); texts.py wraps text encoders, which
sts.py, retrieval.py and classification.py evaluate; benchmarks.py connects those to ``--evaluate-with``; monitors.py
watches a figure during training. measures.py holds the names and explanations of all measures.
"""
