"""From what the caller gives to what is audited, checked at the door.

What the positive of an anchor is:

- what ``positives`` says: vectors of a second view [n, d], or ids of candidates;
- with judgements only, the first one of each query: the rule is told one, the others are what it may walk into;
- ``positives="label"``: one row of the same label, drawn with the seed, for supervised training;
- else there is none, and what needs one (BelowPositive, the clamped share) has no answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hardneg.auditing.subject import Subject
from hardneg.auditing.tags import numbered, unlike
from hardneg.core.errors import ArgumentError
from hardneg.core.types import Keys
from hardneg.core.vectors import unit, widened
from hardneg.mining.checks import check_finite
from hardneg.mining.judgements import Tag
from hardneg.mining.pairs import Pairs, Positives, RowsOf, as_pairs, read_positives


def make_subject(
    embeddings: Tensor | Keys,
    corpus: Tensor | Keys | None,
    *,
    positives: Positives | str | None = None,
    judgements: Positives | None = None,
    labels: Tag | None = None,
    groups: Tag | None = None,
    normalize: bool = True,
    seed: int = 0,
) -> Subject:
    """Checks everything at the door and puts it together."""
    anchors = _keys("embeddings", embeddings, labels, groups, beside=corpus is not None)
    if corpus is None:
        anchors = anchors if anchors.ids is not None else replace(anchors, ids=_arange(anchors))
    candidates = anchors if corpus is None else _keys("corpus", corpus, None, None)
    anchors = _told_apart(anchors, 0)
    candidates = anchors if corpus is None else _told_apart(candidates, len(anchors))
    if anchors.dim != candidates.dim:
        raise ArgumentError(
            "audit", "embeddings and corpus of one dimension", f"{anchors.dim} and {candidates.dim} features"
        )
    wide = torch.promote_types(anchors.vectors.dtype, candidates.vectors.dtype)
    ready = {id(keys): _prepared(name, keys.vectors, normalize, wide) for name, keys in _named(anchors, candidates)}
    subject = Subject(
        ready[id(anchors)],
        ready[id(candidates)],
        ready[id(candidates)] if normalize else unit(ready[id(candidates)]),
        anchors.tags,
        candidates.tags,
        unit=normalize,
        source=candidates.source or "pool",
    )
    rows_of = None if corpus is None and not isinstance(embeddings, Keys) else candidates.ids
    subject = _with_positives(subject, positives, judgements, rows_of, normalize, seed)
    device = subject.anchors.device
    pairs, judged = (None if each is None else each.to(device) for each in (subject.pairs, subject.judged))
    return replace(subject, pairs=pairs, judged=judged)


def _with_positives(
    subject: Subject,
    positives: Positives | str | None,
    judgements: Positives | None,
    ids: Tensor | None,
    normalize: bool,
    seed: int,
) -> Subject:
    size = len(subject.anchors)
    if judgements is not None:
        judged = read_positives(judgements, size, RowsOf(ids, len(subject.candidates)))
        some = judged.count().nonzero()[:, 0]
        if not len(some):
            raise ArgumentError("audit", "at least one judged document", "judgements of none")
        subject = replace(subject, judged=judged, askable=some)
        if positives is None:
            first = _flat_first(judgements, size)
            return replace(subject, pairs=read_positives(first, size, RowsOf(ids, len(subject.candidates))))
    if positives is None:
        return subject
    if isinstance(positives, str):
        if positives != "label":
            raise ArgumentError("audit", 'positives as vectors, ids or "label"', f"positives={positives!r}")
        return replace(subject, pairs=_same_label(subject, seed))
    if isinstance(positives, Tensor) and positives.is_floating_point():
        if positives.shape != subject.anchors.shape:
            got, wanted = tuple(positives.shape), tuple(subject.anchors.shape)
            raise ArgumentError("audit", f"a second view {wanted} as positives", f"positives={got}")
        return replace(subject, views=_prepared("positives", positives, normalize, subject.anchors.dtype))
    return replace(subject, pairs=read_positives(positives, size, RowsOf(ids, len(subject.candidates))))


def _flat_first(judgements: Positives, size: int) -> list[list[Any]]:
    """The first judged document of each query; lists are the best first."""
    lists = judgements.view(size, -1).tolist() if isinstance(judgements, Tensor) else judgements
    real = [[int(one) for one in (each if hasattr(each, "__iter__") else [each]) if int(one) != -1] for each in lists]
    return [each[:1] for each in real]


def _same_label(subject: Subject, seed: int) -> Pairs:
    """One other row of the same label for each anchor that has one, drawn with the seed."""
    tags = (subject.anchor_tags, subject.candidate_tags)
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


def _keys(name: str, given: Tensor | Keys, labels: Tag | None, groups: Tag | None, *, beside: bool = False) -> Keys:
    keys = given if isinstance(given, Keys) else None
    if keys is None:
        if not isinstance(given, Tensor) or given.ndim != 2 or not given.is_floating_point():
            got = f"{tuple(given.shape)} of {given.dtype}" if isinstance(given, Tensor) else repr(type(given).__name__)
            raise ArgumentError("audit", f"{name} as floats [n, d]", f"{name}={got}")
        keys = Keys(given)
    if keys.private or not len(keys):
        raise ArgumentError("audit", f"{name} [n, d] with at least one row", str(tuple(keys.vectors.shape)))
    for word, tag in (("labels", labels), ("groups", groups)):
        if tag is not None:
            number = numbered(word, tag, len(keys), only_numbers=beside).to(keys.vectors.device)
            keys = replace(keys, labels=number) if word == "labels" else replace(keys, clusters=number)
    return keys


def _arange(keys: Keys) -> Tensor:
    return torch.arange(len(keys), device=keys.vectors.device)


def _told_apart(keys: Keys, offset: int) -> Keys:
    """Rows of which no label or group is known (below 0) are like no other row."""
    labels, clusters = (None if tag is None else unlike(tag, offset) for tag in (keys.labels, keys.clusters))
    return replace(keys, labels=labels, clusters=clusters)


def _named(anchors: Keys, candidates: Keys) -> list[tuple[str, Keys]]:
    return [("embeddings", anchors)] if anchors is candidates else [("embeddings", anchors), ("corpus", candidates)]


def _prepared(name: str, vectors: Tensor, normalize: bool, dtype: torch.dtype) -> Tensor:
    check_finite(name, vectors)
    wide = widened(vectors.detach().to(dtype))
    if not normalize:
        return wide
    zero = (wide == 0).all(1)
    if bool(zero.any()):
        raise ArgumentError(
            "audit",
            "vectors with a direction",
            (f"{int(zero.sum())} zero vectors in {name}, first in row {int(zero.int().argmax())}"),
            "leave those rows out or use normalize=False",
        )
    return unit(wide)
