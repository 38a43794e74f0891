"""How often any test can find a difference of three standard errors from three pairs of runs: an upper bound.

Runs of two arms with the same seed have the correlation r; what differs is the seeds alone. Differences and sums of the
pairs are independent then: d, the mean difference in its standard errors, is N(delta, 1), and the sums of squares are x
of the differences, chi-square with 2 degrees of freedom, and y of the sums, (1 + r) / (1 - r) times such a variable. A
test that does not depend on the unit of accuracy sees d^2 : x : y only. The most powerful one against r = 0.41 (that of
"equal, seeds shared in part") with a given level at r = 0 is a linear program over a grid of what it sees. It also
knows r, so no rule for real comparisons does better.

    python experiments/verdict_bound.py
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.stats import nct, norm, t

SHARED = 0.05**2 / (0.05**2 + 0.06**2)
DIFFERENCE = 3.0
LEVELS = (0.0434, 0.05, 0.055, 0.06, 0.07)  # the first is that of the verdict at r = 0


def probabilities(correlation: float, delta: float) -> NDArray[np.float64]:
    """Of each cell of the grid over |d| / sqrt(x + y) and x / (x + y), the total x + y integrated out."""
    total = np.geomspace(1e-4, 400.0, 500)
    ratio = np.concatenate([np.linspace(0.025, 6.0, 120), np.geomspace(6.0, 900.0, 60)[1:]])
    share = np.concatenate([np.geomspace(1e-4, 0.1, 25)[:-1], np.linspace(0.1, 0.995, 50)])
    spread = (1.0 + correlation) / (1.0 - correlation)
    d = ratio[:, None, None] * np.sqrt(total)
    density = norm.pdf(d - delta) + norm.pdf(d + delta)
    density = density * np.exp(-total * (share[:, None] + (1.0 - share[:, None]) / spread) / 2.0) * total**1.5
    cells = (density * np.gradient(total)).sum(-1) * np.gradient(ratio)[:, None] * np.gradient(share)
    return (cells / cells.sum()).ravel()


def most_power(level: float) -> float:
    """Of tests that hold the level whether or not the arms share their seeds."""
    nulls = np.array([probabilities(correlation, 0.0) for correlation in (0.0, SHARED)])
    found = linprog(-probabilities(SHARED, DIFFERENCE), A_ub=nulls, b_ub=[level, level], bounds=(0.0, 1.0))
    return float(-found.fun)


def paired(level: float) -> float:
    """The power of a t-test on the three differences."""
    quantile = t.isf(level / 2.0, 2)
    return float(nct.sf(quantile, 2, DIFFERENCE) + nct.cdf(-quantile, 2, DIFFERENCE))


def main() -> None:
    for level in LEVELS:
        print(f"level {level:.2%}: paired {paired(level):.1%}, most powerful {most_power(level):.1%}")


if __name__ == "__main__":
    main()
