"""One self-contained HTML page about runs and comparisons, for people who have not read the papers."""

from hardneg.report.write import write_report as write_report
