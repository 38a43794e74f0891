"""Charts as inline SVG, without scripts, for reports and audits: lines, dots, histograms and the frontier."""
