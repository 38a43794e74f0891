"""Data to train on: one class per kind, all subclasses of ``Items``.

Read items.py (the interface), inputs.py (what an encoder receives) and kinds.py (``--data`` to a kind) first. The
kinds: images.py (files by named.py and image_files.py), texts.py and pairs.py (files by text_files.py, tokens by
tokens.py), image_texts.py, and graphs.py (files by graph_files.py).
"""
