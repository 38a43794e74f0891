"""Files: atomic writes, locks and checksums, arrays, tables and embeddings, functions by name, provenance.

``files`` and ``sealed`` write and check; ``arrays``, ``tables`` and ``embeddings`` read data; ``outputs`` decides where
a command may write; ``functions``, ``processes`` and ``provenance`` deal with code and the machine; ``terminal``
prints. Every reader takes ``who``, the name of the caller in its errors.
"""
