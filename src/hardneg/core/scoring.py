"""Turn vectors into dense scores: which anchors, positives and candidates are compared, and which are never negatives.

Users start here: ``two_views`` (SimCLR), ``cross_views`` (CLIP, SimCSE), ``score`` (MoCo and other pools) and
``from_matrix`` (any similarity matrix) return ``Scores`` [b, n]. ``hardneg.core.views`` builds the same pairings
without computing them, which is what ``ContrastiveLoss`` uses to stream them.

Vectors are not normalised here; call ``torch.nn.functional.normalize`` first. ``with checks():`` raises for vectors
that are not of unit norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.core.pairing import Pairing, matrices, not_infinite, with_positives
from hardneg.core.tensors import widened, without_autocast
from hardneg.core.types import Guide, Keys, Scores, Tags, other_id
from hardneg.core.views import Pools, as_keys, check_parts, check_temperature, pair_cross, pair_pool, pair_views
from hardneg.core.views import checks as checks


def two_views(
    z1: Annotated[Tensor, "b d"],
    z2: Annotated[Tensor, "b d"],
    temperature: float | Tensor,
    ids: Annotated[Tensor, "b"] | None = None,
    labels: Annotated[Tensor, "b"] | None = None,
    *,
    clusters: Tensor | None = None,
    extra: Pools = (),
) -> Scores:
    """Score a batch of two views (SimCLR): 2b anchors, each against both views of all other instances.

    The positive of a row is the same row of the other view.

    Args:
        z1: Vectors of the first view, [b, d], of unit norm.
        z2: Vectors of the second view, [b, d], of unit norm.
        temperature: Positive number, scalar tensor, or tensor [b, 1] or [2b, 1] with one temperature per anchor.
        ids: Instance ids, [b]. Rows with the same id are never each other's negatives. Default: all rows are distinct.
        labels: Class labels, [b], for distributions that use them.
        clusters: Cluster of each row, [b], or [b, r] for r clusterings.
        extra: More candidates besides the batch, such as a queue or mined negatives: [n, d] shared by all anchors, or
            [2b, k, d] private to each. Their ids are matched only if ``ids`` is passed.

    Returns:
        Scores of 2b anchors, one positive each, and 2b + n candidates.

    Raises:
        ArgumentError: If the shapes do not agree or the temperature is not positive.

    Example:
        >>> import torch
        >>> z = torch.nn.functional.normalize(torch.randn(4, 8), dim=-1)
        >>> scores = two_views(z, z, temperature=0.5)
        >>> scores.num_valid().tolist()
        [6, 6, 6, 6, 6, 6, 6, 6]
    """
    parts = as_keys(extra, match_ids=ids is not None)
    return dense(pair_views([z1, z2], temperature, Tags(ids, labels, clusters), parts))


def cross_views(
    z1: Annotated[Tensor, "b d"],
    z2: Annotated[Tensor, "b d"],
    temperature: float | Tensor,
    ids: Annotated[Tensor, "b"] | None = None,
    labels: Annotated[Tensor, "b"] | None = None,
    *,
    clusters: Tensor | None = None,
    extra: Pools = (),
) -> Scores:
    """Score one view against the other only (SimCSE, CLIP, GraphCL): b anchors, b candidates.

    For a symmetric loss, average it over both directions by swapping ``z1`` and ``z2``.

    Args:
        z1: Vectors of the anchors, [b, d], of unit norm.
        z2: Vectors of the other view, [b, d]: row i is the positive of anchor i, and all rows are candidates.
        temperature: Positive number, scalar tensor, or tensor [b, 1] with one temperature per anchor.
        ids: Instance ids, [b]. Rows with the same id are never each other's negatives.
        labels: Class labels, [b], for distributions that use them.
        clusters: Cluster of each row, [b], or [b, r] for r clusterings.
        extra: More candidates, [n, d] shared or [b, k, d] private; see ``two_views``.

    Returns:
        Scores of b anchors, one positive each, and b + n candidates.

    Example:
        >>> z = torch.eye(3)
        >>> cross_views(z, z, temperature=0.5).candidates
        tensor([[2., 0., 0.],
                [0., 2., 0.],
                [0., 0., 2.]])
    """
    parts = as_keys(extra, match_ids=ids is not None)
    return dense(pair_cross(z1, z2, temperature, Tags(ids, labels, clusters), parts))


def score(
    anchors: Keys | Tensor,
    positives: Keys | Tensor,
    pool: Pools,
    temperature: float | Tensor,
    *,
    positive_mask: Annotated[Tensor, "b p"] | None = None,
) -> Scores:
    """Score anchors against a pool of candidates (MoCo queues, memory banks, explicit negatives).

    Ids are matched only where both sides have them.

    Args:
        anchors: Keys or vectors, [b, d].
        positives: Keys or vectors, [b, d], or [b, p, d] for p positives per anchor. If they have ids, candidates with
            the id of one of the anchor's positives are excluded from its negatives too.
        pool: Candidates: Keys, a tensor, a queue or bank, or a list of these, which are concatenated. Vectors are
            [n, d] if all anchors share them, or [b, k, d] if each anchor has its own.
        temperature: Positive number, scalar tensor, or tensor [b, 1] with one temperature per anchor.
        positive_mask: True for real positives, [b, p]; pad anchors that have fewer than p.

    Returns:
        Scores of b anchors with p positives and n candidates.

    Example:
        >>> anchors, queue = torch.eye(2), torch.eye(2).repeat(3, 1)
        >>> scores = score(anchors, anchors, queue, temperature=1.0)
        >>> scores.positives.shape, scores.candidates.shape
        (torch.Size([2, 1]), torch.Size([2, 6]))
    """
    return dense(pair_pool(anchors, positives, pool, temperature, positive_mask))


def from_matrix(
    similarity: Annotated[Tensor, "b n"],
    positives: Annotated[Tensor, "b n"],
    temperature: float | Tensor = 1.0,
    *,
    valid: Annotated[Tensor, "b n"] | None = None,
    anchors: Tags | None = None,
    candidates: Tags | None = None,
    sources: Sequence[str] | None = None,
    guide: Annotated[Tensor, "b n"] | None = None,
) -> Scores:
    """Make scores from any similarity matrix (MaxSim, a cross-encoder).

    An anchor's positives are never its negatives. ``valid`` and equal ids exclude more candidates.

    Args:
        similarity: Similarity of each anchor with each candidate, [b, n].
        positives: True where the candidate is a positive of the anchor, [b, n].
        temperature: Positive number or tensor by which the similarities are divided.
        valid: True where the candidate may be a negative, [b, n]. Default: everywhere.
        anchors: ``Tags(ids, labels, clusters)`` of the rows.
        candidates: ``Tags(ids, labels, clusters)`` of the columns.
        sources: Name of the source of each column; n names. Default: "matrix" for all.
        guide: Similarities of the same pairs under a second model, [b, n], to detect false negatives.

    Returns:
        Scores with n candidates and n positive slots, of which ``positives`` are real.

    Raises:
        ArgumentError: If shapes do not agree, the matrix has no rows, or the temperature is not positive.

    Example:
        >>> scores = from_matrix(torch.tensor([[0.9, 0.2, 0.1]]), torch.tensor([[True, False, False]]))
        >>> scores.valid
        tensor([[False,  True,  True]])
    """
    _check_matrix(similarity, positives, temperature, guide, sources)
    own, tags = anchors or Tags(), candidates or Tags()
    for which, given, size in zip(("anchors", "candidates"), (own, tags), similarity.shape, strict=True):
        for name in ("ids", "labels", "clusters"):
            if (tag := getattr(given, name)) is not None and len(tag) != size:
                raise ArgumentError("from_matrix", f"{name} of {size} {which}", f"{name}={tuple(tag.shape)}")
    with torch.autocast(similarity.device.type, enabled=False):
        scores = not_infinite(widened(similarity)) / temperature
    negative = ~positives if valid is None else valid & ~positives
    tags = tags.mapped(lambda tag: tag[None])
    if own.ids is not None and tags.ids is not None:
        negative = negative & other_id(own.ids, tags.ids)
    names = ("matrix",) if sources is None else tuple(dict.fromkeys(sources))
    codes = [0] * similarity.shape[1] if sources is None else [names.index(source) for source in sources]
    source = torch.tensor(codes, dtype=torch.long, device=similarity.device)
    second = None if guide is None else Guide(guide.detach(), guide.detach())
    return Scores(scores, scores, positives, negative, temperature, own, tags, source, names, second)


def _check_matrix(
    similarity: Tensor,
    positives: Tensor,
    temperature: float | Tensor,
    guide: Tensor | None,
    sources: Sequence[str] | None,
) -> None:
    if similarity.ndim != 2 or positives.shape != similarity.shape or positives.dtype != torch.bool:
        shapes = f"similarity={tuple(similarity.shape)} and positives={tuple(positives.shape)} of {positives.dtype}"
        raise ArgumentError("from_matrix", "similarity [b, n] and a bool mask of the same shape", shapes)
    if not len(similarity):
        raise ArgumentError("from_matrix", "at least one anchor", f"similarity={tuple(similarity.shape)}")
    check_temperature("from_matrix", temperature, len(similarity))
    if guide is not None and guide.shape != similarity.shape:
        raise ArgumentError("from_matrix", f"a guide of shape {tuple(similarity.shape)}", f"{tuple(guide.shape)}")
    if sources is not None and len(sources) != similarity.shape[1]:
        raise ArgumentError("from_matrix", f"a source for each of {similarity.shape[1]} columns", str(len(sources)))


def same_label_positives(scores: Scores, *, negatives_too: bool = False) -> Scores:
    """Make every candidate with the anchor's label a positive (SupCon).

    Candidates with the anchor's own id are left out, so that an instance that occurs twice is counted once.

    Args:
        scores: Scores whose anchors and candidates have labels.
        negatives_too: Keep the new positives among the negatives as well.

    Returns:
        Scores with p + n positive columns.
    """
    return more_positives(scores, scores.same_label("same_label_positives"), negatives_too=negatives_too)


def more_positives(scores: Scores, mask: Annotated[Tensor, "b n"], *, negatives_too: bool = False) -> Scores:
    """Make the valid candidates in the mask positives instead of negatives.

    Args:
        scores: Scores with p positives and n candidates.
        mask: True for candidates that become positives, [b, n].
        negatives_too: Keep them among the negatives as well: true positives with unlabelled negatives (HCL, Fig. 4).

    Returns:
        Scores with p + n positive columns: the original positives, then one column per candidate, of which
        ``positive_valid`` marks the real ones.
    """
    added = mask & scores.valid
    return with_positives(scores if negatives_too else scores.narrowed(~added), added)


def concatenate_scores(scores: Scores, *others: Scores) -> Scores:
    """Concatenate the candidates of several scores, with the positives of the first.

    Use it for denominators whose parts have different anchors, such as query-query and document-document blocks next to
    the query-document block. Tags and guides that one part lacks are dropped.

    Args:
        scores: The scores whose anchors and positives are used.
        others: Scores with the same number of rows and the same temperature.

    Raises:
        ArgumentError: If the number of rows or the temperatures differ.
    """
    parts = [scores, *others]
    if any(part.candidates.shape[0] != scores.candidates.shape[0] for part in parts):
        raise ArgumentError(
            "concatenate_scores", "the same anchors", f"rows={[part.candidates.shape[0] for part in parts]}"
        )
    if not all(_same_temperature(scores.temperature, part.temperature) for part in others):
        raise ArgumentError(
            "concatenate_scores", "one temperature", f"temperatures={[part.temperature for part in parts]}"
        )
    names = tuple(dict.fromkeys(name for part in parts for name in part.source_names))
    codes = [
        torch.tensor([names.index(name) for name in part.source_names], device=part.source.device) for part in parts
    ]
    return scores.changed(
        candidates=torch.cat([part.candidates for part in parts], dim=1),
        valid=torch.cat([part.valid for part in parts], dim=1),
        candidate_tags=Tags(*(_concatenated_tags(parts, name) for name in ("ids", "labels", "clusters"))),
        source=torch.cat([code[part.source] for code, part in zip(codes, parts, strict=True)]),
        source_names=names,
        guide=_concatenated_guides(parts),
    )


def _same_temperature(one: float | Tensor, other: float | Tensor) -> bool:
    """Compare temperatures up to float32 rounding; tensors on a GPU are not compared, to avoid a synchronisation."""
    cuda = any(isinstance(each, Tensor) and each.is_cuda for each in (one, other))
    if one is other or cuda or torch.compiler.is_compiling():
        return True
    ours, theirs = (torch.as_tensor(each).detach().double() for each in (one, other))
    return bool(torch.isclose(ours, theirs, rtol=1e-6, atol=0.0).all())


def _concatenated_tags(parts: list[Scores], name: str) -> Tensor | None:
    tags = [getattr(part.candidate_tags, name) for part in parts]
    if any(tag is None for tag in tags):
        return None
    rows = parts[0].candidates.shape[0]
    return torch.cat([tag.expand(rows, *tag.shape[1:]) for tag in tags], dim=1)


def _concatenated_guides(parts: list[Scores]) -> Guide | None:
    guides = [part.guide for part in parts if part.guide is not None]
    if len(guides) < len(parts):
        return None
    return Guide(guides[0].positives, torch.cat([guide.candidates for guide in guides], dim=1))


def dense(pairing: Pairing) -> Scores:
    """Compute all scores of a pairing as matrices [b, n]: one tile per pool, concatenated.

    Args:
        pairing: Anchors, positives and candidates that are not compared yet.

    Returns:
        The dense scores, on the device of the anchors, in float32 or wider.
    """
    check_parts(pairing)
    with without_autocast(pairing.anchors.vectors.device):
        return matrices(pairing)
