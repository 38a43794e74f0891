"""Check the input of an audit and prepare the ``AuditedPairs`` that are measured.

The positive of an anchor is:

- what the argument ``positives`` contains: vectors of a second view [a, d], or ids of candidates;
- with judgements only, the first one of each query: the rule can use it, and the others may become false negatives;
- with ``positives="label"``, one row of the same label, drawn with the seed, as in supervised training;
- otherwise nothing, so that figures that need a positive (BelowPositive, the clamped share) are undefined.

``make_audited_pairs`` is called by ``entry`` and ``files``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from hardneg.auditing.audited_pairs import AuditedPairs
from hardneg.core.errors import ArgumentError, argument_error, spelled
from hardneg.core.tensors import unit, widened
from hardneg.core.types import Given, Keys, Names, as_vectors
from hardneg.mining.checks import check_vectors
from hardneg.mining.judgements import Tag, numbered_both
from hardneg.mining.pairs import Pairs, Positives, RowsOf, as_one, as_pairs, numbered_ids, read_positives
from hardneg.search.nearest import Corpus

_in_memory = 1 << 28  # bytes of vectors; larger ones are read in blocks
_block = 1 << 16  # rows of a block


def make_audited_pairs(
    embeddings: Given | Keys,
    corpus: Given | Keys,
    *,
    positives: Positives | str | None = None,
    judgements: Positives | None = None,
    judged_negatives: Positives | None = None,
    held_out_judgements: Positives | None = None,
    labels: Tag | None = None,
    groups: Tag | None = None,
    normalize: bool = True,
    seed: int = 0,
) -> AuditedPairs:
    """Check all input of an audit and combine it.

    Args:
        embeddings: Anchors [a, d], which are the candidates too if there is no corpus.
        corpus: Candidates [n, d], or None.
        positives: Vectors [a, d], ids of candidates, ``"label"`` or None, as in the module docstring.
        judgements: Relevant ids of each anchor, the best first.
        judged_negatives: Ids of each anchor that are judged and not relevant.
        held_out_judgements: Relevant ids of each anchor that mining has not seen.
        labels: Labels of the anchors [a].
        groups: Groups of the anchors [a].
        normalize: Whether to compare directions (cosine) instead of the vectors as they are (dot product).
        seed: Seed for positives drawn by label.

    Raises:
        ArgumentError: If shapes do not match, ids are unknown, or labels are missing for ``positives="label"``.
    """
    anchors = _keys("embeddings", embeddings, labels, groups, with_corpus=corpus is not None)
    if corpus is None and len(anchors) == 1:
        raise ArgumentError("audit", "at least two embeddings, or a corpus", "one embedding and no corpus")
    if corpus is None and anchors.ids is None:
        anchors = replace(anchors, ids=torch.arange(len(anchors), device=anchors.vectors.device))
    given = embeddings if corpus is None else corpus
    names = given.names if isinstance(given, Keys) else None
    candidates = anchors if corpus is None else _keys("corpus", corpus, None, None, offset=len(anchors))
    if anchors.dim != candidates.dim:
        got = f"{anchors.dim} and {candidates.dim} features"
        raise ArgumentError("audit", "embeddings and corpus of the same dimension", got)
    if corpus is not None:
        anchors, candidates = as_one(anchors, candidates)
    wide = torch.promote_types(anchors.vectors.dtype, candidates.vectors.dtype)
    own = _as_corpus("embeddings", anchors.vectors, normalize, wide)
    others = own if corpus is None else _as_corpus("corpus", candidates.vectors, normalize, wide)
    audited = AuditedPairs(
        own,
        others,
        anchors.tags,
        candidates.tags,
        unit=normalize,
        source=candidates.source or "pool",
        names=None if names is None else tuple(names),
    )
    ids = None if corpus is None and not isinstance(embeddings, Keys) else candidates.ids
    audited = _with_positives(audited, _read(positives, names), _read(judgements, names), ids, seed)
    return _with_judged(audited, _read(judged_negatives, names), _read(held_out_judgements, names), ids)


def number_tags(name: str, given: Tag, size: int, *, only_numbers: bool = False) -> Annotated[Tensor, "n"]:
    """Return labels or groups as integers.

    Integers stay as they are; other values are numbered from 0. A missing value (None, NaN, empty text, a number below
    0) gets its own number below 0, so that it equals no other row.

    Args:
        name: ``"labels"`` or ``"groups"``, for errors.
        given: One value per row [n].
        size: Number of rows, n.
        only_numbers: Whether to accept only integers, to be compared with the integers of a corpus.

    Raises:
        ArgumentError: If there is not one value per row, or values are no integers where they must be.

    Example:
        >>> number_tags("labels", ["cat", "dog", "cat", None], 4).tolist()
        [0, 1, 0, -5]
    """
    if isinstance(given, np.ndarray) and given.dtype.kind in "iu":
        given = torch.from_numpy(given.astype(np.int64))
    if isinstance(given, Tensor) and given.shape == (size,) and not given.is_floating_point():
        return distinguish_unknown(given.long())
    if isinstance(given, (list, tuple)):  # a list may hold scalars of NumPy and torch
        given = [one.item() if isinstance(one, (np.generic, Tensor)) else one for one in given]
    number = numbered_both(name, given, [], (size, 0), "audit")[0]
    values = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else list(given)
    known = list(zip(values, (number >= 0).tolist(), strict=True))
    if all(type(one) is int and one < 2**63 for one, is_known in known if is_known):
        return distinguish_unknown(torch.tensor([one if is_known else -1 for one, is_known in known], dtype=torch.long))
    if only_numbers:
        what = f"integers as {name} if there is a corpus, whose Keys have integers"
        raise ArgumentError("audit", what, "other values")
    return number


def distinguish_unknown(tag: Annotated[Tensor, "n"], offset: int = 0) -> Annotated[Tensor, "n"]:
    """Replace numbers below 0, which mean unknown, with a different one in every row.

    Args:
        tag: Numbers [n] or [n, t].
        offset: Number of rows of an earlier set of tags, so that the unknown ones of both sets differ.

    Example:
        >>> distinguish_unknown(torch.tensor([3, -1, -1])).tolist()
        [3, -3, -4]
    """
    row = torch.arange(len(tag), device=tag.device).view(-1, *[1] * (tag.ndim - 1))
    return torch.where(tag < 0, -2 - offset - row, tag)


def _read(given: Any, names: Names | None) -> Any:
    """Return ids as numbers, and vectors of a second view, ``"label"`` and None as they are."""
    if isinstance(given, np.ndarray) and given.dtype.kind == "f":
        return as_vectors(given)
    if given is None or isinstance(given, str) or (isinstance(given, Tensor) and given.is_floating_point()):
        return given
    return numbered_ids(given, names)


def _with_positives(
    audited: AuditedPairs,
    positives: Positives | str | None,
    judgements: Positives | None,
    ids: Tensor | None,
    seed: int,
) -> AuditedPairs:
    """Add the positives and the judgements."""
    size, device = len(audited.anchors), audited.anchors.device

    def pairs_of(given: Positives) -> Pairs:
        return read_positives(given, size, RowsOf(ids, len(audited.candidates)))

    if judgements is not None:
        judged = pairs_of(judgements)
        some = judged.count().nonzero()[:, 0]
        if not len(some):
            raise ArgumentError("audit", "at least one judged document", "empty judgements")
        audited = replace(audited, judged=judged.to(device), eligible=some)
        positives = _first_judged(judgements, size) if positives is None else positives
    if positives is None:
        return audited
    if isinstance(positives, Tensor) and positives.is_floating_point():
        shape = audited.anchors.vectors.shape
        if positives.shape != shape:
            what = f"a second view {tuple(shape)} as positives"
            raise argument_error("audit", what, "positives", tuple(positives.shape))
        return replace(audited, views=_prepared("positives", positives, audited.unit, audited.anchors.dtype))
    if isinstance(positives, str) and positives != "label":
        raise argument_error("audit", 'positives as vectors, ids or "label"', "positives", positives)
    pairs = _same_label(audited, seed) if isinstance(positives, str) else pairs_of(positives)
    return replace(audited, pairs=pairs.to(device))


def _with_judged(
    audited: AuditedPairs, irrelevant: Positives | None, held_out: Positives | None, ids: Tensor | None
) -> AuditedPairs:
    """Add irrelevant pairs, and held-out relevant ones, without those that are positives."""
    size, device = len(audited.anchors), audited.anchors.device
    if irrelevant is None and held_out is None:
        return audited
    rows_of = RowsOf(ids, len(audited.candidates))
    if irrelevant is not None:
        audited = replace(audited, irrelevant=read_positives(irrelevant, size, rows_of).to(device))
    if held_out is None:
        return audited
    given = read_positives(held_out, size, rows_of)
    query, row = given.of(torch.arange(size))
    if audited.pairs is not None:
        own, positive = audited.pairs.to(torch.device("cpu")).of(torch.arange(size))
        width = len(audited.candidates)
        new = ~torch.isin(query * width + row, own * width + positive)
        query, row = query[new], row[new]
    if not len(row):
        what = f"relevant pairs that are not positives as {spelled('audit', 'held_out_judgements')}"
        got = f"{len(given.rows)} pairs, all of them positives"
        fix = "hold some judgements out before mining, or give those of another source"
        raise ArgumentError("audit", what, got, fix)
    kept = as_pairs(query, row, size)
    return replace(audited, held_out=kept.to(device), eligible=kept.count().nonzero()[:, 0])


def _first_judged(judgements: Positives, size: int) -> list[list[Any]]:
    """Return the first judged document of each query, which is the best one."""
    lists = judgements.view(size, -1).tolist() if isinstance(judgements, Tensor) else judgements
    real = [[int(one) for one in (each if hasattr(each, "__iter__") else [each]) if int(one) != -1] for each in lists]
    return [each[:1] for each in real]


def _same_label(audited: AuditedPairs, seed: int) -> Pairs:
    """Draw one other row of the same label for each anchor that has one."""
    tags = (audited.anchor_tags, audited.candidate_tags)
    if any(each.labels is None for each in tags):
        raise ArgumentError("audit", 'labels of anchors and candidates for positives="label"', "none")
    own, labels = (each.labels.cpu() for each in tags if each.labels is not None)
    own_ids, ids = (None if each.ids is None else each.ids.cpu() for each in tags)
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=random)
    order = order[labels[order].argsort(stable=True)]  # rows by label, shuffled within each
    found = labels[order]
    low, high = torch.searchsorted(found, own), torch.searchsorted(found, own, right=True)
    place = (torch.rand(len(own), generator=random, dtype=torch.float64) * (high - low)).long()
    chosen = order[(low + place).clamp(max=len(order) - 1)]
    if own_ids is not None and ids is not None:
        again = order[(low + (place + 1) % (high - low).clamp(min=1)).clamp(max=len(order) - 1)]
        chosen = torch.where(ids[chosen] == own_ids, again, chosen)
        some = (high > low) & (ids[chosen] != own_ids)
    else:
        some = high > low
    anchors = torch.arange(len(own))
    return as_pairs(anchors[some], chosen[some], len(own))


def _keys(
    name: str,
    given: Given | Keys,
    labels: Tag | None,
    groups: Tag | None,
    *,
    with_corpus: bool = False,
    offset: int = 0,
) -> Keys:
    """Return Keys with integers for labels and groups; unknown ones (below 0) become different from all others."""
    keys = given if isinstance(given, Keys) else Keys(given)
    if keys.private or not len(keys):
        raise ArgumentError("audit", f"{name} [n, d] with at least one row", str(tuple(keys.vectors.shape)))

    def tag(word: str, given: Tag | None, own: Tensor | None) -> Tensor | None:
        number = own if given is None else number_tags(word, given, len(keys), only_numbers=with_corpus)
        return None if number is None else distinguish_unknown(number.to(keys.vectors.device), offset)

    return replace(keys, labels=tag("labels", labels, keys.labels), clusters=tag("groups", groups, keys.clusters))


def _as_corpus(name: str, vectors: Tensor, normalize: bool, dtype: torch.dtype) -> Corpus:
    """Return vectors for comparison: one block in memory, or blocks that are read from a large file."""
    if vectors.nbytes <= _in_memory:
        return Corpus(_prepared(name, vectors, normalize, dtype), vectors.device, max(1, len(vectors)), dtype)
    check_vectors(name, vectors, normalize)
    block = min(_block, -(-len(vectors) // 2))  # at least two blocks: a corpus of one block is kept in memory
    return Corpus(vectors.detach(), vectors.device, block, dtype, cosine=normalize)


def _prepared(name: str, vectors: Tensor, normalize: bool, dtype: torch.dtype) -> Tensor:
    """Check vectors and return them in float32 or wider, at unit length if ``normalize``."""
    wide = widened(vectors.detach().to(dtype))
    check_vectors(name, wide, normalize)
    return unit(wide) if normalize else wide
