"""Adapters for other training libraries; each file or folder needs one optional dependency.

Nothing here is imported by ``import hardneg``: import the module of your library, such as
``hardneg.integrations.sentence_transformers``.
"""
