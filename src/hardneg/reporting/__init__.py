"""One self-contained HTML page about runs and comparisons, for people who have not read the papers."""

from hardneg.reporting.write import write_report as write_report
