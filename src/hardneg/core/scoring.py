"""Vectors to scores: who is compared with whom, and who can never be a negative.

Vectors are taken as given, and unit norm is the caller's business: ``with checks():`` raises for other norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.core.pairing import (
    MaskedTile,
    Pairing,
    check_parts,
    check_temperature,
    not_infinite,
    positive_columns,
    similarity,
)
from hardneg.core.pairing import checks as checks
from hardneg.core.tensors import constant, widened, without_autocast
from hardneg.core.types import Guide, Keys, Scores, Tags, other_id
from hardneg.core.views import Pools, as_keys, pair_cross, pair_pool, pair_views


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
    """SimCLR: 2b anchors, each against both views of all other instances.

    The positive of a row is the other view of the same row. ``extra`` candidates (a queue, mined negatives) stand
    beside the batch; private ones are [2b, k, d].

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
    """SimCSE, CLIP, GraphCL: b anchors of one view against the other view only."""
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
    """Anchors against a pool: MoCo, banks, explicit negatives; candidates are shared [n, d] or private [b, k, d].

    ``positives`` is [b, d], or [b, p, d] for several with ``positive_mask`` saying which are real. Given as Keys with
    ids, a candidate with the id of one of the anchor's positives is not its negative either. ``pool`` may be several,
    which are concatenated. Ids are matched only where both sides have them.
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
    """Scores of any scorer (MaxSim, a cross-encoder): ``positives`` is a mask over the same candidates.

    A positive is never its own anchor's negative; ``valid`` excludes more, and so do equal ids. ``anchors`` and
    ``candidates`` are ``Tags(ids, labels, clusters)`` of the rows and the columns, ``sources`` the name of
    each column's source, ``guide`` the plain similarities of another model.
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
    """Every candidate with the anchor's label becomes one more positive, and is no longer a negative.

    Candidates with the anchor's own id stay out, so an instance that is twice in the batch is counted once.
    """
    return more_positives(scores, scores.same_label("same_label_positives"), negatives_too=negatives_too)


def more_positives(scores: Scores, mask: Annotated[Tensor, "b n"], *, negatives_too: bool = False) -> Scores:
    """The valid candidates in the mask become positives, and are no longer negatives.

    The positives are the anchor's own first, then one column per candidate, of which the mask says which are real.
    ``negatives_too`` lets them stay among the negatives: true positives and unlabelled negatives (HCL, Fig. 4).
    """
    added = mask & scores.valid
    return _with_positives(scores if negatives_too else scores.narrowed(~added), added)


def _with_positives(scores: Scores, added: Annotated[Tensor, "b n"]) -> Scores:
    """Append every candidate to the positives; ``added`` marks the real ones."""
    guide = scores.guide
    return scores.changed(
        positives=torch.cat([scores.positives, scores.candidates], dim=1),
        positive_valid=torch.cat([scores.positive_valid, added], dim=1),
        guide=guide and Guide(torch.cat([guide.positives, guide.candidates], dim=1), guide.candidates),
    )


def concatenate_scores(scores: Scores, *others: Scores) -> Scores:
    """Candidates of several scores side by side, with the positives of the first.

    For denominators whose parts have different anchors: query-query and document-document blocks beside the
    query-document one. All have the same number of rows and temperature; tags that a part lacks are lost.
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
        candidate_tags=Tags(*(_beside_tags(parts, name) for name in ("ids", "labels", "clusters"))),
        source=torch.cat([code[part.source] for code, part in zip(codes, parts, strict=True)]),
        source_names=names,
        guide=_beside_guides(parts),
    )


def _same_temperature(one: float | Tensor, other: float | Tensor) -> bool:
    """Up to float32; tensors on a GPU are not looked into."""
    cuda = any(isinstance(each, Tensor) and each.is_cuda for each in (one, other))
    if one is other or cuda or torch.compiler.is_compiling():
        return True
    ours, theirs = (torch.as_tensor(each).detach().double() for each in (one, other))
    return bool(torch.isclose(ours, theirs, rtol=1e-6, atol=0.0).all())


def _beside_tags(parts: list[Scores], name: str) -> Tensor | None:
    tags = [getattr(part.candidate_tags, name) for part in parts]
    if any(tag is None for tag in tags):
        return None
    rows = parts[0].candidates.shape[0]
    return torch.cat([tag.expand(rows, *tag.shape[1:]) for tag in tags], dim=1)


def _beside_guides(parts: list[Scores]) -> Guide | None:
    guides = [part.guide for part in parts if part.guide is not None]
    if len(guides) < len(parts):
        return None
    return Guide(guides[0].positives, torch.cat([guide.candidates for guide in guides], dim=1))


def dense(pairing: Pairing) -> Scores:
    """Compare all anchors with all candidates, as matrices [b, n]; checks first that the parts fit together."""
    check_parts(pairing)
    with without_autocast(pairing.anchors.vectors.device):
        return matrices(pairing)


def matrices(pairing: Pairing) -> Scores:
    """Compare all anchors with all candidates of a checked pairing: one tile per pool, side by side."""
    anchors, pools = pairing.prepared_keys()
    ready = pairing.changed(anchors=anchors, candidates=pools, guide=None)
    blocks = [ready.tile(slice(None), cut) for cut in pairing.cuts(max(1, *map(len, pools)))]
    candidates = _concatenated([block.tile.s for block in blocks])
    positives = _own_scores(pairing, anchors, candidates)
    mask, names = pairing.positive_mask, pairing.source_names
    if mask is None:
        mask = constant(torch.ones, positives.shape, dtype=torch.bool, device=positives.device)
    own, tags = anchors.tags, Tags(*(_side_by_side(blocks, name) for name in ("ids", "labels", "clusters")))
    valid = _concatenated([block.valid.expand(block.tile.s.shape) for block in blocks])
    source = _source_codes(pools, names, candidates)
    scores = Scores(
        positives, candidates, mask, valid, pairing.temperature, own, tags, source, names, ids_given=pairing.ids_given
    )
    if pairing.guide is not None:
        scores = scores.guided(dense(pairing.guide))
    if not pairing.label_positives:
        return scores
    return _with_positives(scores, _concatenated([_promoted(block) for block in blocks]))


def _promoted(block: MaskedTile) -> Annotated[Tensor, "b n"]:
    assert block.promoted is not None
    return block.promoted.expand(block.tile.s.shape)


def _own_scores(pairing: Pairing, anchors: Keys, candidates: Annotated[Tensor, "b n"]) -> Annotated[Tensor, "b p"]:
    """Return the scores of the anchors' own positives; those of views of the batch are among the candidates'."""
    if pairing.num_views == 1:
        return candidates.diagonal()[:, None]
    if pairing.num_views > 1:
        columns = constant(positive_columns, len(pairing), pairing.num_views, device=candidates.device)
        return candidates.gather(1, columns)
    return similarity(anchors.vectors, pairing.prepared_own().vectors) / pairing.temperature


def _side_by_side(blocks: Sequence[MaskedTile], name: str) -> Tensor | None:
    """Return one tag of all candidates, [b|1, n] or [b|1, n, r]; None unless every pool has it."""
    tags = [getattr(block.tile.candidate_tags, name) for block in blocks]
    if any(tag is None for tag in tags):
        return None
    rows = max(len(tag) for tag in tags)
    return _concatenated([tag.expand(rows, *tag.shape[1:]) for tag in tags])


def _source_codes(pool: Sequence[Keys], names: tuple[str, ...], like: Tensor) -> Tensor:
    codes = [
        constant(torch.full, (len(keys),), names.index(keys.source or "pool"), dtype=torch.long, device=like.device)
        for keys in pool
    ]
    return codes[0] if len(codes) == 1 else torch.cat(codes)


def _concatenated(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
