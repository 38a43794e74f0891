"""The dense backend: matrices [b, n] for every distribution and every objective, also inside torch.compile."""

from __future__ import annotations

import hardneg.kernels.backends.tilted as tilted
from hardneg.core.objectives.base import Objective, RowResult
from hardneg.core.pairing import Pairing
from hardneg.core.scoring import matrices
from hardneg.negatives.base import Negatives


class Dense:
    """Computes the scores and log-weights of all pairs at once."""

    def why_not(self, pairing: Pairing, negatives: Negatives, objective: Objective) -> str | None:
        """Return None: matrices work for every distribution and objective."""
        return None

    def rows(self, pairing: Pairing, negatives: Negatives, objective: Objective) -> RowResult:
        """Compute the statistics from matrices; label positives are among the positives of the result.

        Uniform and tilted negatives of views, such as those of a plain ``ContrastiveLoss()``, go through ``tilted``,
        which has fewer operations. All others go through ``core/scoring.py`` and ``Negatives.log_weights``.
        """
        form = tilted.dense_form(pairing, negatives, objective)
        if form is not None:
            return tilted.dense_rows(pairing, form)
        scores = matrices(pairing)
        row = objective.dense_row(scores, negatives.log_weights(scores))
        return RowResult(row, scores.positives, scores.positive_valid)
