"""Exact mining over a whole corpus, by blocks, with the same distributions as in training.

Every query keeps a short list of its nearest candidates, as long as the expression needs
(``search_depth.py``). A query whose list turns out too short after the filters is searched again,
first with the filters inside the search and then with longer lists, so a query has fewer than k
negatives only if the corpus has no more for it.

``Miner`` holds the state that the stages of ``stages.py`` share. ``entry.mine_vectors`` and the jobs
of ``job.py`` build one; ``Mined`` is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.core.text import counted, html_table
from hardneg.core.types import NEVER, Keys
from hardneg.mining.alignment import (
    Alignment,
    alignment_of,
)
from hardneg.mining.candidates import Finder
from hardneg.mining.checks import check_inputs, check_vectors
from hardneg.mining.corpus_scores import CorpusScorer, Rescore
from hardneg.mining.explain import Explanation
from hardneg.mining.pairs import Positives
from hardneg.mining.search import Search
from hardneg.mining.select import Rule, select
from hardneg.mining.stages import PieceArrays, Stage, Stages, Store, chosen_pieces
from hardneg.search.exact import DocumentBlock, screens_in_bfloat16

_pilot, _pilot_rows = 256, 1 << 16  # queries and documents of the sample in needs_filters


@dataclass(frozen=True, eq=False)
class Mined:
    """The mined negatives of each query.

    Attributes:
        ids: Ids of the negatives [q, k], most preferred first and -1 where a query is short. A
            tensor; where the ids of the corpus are texts, an array of texts and None.
        scores: Similarities [q, k] before the temperature (scores of the rescorer, if there is
            one); -inf where short.
        rows: Positions of the negatives in the corpus [q, k], -1 where short.
        found_by: Retrievers that found each negative [q, k], as bits: bit i is ``retrievers[i]``.
        retrievers: Names of the retrievers.
        explanation: Number of candidates that each factor removed, and why queries are short.
        recall: Share of the nearest candidates that an approximate search found, measured on 64
            queries; None for an exact search.
    """

    ids: Any
    scores: Annotated[Tensor, "q k"]
    rows: Annotated[Tensor, "q k"]
    found_by: Annotated[Tensor, "q k"]
    retrievers: tuple[str, ...]
    explanation: Explanation
    recall: float | None = None

    def __repr__(self) -> str:
        """Summarise in one line: number of queries, negatives and short queries, and the mean score."""
        (queries, k), there = self.rows.shape, self.rows >= 0
        found = f"{counted(queries, 'query', 'queries')}, k={k}: {counted(int(there.sum()), 'negative')}"
        mean = f"{float(self.scores[there].double().mean()):.3f}" if bool(there.any()) else "none"
        short = int((there.sum(1) < k).sum())
        return f"Mined({found}, {short:,} short, mean score {mean})"

    def _repr_html_(self) -> str:
        """Show the negatives of the first queries as a table in notebooks."""
        shown, number = self.rows[:5], self.rows.shape[1]
        rows = []
        for query, own in enumerate(shown.tolist()):
            ids, scores = list(self.ids[query]), self.scores[query].tolist()
            cells = [
                f"{name} ({score:.3f})" if row >= 0 else "" for row, name, score in zip(own, ids, scores, strict=True)
            ]
            rows.append((query, *cells))
        note = (
            "Ids of the negatives, with their scores; the first 5 queries." if len(self.rows) > 5 else "Ids and scores."
        )
        return html_table(repr(self), ("query", *map(str, range(1, number + 1))), rows, [note])


class Miner:
    """The state that all stages of mining share: scorer, finder and rule.

    Args:
        queries: Vectors of the queries [q, d].
        corpus: Vectors of the documents [n, d], maybe a memory map.
        positives: Corpus ids of the positives of each query.
        rule: Distribution, number of negatives, draw and seed.
        temperature: Divisor of the similarities for tilts.
        near_positive: Cosine of near-duplicates of a positive; None switches the guard off.
        search: How candidates are found.
        rescore: Function that scores pairs instead of the vectors.
        guide: Vectors of another model, or a function of pairs, for ``by="guide"``.
    """

    def __init__(
        self,
        queries: Keys,
        corpus: Keys,
        positives: Positives,
        rule: Rule,
        temperature: float = 1.0,
        near_positive: float | None = None,
        search: Search = Search(),
        rescore: Rescore | None = None,
        guide: tuple[Tensor, Tensor] | Rescore | None = None,
    ) -> None:
        check_inputs(queries, corpus, rule, temperature, near_positive)
        self.rule, self.search = rule, search
        self.scorer = CorpusScorer(queries, corpus, positives, temperature, near_positive, search, rescore, guide)
        self.finder = Finder(self.scorer, rule, search)
        if not self.finder.searched:  # a searched corpus is checked block by block while it is read
            check_vectors("corpus", corpus.vectors, search.cosine)

    def mined(self, progress: Callable[[int], None] | None = None) -> Iterator[PieceArrays]:
        """Run all stages in this process and yield the chosen negatives, one block of queries at a time.

        Args:
            progress: Called with the number of queries decided in each block.
        """
        store = Store()
        stages = Stages(self, store)

        def run(stage: Stage) -> None:
            for piece in range(stage.pieces):
                store.write(stage.name, piece, stages.perform(stage, piece))

        for piece in chosen_pieces(self, store, run):
            if progress is not None:
                progress(int(piece["decided"].sum()))
            yield piece

    def joined(self, pieces: Iterable[PieceArrays]) -> Mined:
        """Join the blocks into one result, with the ids of the corpus.

        Args:
            pieces: Arrays of the stage ``chosen``; rows of queries that are not decided yet are ignored.
        """
        shape = len(self.scorer.queries), self.rule.k
        rows, found_by = torch.full(shape, -1), torch.zeros(shape, dtype=torch.long)
        scores = torch.full(shape, NEVER, dtype=self.scorer.corpus.dtype)
        explanation = Explanation.of(self.rule.negatives, self.scorer.near_positive, self.rule.near_negative)
        for piece in pieces:
            one = {name: torch.from_numpy(piece[name][piece["decided"]]) for name in piece if name != "decided"}
            query = one["query"]
            rows[query], scores[query], found_by[query] = one["rows"], one["scores"], one["found_by"]
            explanation.count(one["left"], one["removed"], (one["rows"] >= 0).sum(1), self.rule.k)
        ids, retrievers = self.scorer.ids_of(rows), self.finder.retrievers
        return Mined(ids, scores, rows, found_by, retrievers, explanation, self.finder.recall())

    def alignment(self) -> Alignment:
        """Return how close the positives are compared with random documents, on a sample."""
        scorer = self.scorer
        return alignment_of(scorer.queries.vectors, scorer.keys.vectors, scorer.positives, cosine=self.search.cosine)

    @property
    def bfloat16(self) -> bool:
        """True if bfloat16 products screen the candidates; the result is the same."""
        if self.search.precision != "auto":
            return self.search.precision == "bfloat16"
        size = len(self.scorer.queries) * len(self.scorer.corpus) * self.scorer.queries.dim
        return screens_in_bfloat16(self.scorer.device, size)

    @property
    def short_rows(self) -> bool:
        """True if all scores of a block of queries fit into memory, so that bounds need no extra passes."""
        finder, n = self.finder, len(self.scorer.corpus)
        return len(finder.shards) == 1 and n * finder.block(self.rule.k) <= self.scorer.most_scores

    def needs_filters(self) -> bool:
        """Return whether the first search should apply the filters; this affects speed only.

        It should if they cost nothing there (ceilings), or if more than a quarter of the first 256
        queries would be short without them. On a large corpus, that share is estimated from its
        first 65,536 documents, with a list shortened in proportion.
        """
        finder, corpus = self.finder, self.scorer.corpus
        attempts = list(finder.attempts(False))
        if finder.applies_all_factors or len(attempts) == 1 or not attempts[1][1] or not len(self.scorer.queries):
            return False
        if finder.leading_forms() is not None and (not self.bfloat16 or self.scorer.device.type == "cpu"):
            return True  # ceilings cost nothing, and the corpus is read only once
        query = torch.arange(min(_pilot, len(self.scorer.queries)), device=self.scorer.device)
        low, high = 0, min(_pilot_rows, len(corpus))
        share = high / len(corpus)
        size, wanted = (max(1, round(number * share)) for number in (attempts[0][0] or 1, finder.reach.size or 1))
        running = finder.running(query, size, False, None)
        for part in corpus.blocks((low, high)):
            running.add(DocumentBlock.of(corpus, *part))
        candidates, _ = finder.candidates(query, size, running.found(), None)
        if high == len(corpus):
            return float((~select(candidates, self.rule, self.scorer.directions).decided).float().mean()) > 0.25
        assert candidates.scores is not None
        left = torch.ones_like(candidates.scores.valid)
        for factor in finder.leading:
            left &= factor.log_weights(candidates.scores) != NEVER
        self.scorer.forget()
        return float(((left & candidates.scores.valid).sum(1) < wanted).float().mean()) > 0.25
