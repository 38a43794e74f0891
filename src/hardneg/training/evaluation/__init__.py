"""Evaluation of embeddings."""
