"""Exact mining over a whole corpus, by blocks, with the same distributions as in training.

Every query keeps a short list of its nearest candidates, as long as the expression needs
(``search_depth.py``). A query whose list turns out too short after the filters is searched again,
first with the filters inside the search and then with longer lists, so a query has fewer than k
negatives only if the corpus has no more for it.

``mine`` is the function for vectors; ``Miner`` holds the state that the stages of ``stages.py``
share, and is also used by the jobs of ``job.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, check_kind
from hardneg.core.text import counted, html_table
from hardneg.core.types import NEVER, Keys
from hardneg.mining.alignment import (
    Alignment,
    alignment_of,
    warn_of_alignment,
    warn_of_easy_negatives,
    warn_of_missing_positives,
)
from hardneg.mining.candidates import Finder
from hardneg.mining.checks import check_inputs, check_vectors
from hardneg.mining.corpus_scores import CorpusScorer, Rescore
from hardneg.mining.explain import Explanation
from hardneg.mining.options import TEMPERATURE, Draw, MineOptions, Similarity
from hardneg.mining.pairs import Positives
from hardneg.mining.search import Search, SearchKind
from hardneg.mining.select import Rule, select
from hardneg.mining.stages import PieceArrays, Stage, Stages, Store, chosen_pieces
from hardneg.negatives import Negatives, parse
from hardneg.search.exact import DocumentBlock, runs_in_triton

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


def mine(
    queries: Keys,
    corpus: Keys,
    positives: Positives,
    negatives: Negatives | str = MineOptions.negatives,
    k: int = MineOptions.k,
    draw: Draw = "top",
    seed: int = 0,
    *,
    similarity: Similarity | None = None,
    temperature: float = TEMPERATURE,
    near_positive: float | None = None,
    near_negative: float | None = None,
    search: Search | SearchKind = "exact",
    rescore: Rescore | None = None,
    guide: tuple[Tensor, Tensor] | Rescore | None = None,
    progress: Callable[[int], None] | None = None,
) -> Mined:
    """Mine k negatives from the corpus for each query, by any distribution, as in training.

    Args:
        queries: Vectors of the queries [q, d]; a query with an id is never matched with the corpus
            row of the same id.
        corpus: Vectors of the documents [n, d], with distinct ids if they have any.
        positives: Corpus ids (row numbers where the corpus has no ids): [q], [q, p] padded with -1,
            or one list per query. Positives are never negatives. ``BelowPositive`` compares with
            the lowest-scored one.
        negatives: Distribution, or its expression such as ``"BelowPositive(0.05) * Tilt(10)"``.
        k: Number of negatives per query.
        draw: ``"top"``, the k most similar of the support; ``"gumbel"``, k draws without
            replacement from the weights; ``"categorical"``, with replacement. A draw depends only
            on the seed and on the positions of query and candidate.
        seed: Seed of the draws.
        similarity: ``"cosine"``, or ``"dot"`` for the dot product of the vectors as they are; None
            is that of ``search``, which is the cosine by default.
        temperature: Divisor of the similarities for tilts; 1 means that ``Tilt(beta)`` is exp(beta
            * similarity).
        near_positive: Cosine from which a candidate counts as a near-duplicate of a positive and is
            skipped.
        near_negative: Cosine from which a candidate counts as a near-duplicate of a negative chosen
            before and is skipped.
        search: How candidates are found; see ``Search``.
        rescore: ``rescore(query_rows [m], corpus_rows [m]) -> scores [m]``, a cross-encoder for
            example. It scores the nearest ``search.candidates`` of each query and the positives,
            and its scores replace the similarities.
        guide: Another model's vectors of the queries [q, e] and of the corpus [n, e], or a function
            like ``rescore``, for ``BelowPositive(..., by="guide")``. A function scores only the
            nearest ``search.candidates``.
        progress: Called with the number of queries decided since the last call.

    Returns:
        The negatives with scores, retrievers and an explanation.

    Raises:
        ArgumentError: If shapes, ids, the rule or the search do not fit together.
        NotFinite: If vectors contain NaN or infinite values.

    Example:
        >>> keys = Keys(torch.eye(3), ids=torch.tensor([7, 8, 9]))
        >>> mine(keys, keys, torch.tensor([8, 9, 7]), "Uniform()", k=2).ids.tolist()  # not itself, not its positive
        [[9, -1], [7, -1], [8, -1]]
    """
    rule = Rule(parse(negatives) if isinstance(negatives, str) else negatives, k, draw, seed, near_negative)
    search = Search(search) if isinstance(search, str) else search
    check_kind("mine", "search", search, Search, "a Search, or the kind of one")
    search = search if similarity is None else replace(search, similarity=similarity)
    for name, given in (("rescore", rescore), ("guide", guide)):
        if not (given is None or callable(given) or (name == "guide" and isinstance(given, tuple))):
            what = "a function of queries and rows" + ", or (queries, documents) of a second model" * (name == "guide")
            raise ArgumentError("mine", what, f"{name} of type {type(given).__name__}")
    miner = Miner(queries, corpus, positives, rule, temperature, near_positive, search, rescore, guide)
    alignment = miner.alignment()
    warn_of_alignment(alignment)
    warn_of_missing_positives(miner.scorer.positives, rule.negatives)
    mined = miner.joined(miner.mined(progress))
    if rescore is None:
        several = bool((miner.scorer.positives.count() > 1).any())
        warn_of_easy_negatives(alignment, rule.negatives, draw, mined.scores[mined.rows >= 0], several)
    return mined


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
        return self.scorer.device.type == "cuda" and runs_in_triton(self.scorer.device)

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
        if finder.ceilings() is not None and not self.bfloat16:
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
