"""One optional dependency per file."""
