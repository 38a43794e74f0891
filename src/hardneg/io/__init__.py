"""Files: whole-or-nothing writes, locks, checksums, arrays, tables."""
