"""Audits of embeddings and of mined files: how hard, how false and how concentrated the negatives of a rule are.

``hardneg.core.diagnose`` looks at one batch of scores, without opening a file; this looks at whole data sets.
"""

from hardneg.auditing.engine import audit as audit
from hardneg.auditing.result import Audit as Audit
