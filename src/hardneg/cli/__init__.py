"""The command line: one file per larger verb, shared flags, errors, progress bars and tables.

Read ``app.py`` first: it registers every verb. ``flags.py`` turns dataclasses of options into flags, ``options.py``
holds the dataclasses of the small verbs, and ``errors.py`` turns exceptions into one sentence and an exit code.
"""
