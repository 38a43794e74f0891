"""Candidates of a block of queries as Scores: from the exact search, from FAISS, from several retrievers, rescored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, written
from hardneg.core.keyed import uniform_of_pairs
from hardneg.core.nearest import Corpus, FaissIndex, Nearest, merged, nearest
from hardneg.core.tiles import Tile
from hardneg.core.types import NEVER, Guide, Keys, Scores, Tags
from hardneg.core.vectors import unit
from hardneg.mining.filters import Filters, near_positive_block, near_positive_listed
from hardneg.mining.guide import GuideModel, pair_products, rows_of_vectors
from hardneg.mining.pairs import Pairs, Positives, RowsOf, as_pairs, read_positives
from hardneg.mining.search import Retriever, Search, most_scores
from hardneg.mining.search_depth import may_remove, reach_of
from hardneg.mining.select import Candidates, Rule
from hardneg.negatives.base import not_pointwise

Rescore = Callable[[Annotated[Tensor, "m"], Annotated[Tensor, "m"]], Tensor]
"""(positions of queries, rows of the corpus) -> one score for each pair."""


class Finder:
    """Finds candidates, takes out what can never be a negative, and scores the rest."""

    def __init__(
        self,
        queries: Keys,
        corpus: Keys,
        positives: Positives,
        rule: Rule,
        temperature: float,
        near_positive: float | None,
        search: Search,
        rescore: Rescore | None,
        guide: tuple[Tensor, Tensor] | None,
    ) -> None:
        self.queries, self.keys, self.rule, self.search = queries, corpus, rule, search
        self.temperature, self.near_positive, self.rescore = temperature, near_positive, rescore
        self.device = torch.device(search.device) if search.device else corpus.vectors.device
        self.query_block, block = search.blocks(self.device)
        self.corpus = Corpus(corpus.vectors, self.device, block, queries.vectors.dtype, search.cosine)
        self.guide = None if guide is None else GuideModel(*guide, queries, self.corpus)
        nothing = torch.zeros(0)
        self._last_positives = (nothing, (nothing, nothing))
        self.reach = reach_of(rule.negatives, rule.k, rule.draw)
        rows_of = RowsOf(corpus.ids, len(corpus))
        pairs = read_positives(positives, len(queries), rows_of)
        self.positives = pairs.to(self.device)
        self.excluded = _with_own(pairs, queries.ids, corpus.ids, rows_of).to(self.device)
        near = () if search.kind == "also" else (corpus.source or "corpus",)
        self.retrievers = (*near, *(other.name for other in search.also))
        self.index = (
            FaissIndex(self.corpus, search.kind, search.num_probes) if search.kind in ("flat", "ivf", "hnsw") else None
        )
        self.shards = self.corpus.shards(search.shards)
        check_shards(search, rule, self.listed)
        if self.index is not None and self.reach.size is None and not self.listed:
            raise ArgumentError(
                f"Search({search.kind!r})",
                "an expression that the nearest candidates decide",
                f"{rule.negatives!r} with {written('mine', 'draw', rule.draw)}",
                f"begin with Rank(0, stop) or use {written('mine', 'search', 'exact')}",
            )

    @property
    def listed(self) -> bool:
        """Whether candidates are fixed lists (a union of retrievers, rescored) instead of the whole corpus."""
        return bool(self.search.also) or self.rescore is not None

    @property
    def swept(self) -> bool:
        """Whether every factor is applied inside the search, with bounds from sweeps over the whole corpus."""
        if self.listed or self.index is not None or self.rule.draw == "categorical":
            return False
        return (self.reach.size is None or len(self.shards) > 1) and self.rule.negatives.pointwise

    def attempts(self, filter_first: bool) -> Iterator[tuple[int | None, bool]]:
        """(how many candidates, whether the leading factors filter inside the search), deeper and deeper.

        None is the whole row. The last attempt always decides.
        """
        n, size = len(self.corpus), self.reach.size
        if self.listed:
            yield self.search.candidates, False
            return
        if self.swept:
            size = self.rule.k
        elif size is None:
            yield None, False
            return
        size *= 4 if self.rule.near_negative is not None else 1
        if self.swept:
            yield from ((each, True) for each in _growing(size, n))
            return
        filters = any(may_remove(factor) for factor in self.rule.negatives.factors[: self.reach.num_leading])
        filters = (filters or self.near_positive is not None) and self.index is None
        if not (filters and filter_first):
            yield (2 * size + 8 if filters else size), False
        *deeper, last = _growing(size, n)
        yield from ((each, filters) for each in deeper)
        yield last, False

    def queries_at_once(self, size: int | None) -> int:
        width = len(self.corpus) if size is None or self.swept else size * (1 + len(self.search.also))
        return max(1, most_scores // max(width, 1))

    def find(self, query: Annotated[Tensor, "b"], size: int | None, filtered: bool) -> tuple[Candidates, Tensor]:
        """Candidates of these queries, and how many were at hand, after the guard, after factors already applied."""
        query = query.to(self.device)
        if size is None:
            return self._whole_rows(query)
        if self.listed:
            return self._listed(query, size)
        if self.swept:
            return self._swept(query, size)
        keep = Filters(self, query, self.rule.negatives.factors[: self.reach.num_leading]) if filtered else None
        values, rows, _ = self._nearest(query, size, keep)
        whole = (rows[:, -1] < 0) | (rows.shape[1] >= len(self.corpus))
        valid = rows >= 0
        after = valid if filtered else valid & ~near_positive_listed(self, query, rows)
        seen = _counts(valid, after) if keep is None else keep.seen
        scores = self._listed_scores(query, values.masked_fill(~valid, 0.0), after, rows)
        return Candidates(scores, values, rows, query, whole), seen

    def directions(self, rows: Tensor) -> Tensor:
        return unit(self.corpus.rows(rows))

    def outcome(self, candidates: Candidates, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, plain similarities and retrievers of the chosen; -1, NEVER and 0 where short."""
        none, slot = slots < 0, slots.clamp(min=0)
        rows = candidates.row_numbers().gather(1, slot).masked_fill(none, -1)
        scores = candidates.similarity.gather(1, slot).masked_fill(none, NEVER)
        found_by = (~none).long()
        if candidates.lists:
            inside = [(rows[:, :, None] == each[:, None, :]).any(2) & ~none for each in candidates.lists]
            found_by = torch.stack([each.long() << i for i, each in enumerate(inside)]).sum(0)
        return rows.cpu(), scores.cpu(), found_by.cpu()

    def ids_of(self, rows: Tensor) -> Tensor:
        if self.keys.ids is None:
            return rows
        return self.keys.ids.cpu()[rows.clamp(min=0)].masked_fill(rows < 0, -1)

    def positive_scores(self, query: Tensor) -> tuple[Annotated[Tensor, "b p"], Annotated[Tensor, "b p"]]:
        """Similarities of these queries with their positives, and which are real; kept for the blocks of a search."""
        if self._last_positives[0] is not query:
            self._last_positives = (query, self._padded_positives(query, self.pair_scores))
        return self._last_positives[1]

    def _padded_positives(self, query: Tensor, score: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        place, rows = self.positives.of(query)
        flat = score(query[place], rows)
        count = torch.bincount(place, minlength=len(query))
        column = torch.arange(len(place), device=self.device) - (count.cumsum(0) - count)[place]
        width = max(int(count.max()) if len(count) else 0, 1)
        scores = torch.zeros(len(query), width, dtype=self.corpus.dtype, device=self.device)
        real = torch.zeros(len(query), width, dtype=torch.bool, device=self.device)
        scores[place, column], real[place, column] = flat, True
        return scores, real

    def pair_scores(self, query: Annotated[Tensor, "m"], rows: Annotated[Tensor, "m"]) -> Annotated[Tensor, "m"]:
        """Similarity, or the rescorer's score, of each pair."""
        if self.rescore is not None:
            scores = self.rescore(query.cpu(), rows.cpu()).to(self.device, self.corpus.dtype)
            if scores.shape != rows.shape or not bool(scores.isfinite().all()):
                raise ArgumentError(
                    "rescore", f"one finite score for each of {len(rows)} pairs", f"shape {tuple(scores.shape)}"
                )
            return scores
        return pair_products(self.queries.vectors, self.corpus, query, rows)

    def vectors(self, query: Tensor) -> Annotated[Tensor, "b d"]:
        return rows_of_vectors(self.queries.vectors, query, self.corpus)

    def block_scores(self, query: Tensor, similarity: Tensor, valid: Tensor, low: int, high: int) -> Scores:
        """Scores against the rows low to high - 1 of the corpus, which all these queries share."""

        def part(tag: Tensor | None) -> Tensor | None:
            return None if tag is None else tag[low:high].to(self.device)[None]

        tags = self.keys.tags
        shared = Tags(part(tags.ids), part(tags.labels), part(tags.clusters))
        scores = self._scores(query, similarity, valid, shared)
        if self.guide is None:
            return scores
        return replace(scores, guide=Guide(self._guide_positives(query), self.guide.block(query, low, high)))

    def _listed_scores(
        self, query: Tensor, similarity: Tensor, valid: Tensor, rows: Annotated[Tensor, "b m"]
    ) -> Scores:
        scores = self._scores(query, similarity, valid, self._tags(rows.clamp(min=0)))
        if self.guide is None:
            return scores
        place = torch.arange(len(rows), device=self.device)[:, None].expand_as(rows)
        guided = self.guide.pairs(query[place.flatten()], rows.flatten()).view_as(similarity)
        return replace(scores, guide=Guide(self._guide_positives(query), guided))

    def _guide_positives(self, query: Tensor) -> Annotated[Tensor, "b p"]:
        assert self.guide is not None
        return self._padded_positives(query, self.guide.pairs)[0]

    def _nearest(self, query: Tensor, size: int, keep: Filters | None = None) -> Nearest:
        vectors, excluded = self.vectors(query), self.excluded.of(query)
        if self.index is not None:
            return self.index.nearest(vectors, size, excluded)
        lists = [nearest(self.corpus, vectors, size, excluded, keep, part) for part in self.shards]
        return reduce(lambda first, second: merged(first, second, size), lists)

    def _swept(self, query: Tensor, size: int) -> tuple[Candidates, Tensor]:
        """The first of the support in the order in which they are taken, from all of the corpus."""

        def uniforms(low: int, high: int) -> Tensor:
            rows = torch.arange(low, high, device=self.device).expand(len(query), -1)
            return uniform_of_pairs(self.rule.seed, query, rows)

        drawn = uniforms if self.rule.draw == "gumbel" else None
        keep = Filters(self, query, self.rule.negatives.factors, drawn)
        found = self._nearest(query, size, keep)
        whole = (found.rows[:, -1] < 0) | (found.rows.shape[1] >= len(self.corpus))
        return Candidates(None, found.similarity, found.rows, query, whole, left=keep.seen[:, 1:]), keep.seen

    def tile(self, query: Tensor, similarity: Tensor, low: int, high: int) -> Tile:
        """These queries against the rows low to high - 1 of the corpus."""
        tile = self.block_scores(query, similarity, similarity != NEVER, low, high).tile()
        tile.column = tile.column + low
        return tile

    def positive_tile(self, query: Tensor) -> tuple[Tile, Tensor]:
        """These queries against their positives, and which of them are real."""
        empty = torch.zeros(len(query), 0, dtype=self.corpus.dtype, device=self.device)
        scores = self.block_scores(query, empty, empty.bool(), 0, 0)
        return scores.positive_tile(), scores.positive_valid

    def _whole_rows(self, query: Tensor) -> tuple[Candidates, Tensor]:
        vectors, excluded = self.vectors(query), self.excluded.of(query)
        blocks = self.corpus.blocks()
        similarity = torch.cat([self.corpus.scores(vectors, excluded, low, high) for low, high in blocks], 1)
        valid = similarity != NEVER
        near = [near_positive_block(self, query, low, high) for low, high in blocks]
        after = valid & ~torch.cat([each.expand(len(query), -1) for each in near], 1)
        scores = self.block_scores(query, similarity.masked_fill(~valid, 0.0), after, 0, len(self.corpus))
        whole = torch.ones(len(query), dtype=torch.bool, device=self.device)
        return Candidates(scores, similarity, None, query, whole, ordered=False), _counts(valid, after)

    def _listed(self, query: Tensor, size: int) -> tuple[Candidates, Tensor]:
        """The union of what several retrievers found, each candidate once, under the first that found it."""
        lists = [] if self.search.kind == "also" else [self._nearest(query, size).rows]
        lists += [self._other(other, query, size) for other in self.search.also]
        rows = torch.cat(lists, 1)
        valid = (rows >= 0) & ~_repeated(rows)
        place, column = valid.nonzero().unbind(1)
        similarity = torch.full(rows.shape, NEVER, dtype=self.corpus.dtype, device=self.device)
        similarity[place, column] = self.pair_scores(query[place], rows[place, column])
        after = valid & ~near_positive_listed(self, query, rows)
        scores = self._listed_scores(query, similarity.masked_fill(~valid, 0.0), after, rows)
        codes = [torch.full((each.shape[1],), i, device=self.device) for i, each in enumerate(lists)]
        scores = replace(scores, source=torch.cat(codes), source_names=self.retrievers)
        whole = torch.ones(len(query), dtype=torch.bool, device=self.device)
        return Candidates(scores, similarity, rows, query, whole, False, tuple(lists)), _counts(valid, after)

    def _other(self, retriever: Retriever, query: Tensor, size: int) -> Tensor:
        rows = retriever(query.cpu(), size).to(self.device)
        place, banned = self.excluded.of(query)
        n = len(self.corpus)
        taken = torch.isin(torch.arange(len(query), device=self.device)[:, None] * n + rows, place * n + banned)
        return rows.masked_fill(taken, -1)

    def _scores(self, query: Tensor, similarity: Tensor, valid: Tensor, tags: Tags) -> Scores:
        positives, real = self.positive_scores(query)
        mine = self.queries

        def own(tag: Tensor | None) -> Tensor | None:
            return None if tag is None else tag[query.to(tag.device)].to(self.device)

        tempered = similarity if self.temperature == 1.0 else similarity / self.temperature
        return Scores(
            positives=positives / self.temperature,
            candidates=tempered,
            positive_valid=real,
            valid=valid,
            temperature=self.temperature,
            anchor_tags=Tags(own(mine.ids), own(mine.labels), own(mine.clusters)),
            candidate_tags=tags,
            source=torch.zeros(similarity.shape[1], dtype=torch.long, device=self.device),
            source_names=self.retrievers[:1],
        )

    def _tags(self, rows: Annotated[Tensor, "b m"]) -> Tags:
        def of(tag: Tensor | None) -> Tensor | None:
            return None if tag is None else tag[rows.to(tag.device)].to(self.device)

        return Tags(of(self.keys.ids), of(self.keys.labels), of(self.keys.clusters))


def _with_own(positives: Pairs, query_ids: Tensor | None, corpus_ids: Tensor | None, rows_of: RowsOf) -> Pairs:
    """What can never be a negative: the positives, and the row with the query's own id."""
    if query_ids is None or corpus_ids is None:
        return positives
    ids = query_ids.cpu()
    own = torch.where(ids >= 0, rows_of(ids), -1)
    query = torch.repeat_interleave(torch.arange(len(positives)), positives.count())
    real = (own >= 0).nonzero()[:, 0]
    return as_pairs(torch.cat([query, real]), torch.cat([positives.rows, own[real]]), len(positives))


def _counts(*masks: Tensor) -> Annotated[Tensor, "b f"]:
    return torch.stack([mask.sum(1) for mask in masks], 1)


def _repeated(rows: Annotated[Tensor, "b m"]) -> Annotated[Tensor, "b m"]:
    """True where the same row stands further left already."""
    order = rows.argsort(dim=1, stable=True)
    ordered = rows.gather(1, order)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter(1, order, again)


def check_shards(search: Search, rule: Rule, listed: bool) -> None:
    """Raises for what a corpus in shards cannot answer."""
    if search.shards == 1:
        return
    for factor in rule.negatives.factors:
        if not factor.pointwise:
            raise not_pointwise(factor, "a corpus in shards")
    if listed or search.kind != "exact" or rule.draw == "categorical":
        got = f"Search({search.kind!r}, shards={search.shards}) with draw={rule.draw!r}"
        raise ArgumentError("mine", "an exact search and draw 'top' or 'gumbel' for shards", got, "use shards=1")


def _growing(size: int, n: int) -> list[int]:
    """Longer and longer lists, the last of them with all of the corpus."""
    sizes = []
    while size < n:
        sizes.append(size)
        size *= 4
    return [*sizes, n]
