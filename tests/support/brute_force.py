"""Loops over anchors and candidates in the plain formulas: what the tensors of hardneg are compared with.

Nothing here is in log-space, sorted by selection or masked by broadcasting; every number is a float64 scalar with its
own graph, so gradients are autograd's of the loop. Candidates that are not negatives have the weight None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import hardneg as hn

Weight = Tensor | float | None
Table = list[list[Weight]]


@dataclass
class Item:
    """A vector and what is known of it."""

    vector: Tensor
    id: int | None = None
    label: int | None = None
    clusters: tuple[int, ...] = ()
    source: str = "pool"


@dataclass
class Row:
    """One anchor: its positives (None where the mask drops one) and its candidates with their scores."""

    anchor: Item
    positives: list[Tensor | None]
    candidates: list[Item]
    scores: list[Tensor]
    valid: list[bool]
    temperature: float | Tensor


def number(x: Tensor | float) -> float:
    return x.item() if isinstance(x, Tensor) else x


def items(keys: hn.Keys | Tensor, row: int | None = None, source: str | None = None) -> list[Item]:
    """The keys one by one; of private keys, those of one anchor."""
    keys = keys if isinstance(keys, hn.Keys) else hn.Keys(keys)
    found = []
    for j in range(len(keys)):
        at = j if keys.vectors.ndim == 2 else (row, j)
        clusters = () if keys.clusters is None else tuple(torch.atleast_1d(keys.clusters[at]).tolist())
        found.append(
            Item(
                keys.vectors[at],
                None if keys.ids is None else int(keys.ids[at]),
                None if keys.labels is None else int(keys.labels[at]),
                clusters,
                source or keys.source or "pool",
            )
        )
    return found


def two_views(
    z1: Tensor,
    z2: Tensor,
    temperature: float | Tensor,
    ids: Tensor | None = None,
    labels: Tensor | None = None,
    clusters: Tensor | None = None,
    extra: Sequence[hn.Keys] = (),
) -> list[Row]:
    first = _view(z1, ids, labels, clusters)
    second = _view(z2, ids, labels, clusters)
    rows = []
    for own, other in ((first, second), (second, first)):
        for i, anchor in enumerate(own):
            candidates = [*first, *second, *_others(extra, i, ids)]
            rows.append(_row(anchor, [other[i].vector], candidates, temperature))
    return rows


def cross_views(
    z1: Tensor,
    z2: Tensor,
    temperature: float | Tensor,
    ids: Tensor | None = None,
    labels: Tensor | None = None,
    clusters: Tensor | None = None,
    extra: Sequence[hn.Keys] = (),
) -> list[Row]:
    first, second = _view(z1, ids, labels, clusters), _view(z2, ids, labels, clusters)
    return [
        _row(anchor, [second[i].vector], [*second, *_others(extra, i, ids)], temperature)
        for i, anchor in enumerate(first)
    ]


def score(
    anchors: hn.Keys,
    positives: hn.Keys | Tensor,
    pools: Sequence[hn.Keys | Tensor],
    temperature: float | Tensor,
    positive_mask: Tensor | None = None,
) -> list[Row]:
    rows = []
    for i, anchor in enumerate(items(anchors)):
        vectors = positives.vectors if isinstance(positives, hn.Keys) else positives
        own = vectors[i] if vectors.ndim == 3 else vectors[i : i + 1]
        ids = positives.ids if isinstance(positives, hn.Keys) else None
        own_ids = [] if ids is None else torch.atleast_1d(ids[i]).tolist()
        if positive_mask is not None:  # what is masked is padding, and so is its id
            own_ids = [each for each, keep in zip(own_ids, positive_mask[i], strict=False) if keep]
        candidates = [item for pool in pools for item in items(pool, i)]
        row = _row(anchor, list(own), candidates, temperature, own_ids)
        if positive_mask is not None:
            row.positives = [a if keep else None for a, keep in zip(row.positives, positive_mask[i], strict=True)]
        rows.append(row)
    return rows


def same_label_positives(rows: list[Row]) -> list[Row]:
    changed = []
    for row in rows:
        same = [row.valid[j] and row.candidates[j].label == row.anchor.label for j in range(len(row.candidates))]
        more = [s if same[j] else None for j, s in enumerate(row.scores)]
        valid = [row.valid[j] and not same[j] for j in range(len(same))]
        changed.append(replace(row, positives=[*row.positives, *more], valid=valid))
    return changed


def weights(q: hn.negatives.Negatives, rows: list[Row]) -> Table:
    """w_ij of every candidate, None where it is not a negative; a product multiplies what its factors leave."""
    table: Table = [[1.0 if valid else None for valid in row.valid] for row in rows]
    for factor in q.factors:
        alive = [[w is not None for w in line] for line in table]
        new = _factor(factor, rows, alive)
        table = [
            [None if w is None or v is None else w * v for w, v in zip(*lines, strict=True)]
            for lines in zip(table, new, strict=True)
        ]
    return table


def info_nce(
    rows: list[Row],
    table: Table,
    num_negatives: str | float = "support",
    tau_plus: float = 0.0,
    positives_in_denominator: str = "own",
    log_q: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    losses = []
    for i, (row, line) in enumerate(zip(rows, table, strict=True)):
        scores, positives = _corrected(row, i, log_q)
        support = [j for j, w in enumerate(line) if w is not None]
        mass = sum(line[j] for j in support)
        mean = sum(line[j] * scores[j].exp() for j in support) / mass if support else 0.0
        many = {
            "support": len(support),
            "candidates": sum(item.id is None or item.id < 0 or item.id != row.anchor.id for item in row.candidates),
            "mass": mass,
        }.get(num_negatives, num_negatives)
        everyone = sum(a.exp() for a in positives if a is not None)
        for a in positives:
            if a is None or (not support and positives_in_denominator != "all"):
                losses.append(torch.zeros((), dtype=torch.float64))
                continue
            negative = many * (debiased(mean, a, tau_plus, row.temperature) if tau_plus else mean)
            beside = {"own": a.exp(), "all": everyone, "none": 0.0}[positives_in_denominator]
            losses.append(-(a.exp() / (beside + negative)).log())
    return torch.stack(losses).view(len(rows), -1)


def debiased(mean: Any, a: Tensor, tau_plus: float, temperature: float | Tensor) -> Tensor:
    corrected = (mean - tau_plus * a.exp()) / (1.0 - tau_plus)
    floor = torch.exp(torch.as_tensor(-1.0 / temperature, dtype=torch.float64))
    return torch.maximum(corrected, floor)


def jsd(rows: list[Row], table: Table, tau_plus: float = 0.0) -> Tensor:
    losses = []
    for row, line in zip(rows, table, strict=True):
        support = [j for j, w in enumerate(line) if w is not None]
        for a in row.positives:
            if a is None or not support:
                losses.append(torch.zeros((), dtype=torch.float64))
                continue
            mean = sum(line[j] * _softplus(row.scores[j]) for j in support) / sum(line[j] for j in support)
            mean = (mean - tau_plus * _softplus(a)) / (1.0 - tau_plus)
            losses.append((mean - math.log(2.0)) - (math.log(2.0) - _softplus(-a)))
    return torch.stack(losses).view(len(rows), -1)


def surrogate(rows: list[Row], table: Table, log_norm: Tensor | None = None) -> Tensor:
    losses = []
    for i, (row, line) in enumerate(zip(rows, table, strict=True)):
        support = [j for j, w in enumerate(line) if w is not None]
        norm = sum(number(line[j]) for j in support) if log_norm is None else math.exp(number(log_norm[i]))
        pulled = sum(number(line[j]) / norm * row.scores[j] for j in support)
        for a in row.positives:
            losses.append(torch.zeros((), dtype=torch.float64) if a is None or not support else pulled - a)
    return torch.stack(losses).view(len(rows), -1)


def reduce(losses: Tensor, rows: list[Row], reduction: str, anchor_weights: Sequence[float] | None = None) -> Tensor:
    importance = [1.0] * len(rows) if anchor_weights is None else [float(w) for w in anchor_weights]
    means, total, pairs = [], 0.0, 0.0
    for i, row in enumerate(rows):
        real = [losses[i, k] for k, a in enumerate(row.positives) if a is not None]
        means.append(sum(real) / len(real) if real else torch.zeros((), dtype=torch.float64))
        total, pairs = total + importance[i] * sum(real), pairs + importance[i] * len(real)
    if reduction == "none":
        return torch.stack([w * mean for w, mean in zip(importance, means, strict=True)])
    if reduction == "pairs":
        return total / pairs
    return sum(w * mean for w, mean in zip(importance, means, strict=True)) / sum(importance)


def assumption_1(rows: list[Row], table: Table) -> float:
    holds, asked = 0, 0
    for row, line in zip(rows, table, strict=True):
        sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
        for item, s, w in zip(row.candidates, row.scores, line, strict=True):
            if w is not None:
                sums[item.label == row.anchor.label][0] += number(w) * math.exp(number(s))
                sums[item.label == row.anchor.label][1] += number(w)
        if sums[True][1] and sums[False][1]:
            asked += 1
            holds += sums[True][0] / sums[True][1] >= sums[False][0] / sums[False][1]
    return holds / asked if asked else math.nan


def _factor(q: hn.negatives.Negatives, rows: list[Row], alive: list[list[bool]]) -> Table:
    if isinstance(q, hn.negatives.ClippedTilt):
        return _clipped(q, rows, alive)
    if isinstance(q, (hn.Ring, hn.Rank)):
        return [ranked(q, row, living) for row, living in zip(rows, alive, strict=True)]
    if isinstance(q, hn.Threshold) and q.similarity == "mean":
        return [_above_mean(row, living) for row, living in zip(rows, alive, strict=True)]
    return [[_weight(q, row, j) for j in range(len(row.scores))] for row in rows]


def _above_mean(row: Row, living: list[bool]) -> list[Weight]:
    """eta(t) = 1[e^t >= tau], tau(x, f) = E[e^g] (Jiang et al. 2024, sec. IV-A and V), over what is left."""
    left = [math.exp(number(s)) for s, lives in zip(row.scores, living, strict=True) if lives]
    tau = sum(left) / len(left) if left else 0.0
    return [1.0 if math.exp(number(s)) >= tau else None for s in row.scores]


def _weight(q: hn.negatives.Negatives, row: Row, j: int) -> Weight:
    s, item, anchor = row.scores[j], row.candidates[j], row.anchor
    shared = any(a == c for a, c in zip(anchor.clusters, item.clusters, strict=False))
    match q:
        case hn.Uniform():
            return 1.0
        case hn.Tilt(beta, detach, source):
            return 1.0 if source not in (None, item.source) else (beta * (s.detach() if detach else s)).exp()
        case hn.Threshold(similarity):
            return 1.0 if number(s) >= similarity / number(row.temperature) else None
        case hn.BelowPositive(relative, absolute):
            return 1.0 if _below(number(s), row, relative, absolute) else None
        case hn.OtherLabel():
            return 1.0 if item.label != anchor.label else None
        case hn.SameCluster():
            return 1.0 if shared else None
        case hn.OtherCluster():
            return None if shared else 1.0
        case hn.From(source):
            return 1.0 if item.source == source else None
        case hn.Hardening(log_eta, parameter):
            return _hardened(log_eta, parameter, s)
    raise AssertionError(f"no loop for {q!r}")


def _below(s: float, row: Row, relative: float | None, absolute: float | None) -> bool:
    temperature = number(row.temperature)
    similarities = [number(a) * temperature for a in row.positives if a is not None]
    if not similarities:
        return True
    lowest = min(similarities)
    if relative is not None and s * temperature > lowest - relative * abs(lowest):
        return False
    return absolute is None or s * temperature <= lowest - absolute


def _hardened(log_eta: Any, parameter: float, s: Tensor) -> Weight:
    if log_eta == "exponential":
        return (parameter * s).exp()
    if log_eta == "threshold":
        return 1.0 if math.exp(number(s)) >= parameter else None
    if log_eta == "sigmoid":
        return 1.0 / (1.0 + (-parameter * s).exp())
    w = log_eta(s[None])[0].exp()
    return w if number(w) > 0 else None


def ranked(q: hn.Ring | hn.Rank, row: Row, living: list[bool]) -> list[Weight]:
    order = sorted((j for j in range(len(living)) if living[j]), key=lambda j: -number(row.scores[j]))
    if isinstance(q, hn.Rank):
        kept = order[q.start : q.stop]
    else:
        stop = int(q.outer * len(order))
        start = int(q.inner * (stop if q.dynamic_inner else len(order)))
        kept = order[start:stop]
    return [1.0 if j in kept else None for j in range(len(living))]


def _clipped(q: hn.negatives.ClippedTilt, rows: list[Row], alive: list[list[bool]]) -> Table:
    sizes = [
        s.abs() for row, living in zip(rows, alive, strict=True) for s, a in zip(row.scores, living, strict=True) if a
    ]
    largest = torch.stack(sizes).max() if sizes else torch.ones((), dtype=torch.float64)
    scale = q.beta * q.bound / largest
    return [
        [
            ((scale * s).detach() if q.detach else scale * s).exp() if a else None
            for s, a in zip(row.scores, living, strict=True)
        ]
        for row, living in zip(rows, alive, strict=True)
    ]


def _row(
    anchor: Item,
    positives: Sequence[Tensor],
    candidates: list[Item],
    temperature: float | Tensor,
    positive_ids: Sequence[int] = (),
) -> Row:
    forbidden = {i for i in (anchor.id, *positive_ids) if i is not None and i >= 0}
    return Row(
        anchor,
        [(anchor.vector * positive).sum() / temperature for positive in positives],
        candidates,
        [(anchor.vector * item.vector).sum() / temperature for item in candidates],
        [item.id not in forbidden for item in candidates],
        temperature,
    )


def _view(z: Tensor, ids: Tensor | None, labels: Tensor | None, clusters: Tensor | None) -> list[Item]:
    ids = torch.arange(len(z)) if ids is None else ids  # without ids the rows are distinct
    return items(hn.Keys(z, ids, labels, clusters), source="batch")


def _others(extra: Sequence[hn.Keys | Tensor], row: int, ids: Tensor | None) -> list[Item]:
    """Candidates from outside; without ids of the batch, theirs match nothing."""
    found = [item for keys in extra for item in items(keys, row)]
    return found if ids is not None else [replace(item, id=None) for item in found]


def _corrected(row: Row, i: int, log_q: tuple[Tensor, Tensor] | None) -> tuple[list[Tensor], list[Tensor | None]]:
    if log_q is None:
        return row.scores, row.positives
    of_candidates, of_positives = log_q
    of_candidates = of_candidates if of_candidates.ndim == 1 else of_candidates[i]
    of_positives = torch.atleast_1d(of_positives[i]).expand(len(row.positives))
    scores = [s - of_candidates[j] for j, s in enumerate(row.scores)]
    return scores, [None if a is None else a - of_positives[k] for k, a in enumerate(row.positives)]


def _softplus(x: Tensor) -> Tensor:
    return torch.log(1.0 + torch.exp(x))


@dataclass
class Case:
    """The same vectors as tensors and as loops."""

    leaves: list[Tensor]
    scores: hn.Scores
    rows: list[Row]


def random_keys(seed: int, *shape: int) -> Tensor:
    """Vectors of norms around 1, so that similarities of both signs and above 1 occur."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(*shape, generator=generator, dtype=torch.float64)
    size = 0.7 + 0.6 * torch.rand(*shape[:-1], 1, generator=generator, dtype=torch.float64)
    return (size * z / z.norm(dim=-1, keepdim=True)).requires_grad_()


def _both_views(temperature: float = 0.5, positives: str = "view", **options: Any) -> Case:
    z1, z2 = random_keys(1, 5, 3), random_keys(2, 5, 3)
    scores = hn.two_views(z1, z2, temperature, **options)
    rows = two_views(z1, z2, temperature, **options)
    if positives == "label":
        scores, rows = hn.core.scoring.same_label_positives(scores), same_label_positives(rows)
    extra = options.get("extra", ())
    return Case([z1, z2, *(keys.vectors for keys in extra)], scores, rows)


def _one_view(**options: Any) -> Case:
    z1, z2 = random_keys(3, 6, 3), random_keys(4, 6, 3)
    return Case([z1, z2], hn.cross_views(z1, z2, 0.3, **options), cross_views(z1, z2, 0.3, **options))


def _against(pools: Sequence[hn.Keys | Tensor], positives: hn.Keys | Tensor, mask: Tensor | None = None) -> Case:
    anchors = hn.Keys(
        random_keys(5, 5, 3), torch.tensor([0, 1, 2, 3, -1]), torch.tensor([0, 1, 0, 2, 1]), _clusterings(5)
    )
    scores = hn.score(anchors, positives, pools, 0.4, positive_mask=mask)
    vectors = [keys.vectors if isinstance(keys, hn.Keys) else keys for keys in (anchors, positives, *pools)]
    return Case(vectors, scores, score(anchors, positives, pools, 0.4, mask))


def _clusterings(*shape: int) -> Tensor:
    return torch.randint(3, (*shape, 2), generator=torch.Generator().manual_seed(9))


def queue(size: int = 7) -> hn.Keys:
    ids = torch.tensor([11, 2, 12, 0, -1, 14, 21])[:size]
    return hn.Keys(random_keys(6, size, 3), ids, torch.arange(size) % 3, _clusterings(size), source="queue")


def mined() -> hn.Keys:
    """Three private candidates of each of five anchors, the anchor's own instance among them."""
    ids = torch.stack([torch.arange(5), torch.arange(5) + 20, torch.full((5,), 2)], dim=1)
    return hn.Keys(random_keys(7, 5, 3, 3), ids, ids % 3, _clusterings(5, 3), source="mined")


def _several_positives() -> hn.Keys:
    ids = torch.tensor([[0, 11, 30], [1, 31, 32], [2, 14, 33], [3, 34, 21], [-1, -1, 35]])
    return hn.Keys(random_keys(8, 5, 3, 3), ids)


def _some_positives() -> Tensor:
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 0]])
    return mask.bool()


_labels = torch.tensor([0, 1, 0, 2, 1])
_ids = torch.tensor([4, 2, 4, 0, 9])  # an instance that is twice in the batch

CASES: dict[str, Callable[[], Case]] = {
    "two views": lambda: _both_views(),
    "two views, ids and labels": lambda: _both_views(ids=_ids, labels=_labels, clusters=_clusterings(5)[:, 0]),
    "two views beside a queue": lambda: _both_views(ids=_ids, extra=[queue(), hn.Keys(random_keys(7, 2, 3))]),
    "two views beside a queue, no ids": lambda: _both_views(extra=[queue()]),
    "cross views": lambda: _one_view(),
    "cross views, ids": lambda: _one_view(ids=torch.tensor([3, 5, 3, 3, 8, 6])),
    "shared pool": lambda: _against([queue()], random_keys(8, 5, 3)),
    "private pool": lambda: _against([mined()], random_keys(8, 5, 3)),
    "pool as a tensor": lambda: _against([random_keys(6, 7, 3)], random_keys(8, 5, 3)),
    "several pools": lambda: _against([queue(), mined(), random_keys(9, 2, 3)], random_keys(8, 5, 3)),
    "several positives": lambda: _against([queue(), mined()], _several_positives(), _some_positives()),
    "positives of the label": lambda: _both_views(positives="label", ids=_ids, labels=_labels),
}


def assert_agree(ours: Tensor, loop: Tensor, leaves: Sequence[Tensor], seed: int = 0) -> None:
    """The same values, and the same gradients under an upstream gradient that differs from entry to entry."""
    torch.testing.assert_close(ours, loop, rtol=1e-9, atol=1e-12)
    upstream = torch.rand(ours.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gradients = [
        torch.autograd.grad((values * upstream).sum(), leaves, retain_graph=True, materialize_grads=True)
        for values in (ours, loop)
    ]
    for mine, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)
