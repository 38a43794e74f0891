"""Judge a few hundred pairs, and know with a guarantee how many mined negatives are false."""
