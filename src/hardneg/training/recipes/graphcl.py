"""GraphCL with any negatives (You et al. 2020): the first view of each graph against the second views of the batch.

One direction, and the positive is not in the denominator, as in the authors' code. The paper's equation 3 includes it
(``positives_in_denominator="own"``), and so does ProSampler's equation 14.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hardneg.training.recipes.simclr import SimCLR


class GraphCL(SimCLR):
    """SimCLR in one direction, on views of graphs."""

    arguments: ClassVar[dict[str, Any]] = {"views": "cross"}
