"""Candidates of a block of queries: from the exact search, from FAISS, from several retrievers, rescored."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, written
from hardneg.core.keyed import uniform_of_pairs
from hardneg.core.nearest import FaissIndex, Nearest, merged, nearest
from hardneg.core.types import NEVER
from hardneg.mining.filters import Filters
from hardneg.mining.fusion import Quotas, compacted, fused_key, named_source, source_number
from hardneg.mining.meeting import Meeting, PairGuide
from hardneg.mining.search import Retriever, Search, most_scores
from hardneg.mining.search_depth import may_remove, reach_of
from hardneg.mining.select import Candidates, Rule
from hardneg.negatives.base import not_pointwise


class Finder:
    """Finds candidates, takes out what can never be a negative, and scores the rest."""

    def __init__(self, meeting: Meeting, rule: Rule, search: Search) -> None:
        self.meeting, self.rule, self.search = meeting, rule, search
        self.device, self.corpus = meeting.device, meeting.corpus
        self.reach = reach_of(rule.negatives, rule.k, rule.draw)
        near = () if search.kind == "also" else (meeting.source,)
        self.retrievers = (*near, *(other.name for other in search.also))
        by_faiss = search.kind in ("flat", "ivf", "hnsw")
        self.index = FaissIndex(self.corpus, search.kind, search.num_probes) if by_faiss else None
        self.shards = self.corpus.shards(search.shards)
        check_shards(search, rule, self.listed)
        check_quotas(search, rule, self.retrievers)
        if by_faiss and self.reach.size is None and not self.listed:
            raise ArgumentError(
                f"Search({search.kind!r})",
                "an expression that the nearest candidates decide",
                f"{rule.negatives!r} with {written('mine', 'draw', rule.draw)}",
                f"begin with Rank(0, stop) or use {written('mine', 'search', 'exact')}",
            )

    @property
    def listed(self) -> bool:
        """Whether candidates are fixed lists (a union of retrievers, rescored) instead of the whole corpus."""
        return bool(self.search.also) or self.meeting.rescore is not None or isinstance(self.meeting.guide, PairGuide)

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
        n, size = len(self.corpus), self.rule.k if self.swept else self.reach.size
        if self.listed or size is None:
            yield (self.search.candidates if self.listed else None), False
            return
        size *= 4 if self.rule.near_negative is not None else 1
        if self.swept:
            yield from ((each, True) for each in _growing(size, n))
            return
        filters = any(may_remove(factor) for factor in self.rule.negatives.factors[: self.reach.num_leading])
        filters = (filters or self.meeting.near_positive is not None) and self.index is None
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
        leading = self.rule.negatives.factors[: self.reach.num_leading]
        keep = Filters(self.meeting, self.shards, query, leading) if filtered else None
        values, rows, _ = self._nearest(query, size, keep)
        valid = rows >= 0
        after = valid if filtered else valid & ~self.meeting.near_positive_listed(query, rows)
        seen = _counts(valid, after) if keep is None else keep.seen
        scores = self.meeting.listed_scores(query, values.masked_fill(~valid, 0.0), after, rows)
        return Candidates(scores, values, rows, query, self._is_all(rows)), seen

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

    def _is_all(self, rows: Annotated[Tensor, "b m"]) -> Annotated[Tensor, "b"]:
        """True where there are no candidates beyond the list."""
        return (rows[:, -1] < 0) | (rows.shape[1] >= len(self.corpus))

    def _nearest(self, query: Tensor, size: int, keep: Filters | None = None) -> Nearest:
        vectors, excluded = self.meeting.model.of(query), self.meeting.excluded.of(query)
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
        keep = Filters(self.meeting, self.shards, query, self.rule.negatives.factors, drawn)
        found = self._nearest(query, size, keep)
        whole = self._is_all(found.rows)
        return Candidates(None, found.similarity, found.rows, query, whole, left=keep.seen[:, 1:]), keep.seen

    def _whole_rows(self, query: Tensor) -> tuple[Candidates, Tensor]:
        meeting, blocks = self.meeting, self.corpus.blocks()
        vectors, excluded = meeting.model.of(query), meeting.excluded.of(query)
        similarity = torch.cat([self.corpus.scores(vectors, excluded, low, high) for low, high in blocks], 1)
        valid = similarity != NEVER
        near = [meeting.near_positive_block(query, low, high) for low, high in blocks]
        after = valid & ~torch.cat([each.expand(len(query), -1) for each in near], 1)
        scores = meeting.block_scores(query, similarity.masked_fill(~valid, 0.0), after, 0, len(self.corpus))
        return Candidates(scores, similarity, None, query, _all(query), ordered=False), _counts(valid, after)

    def _listed(self, query: Tensor, size: int) -> tuple[Candidates, Tensor]:
        """The union of what several retrievers found, each candidate once, under the first that found it."""
        lists = [] if self.search.kind == "also" else [self._nearest(query, size).rows]
        lists += [self._other(other, query, size) for other in self.search.also]
        source = named_source(self.rule.negatives, self.retrievers)
        order = sorted(range(len(lists)), key=lambda i: i != source)  # what the named source found is of that source
        rows = torch.cat([lists[i] for i in order], 1)
        valid = (rows >= 0) & ~_repeated(rows)
        place, column = valid.nonzero().unbind(1)
        similarity = torch.full(rows.shape, NEVER, dtype=self.corpus.dtype, device=self.device)
        similarity[place, column] = self.meeting.pair_scores(query[place], rows[place, column])
        after = valid & ~self.meeting.near_positive_listed(query, rows)
        scores = self.meeting.listed_scores(query, similarity.masked_fill(~valid, 0.0), after, rows)
        codes = [torch.full((lists[i].shape[1],), i, device=self.device) for i in order]
        scores = scores.changed(source=torch.cat(codes), source_names=self.retrievers)
        key, quotas = self._fused(lists, rows, source)
        found = Candidates(scores, similarity, rows, query, _all(query), False, tuple(lists), key, quotas)
        return found, _counts(valid, after)

    def _fused(self, lists: list[Tensor], rows: Tensor, source: int | None) -> tuple[Tensor | None, Quotas]:
        """By what the candidates of several retrievers are taken; see fusion.py. Rescored ones go by their scores, but
        for those of a retriever that stand in for similarities where there are no vectors."""
        number = {name: source_number(name, self.retrievers) for name, _ in self.search.quotas}
        quotas = tuple((fused_key([lists[number[name]]], rows), count) for name, count in self.search.quotas)
        stands_in = getattr(self.meeting.rescore, "__self__", None) in self.search.also
        rescored = self.meeting.rescore is not None and not stands_in
        if rescored or (source is None and (len(lists) == 1 or self.search.fusion != "rrf")):
            return None, quotas
        return fused_key(lists if source is None else [lists[source]], rows), quotas

    def _other(self, retriever: Retriever, query: Tensor, size: int) -> Tensor:
        place, banned = self.meeting.excluded.of(query)
        n, most = len(self.corpus), int(torch.bincount(place).max()) if len(place) else 0
        rows = retriever(query.cpu(), size + most).to(self.device)
        taken = torch.isin(torch.arange(len(query), device=self.device)[:, None] * n + rows, place * n + banned)
        return compacted(rows.masked_fill(taken, -1), size)


def _all(query: Tensor) -> Annotated[Tensor, "b"]:
    return torch.ones_like(query, dtype=torch.bool)


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


def check_quotas(search: Search, rule: Rule, retrievers: tuple[str, ...]) -> None:
    """Raises for quotas of unknown sources, of more than k in all, or beside a draw."""
    for name, _ in search.quotas:
        source_number(name, retrievers)
    total = sum(number for _, number in search.quotas)
    if total > rule.k:
        raise ArgumentError("mine", f"quotas of at most {written('mine', 'k', rule.k)} in all", str(total))
    if search.quotas and rule.draw != "top":
        raise ArgumentError("mine", "draw 'top' with quotas", written("mine", "draw", rule.draw))


def _growing(size: int, n: int) -> list[int]:
    """Longer and longer lists, the last of them with all of the corpus."""
    sizes = []
    while size < n:
        sizes.append(size)
        size *= 4
    return [*sizes, n]
