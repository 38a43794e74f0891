"""Charts as inline SVG, without scripts, for reports and audits: lines, dots, histograms and the frontier.

``axes`` has what all charts share; every other module has one kind of chart, whose function returns Markup.
"""
