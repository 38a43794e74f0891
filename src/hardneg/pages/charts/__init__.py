"""Charts as inline SVG, without scripts, for reports and audits: lines, dots, histograms and the frontier.

``axes`` has what all charts share. ``arms`` (lines and dots) and ``similarities`` (histograms and the frontier) have
functions that return Markup.
"""
