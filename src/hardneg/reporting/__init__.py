"""Report: one self-contained HTML page about runs and comparisons, for readers who do not know the papers.

``write_report`` (write.py) is the public function, used by ``hardneg report`` and ``hardneg compare``. Read contents.py
(the data of a page) and reading.py (how they are read from disk) first; the other files each make one section.
"""

from hardneg.reporting.write import write_report as write_report
