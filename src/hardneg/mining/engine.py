"""hn.mine: the same distributions as in training, over a whole corpus, exactly and by blocks.

Every query keeps a short list of its nearest candidates, as long as the expression needs (search_depth.py). A query
whose list was too short after the filters is searched again, with the filters inside the search, and then with longer
lists: none comes out short that need not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.core.types import NEVER, Keys
from hardneg.mining.alignment import alignment_of, warn_of_alignment, warn_of_easy_negatives
from hardneg.mining.candidates import Finder
from hardneg.mining.checks import check_inputs
from hardneg.mining.explain import Explanation
from hardneg.mining.meeting import Meeting, Rescore
from hardneg.mining.pairs import Positives
from hardneg.mining.search import Search
from hardneg.mining.select import Candidates, Rule, Selection, select
from hardneg.negatives import Negatives, parse

_pilot = 256


@dataclass(frozen=True, eq=False)
class Mined:
    """The negatives of each query: ``ids`` [q, k] of the corpus, -1 where short, and plain similarities ``scores``.

    ``rows`` are positions in the corpus. ``found_by`` says which retrievers found each: bit i for ``retrievers[i]``.
    ``explanation`` says what each factor removed and why queries are short.
    """

    ids: Any  # [q, k]: a tensor, or an array of texts and None where those of the corpus are texts
    scores: Annotated[Tensor, "q k"]
    rows: Annotated[Tensor, "q k"]
    found_by: Annotated[Tensor, "q k"]
    retrievers: tuple[str, ...]
    explanation: Explanation


def mine(
    queries: Keys,
    corpus: Keys,
    positives: Positives,
    negatives: Negatives | str,
    k: int,
    draw: str = "top",
    seed: int = 0,
    *,
    temperature: float = 1.0,
    near_positive: float | None = None,
    near_negative: float | None = None,
    search: Search | str = "exact",
    rescore: Rescore | None = None,
    guide: tuple[Tensor, Tensor] | Rescore | None = None,
    progress: Callable[[int], None] | None = None,
) -> Mined:
    """k negatives from the corpus for each query, by any distribution, as in training.

    positives: corpus ids (rows where the corpus has no ids): [q], [q, p] padded with -1, or one list per query. They
        are never negatives, nor is a row with the query's own id. BelowPositive compares with the lowest-scored one.
    draw: ``"top"``, the k most similar of the support; ``"gumbel"``, k draws without replacement from the weights;
        ``"categorical"``, with replacement. A draw depends on the seed and the positions of query and candidate only.
    temperature: what similarities are divided by for tilts; 1 means that ``Tilt(beta)`` is exp(beta * similarity).
    near_positive, near_negative: cosine from which a candidate counts as a copy of a positive, and as a copy of a
        negative taken before it; copies are passed over.
    search: how candidates are found; see ``Search``.
    rescore: ``rescore(query_rows [m], corpus_rows [m]) -> scores [m]``, a cross-encoder for example: it scores the
        nearest ``search.candidates`` of each query and the positives, and its scores replace the similarities.
    guide: another model's vectors of the queries and of the corpus, or a function like ``rescore``, for
        ``BelowPositive(..., by="guide")``: a function is asked about the nearest ``search.candidates``.

    Similarity is the dot product of the vectors as given: normalise them for the cosine.

    >>> keys = Keys(torch.eye(3), ids=torch.tensor([7, 8, 9]))
    >>> mine(keys, keys, torch.tensor([8, 9, 7]), "Uniform()", k=2).ids.tolist()  # not itself, not its positive
    [[9, -1], [7, -1], [8, -1]]
    """
    rule = Rule(parse(negatives) if isinstance(negatives, str) else negatives, k, draw, seed, near_negative)
    search = Search(search) if isinstance(search, str) else search
    miner = Miner(queries, corpus, positives, rule, temperature, near_positive, search, rescore, guide)
    own = miner.meeting.positives
    alignment = alignment_of(queries.vectors, corpus.vectors, own, cosine=search.cosine)
    warn_of_alignment(alignment)
    parts = []
    for low, high in miner.blocks():
        parts.append(miner.block(low, high))
        if progress is not None:
            progress(high - low)
    mined = miner.joined(parts)
    if rescore is None:
        chosen, several = mined.scores[mined.rows >= 0], bool((own.count() > 1).any())
        warn_of_easy_negatives(alignment, rule.negatives, draw, chosen, several)
    return mined


@dataclass(frozen=True, eq=False)
class MinedBlock:
    """The negatives of consecutive queries, by row of the corpus."""

    rows: Annotated[Tensor, "b k"]
    scores: Annotated[Tensor, "b k"]
    found_by: Annotated[Tensor, "b k"]
    explanation: Explanation


class Miner:
    """Everything that the blocks of queries share; each block is mined by itself, anywhere, with the same result."""

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
        self.rule = rule
        self.meeting = Meeting(queries, corpus, positives, temperature, near_positive, search, rescore, guide)
        self.finder = Finder(self.meeting, rule, search)
        self._filter_first: bool | None = None

    def blocks(self) -> list[tuple[int, int]]:
        step, total = self.meeting.query_block, len(self.meeting.queries)
        return [(low, min(low + step, total)) for low in range(0, total, step)]

    def block(self, low: int, high: int) -> MinedBlock:
        """The negatives of queries low to high - 1."""
        block = self._empty(high - low)
        for query, candidates, seen, chosen in self._attempted(torch.arange(low, high)):
            done = chosen.decided.cpu()
            left, removed = _steps(seen, chosen)
            number = (chosen.slots >= 0).sum(1)
            decided = chosen.decided
            block.explanation.count(left[decided], removed[decided], number[decided], self.rule.k)
            outcome = self.finder.outcome(candidates, chosen.slots)
            for column, values in zip((block.rows, block.scores, block.found_by), outcome, strict=True):
                column[query[done] - low] = values[done]
        return block

    def joined(self, parts: Sequence[MinedBlock]) -> Mined:
        """The blocks as one, with the ids of the corpus."""
        whole = self._empty(0)
        for part in parts:
            whole.explanation.add(part.explanation)
        rows, scores, found_by = (
            torch.cat([getattr(part, name) for part in (whole, *parts)]) for name in ("rows", "scores", "found_by")
        )
        ids = self.meeting.ids_of(rows)
        return Mined(ids, scores, rows, found_by, self.finder.retrievers, whole.explanation)

    def _empty(self, queries: int) -> MinedBlock:
        """The block of queries that have no negatives."""
        shape = queries, self.rule.k
        explanation = Explanation.of(self.rule.negatives, self.meeting.near_positive, self.rule.near_negative)
        scores = torch.full(shape, NEVER, dtype=self.meeting.corpus.dtype)
        return MinedBlock(torch.full(shape, -1), scores, torch.zeros(shape, dtype=torch.long), explanation)

    def _attempted(self, pending: Tensor) -> Iterator[tuple[Tensor, Candidates, Tensor, Selection]]:
        """Searches deeper until every query is decided; yields each attempt with its candidates and choice."""
        if self._filter_first is None:
            self._filter_first = self._most_need_filters()
        for size, filtered in self.finder.attempts(self._filter_first):
            undecided = []
            for query in torch.split(pending, self.finder.queries_at_once(size)):
                candidates, seen = self.finder.find(query, size, filtered)
                chosen = select(candidates, self.rule, self.meeting.directions)
                undecided.append(query[~chosen.decided.cpu()])
                yield query, candidates, seen, chosen
            pending = torch.cat(undecided)
            if not len(pending):
                return
        raise AssertionError(f"{len(pending)} queries stayed undecided; the last attempt sees every candidate.")

    def _most_need_filters(self) -> bool:
        """Whether more than a quarter of the first queries need the filters inside the search; speed only."""
        if self.finder.swept:
            return False
        attempts = list(self.finder.attempts(False))
        if len(attempts) == 1 or not attempts[1][1]:
            return False
        first = torch.arange(min(_pilot, len(self.meeting.queries)))
        candidates, _ = self.finder.find(first, *attempts[0])
        return float((~select(candidates, self.rule, self.meeting.directions).decided).float().mean()) > 0.25


def _steps(seen: Tensor, chosen: Selection) -> tuple[Tensor, Tensor]:
    """How many were left at hand and after each step, and how many each step removed.

    ``seen`` counts at hand, after the guard, and after the factors that were applied inside the search, there over
    whole rows; the later factors counted the candidates of the list.
    """
    listed = chosen.left[:, seen.shape[1] - 1 :]
    last = chosen.left[:, seen.shape[1] - 2 : seen.shape[1] - 1]
    removed = [-seen.diff(dim=1), -torch.cat([last, listed], 1).diff(dim=1), chosen.copies[:, None]]
    return torch.cat([seen, listed], 1), torch.cat(removed, 1)
