"""The pairs of an audit: anchors, candidates, positives, and which candidates are known to be false negatives.

A candidate is known to be false if it has the anchor's label or group, or is judged relevant to it. Positives and
rows with the anchor's own id are never candidates. Whether an unjudged candidate is false is unknown.

``prepare.make_audited_pairs`` builds ``AuditedPairs``; ``sampling`` and ``measure`` read it chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from hardneg.core.tensors import unit
from hardneg.core.types import Scores, Tags, other_id
from hardneg.mining.corpus_scores import is_copy
from hardneg.mining.pairs import Pairs
from hardneg.search.nearest import Corpus

_labels = ("labels", "clusters")


class ComparedAnchors(NamedTuple):
    """Some anchors compared with all candidates.

    Attributes:
        rows: Rows of the anchors [b].
        similarity: Cosine or dot product with every candidate [b, n].
        near: Whether a candidate is a near-duplicate of the anchor or of one of its positives [b, n].
    """

    rows: Annotated[Tensor, "b"]
    similarity: Annotated[Tensor, "b n"]
    near: Annotated[Tensor, "b n"]

    def split(self, size: int) -> Iterator[ComparedAnchors]:
        """Yield the same comparison in chunks of at most ``size`` anchors."""
        return (ComparedAnchors(*parts) for parts in zip(*(each.split(size) for each in self), strict=True))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class AuditedPairs:
    """The anchors, candidates, positives and judgements of an audit; positives are second views or pairs of rows.

    It is not a ``core.pairing.Pairing``: candidates may be read from disk block by block, and only some anchors are
    compared at a time.

    Attributes:
        anchors: Vectors of the anchors [a, d].
        candidates: Vectors of the candidates [n, d]: one block in memory, or blocks on disk.
        anchor_tags: Ids, labels and clusters of the anchors.
        candidate_tags: Ids, labels and clusters of the candidates.
        views: Vectors of a second view [a, d], if these are the positives.
        pairs: Rows of the candidates that are positives, if these are.
        judged: Relevant pairs.
        irrelevant: Pairs that are judged and not relevant.
        held_out: Relevant pairs that mining has not seen; all other pairs count as irrelevant.
        eligible: Rows of the anchors that may be measured [m]; None for all.
        unit: Whether vectors are compared at unit length.
        source: Source of the candidates in the scores.
        names: Name of each candidate in the result; None for its id or row.
    """

    anchors: Corpus
    candidates: Corpus
    anchor_tags: Tags
    candidate_tags: Tags
    views: Annotated[Tensor, "a d"] | None = None
    pairs: Pairs | None = None
    judged: Pairs | None = None
    irrelevant: Pairs | None = None
    held_out: Pairs | None = None
    eligible: Annotated[Tensor, "m"] | None = None
    unit: bool = True
    source: str = "pool"
    names: tuple[Any, ...] | None = None

    @property
    def has_positives(self) -> bool:
        """Whether anchors have positives."""
        return self.views is not None or self.pairs is not None

    @property
    def judges(self) -> tuple[str, ...]:
        """The data by which false negatives are known: labels, groups, judgements, held-out judgements."""
        known = {"labels": "labels", "groups": "clusters"}
        found = [word for word, tag in known.items() if self.both_have(tag)]
        found += ["judgements"] if self.judged is not None else []
        return (*found, *(["held-out judgements"] if self.held_out is not None else []))

    @cached_property
    def all_judged(self) -> bool:
        """Whether every pair is judged, so that shares of false negatives are rates and not lower bounds."""
        if self.held_out is not None:
            return True
        known = self.has_judgements(torch.arange(len(self.anchors), device=self.anchors.device))  # others do not count
        tags = [(getattr(self.anchor_tags, name), getattr(self.candidate_tags, name)) for name in _labels]
        given = [(one, two) for one, two in tags if one is not None and two is not None]
        return any(bool((one[known] >= 0).all() and (two >= 0).all()) for one, two in given)

    def rows(self) -> Annotated[Tensor, "m"]:
        """Return the rows of the anchors that may be measured."""
        return torch.arange(len(self.anchors)) if self.eligible is None else self.eligible

    def name_of(self, row: int) -> Any:
        """Return the name of a candidate in the result: its name, id or row."""
        if self.names is not None:
            return self.names[row]
        return row if self.candidate_tags.ids is None else int(self.candidate_tags.ids[row])

    def compare(self, rows: Annotated[Tensor, "b"], cosine: float = 1.0) -> ComparedAnchors:
        """Compare some anchors with all candidates in one pass.

        Args:
            rows: Rows of the anchors [b].
            cosine: Cosine similarity above which a candidate is a near-duplicate, up to rounding.
        """
        anchors, positives = self.anchors.rows(rows), self._directions(rows)
        similarity = anchors.new_empty(len(rows), len(self.candidates))
        near = torch.empty_like(similarity, dtype=torch.bool)
        for low, high in self.candidates.blocks():
            part = self.candidates.part(low, high)
            found = anchors @ part.T
            directions = part if self.unit else unit(part)
            close = is_copy(found if self.unit else unit(anchors) @ directions.T, cosine, part.shape[1])
            for place, vectors in positives:
                close[place] |= is_copy(vectors @ directions.T, cosine, part.shape[1])
            similarity[:, low:high], near[:, low:high] = found, close
        return ComparedAnchors(rows, similarity, near)

    def scores(self, compared: ComparedAnchors, temperature: float) -> Scores:
        """Return the scores of compared anchors against all candidates.

        Positives and the anchors themselves are invalid candidates.

        Args:
            compared: The comparison from ``compare``.
            temperature: Temperature that similarities are divided by.
        """
        rows, similarity, _ = compared
        positives, real = self._positives(rows)
        tags = self.anchor_tags.mapped(lambda tag: tag[rows])
        valid = torch.ones_like(similarity, dtype=torch.bool)
        if tags.ids is not None and self.candidate_tags.ids is not None:
            valid &= other_id(tags.ids, self.candidate_tags.ids[None])
        if self.pairs is not None:
            valid[self.pairs.of(rows)] = False
        return Scores(
            positives / temperature,
            similarity / temperature,
            real,
            valid,
            temperature,
            tags,
            self.candidate_tags.mapped(lambda tag: tag[None]),
            torch.zeros(len(self.candidates), dtype=torch.long, device=similarity.device),
            (self.source,),
        )

    def known_false(self, rows: Annotated[Tensor, "b"], scores: Scores) -> Annotated[Tensor, "b n"]:
        """Return which candidates are known to be false negatives of these anchors [b, n]."""
        false = torch.zeros_like(scores.valid)
        if self.both_have("labels"):
            false |= scores.same_label("audit")
        if self.both_have("clusters"):
            false |= scores.same_cluster("audit")
        given = [pairs for pairs in (self.judged, self.held_out) if pairs is not None]
        for pairs in (*given, *([self.pairs] if given and self.pairs is not None else [])):
            false[pairs.of(rows)] = True
        return false

    def known_pairs(self, rows: Annotated[Tensor, "b"], false: Annotated[Tensor, "b n"]) -> Annotated[Tensor, "b n"]:
        """Return which candidates are judged to be false or not [b, n]."""
        if self.all_judged:
            return torch.ones_like(false)
        known = false.clone()
        for name in _labels:
            if self.both_have(name):
                anchors, candidates = getattr(self.anchor_tags, name)[rows], getattr(self.candidate_tags, name)
                some = [(tag >= 0).view(len(tag), -1).any(1) for tag in (anchors, candidates)]
                known |= some[0][:, None] & some[1][None]
        if self.irrelevant is not None:
            known[self.irrelevant.of(rows)] = True
        return known

    def has_judgements(self, rows: Annotated[Tensor, "b"]) -> Annotated[Tensor, "b"]:
        """Return which anchors have any judgement [b]; an unlabelled one has no known false negatives."""
        known = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for word, tag in (("labels", self.anchor_tags.labels), ("clusters", self.anchor_tags.clusters)):
            if self.both_have(word) and tag is not None:
                known |= (tag[rows] >= 0).view(len(rows), -1).any(1)
        return known | True if self.judged is not None or self.held_out is not None else known

    def _directions(self, rows: Annotated[Tensor, "b"]) -> list[tuple[Tensor, Tensor]]:
        """Return (places, unit vectors) of the positives, in groups in which every place occurs once."""
        if self.views is not None:
            return [(torch.arange(len(rows), device=rows.device), unit(self.views[rows]))]
        if self.pairs is None:
            return []
        place, column, row = self.pairs.columns(rows)
        each = [column == number for number in range(int(column.max()) + 1 if len(column) else 0)]
        return [(place[one], unit(self.candidates.rows(row[one]))) for one in each]

    def _positives(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return similarities of the positives [b, p] and which of them exist; one invalid column without positives."""
        anchors = self.anchors.rows(rows)
        if self.views is not None:
            own = (anchors * self.views[rows]).sum(-1, keepdim=True)
            return own, torch.ones_like(own, dtype=torch.bool)
        if self.pairs is None:
            return anchors.new_zeros(len(rows), 1), torch.zeros(len(rows), 1, dtype=torch.bool, device=anchors.device)
        return self.pairs.padded(rows, lambda place, row: (anchors[place] * self.candidates.rows(row)).sum(-1))

    def both_have(self, name: str) -> bool:
        """Whether both anchors and candidates have this tag."""
        return getattr(self.anchor_tags, name) is not None and getattr(self.candidate_tags, name) is not None
