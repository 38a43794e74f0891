"""Find the candidates of a block of queries: by exact search, by FAISS, from several retrievers, or rescored.

``Finder`` is the only class. ``stages.py`` uses it to search shards (``running``), to turn the
lists into ``Candidates`` for ``select.py`` (``candidates``), and to read the chosen rows
(``outcome``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.bounds import Bounds
from hardneg.core.keyed import uniform_of_pairs
from hardneg.core.types import NEVER
from hardneg.mining.corpus_scores import CorpusScorer, PairGuide
from hardneg.mining.edges import COUNT_BYTES, is_wide
from hardneg.mining.filters import Ceilings, Filters, bounds_of
from hardneg.mining.fusion import Quotas, check_quotas, compacted, fused_key, named_source, source_number
from hardneg.mining.search import Retriever, Search
from hardneg.mining.search_depth import can_sweep, check_depth, check_lists, may_remove, reach_of
from hardneg.mining.select import Candidates, Rule
from hardneg.negatives import Negatives
from hardneg.negatives.closed import ClosedForm
from hardneg.search.exact import DocumentBlock, RunningNearest, exact_nearest, largest_on
from hardneg.search.nearest import FaissIndex, Nearest, Weigh
from hardneg.search.topk import in_order

_recalled = 64  # queries on which the recall of an approximate search is measured


class Finder:
    """Finds candidates, removes those that can never be negatives, and scores the others.

    Args:
        scorer: Queries, corpus, positives and similarities.
        rule: Distribution, number of negatives and draw, which decide how deep the search goes.
        search: Kind of search, retrievers and memory.
    """

    def __init__(self, scorer: CorpusScorer, rule: Rule, search: Search) -> None:
        self.scorer, self.rule, self.search = scorer, rule, search
        self.device, self.corpus = scorer.device, scorer.corpus
        self.reach = reach_of(rule.negatives, rule.k, rule.draw)
        near = () if search.kind == "also" else (scorer.source,)
        self.retrievers = (*near, *(other.name for other in search.also))
        by_faiss = search.kind in ("flat", "ivf", "hnsw")
        check_depth(rule.negatives, rule.k, rule.draw, search.kind, search.shards, listed=self.listed)
        if self.listed:
            sizes = search.candidates, len(self.retrievers), len(self.corpus)
            check_lists("Search", rule.negatives, rule.k, rule.draw, *sizes)
        check_quotas(search.quotas, rule.k, rule.draw, self.retrievers)
        sizes = len(scorer.queries), len(self.corpus), scorer.queries.dim
        self.shards = self.corpus.shards(search.shards_for(*sizes, self.device) if self.searched else 1)
        self.index = FaissIndex(self.corpus, search.kind, search.num_probes) if by_faiss else None

    @property
    def listed(self) -> bool:
        """True if candidates are fixed lists (of several retrievers, or rescored) instead of the whole corpus."""
        return bool(self.search.also) or self.scorer.rescore is not None or isinstance(self.scorer.guide, PairGuide)

    @property
    def applies_all_factors(self) -> bool:
        """True if every factor is applied during the search, with bounds from passes over the whole corpus."""
        if self.listed or self.reach.size is not None or self.search.kind != "exact":
            return False
        return can_sweep(self.rule.negatives, self.rule.draw)

    @property
    def whole_rows(self) -> bool:
        """True if the choice needs all scores of a query."""
        return self.reach.size is None and not self.listed and not self.applies_all_factors

    @property
    def searched(self) -> bool:
        """True if the shards of the corpus are searched first, for all queries."""
        return self.search.kind == "exact" and not self.whole_rows

    def attempts(self, filter_first: bool) -> Iterator[tuple[int | None, bool]]:
        """Yield ever deeper searches as (number of candidates, whether the leading factors filter during it).

        The number is None for whole rows. The last attempt always decides.

        Args:
            filter_first: Whether the first attempt already applies filters; see ``Miner.needs_filters``.
        """
        n, size = len(self.corpus), self.rule.k if self.applies_all_factors else self.reach.size
        if self.listed or size is None:
            yield (self.search.candidates if self.listed else None), False
            return
        size *= 4 if self.rule.near_negative is not None else 1
        if self.applies_all_factors:
            yield from ((each, True) for each in _growing(size, n))
            return
        if not (self.filters and filter_first):
            yield (2 * size + 8 if self.filters else size), False
        # Filters during the search keep candidates that rounding may have moved over an edge: ask for 8 more.
        *deeper, last = _growing(size + 8 if self.filters else size, n)
        yield from ((each, self.filters) for each in deeper)
        yield last, False

    @property
    def leading(self) -> tuple[Negatives, ...]:
        """The first factors of the expression that judge each candidate by itself."""
        return tuple(self.rule.negatives.factors[: self.reach.num_leading])

    @property
    def filters(self) -> bool:
        """True if anything can be removed during the search."""
        some = any(may_remove(factor) for factor in self.leading) or self.scorer.near_positive is not None
        return some and self.index is None

    def block(self, size: int | None) -> int:
        """Return the number of queries in one block, for lists of ``size`` candidates."""
        width = len(self.corpus) if size is None else size * (1 + len(self.search.also))
        return max(1, min(self.scorer.query_block, self.scorer.most_scores // max(width, 1)))

    def at_once(self, size: int | None, shards: int = 1) -> int:
        """Return the number of queries whose lists and vectors are held while a shard is searched.

        Args:
            size: Candidates in each list.
            shards: Shards whose lists are in memory at the same time.
        """
        return max(self.block(size), self.search.memory_on(self.device) // 2 // self.query_bytes(size, shards))

    def query_bytes(self, size: int | None, shards: int = 1) -> int:
        """Return the bytes of a query during a search: lists, counts, and its vector as given and as compared."""
        longest = min(size or 0, max(high - low for low, high in self.shards))
        return shards * (self.piece_bytes(longest) + COUNT_BYTES * self.num_wide) + 8 * self.scorer.queries.dim

    def piece_bytes(self, size: int | None) -> int:
        """Return the bytes that the list of a query in one shard takes in a piece."""
        places = 24 if self.rule.draw == "gumbel" else 16  # key and row, and the similarity if the key was drawn
        return places * (size or 0) + 8 * (2 + len(self.rule.negatives.factors))

    @property
    def num_wide(self) -> int:
        """Number of windows whose edges are found by counting, pass by pass."""
        bounds = (bound for factor in self.rule.negatives.factors for bound in factor.bounds().values())
        return sum(map(is_wide, bounds)) if self.applies_all_factors else 0

    def running(
        self, query: Annotated[Tensor, "b"], size: int, filtered: bool, bounds: Sequence[Bounds] | None
    ) -> RunningNearest:
        """Return empty lists of these queries, to which the documents of a shard are added.

        Args:
            query: Positions of the queries [b].
            size: Candidates in each list.
            filtered: Whether the leading factors are applied during the search.
            bounds: Bounds of all factors, if every factor is applied during the search (``applies_all_factors``).
        """
        keep: Weigh | None = None
        if self.applies_all_factors:
            assert bounds is not None
            drawn = (lambda low, high: self._uniforms(query, low, high)) if self.rule.draw == "gumbel" else None
            keep = Filters(self.scorer, query, self.rule.negatives.factors, bounds, drawn)
        elif filtered and (forms := self.leading_forms()) is not None:
            keep = Ceilings(self.scorer, query, forms)
        elif filtered:
            own = bounds_of(self.scorer, query, self.leading)
            keep = Filters(self.scorer, query, self.leading, own, judged_again=True)
        excluded = self.scorer.excluded.of(query)
        return RunningNearest(self.corpus, self.scorer.model.raw(query), size, excluded, keep, largest_on(self.device))

    def leading_forms(self) -> list[ClosedForm] | None:
        """Return the closed forms of the leading factors if all they remove is above a ceiling, else None."""
        forms = [factor.closed_form() if may_remove(factor) else ClosedForm() for factor in self.leading]
        known = [form for form in forms if form is not None and form.cut_from_above]
        return known if len(known) == len(forms) and self.scorer.near_positive is None else None

    def _uniforms(self, query: Tensor, low: int, high: int) -> Tensor:
        rows = torch.arange(low, high, device=self.device).expand(len(query), -1)
        return uniform_of_pairs(self.rule.seed, query, rows)

    def candidates(
        self, query: Annotated[Tensor, "b"], size: int | None, found: Nearest | None, seen: Tensor | None
    ) -> tuple[Candidates, Tensor]:
        """Return the candidates of these queries, and counts [b, 2 + applied] of the steps done so far.

        Args:
            query: Positions of the queries [b].
            size: Candidates in each list; None for whole rows.
            found: Merged lists of the search, if there was one.
            seen: Counts of the search, if it applied factors: candidates at the start, after the
                guard, after each factor.
        """
        if found is None and self.index is not None:
            found = self._by_index(query, self.search.candidates if size is None else size)
        if self.listed:
            return self._listed(query, self.search.candidates, found)
        if found is None:
            return self._whole_rows(query)
        _, rows, values = found
        if self.applies_all_factors:
            assert seen is not None
            return Candidates(None, values, rows, query, self._is_all(rows), left=seen[:, 1:]), seen
        valid = rows >= 0
        after = valid & ~self.scorer.near_positive_listed(query, rows)
        scores = self.scorer.listed_scores(query, values.masked_fill(~valid, 0.0), after, rows)
        seen = _counts(valid, after) if seen is None else seen
        return Candidates(scores, values, rows, query, self._is_all(rows)), seen

    def outcome(self, candidates: Candidates, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, similarities and retrievers of the chosen candidates, [b, k] each.

        Args:
            candidates: The candidates.
            slots: Columns of the chosen candidates [b, k], -1 where short.

        Returns:
            Rows (-1 where short), similarities without the temperature (``NEVER`` where short), and
            the bits of the retrievers that found each (0 where short); all on the CPU.
        """
        none, slot = slots < 0, slots.clamp(min=0)
        rows = candidates.row_numbers().gather(1, slot).masked_fill(none, -1)
        if candidates.rows is None:  # the last digits of block products depend on the blocks, so score again
            query = candidates.query.repeat_interleave(rows.shape[1])
            scores = self.scorer.model.pairs(query, rows.flatten()).view(rows.shape).masked_fill(none, NEVER)
        else:
            scores = candidates.similarity.gather(1, slot).masked_fill(none, NEVER)
        found_by = (~none).long()
        if candidates.lists:
            inside = [(rows[:, :, None] == each[:, None, :]).any(2) & ~none for each in candidates.lists]
            found_by = torch.stack([each.long() << i for i, each in enumerate(inside)]).sum(0)
        return rows.cpu(), scores.to(self.corpus.dtype).cpu(), found_by.cpu()

    def _is_all(self, rows: Annotated[Tensor, "b m"]) -> Annotated[Tensor, "b"]:
        """Mark queries without candidates beyond the list."""
        return (rows[:, -1] < 0) | (rows.shape[1] >= len(self.corpus))

    def recall(self) -> float | None:
        """Return the share of the nearest candidates that an approximate index finds; None for an exact search."""
        if self.search.kind not in ("ivf", "hnsw") or not len(self.scorer.queries):
            return None
        number = len(self.scorer.queries)
        query = torch.linspace(0, number - 1, min(_recalled, number), device=self.device).long()
        size, _ = next(self.attempts(False))
        assert size is not None
        blocks = (DocumentBlock.of(self.corpus, low, high) for low, high in self.corpus.blocks())
        args = self.scorer.model.raw(query), size, self.scorer.excluded.of(query)
        right, found = exact_nearest(self.corpus, blocks, *args).rows, self._by_index(query, size).rows
        hit = (right[:, :, None] == found[:, None, :]).any(2) & (right >= 0)
        return float(hit.sum() / (right >= 0).sum().clamp(min=1))

    def _by_index(self, query: Tensor, size: int) -> Nearest:
        """Return the lists of FAISS, scored and ordered as those of the exact search."""
        assert self.index is not None
        rows = self.index.nearest(self.scorer.model.of(query), size, self.scorer.excluded.of(query)).rows
        values = self.scorer.model.pairs(query.repeat_interleave(rows.shape[1]), rows.flatten()).view(rows.shape)
        key, rows = in_order(values.masked_fill(rows < 0, NEVER), rows)
        return Nearest(key, rows, key)

    def _whole_rows(self, query: Tensor) -> tuple[Candidates, Tensor]:
        """Return every document as a candidate, with all scores."""
        scorer, blocks = self.scorer, self.corpus.blocks()
        vectors, excluded = scorer.model.of(query), scorer.excluded.of(query)
        similarity = torch.cat([self.corpus.scores(vectors, excluded, low, high) for low, high in blocks], 1)
        valid = similarity != NEVER
        near = [scorer.near_positive_block(query, low, high) for low, high in blocks]
        after = valid & ~torch.cat([each.expand(len(query), -1) for each in near], 1)
        scores = scorer.block_scores(query, similarity.masked_fill(~valid, 0.0), after, 0, len(self.corpus))
        return Candidates(scores, similarity, None, query, _all(query), ordered=False), _counts(valid, after)

    def _listed(self, query: Tensor, size: int, found: Nearest | None) -> tuple[Candidates, Tensor]:
        """Return the union of the lists of several retrievers, each candidate once, under the first that found it."""
        lists = [] if found is None else [found.rows]
        lists += [self._other(other, query, size) for other in self.search.also]
        source = named_source(self.rule.negatives, self.retrievers)
        order = sorted(
            range(len(lists)), key=lambda i: i != source
        )  # the source that From names owns all its candidates
        # Sorted by row, which breaks ties; the first copy of a row belongs to the first retriever that found it.
        rows, column = torch.cat([lists[i] for i in order], 1).sort(dim=1, stable=True)
        valid = rows >= 0
        valid[:, 1:] &= rows[:, 1:] != rows[:, :-1]
        codes = torch.cat([torch.full_like(lists[i], i) for i in order], 1).gather(1, column)
        place, column = valid.nonzero().unbind(1)
        similarity = torch.full(rows.shape, NEVER, dtype=torch.float64, device=self.device)
        similarity[place, column] = self.scorer.pair_scores(query[place], rows[place, column])
        after = valid & ~self.scorer.near_positive_listed(query, rows)
        scores = self.scorer.listed_scores(query, similarity.masked_fill(~valid, 0.0), after, rows)
        scores = scores.changed(source=codes, source_names=self.retrievers)
        key, quotas = self._fused(lists, rows, source)
        candidates = Candidates(scores, similarity, rows, query, _all(query), False, tuple(lists), key, quotas)
        return candidates, _counts(valid, after)

    def _fused(self, lists: list[Tensor], rows: Tensor, source: int | None) -> tuple[Tensor | None, Quotas]:
        """Return the key that orders candidates of several retrievers, and the quotas; see ``fusion.py``.

        Rescored candidates are ordered by their scores, unless the scores are those of a retriever
        that replaces similarities because there are no vectors.
        """
        number = {name: source_number(name, self.retrievers) for name, _ in self.search.quotas}
        quotas = tuple((fused_key([lists[number[name]]], rows), count) for name, count in self.search.quotas)
        stands_in = getattr(self.scorer.rescore, "__self__", None) in self.search.also
        rescored = self.scorer.rescore is not None and not stands_in
        if rescored or (source is None and (len(lists) == 1 or self.search.fusion != "rrf")):
            return None, quotas
        return fused_key(lists if source is None else [lists[source]], rows), quotas

    def _other(self, retriever: Retriever, query: Tensor, size: int) -> Tensor:
        """Return the list of another retriever, without positives and the query itself [b, size]."""
        place, banned = self.scorer.excluded.of(query)
        n, most = len(self.corpus), int(torch.bincount(place).max()) if len(place) else 0
        rows = torch.nn.functional.pad(retriever(query.cpu(), size + most).to(self.device), (0, 1), value=-1)
        taken = torch.isin(torch.arange(len(query), device=self.device)[:, None] * n + rows, place * n + banned)
        return compacted(rows.masked_fill(taken, -1), size)


def _all(query: Tensor) -> Annotated[Tensor, "b"]:
    return torch.ones_like(query, dtype=torch.bool)


def _counts(*masks: Tensor) -> Annotated[Tensor, "b f"]:
    return torch.stack([mask.sum(1) for mask in masks], 1)


def _growing(size: int, n: int) -> list[int]:
    """Return ever larger list sizes, the last of which is the whole corpus."""
    sizes = []
    while size < n:
        sizes.append(size)
        size *= 4
    return [*sizes, n]
