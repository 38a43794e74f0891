"""Scores of queries against a corpus: blocks of products screen candidates, single pairs in float64 decide.

Mining cannot use ``core.pairing.Pairing``: that computes a similarity once, in the precision of its
vectors. Here a product of blocks is only a bound, and the similarity that decides is computed again
for each pair alone (``search/exact.py``), so results do not depend on blocks, shards or devices.
The corpus may be a memory map that is never completely in memory. Distributions see the same types
as in training: ``Scores`` and ``Tile``.

``CorpusScorer`` is used by the finder, the filters and the stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.core.tensors import check_device, unit
from hardneg.core.tiles import Tile
from hardneg.core.types import NEVER, Guide, Keys, Scores, Tags
from hardneg.mining.pairs import Pairs, Positives, RowsOf, as_pairs, read_positives
from hardneg.mining.search import Search, most_numbers
from hardneg.search.exact import pair_similarity, rounding_of_products
from hardneg.search.nearest import Corpus

Rescore = Callable[[Annotated[Tensor, "m"], Annotated[Tensor, "m"]], Tensor]
"""(positions of queries, rows of the corpus) -> one score for each pair."""


class ModelVectors:
    """One model's vectors of queries and corpus, with the products of pairs and of blocks.

    Args:
        queries: Vectors of the queries [q, d].
        corpus: Documents, which define device, dtype and whether vectors are scaled to unit length.
    """

    def __init__(self, queries: Annotated[Tensor, "q d"], corpus: Corpus) -> None:
        self.queries, self.corpus = queries, corpus

    def raw(self, query: Annotated[Tensor, "b"]) -> Annotated[Tensor, "b d"]:
        """Return the vectors of these queries as they were given."""
        return self.queries[query.to(self.queries.device)]

    def of(self, query: Annotated[Tensor, "b"]) -> Annotated[Tensor, "b d"]:
        """Return the vectors of these queries as they are compared: on the device, scaled for the cosine."""
        return self.corpus.prepared(self.raw(query))

    def block(self, query: Annotated[Tensor, "b"], low: int, high: int) -> Annotated[Tensor, "b m"]:
        """Return the products of these queries with the documents low to high - 1."""
        return self.of(query) @ self.corpus.part(low, high).T

    def slack(self, query: Annotated[Tensor, "b"], low: int, high: int) -> Annotated[Tensor, "b 1"]:
        """Return the largest possible difference between ``block`` and ``pairs``, for each query."""
        ours, others = (
            torch.linalg.vector_norm(each.double(), dim=1) for each in (self.of(query), self.corpus.part(low, high))
        )
        return rounding_of_products(self.queries.shape[1], self.corpus.dtype, ours[:, None], float(others.max()))

    def pairs(self, query: Annotated[Tensor, "m"], rows: Annotated[Tensor, "m"]) -> Annotated[Tensor, "m"]:
        """Return the similarity of each pair in float64, independent of the other pairs.

        Args:
            query: Positions of queries [m].
            rows: Rows of the corpus [m]; the value for a negative row is meaningless.
        """
        parts = [torch.zeros(0, dtype=torch.float64, device=self.corpus.device)]
        at_once = max(1, most_numbers // max(self.queries.shape[1], 1))
        for some, its in zip(torch.split(query, at_once), torch.split(rows.clamp(min=0), at_once), strict=True):
            of_query, of_row = (
                vectors[index.to(vectors.device)].to(self.corpus.device)
                for vectors, index in ((self.queries, some), (self.corpus.vectors, its))
            )
            parts.append(pair_similarity(of_query, of_row, cosine=self.corpus.cosine))
        return torch.cat(parts)


class PairGuide:
    """A guide that scores pairs one by one, such as a cross-encoder; it cannot score whole blocks."""

    def __init__(self, score: Rescore, scorer: CorpusScorer) -> None:
        self.score, self.scorer = score, scorer

    def pairs(self, query: Annotated[Tensor, "m"], rows: Annotated[Tensor, "m"]) -> Annotated[Tensor, "m"]:
        """Return the score of each pair [m]."""
        return self.scorer.checked(self.score, query, rows)

    def block(self, query: Tensor, low: int, high: int) -> Tensor:
        """Raise: the finder must not ask a guide of pairs for a block."""
        raise AssertionError("A guide of pairs scores lists of candidates only.")


class CorpusScorer:
    """Scores of queries against blocks and lists of a corpus, with positives and excluded pairs.

    Args:
        queries: Vectors, ids and labels of the queries.
        corpus: Vectors, ids and labels of the documents.
        positives: Corpus ids of the positives of each query.
        temperature: Divisor of the similarities that distributions see.
        near_positive: Cosine of near-duplicates of a positive, or None.
        search: Device, blocks and memory.
        rescore: Function that scores pairs instead of the vectors, or None.
        guide: Vectors of another model, a function of pairs, or None.
    """

    def __init__(
        self,
        queries: Keys,
        corpus: Keys,
        positives: Positives,
        temperature: float,
        near_positive: float | None,
        search: Search,
        rescore: Rescore | None,
        guide: tuple[Tensor, Tensor] | Rescore | None,
    ) -> None:
        self.queries, self.keys, self.rescore = queries, corpus, rescore
        self.temperature, self.near_positive = temperature, near_positive
        self.device = check_device("Search", search.device) if search.device else corpus.vectors.device
        self.query_block, self._block = search.blocks(self.device, len(corpus))
        self.most_scores = search.most_scores(self.device)
        self.model = self._model(queries.vectors, corpus.vectors, search.cosine)
        self.corpus = self.model.corpus
        self.guide: ModelVectors | PairGuide | None = None
        if guide is not None:
            self.guide = self._guide(*guide, search.cosine) if isinstance(guide, tuple) else PairGuide(guide, self)
        rows_of = RowsOf(corpus.ids, len(corpus))
        pairs = read_positives(positives, len(queries), rows_of)
        self.positives = pairs.to(self.device)
        self.excluded = _with_own(pairs, queries.ids, corpus.ids, rows_of).to(self.device)
        self.source = corpus.source or "corpus"
        self._of_block: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = {}

    def _model(self, queries: Tensor, corpus: Tensor, cosine: bool) -> ModelVectors:
        return ModelVectors(queries, Corpus(corpus, self.device, self._block, queries.dtype, cosine))

    def _guide(self, queries: Tensor, corpus: Tensor, cosine: bool) -> ModelVectors:
        sizes = len(self.queries), len(self.keys)
        if (len(queries), len(corpus)) != sizes or queries.shape[1:] != corpus.shape[1:]:
            got = f"guide={tuple(queries.shape)} and {tuple(corpus.shape)}"
            raise ArgumentError("mine", f"a guide of {sizes[0]} queries and {sizes[1]} documents", got)
        return self._model(queries, corpus, cosine)

    def directions(self, rows: Tensor) -> Tensor:
        """Return these rows of the corpus at unit length."""
        return unit(self.corpus.rows(rows))

    def ids_of(self, rows: Tensor) -> Tensor:
        """Return the corpus ids of these rows, -1 where a row is negative."""
        if self.keys.ids is None:
            return rows
        return self.keys.ids.cpu()[rows.clamp(min=0)].masked_fill(rows < 0, -1)

    def pair_scores(self, query: Annotated[Tensor, "m"], rows: Annotated[Tensor, "m"]) -> Annotated[Tensor, "m"]:
        """Return the similarity, or the rescorer's score, of each pair."""
        return self.model.pairs(query, rows) if self.rescore is None else self.checked(self.rescore, query, rows)

    def checked(self, score: Rescore, query: Tensor, rows: Tensor) -> Annotated[Tensor, "m"]:
        """Return the user function's scores of the pairs, as float64 on the device.

        Raises:
            ArgumentError: If the scores are not one finite number for each pair.
        """
        scores = torch.as_tensor(score(query.cpu(), rows.cpu())).to(self.device, torch.float64)
        if scores.shape != rows.shape or not bool(scores.isfinite().all()):
            what = f"one finite score for each of {len(rows)} pairs"
            raise ArgumentError("rescore", what, f"shape {tuple(scores.shape)}")
        return scores

    def positive_scores(self, query: Tensor) -> tuple[Annotated[Tensor, "b p"], Annotated[Tensor, "b p"]]:
        """Return the scores of these queries with their positives and which of them are real, [b, p] each.

        The scores are kept until ``forget``, since each block of a search needs them.
        """
        if id(query) not in self._of_block:
            self._of_block[id(query)] = query, self._of_positives(query, self.pair_scores)
        return self._of_block[id(query)][1]

    def forget(self) -> None:
        """Delete the scores that were kept for the blocks of a search."""
        self._of_block.clear()

    def _of_positives(self, query: Tensor, score: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        return self.positives.padded(query, lambda place, rows: score(query[place], rows))

    def block_scores(self, query: Tensor, similarity: Tensor, valid: Tensor, low: int, high: int) -> Scores:
        """Return scores against the corpus rows low to high - 1, which all these queries share.

        Args:
            query: Positions of the queries [b].
            similarity: Their similarities with the block [b, high - low].
            valid: Which of them may be negatives.
            low: First row of the block.
            high: End of the block.
        """
        tags = self.keys.tags.mapped(lambda tag: tag[low:high].to(self.device)[None])
        guided = None if self.guide is None else self.guide.block(query, low, high)
        return self._scores(query, similarity, valid, tags, guided)

    def listed_scores(self, query: Tensor, similarity: Tensor, valid: Tensor, rows: Annotated[Tensor, "b m"]) -> Scores:
        """Return scores against a list of corpus rows for each query.

        Args:
            query: Positions of the queries [b].
            similarity: Similarities with the rows of the lists [b, m].
            valid: Which of them may be negatives.
            rows: Rows of the corpus [b, m].
        """
        tags = self.keys.tags.mapped(lambda tag: tag[rows.clamp(min=0).to(tag.device)].to(self.device))
        guided = None
        if self.guide is not None:
            place, column = valid.nonzero().unbind(1)
            guided = torch.zeros_like(similarity)
            guided[place, column] = self.guide.pairs(query[place], rows[place, column])
        return self._scores(query, similarity, valid, tags, guided)

    def _scores(self, query: Tensor, similarity: Tensor, valid: Tensor, tags: Tags, guided: Tensor | None) -> Scores:
        positives, real = self.positive_scores(query)
        guide = None
        if self.guide is not None and guided is not None:
            guide = Guide(self._of_positives(query, self.guide.pairs)[0], guided)
        return Scores(
            positives=positives / self.temperature,
            candidates=similarity if self.temperature == 1.0 else similarity / self.temperature,
            positive_valid=real,
            valid=valid,
            temperature=self.temperature,
            anchor_tags=self.queries.tags.mapped(lambda tag: tag[query.to(tag.device)].to(self.device)),
            candidate_tags=tags,
            source=torch.zeros(similarity.shape[1], dtype=torch.long, device=self.device),
            source_names=(self.source,),
            guide=guide,
        )

    def tile(self, query: Tensor, similarity: Tensor, low: int, high: int) -> Tile:
        """Return the tile of these queries against the corpus rows low to high - 1."""
        tile = self.block_scores(query, similarity, similarity != NEVER, low, high).tile()
        tile.column = tile.column + low
        return tile

    def positive_tile(self, query: Tensor) -> tuple[Tile, Tensor]:
        """Return the tile of these queries against their positives, and which of these are real."""
        empty = torch.zeros(len(query), 0, dtype=self.corpus.dtype, device=self.device)
        scores = self.block_scores(query, empty, empty.bool(), 0, 0)
        return scores.positive_tile(), scores.positive_valid

    def near_positive_listed(self, query: Tensor, rows: Annotated[Tensor, "b m"]) -> Annotated[Tensor, "b|1 m"]:
        """Mark the candidates of a list that are near-duplicates of a positive of their query, by cosine."""

        def cosine(where: Tensor, row: Tensor) -> Tensor:
            return torch.bmm(self.directions(rows[where]), self.directions(row)[:, :, None])[:, :, 0]

        return self._near_positive(query, rows.shape[1], most_numbers // self.queries.dim, cosine)

    def near_positive_block(self, query: Tensor, low: int, high: int) -> Annotated[Tensor, "b|1 m"]:
        """Mark the rows of a block that are near-duplicates of a positive of each query, by cosine."""
        part = None if self.near_positive is None else unit(self.corpus.part(low, high))
        most = self.most_scores
        return self._near_positive(query, high - low, most, lambda where, row: self.directions(row) @ part.T)  # type: ignore[union-attr]

    def _near_positive(
        self, query: Tensor, width: int, most: int, cosine: Callable[[Tensor, Tensor], Tensor]
    ) -> Annotated[Tensor, "b|1 m"]:
        if self.near_positive is None:
            return torch.zeros(1, width, dtype=torch.bool, device=self.device)
        hits = torch.zeros(len(query), width, dtype=torch.int32, device=self.device)
        place, positive = self.positives.of(query)
        at_once = max(1, most // max(width, 1))
        for where, row in zip(torch.split(place, at_once), torch.split(positive, at_once), strict=True):
            hits.index_add_(0, where, is_copy(cosine(where, row), self.near_positive, self.queries.dim).int())
        return hits > 0


def is_copy(cosine: Tensor, limit: float, dim: int) -> Tensor:
    """Return whether a cosine reaches the limit, allowing for rounding.

    The computed cosine of a vector with its copy may be slightly below 1; the error of a sum of ``dim`` products grows
    like the square root of ``dim``.
    """
    return cosine >= limit - 4.0 * torch.finfo(cosine.dtype).eps * math.sqrt(dim)


def _with_own(positives: Pairs, query_ids: Tensor | None, corpus_ids: Tensor | None, rows_of: RowsOf) -> Pairs:
    """Return the pairs that can never be negatives: the positives, and the row with the query's own id."""
    if query_ids is None or corpus_ids is None:
        return positives
    ids = query_ids.cpu()
    own = torch.where(ids >= 0, rows_of(ids), -1)
    query = torch.repeat_interleave(torch.arange(len(positives)), positives.count())
    real = (own >= 0).nonzero()[:, 0]
    return as_pairs(torch.cat([query, real]), torch.cat([positives.rows, own[real]]), len(positives))
