"""Losses beside plain torch and other libraries: forward and backward, 128 features, float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cases import Work, case

SIZES = (256, 512, 1024, 2048, 4096)

TEMPERATURE, DIM, LABELS, QUEUE = 0.2, 128, 10, 65536


def steps(ours: Callable[..., Any], theirs: Callable[..., Any], *views: Any) -> tuple[Work, Work]:
    """Return a step of both losses, which returns the value and the gradient."""
    import torch

    def step(loss: Callable[..., Any]) -> Work:
        def work() -> Any:
            value = loss(*views)
            return value.detach(), *torch.autograd.grad(value, [view for view in views if view.requires_grad])

        return work

    for _ in range(8):  # past most of the calls that look for warnings, which happens at powers of two
        step(ours)()
    return step(ours), step(theirs)


def two_views(rows: int, gradient: bool = True) -> tuple[Any, Any, Any]:
    """Return two views of ``rows / 2`` instances with their labels."""
    import torch

    random = torch.Generator().manual_seed(0)
    batch = rows // 2
    z1, z2 = (torch.randn(batch, DIM, generator=random).requires_grad_(gradient) for _ in range(2))
    return z1, z2, torch.randint(0, LABELS, (batch,), generator=random)


def unit_views(*views: Any) -> Any:
    """Return all views below each other, normalised."""
    import torch

    return torch.nn.functional.normalize(torch.cat(views), dim=-1)


def scores_of(*views: Any) -> tuple[Any, Any, Any]:
    """Return scores, scores of the positives [n, 1], and the mask of the anchor's own instance, for two views."""
    import torch

    z = unit_views(*views)
    s, n = z @ z.T / TEMPERATURE, len(z)
    other = torch.arange(n).roll(n // 2)
    own = torch.eye(n, dtype=torch.bool)
    return s, s.gather(1, other[:, None]), own | own[other]


def plain_nt_xent(*views: Any) -> Any:
    """NT-Xent in three lines of torch."""
    import torch

    z = unit_views(*views)
    logits = (z @ z.T / TEMPERATURE).fill_diagonal_(-math.inf)
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(z)).roll(len(z) // 2))


@case("NT-Xent", "plain NT-Xent in torch", goal=1.1, sizes=SIZES, growth=2.0)
def nt_xent(rows: int) -> tuple[Work, Work]:
    import hardneg as hn

    return steps(hn.ContrastiveLoss(temperature=TEMPERATURE), plain_nt_xent, *two_views(rows)[:2])


@case("NT-Xent with ids", "plain NT-Xent in torch", goal=1.3, sizes=SIZES, growth=2.0)
def nt_xent_with_ids(rows: int) -> tuple[Work, Work]:
    import torch

    import hardneg as hn

    loss, ids = hn.ContrastiveLoss(temperature=TEMPERATURE), torch.arange(rows // 2)
    return steps(lambda *views: loss(*views, ids=ids), plain_nt_xent, *two_views(rows)[:2])


def our_supcon(labels: Any) -> Callable[..., Any]:
    """Return our SupCon of two views with these labels."""
    import hardneg as hn

    loss = hn.ContrastiveLoss("OtherLabel()", TEMPERATURE, positives="label", positives_in_denominator="all")
    return lambda *views: loss(*views, labels=labels)


@case("SupCon", "plain SupCon in torch", goal=0.5, sizes=SIZES, growth=2.0)
def supcon(rows: int) -> tuple[Work, Work]:
    import torch

    z1, z2, labels = two_views(rows)

    def plain(*views: Any) -> Any:
        z, tags = unit_views(*views), labels.repeat(2)
        logits = z @ z.T / TEMPERATURE
        logits = logits - logits.amax(1, keepdim=True).detach()
        others = ~torch.eye(len(z), dtype=torch.bool)
        positive = (tags[:, None] == tags) & others
        log_prob = logits - (logits.exp() * others).sum(1, keepdim=True).log()
        return -((log_prob * positive).sum(1) / positive.sum(1)).mean()

    return steps(our_supcon(labels), plain, z1, z2)


PML = "SupConLoss of pytorch-metric-learning"


@case("SupCon beside PML", PML, goal=0.5, sizes=SIZES, needs=("pytorch_metric_learning",), growth=2.0)
def supcon_of_pml(rows: int) -> tuple[Work, Work]:
    import torch
    from pytorch_metric_learning.losses import SupConLoss

    theirs, (z1, z2, labels) = SupConLoss(temperature=TEMPERATURE), two_views(rows)
    return steps(our_supcon(labels), lambda *views: theirs(torch.cat(views), labels.repeat(2)), z1, z2)


@case("H-SCL", "plain H-SCL in torch", goal=0.5, sizes=SIZES, growth=2.0)
def hscl(rows: int) -> tuple[Work, Work]:
    import torch

    import hardneg as hn

    options: dict[str, Any] = {"positives": "label", "num_negatives": "candidates", "reduction": "pairs"}
    loss = hn.ContrastiveLoss("OtherLabel() * Tilt(1.0)", TEMPERATURE, **options)
    z1, z2, labels = two_views(rows)

    def plain(*views: Any) -> Any:
        z, tags = unit_views(*views), labels.repeat(2)
        s, same = z @ z.T / TEMPERATURE, tags[:, None] == tags
        e = s.exp()
        w = e.masked_fill(same, 0.0)
        negative = (len(z) - 2) * (w * e).sum(1, keepdim=True) / w.sum(1, keepdim=True)
        positive = same & ~torch.eye(len(z), dtype=torch.bool)
        return ((e + negative).log() - s)[positive].mean()

    return steps(lambda *views: loss(*views, labels=labels), plain, z1, z2)


@case("Ring", "plain ring with topk in torch", goal=0.7, sizes=SIZES, growth=2.0)
def ring(rows: int) -> tuple[Work, Work]:
    import torch

    import hardneg as hn

    loss = hn.ContrastiveLoss("Ring(0.1, 0.5)", TEMPERATURE)

    def plain(*views: Any) -> Any:
        s, positive, own = scores_of(*views)
        count = len(s) - 2
        closest = s.masked_fill(own, -math.inf).topk(int(0.5 * count), dim=1).values
        negative = closest[:, int(0.1 * count) :].logsumexp(1, keepdim=True)
        return torch.nn.functional.softplus(negative - positive).mean()

    return steps(loss, plain, *two_views(rows)[:2])


@case("Threshold", "plain masked loss in torch", goal=0.8, sizes=SIZES, growth=2.0)
def threshold(rows: int) -> tuple[Work, Work]:
    import torch

    import hardneg as hn

    loss = hn.ContrastiveLoss("Threshold(0.02)", TEMPERATURE)

    def plain(*views: Any) -> Any:
        s, positive, own = scores_of(*views)
        negative = s.masked_fill(own | (s * TEMPERATURE < 0.02), -math.inf).logsumexp(1, keepdim=True)
        return torch.nn.functional.softplus(negative - positive).mean()

    return steps(loss, plain, *two_views(rows)[:2])


ANCHORS = (64, 128, 256, 512, 1024)


@case(
    "MoCo, queue of 65,536", "plain MoCo in torch", goal=0.55, sizes=ANCHORS, at=ANCHORS[2:], unit="anchors", growth=1.0
)
def moco(anchors: int) -> tuple[Work, Work]:
    import torch
    from torch.nn.functional import cross_entropy, normalize

    import hardneg as hn

    loss = hn.ContrastiveLoss(temperature=TEMPERATURE, views="pool", detach_keys=True)
    z1, z2, _ = two_views(2 * anchors)
    keys = z2.detach()
    queue = normalize(torch.randn(QUEUE, DIM, generator=torch.Generator().manual_seed(1)), dim=-1)

    def plain(z: Any) -> Any:
        q, k = normalize(z, dim=-1), normalize(keys, dim=-1)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ queue.T], dim=1) / TEMPERATURE
        return cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))

    return steps(lambda z: loss(z, keys, pool=queue), plain, z1)


@case("cross views", "chunked linear_cross_entropy of torch", goal=1.1, sizes=SIZES, growth=2.0)
def cross(rows: int) -> tuple[Work, Work]:
    import torch
    from torch.nn.functional import linear_cross_entropy, normalize

    import hardneg as hn

    loss = hn.ContrastiveLoss(temperature=TEMPERATURE, views="cross")
    chunks = torch.nn.LinearCrossEntropyOptions()

    def theirs(z1: Any, z2: Any) -> Any:
        target = torch.arange(len(z1))
        return linear_cross_entropy(normalize(z1, dim=-1) / TEMPERATURE, normalize(z2, dim=-1), target, options=chunks)

    return steps(loss, theirs, *two_views(2 * rows)[:2])
