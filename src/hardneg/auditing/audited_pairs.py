"""Who is compared with whom: anchors, candidates, positives, and what is known to be a false negative.

A candidate is known to be false if it has the anchor's label or group, or is judged relevant to it. Positives and
rows with the anchor's own id are never candidates. Whether a candidate is false that no judge knows is unknown.
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


class Compared(NamedTuple):
    """Some anchors against all candidates: plain similarities, and who is a copy of the anchor or of a positive."""

    rows: Annotated[Tensor, "b"]
    similarity: Annotated[Tensor, "b n"]
    near: Annotated[Tensor, "b n"]

    def split(self, size: int) -> Iterator[Compared]:
        return (Compared(*parts) for parts in zip(*(each.split(size) for each in self), strict=True))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class AuditedPairs:
    """The anchors, candidates, positives and judgements of an audit; positives are second views or pairs of rows.

    Not a ``core.pairing.Pairing``: candidates may be read from disk block by block, and some anchors are sampled.
    """

    anchors: Corpus
    candidates: Corpus  # one block in memory, or blocks that are read where they are
    anchor_tags: Tags
    candidate_tags: Tags
    views: Annotated[Tensor, "a d"] | None = None
    pairs: Pairs | None = None
    judged: Pairs | None = None  # relevant ones
    irrelevant: Pairs | None = None  # judged, and not relevant
    held_out: Pairs | None = None  # relevant ones that mining has not seen; other pairs are taken to be irrelevant
    known_rows: Annotated[Tensor, "m"] | None = None  # anchors that may be looked at; None: all
    unit: bool = True
    source: str = "pool"
    names: tuple[Any, ...] | None = None  # of the candidates, in the result

    @property
    def has_positives(self) -> bool:
        return self.views is not None or self.pairs is not None

    @property
    def judges(self) -> tuple[str, ...]:
        """What false negatives are known by."""
        known = {"labels": "labels", "groups": "clusters"}
        found = [word for word, tag in known.items() if self.both(tag)]
        found += ["judgements"] if self.judged is not None else []
        return (*found, *(["held-out judgements"] if self.held_out is not None else []))

    @cached_property
    def all_judged(self) -> bool:
        """Whether a judge knows every pair, so that shares of false negatives are rates and not lower bounds."""
        if self.held_out is not None:
            return True
        known = self.is_known(torch.arange(len(self.anchors), device=self.anchors.device))  # the others do not count
        tags = [(getattr(self.anchor_tags, name), getattr(self.candidate_tags, name)) for name in _labels]
        given = [(one, two) for one, two in tags if one is not None and two is not None]
        return any(bool((one[known] >= 0).all() and (two >= 0).all()) for one, two in given)

    def rows(self) -> Annotated[Tensor, "m"]:
        """The anchors that may be looked at."""
        return torch.arange(len(self.anchors)) if self.known_rows is None else self.known_rows

    def name_of(self, row: int) -> Any:
        if self.names is not None:
            return self.names[row]
        return row if self.candidate_tags.ids is None else int(self.candidate_tags.ids[row])

    def compared(self, rows: Annotated[Tensor, "b"], cosine: float = 1.0) -> Compared:
        """One pass over the candidates; near is a cosine of at least this, but for rounding."""
        anchors, positives = self.anchors.rows(rows), self._directions(rows)
        similarity = anchors.new_empty(len(rows), len(self.candidates))
        near = torch.empty_like(similarity, dtype=torch.bool)
        for low, high in self.candidates.blocks():
            part = self.candidates.part(low, high)
            found = anchors @ part.T
            directions = part if self.unit else unit(part)
            close = is_copy(found if self.unit else unit(anchors) @ directions.T, cosine)
            for place, vectors in positives:
                close[place] |= is_copy(vectors @ directions.T, cosine)
            similarity[:, low:high], near[:, low:high] = found, close
        return Compared(rows, similarity, near)

    def scores(self, met: Compared, temperature: float) -> Scores:
        """Scores of some anchors against all candidates."""
        rows, similarity, _ = met
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
        """Candidates that are known not to be negatives of these anchors."""
        false = torch.zeros_like(scores.valid)
        if self.both("labels"):
            false |= scores.same_label("audit")
        if self.both("clusters"):
            false |= scores.same_cluster("audit")
        given = [pairs for pairs in (self.judged, self.held_out) if pairs is not None]
        for pairs in (*given, *([self.pairs] if given and self.pairs is not None else [])):
            false[pairs.of(rows)] = True
        return false

    def known_pairs(self, rows: Annotated[Tensor, "b"], false: Annotated[Tensor, "b n"]) -> Annotated[Tensor, "b n"]:
        """Candidates of which a judge says whether they are false."""
        if self.all_judged:
            return torch.ones_like(false)
        known = false.clone()
        for name in _labels:
            if self.both(name):
                anchors, candidates = getattr(self.anchor_tags, name)[rows], getattr(self.candidate_tags, name)
                some = [(tag >= 0).view(len(tag), -1).any(1) for tag in (anchors, candidates)]
                known |= some[0][:, None] & some[1][None]
        if self.irrelevant is not None:
            known[self.irrelevant.of(rows)] = True
        return known

    def is_known(self, rows: Annotated[Tensor, "b"]) -> Annotated[Tensor, "b"]:
        """Anchors about which any judge says something: an unlabelled one has no known false negatives."""
        known = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for word, tag in (("labels", self.anchor_tags.labels), ("clusters", self.anchor_tags.clusters)):
            if self.both(word) and tag is not None:
                known |= (tag[rows] >= 0).view(len(rows), -1).any(1)
        return known | True if self.judged is not None or self.held_out is not None else known

    def _directions(self, rows: Annotated[Tensor, "b"]) -> list[tuple[Tensor, Tensor]]:
        """(places, vectors at unit length) of the positives; no place is twice among those of one pair."""
        if self.views is not None:
            return [(torch.arange(len(rows), device=rows.device), unit(self.views[rows]))]
        if self.pairs is None:
            return []
        place, column, row = self.pairs.columns(rows)
        each = [column == number for number in range(int(column.max()) + 1 if len(column) else 0)]
        return [(place[one], unit(self.candidates.rows(row[one]))) for one in each]

    def _positives(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Plain similarities [b, p] and which are real; one that is not, where there are none."""
        anchors = self.anchors.rows(rows)
        if self.views is not None:
            own = (anchors * self.views[rows]).sum(-1, keepdim=True)
            return own, torch.ones_like(own, dtype=torch.bool)
        if self.pairs is None:
            return anchors.new_zeros(len(rows), 1), torch.zeros(len(rows), 1, dtype=torch.bool, device=anchors.device)
        return self.pairs.padded(rows, lambda place, row: (anchors[place] * self.candidates.rows(row)).sum(-1))

    def both(self, name: str) -> bool:
        """Whether anchors and candidates have this tag."""
        return getattr(self.anchor_tags, name) is not None and getattr(self.candidate_tags, name) is not None
