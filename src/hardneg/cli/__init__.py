"""The command line: app.py, and a file for each of the larger verbs."""
