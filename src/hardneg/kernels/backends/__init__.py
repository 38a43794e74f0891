"""Backends of the row engine, one file each; ``tilted`` is a shortcut of the first two for uniform and tilted views."""
