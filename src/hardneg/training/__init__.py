"""Training: options, data, augmentation, encoders, the loop, its run directory, evaluation and the recipes.

Three parts, in reading order:

- data: ``data/``, ``augmentation/`` and the encoders, which turn a ``--data`` text into batches of views;
- loop: ``loop/`` (``method.py`` is the interface of a recipe, ``train.py`` the loop, ``runs.py`` the run directory),
  ``options/`` and ``recipes/``;
- evaluation: ``evaluation/``, and ``export.py`` for the trained encoder.
"""
