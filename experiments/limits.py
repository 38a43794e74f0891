"""Draw the limits of HCL (Robinson et al. 2021, section 4): the figure of docs/explanation/limits.md.

    python experiments/limits.py --out docs/figures/limits.svg

Four panels: a tilted loss and the worst case (Proposition 3), ten classes on a circle (Theorem 4), the bound on the
1-NN error (Theorem 5), and the variance with one positive (Lemma 11). All numbers are printed too.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
from torch.nn.functional import normalize

import hardneg as hn
from hardneg import theory

try:
    import matplotlib
except ImportError:
    sys.exit("limits.py needs matplotlib, which is not installed: pip install matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

matplotlib.rcParams |= {"svg.hashsalt": "hardneg", "svg.fonttype": "none"}


def worst_case(axis: Axes) -> None:
    torch.manual_seed(0)
    z1, z2 = normalize(torch.randn(2, 32, 8, dtype=torch.float64), dim=-1)
    scores = hn.two_views(z1, z2, temperature=0.5)
    worst = theory.worst_case_loss(scores, num_negatives=62)
    betas = [2.0**power for power in range(-1, 9)]
    gaps = [
        float((worst - hn.info_nce(scores, hn.Tilt(beta).log_weights(scores), num_negatives=62)).mean())
        for beta in betas
    ]
    bounds = [theory.tilt_gap_bound(62, beta) for beta in betas]
    axis.loglog(betas, gaps, "o-", label="worst case - tilted loss")
    axis.loglog(betas, bounds, "s--", label="bound log(n) / beta")
    axis.set(xlabel="beta", ylabel="nats", title="Proposition 3")
    print("Proposition 3:", *(f"beta {b:g}: {g:.3g} <= {c:.3g}" for b, g, c in zip(betas, gaps, bounds, strict=True)))


def packing(axis: Axes) -> None:
    circle = torch.linspace(0.0, 2.0 * math.pi, 200)
    axis.plot(circle.cos(), circle.sin(), color="0.85")
    for name, radius, style in (("mean", 1.0, "o"), ("smallest", 0.8, "s")):
        found = theory.ball_packing(10, 2, objective=name)
        axis.plot(*(radius * found.vectors).T, style, label=f"{name}: eq. 7 is {found.value:.2f}")
        print(f"Theorem 4, ten classes on a circle, {name}: value {found.value:.3f}, separation {found.separation:.3f}")
    axis.set(title="Theorem 4: ten classes", xticks=[], yticks=[], aspect="equal")


def risk(axis: Axes) -> None:
    excess = [10.0 ** (-k / 2) for k in range(4, 17)]
    for classes in (2, 10, 100):
        separation = theory.ball_packing(classes, 128, radius=0.5**-0.5, starts=1).separation
        bounds = [theory.nearest_neighbour_risk(each, separation, classes, 0.5) for each in excess]
        axis.loglog(excess, bounds, "o-", label=f"{classes} classes")
        print(f"Theorem 5, {classes} classes:", *(f"{e:.1e}: {b:.1e}" for e, b in zip(excess, bounds, strict=True)))
    axis.set(xlabel="excess of the worst-case loss", ylabel="bound on the error", title="Theorem 5")


def variance(axis: Axes) -> None:
    torch.manual_seed(0)
    z, noise = normalize(torch.randn(2, 500, 16, dtype=torch.float64), dim=-1)
    found = [
        theory.positive_variance(hn.score(z, normalize(z + scale * noise, dim=-1), noise, temperature=0.5))
        for scale in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
    ]
    alignment = [each.alignment for each in found]
    axis.loglog(alignment, [each.variance for each in found], "o-", label="variance of e^s")
    axis.loglog(alignment, [each.bound for each in found], "s--", label="bound")
    axis.set(xlabel="alignment", title="Lemma 11")
    print("Lemma 11:", *(f"{each.alignment:.3g}: {each.variance:.3g} <= {each.bound:.3g}" for each in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="limits.svg")
    out = parser.parse_args().out
    figure, axes = plt.subplots(1, 4, figsize=(15.0, 3.6), layout="constrained")
    for axis, draw in zip(axes, (worst_case, packing, risk, variance), strict=True):
        draw(axis)
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Date": None})
    print(f"Wrote {out}.")


if __name__ == "__main__":
    main()
