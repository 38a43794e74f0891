"""Nearest rows (exact and approximate), top-k, draws, k-means and histograms: what mining, graphs and audits use."""
