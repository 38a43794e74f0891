"""Compare contrastive losses fairly, and judge which differences are significant.

All arms of a comparison have the same data, budget, seeds and initial weights. Read request.py (what is compared),
arms.py (the text form of an arm), comparing.py (the procedure), then runs.py and memory.py (processes) and
statistics.py and verdict.py (the conclusions). The caller is ``hardneg compare`` (cli/), and the report reads what is
written here.
"""

from hardneg.comparing.comparing import compare as compare
from hardneg.comparing.request import Comparison as Comparison
