"""Charts as inline SVG, without scripts, for reports and audits: lines, dots, histograms and the frontier.

``axes`` has what all charts share. ``arms`` (lines and dots), ``histogram`` and ``scatter`` each have functions that
return Markup.
"""
