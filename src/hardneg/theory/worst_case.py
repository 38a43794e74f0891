"""The limits of hard negatives in HCL (Robinson et al. 2021, section 4 and appendices A and D).

``worst_case_loss`` is L*, the loss under the hardest distribution of negatives, to which a tilt tends as beta grows
(Proposition 3, with the rate of ``tilt_gap_bound``). ``ball_packing`` solves the problem whose solutions are the
embeddings of least L* (Theorem 4), ``nearest_neighbour_risk`` bounds the error of a 1-nearest-neighbour classifier near
them (Theorem 5), and ``positive_variance`` is the variance that the correction with one positive has (Lemma 11).

The paper's sphere of radius 1/t is scores with temperature t^2 here: dot products of its vectors are cosine / t^2.

Where the paper's text and its proofs differ:

- Theorem 5 prints 8 e / D^2; its proof minimises 2 e / d^2 + 2 e / (sqrt(D) - d)^2 over d, which gives 16 e / D.
- Below Theorem 4 it says that for a uniform law of the classes eq. 7 is Tammes' problem. Eq. 7 is a mean over the
  classes and Tammes' problem is the smallest distance; with many classes in few dimensions their solutions differ (ten
  classes on a circle: it is better to put seven in one place). With at most d + 1 classes both are the simplex.
- Lemma 11 bounds the variance given x; the bound here includes the variance over x, by
  0 <= e^(1/t^2) - X <= e^(1/t^2) times half the squared distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, check_among, check_count, check_range
from hardneg.core.objectives.base import check_shape, softplus
from hardneg.core.statistics import masked_lse
from hardneg.core.types import NEVER, LogWeights, PairLosses, Scores
from hardneg.negatives import Uniform

PACKING_STEPS = 600
"""Steps of Adam per start of ``ball_packing``; with them the tests reach known optima within 0.4 %."""


def worst_case_loss(
    scores: Scores, log_w: LogWeights | None = None, *, num_negatives: float | str = "support"
) -> PairLosses:
    """Compute L*(f), the supremum of InfoNCE over all distributions of negatives (eq. 5), for each positive.

    It is attained by the closest candidate alone: -log e^a / (e^a + Q e^max).

    Args:
        scores: Scores of b anchors.
        log_w: The candidates that the distributions may use are those with a weight, [b, n], such as
            ``OtherLabel().log_weights(scores)``; all valid ones by default.
        num_negatives: Q; ``"support"`` is the number of these candidates. ``math.inf`` gives the limit
            L*_inf = max - a (eq. 6), from which log Q is subtracted.

    Returns:
        Losses [b, p]; 0 for positives that are not real and anchors without a negative.

    Raises:
        ArgumentError: If the shape of ``log_w`` does not match, or ``num_negatives`` is not positive.

    Example:
        >>> from hardneg import cross_views
        >>> scores = cross_views(torch.eye(3), torch.eye(3), temperature=1.0)
        >>> worst_case_loss(scores, num_negatives=math.inf).flatten().tolist()
        [-1.0, -1.0, -1.0]
    """
    log_w = Uniform().log_weights(scores) if log_w is None else log_w
    check_shape("worst_case_loss", scores, log_w)
    kept = log_w != NEVER
    some = kept.any(-1, keepdim=True)
    closest = scores.candidates.masked_fill(~kept, NEVER).amax(-1, keepdim=True)
    gap = torch.where(some, closest, 0.0) - scores.positives
    if num_negatives == "support":
        losses = softplus(gap + kept.sum(-1, keepdim=True).clamp(min=1).to(gap.dtype).log())
    else:
        check_range("worst_case_loss", "num_negatives", num_negatives, 0.0, math.inf)
        if not num_negatives:
            raise argument_error("worst_case_loss", "num_negatives above 0", "num_negatives", num_negatives)
        number = float(num_negatives)
        losses = gap if math.isinf(number) else softplus(gap + math.log(number))
    return torch.where(scores.positive_valid & some, losses, 0.0)


def tilt_gap_bound(num_candidates: int, beta: float) -> float:
    """Bound L* - L(f, q_beta), the distance of a tilted loss from the worst case (Proposition 3).

    The paper shows that it tends to 0. As E_q[s] >= max - log(n) / beta for a tilt over n candidates, and the loss
    changes at most as much as log E_q[e^s], the distance is at most log(n) / beta.

    Args:
        num_candidates: Number n of candidates of an anchor.
        beta: The beta of ``Tilt(beta)``.

    Example:
        >>> round(tilt_gap_bound(100, 10.0), 3)
        0.461
    """
    check_count("tilt_gap_bound", "num_candidates", num_candidates)
    check_range("tilt_gap_bound", "beta", beta, 0.0, math.inf)
    return math.inf if beta == 0 else math.log(num_candidates) / beta


@dataclass(frozen=True, eq=False)
class Packing:
    """Vectors on a sphere that are as far from each other as possible."""

    vectors: Annotated[Tensor, "c d"]
    """One vector per class, float64."""
    value: float
    """The weighted mean over the classes of the squared distance to the closest other vector (eq. 7)."""
    separation: float
    """Smallest distance of two vectors, the xi of Theorem 5."""


def ball_packing(
    num_classes: int,
    dim: int,
    weights: Annotated[Tensor, "c"] | None = None,
    *,
    radius: float = 1.0,
    objective: str = "mean",
    starts: int = 8,
    seed: int = 0,
) -> Packing:
    """Place one vector per class on a sphere, as far apart as possible (Theorem 4, eq. 7).

    A local search by gradients from several random starts: the value is a lower bound of the optimum.

    Args:
        num_classes: Number of vectors, at least 2.
        dim: Dimension of the space, at least 2.
        weights: Probability of each class, [c]; equal by default.
        radius: Radius of the sphere, 1/t in the paper.
        objective: ``"mean"``: the mean over the classes of the squared distance to the closest other one (eq. 7).
            ``"smallest"``: the smallest distance (Tammes' problem), which ignores ``weights``.
        starts: Number of random starts.
        seed: Seed of the starts.

    Raises:
        ArgumentError: If a number is too small, or the weights are not probabilities.

    Example:
        >>> round(ball_packing(3, 2, starts=2).separation, 2)  # a triangle: sqrt(3)
        1.73
    """
    who = "ball_packing"
    for name, value, least in (("num_classes", num_classes, 2), ("dim", dim, 2), ("starts", starts, 1)):
        check_count(who, name, value, least=least)
    check_among(who, "objective", objective, ("mean", "smallest"))
    check_range(who, "radius", radius, 1e-12, math.inf, open_high=True)
    share = torch.full((num_classes,), 1.0 / num_classes) if weights is None else torch.as_tensor(weights)
    share = share.double()
    if share.shape != (num_classes,) or bool((share < 0).any()) or abs(float(share.sum()) - 1.0) > 1e-6:
        raise ArgumentError(who, f"{num_classes} weights of sum 1", f"weights={share.tolist()}", "divide by their sum")
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(starts, num_classes, dim, generator=generator, dtype=torch.float64)
    if objective == "mean" and num_classes > dim + 1:  # starts with all but 1, 2, ... dim classes in one place
        for start in range(0, starts, 2):
            alone = min(1 + start // 2, dim)
            points[start, alone:] = points[start, alone] + 1e-3 * points[start, alone:]
    unit = _spread(points, share, objective)
    squared = _nearest(unit, math.inf)
    values = (squared * share).sum(-1) if objective == "mean" else squared.amin(-1)
    best = int(values.argmax())
    return Packing(
        unit[best] * radius,
        float((squared[best] * share).sum()) * radius**2,
        float(squared[best].amin().sqrt()) * radius,
    )


def _spread(points: Annotated[Tensor, "s c d"], share: Tensor, objective: str) -> Annotated[Tensor, "s c d"]:
    """Maximise a smooth version of the objective from every start, ever closer to the exact one."""
    points = points.clone().requires_grad_()
    optimizer = torch.optim.Adam([points], lr=0.05)
    for step in range(PACKING_STEPS):
        progress = step / PACKING_STEPS
        sharpness = 4.0 * 1000.0**progress
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1.0 - progress) + 1e-5
        squared = _nearest(torch.nn.functional.normalize(points, dim=-1), sharpness)
        value = (
            (squared * share).sum(-1) if objective == "mean" else -torch.logsumexp(-sharpness * squared, -1) / sharpness
        )
        optimizer.zero_grad()
        (-value.sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return torch.nn.functional.normalize(points.detach(), dim=-1)


def _nearest(unit: Annotated[Tensor, "s c d"], sharpness: float) -> Annotated[Tensor, "s c"]:
    """Return the squared distance of each vector to the closest other one, as a soft minimum unless infinite."""
    itself = torch.eye(unit.shape[1], dtype=torch.bool)
    squared = (2.0 - 2.0 * unit @ unit.transpose(1, 2)).masked_fill(itself, math.inf)
    if math.isinf(sharpness):
        return squared.amin(-1).clamp(min=0.0)
    return -torch.logsumexp(-sharpness * squared, dim=-1) / sharpness


def nearest_neighbour_risk(
    excess: float, separation: float, num_classes: int, temperature: float, *, smallest_class: float | None = None
) -> float:
    """Bound the error of a 1-nearest-neighbour classifier by the excess of the worst-case loss (Theorem 5).

    Args:
        excess: Excess e of L*_inf over its minimum, in [0, 1].
        separation: xi, the smallest distance of the optimal vectors on the sphere of radius 1 / sqrt(temperature); it
            is ``ball_packing(..., radius=temperature**-0.5).separation``.
        num_classes: Number of classes.
        temperature: Temperature of the scores (the paper's t^2).
        smallest_class: Probability of the smallest class, if classes are not equally likely.

    Returns:
        The proof's bound, 16 e / (xi^2 - 2 |C| (1 + 1/t) sqrt(e)), at most 1; 1 if the denominator is not positive.

    Raises:
        ArgumentError: If a number is out of its range.

    Example:
        >>> packing = ball_packing(10, 16, radius=0.5**-0.5, starts=1)
        >>> round(nearest_neighbour_risk(1e-5, packing.separation, 10, 0.5), 6)
        3.7e-05
    """
    who = "nearest_neighbour_risk"
    check_range(who, "excess", excess, 0.0, 1.0)
    check_range(who, "separation", separation, 0.0, math.inf)
    check_count(who, "num_classes", num_classes, least=2)
    check_range(who, "temperature", temperature, 1e-12, math.inf, open_high=True)
    if smallest_class is not None:
        check_range(who, "smallest_class", smallest_class, 1e-12, 1.0 / num_classes)
    classes = num_classes if smallest_class is None else 1.0 / smallest_class
    room = separation**2 - 2.0 * classes * (1.0 + temperature**-0.5) * math.sqrt(excess)
    return 1.0 if room <= 0.0 else min(1.0, 16.0 * excess / room)


class PositiveVariance(NamedTuple):
    """The variance of e^s over anchors and their positives, and its bound by the alignment."""

    variance: float
    """Variance of X = e^s with the anchor from the data and the positive from q+, proportional to e^(beta s)."""
    alignment: float
    """Mean of half the squared distance of anchor and positive, (1 - cosine) / temperature, with equal weights."""
    bound: float
    """(2 / temperature) e^(2 (1 + beta) / temperature) times the alignment."""


def positive_variance(scores: Scores, beta: float = 0.0) -> PositiveVariance:
    """Measure the variance that the correction by one positive has, and its bound (Lemma 11).

    The paper's bound is O(alignment); the constant here follows from 0 <= e^(1/temperature) - X <= e^(1/temperature)
    times half the squared distance, and from q+ / p+ <= e^(2 beta / temperature).

    Args:
        scores: Scores of unit vectors, with a single temperature.
        beta: The beta of the tilted positives.

    Raises:
        ArgumentError: If there is no positive, beta is negative, or the temperature is not one number.

    Example:
        >>> from hardneg import cross_views
        >>> positive_variance(cross_views(torch.eye(3), torch.eye(3), temperature=1.0))
        PositiveVariance(variance=0.0, alignment=0.0, bound=0.0)
    """
    check_range("positive_variance", "beta", beta, 0.0, math.inf, open_high=True)
    real = scores.positive_valid
    if not bool(real.any()):
        raise ArgumentError("positive_variance", "anchors with a positive", "none", "check positive_mask")
    if isinstance(scores.temperature, Tensor) and scores.temperature.numel() != 1:
        raise ArgumentError("positive_variance", "one temperature", f"{tuple(scores.temperature.shape)}")
    temperature, has_positive = float(scores.temperature), real.any(-1)
    s, real = scores.positives.detach().double()[has_positive], real[has_positive]
    log_q = beta * s - masked_lse(beta * s, real)
    weights = torch.where(real, log_q.exp(), 0.0) / len(s)
    x = torch.where(real, s, 0.0).exp()
    mean = (weights * x).sum()
    variance = float((weights * (x - mean).square()).sum())
    halves = torch.where(real, 1.0 / temperature - s, 0.0).sum(-1) / real.sum(-1)
    alignment = float(halves.mean())
    return PositiveVariance(
        variance, alignment, 2.0 / temperature * math.exp(2.0 * (1.0 + beta) / temperature) * alignment
    )
