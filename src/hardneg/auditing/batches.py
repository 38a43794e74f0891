"""Audit of planned batches: how similar the pairs within a batch are, by kind (ProSampler, Fig. 4, 5, 8 and 9).

A planner such as ``proximity()`` decides which items share a batch, and with that which negatives each anchor has.
``audit_batches`` plans an epoch on given embeddings, and counts the similarities of negatives, known false negatives
and positives. `hardneg audit --batches` and ``hn.audit(batches=...)`` call it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from hardneg.auditing.audited_pairs import AuditedPairs
from hardneg.auditing.result import Audit, BatchFigures
from hardneg.auditing.sampling import PairCounts
from hardneg.batching.plan import Plan
from hardneg.batching.spec import parse_batches
from hardneg.core.errors import ArgumentError, argument_error, check_count
from hardneg.core.tensors import unit

POSITIVES, FALSE, NEGATIVES = range(3)  # the kinds of PairCounts


def audit_batches(
    vectors: Annotated[Tensor, "n d"],
    batches: str | Plan,
    batch_size: int = 256,
    *,
    labels: Annotated[Tensor, "n"] | None = None,
    groups: Annotated[Tensor, "n"] | None = None,
    positives: Annotated[Tensor, "n d"] | None = None,
    normalize: bool = True,
    epoch: int = 0,
    epochs: int = 100,
    seed: int = 0,
) -> BatchFigures:
    """Plan an epoch and measure the similarities of the pairs that share a batch.

    Args:
        vectors: Embeddings of the items, [n, d].
        batches: A planner as text, such as ``"proximity(num_candidates=500)"``, or a plan of these n items.
        batch_size: Number of items per batch.
        labels: Labels, [n]; a pair with the same label is a false negative. A negative number means unknown: it equals
            no other.
        groups: Groups, [n]; a pair of the same group is a false negative too.
        positives: Vectors of a second view, [n, d]: the similarity of each item in a batch with its own.
        normalize: Whether to compare directions (cosine) instead of the vectors as they are.
        epoch: The epoch to plan, for planners with a schedule.
        epochs: Number of epochs of the schedule.
        seed: Seed of the plan.

    Returns:
        Histograms by kind, with the share of false negatives, and the same means over all pairs of the data.

    Raises:
        ArgumentError: If the batch is larger than the data, shapes do not agree, or the planner does not fit the data.
        GrammarError: If ``batches`` is not a known planner.

    Example:
        >>> z = torch.nn.functional.normalize(torch.randn(64, 8), dim=-1)
        >>> hard, even = (audit_batches(z, text, 16) for text in ("knn()", "uniform()"))
        >>> hard.similarity > even.similarity
        True
    """
    vectors = _prepared(vectors, normalize)
    given = (("labels", labels), ("groups", groups))
    tags = [_with_unknown_apart(name, tag, len(vectors)) for name, tag in given if tag is not None]
    if positives is not None and positives.shape != vectors.shape:
        what = f"positives of shape {tuple(vectors.shape)}"
        raise argument_error("audit", what, "positives", tuple(positives.shape))
    views = None if positives is None else _prepared(positives, normalize)
    plan = _planned(vectors, batches, batch_size, epoch, epochs, seed)
    return _measured(batches if isinstance(batches, str) else "given", plan, vectors, tags, views)


def _measured(name: str, plan: Plan, vectors: Tensor, tags: list[Tensor], views: Tensor | None) -> BatchFigures:
    """Count the pairs of all batches of a plan."""
    counts = PairCounts()
    for batch in plan:
        _count(counts, torch.from_numpy(batch).to(vectors.device), vectors, tags, views)
    described = plan.describe(vectors)
    found, pairs = counts.found(), counts.counts[[FALSE, NEGATIVES]].sum(1).tolist()
    return BatchFigures(
        batches=name,
        batch_size=plan.batch_size,
        num_batches=len(plan),
        similarity=described.similarity,
        uniform_similarity=described.uniform_similarity,
        false_negatives=pairs[0] / max(sum(pairs), 1) if tags else math.nan,
        uniform_false_negatives=_share_of_all(tags),
        coverage=described.coverage,
        filled=described.filled,
        similarities=found,
    )


def with_batches(audit: Audit, audited: AuditedPairs, batches: Sequence[str | Plan], batch_size: int) -> Audit:
    """Add the figures of each planner to an audit of embeddings without a corpus.

    Args:
        audit: The audit of the rules.
        audited: The anchors, with labels, groups and second views.
        batches: Planners, as text or plans.
        batch_size: Number of items per batch.

    Raises:
        ArgumentError: If the candidates are a corpus: batches hold anchors only.
    """
    if not batches:
        return audit
    if audited.anchors is not audited.candidates:
        raise ArgumentError("audit", "embeddings without a corpus for batches", "a corpus", "leave the corpus out")
    tags = audited.anchor_tags
    found = tuple(
        audit_batches(
            audited.anchors.vectors,
            each,
            batch_size,
            labels=tags.labels,
            groups=tags.clusters,
            positives=audited.views,
            normalize=False,  # prepared already
            seed=audit.seed,
        )
        for each in batches
    )
    return replace(audit, batches=found)


def _planned(vectors: Tensor, batches: str | Plan, batch_size: int, epoch: int, epochs: int, seed: int) -> Plan:
    """Return the plan as given, or plan an epoch."""
    if isinstance(batches, Plan):
        if batches.num_instances != len(vectors):
            what = f"a plan of {len(vectors)} items"
            raise argument_error("audit", what, "batches", f"a plan of {batches.num_instances}")
        return batches
    check_count("audit", "batch_size", batch_size, least=2)
    if batch_size > len(vectors):
        what = f"a batch of at most {len(vectors)} items"
        raise argument_error("audit", what, "batch_size", batch_size, "use a smaller batch_size")
    spec = parse_batches(batches)
    generator = torch.Generator().manual_seed(seed)
    return spec.planner.at(epoch, epochs).plan(vectors.cpu(), batch_size, generator, coverage=spec.coverage)


def _count(counts: PairCounts, batch: Tensor, vectors: Tensor, tags: list[Tensor], views: Tensor | None) -> None:
    """Add the pairs of one batch: each unordered pair of items once, and each item with its second view."""
    rows = vectors[batch]
    first, second = torch.triu_indices(len(batch), len(batch), offset=1, device=rows.device)
    similarity = (rows @ rows.T)[first, second]
    false = torch.zeros_like(similarity, dtype=torch.bool)
    for tag in tags:
        own = tag.to(rows.device)[batch]
        false |= own[first] == own[second]
    counts.add(NEGATIVES, similarity[~false])
    counts.add(FALSE, similarity[false])
    if views is not None:
        counts.add(POSITIVES, (rows * views[batch]).sum(-1))


def _share_of_all(tags: list[Tensor]) -> float:
    """Return the share of all pairs with an equal tag, from the counts of the tags; NaN without tags."""
    if not tags:
        return math.nan
    total = len(tags[0]) * (len(tags[0]) - 1)
    both = [torch.unique(torch.stack(tags), dim=1, return_inverse=True)[1]] if len(tags) == 2 else []  # type: ignore[no-untyped-call]
    equal = [torch.bincount(torch.unique(tag, return_inverse=True)[1]).double() for tag in (*tags, *both)]  # type: ignore[no-untyped-call]
    pairs = [float((counts * (counts - 1)).sum()) for counts in equal]
    return (sum(pairs[: len(tags)]) - sum(pairs[len(tags) :])) / total


def _with_unknown_apart(name: str, tag: Tensor, size: int) -> Tensor:
    """Return labels or groups with a separate number for each unknown (negative) one."""
    if not isinstance(tag, Tensor) or tag.shape != (size,):
        got = tuple(tag.shape) if isinstance(tag, Tensor) else type(tag).__name__
        raise argument_error("audit", f"{name} of {size} items", name, got)
    return torch.where(tag < 0, -2 - torch.arange(size, device=tag.device), tag)


def _prepared(vectors: Tensor, normalize: bool) -> Tensor:
    if not isinstance(vectors, Tensor) or vectors.ndim != 2 or not vectors.is_floating_point() or len(vectors) < 2:
        got = f"{tuple(vectors.shape)}" if isinstance(vectors, Tensor) else type(vectors).__name__
        raise ArgumentError("audit", "vectors [n, d] of at least two items", got)
    vectors = vectors.detach()
    if not bool(torch.isfinite(vectors).all()):
        raise ArgumentError("audit", "finite vectors", "NaN or infinite values", "check the encoder's output")
    return unit(vectors) if normalize else vectors.float() if vectors.dtype != torch.float64 else vectors
