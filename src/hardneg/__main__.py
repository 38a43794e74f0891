"""``python -m hardneg``: the command, where its script is not on the path."""

from hardneg.cli.app import main

main()
