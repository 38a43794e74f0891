"""SimCSE with any negatives (Gao et al. 2021): two dropout passes of each text, the first against the second ones.

One direction, as in the authors' code; the positive is in the denominator (eq. 4). HCL and DCL are this recipe with
other ``negatives`` and ``tau_plus``. ProSampler with a graph that is built once is ``--batches "proximity(warmup=0,
encode=True, refresh=1000000)"``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hardneg.training.recipes.simclr import SimCLR


class SimCSE(SimCLR):
    """SimCLR in one direction, on two dropout passes of each text."""

    arguments: ClassVar[dict[str, Any]] = {"views": "cross"}
