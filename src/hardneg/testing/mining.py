"""The check of mining: blocks and shards give the same negatives as whole rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hardneg.core.keyed import uniform_of_pairs
from hardneg.core.pairing import Pairing
from hardneg.core.scoring import dense
from hardneg.core.types import NEVER, Keys
from hardneg.mining import Search
from hardneg.mining.miner import mine
from hardneg.negatives import Negatives
from hardneg.search.draws import gumbel_order
from hardneg.search.topk import top_of_rows

# Sizes that the blocks do not divide.
_QUERIES, _CORPUS, _K, _TEMPERATURE = 12, 60, 5, 0.5


def mines_as_whole_rows(negatives: Negatives) -> str | None:
    """Mining by blocks and by shards gives the negatives of whole rows, ties included, also for seeded draws.

    The miner reads the corpus in blocks and may skip blocks by the bounds that a distribution declares; a wrong bound
    loses negatives. Distributions that depend on a batch or on sources are not checked.
    """
    if negatives.batch_scope or "source" in negatives.reads():
        return None  # mining has no batch, and its corpus is a single source
    pairing = make_mining()
    queries, corpus, guide = pairing.anchors, pairing.candidates[0], pairing.guide
    assert guide is not None
    assert pairing.positives.ids is not None
    searches = [Search(query_block=4, corpus_block=7, similarity="dot")]
    searches += [replace(searches[0], shards=3)] if negatives.pointwise else []
    for draw in ("top", "gumbel"):
        right = _from_whole_rows(negatives, pairing, draw)
        for search in searches:
            vectors = guide.anchors.vectors, guide.candidates[0].vectors
            options = {"temperature": _TEMPERATURE, "search": search, "guide": vectors}
            found = mine(queries, corpus, pairing.positives.ids, negatives, _K, draw, **options)  # type: ignore[arg-type]
            if not torch.equal(found.rows, right):
                where = "shards" if search.shards > 1 else "blocks"
                return (
                    f"gives other negatives by {where} than from whole rows (draw={draw!r}); do not override shown() "
                    "and monotone unless they hold for every row, and set removes = True if it can remove a candidate"
                )
    return None


def make_mining() -> Pairing:
    """Return queries with one or two positives each and a corpus with duplicates, labels, clusters and a guide.

    Vectors are multiples of 1/4, so dot products are exact and ties stay ties however they are computed.
    """
    random = torch.Generator().manual_seed(0)

    def exact(rows: int) -> Tensor:
        return torch.randint(-2, 3, (rows, 6), generator=random).double() / 4.0

    def keys(rows: int, first_id: int) -> Keys:
        number = torch.arange(rows)
        return Keys(exact(rows), number + first_id, number % 4, number % 3)

    queries, corpus = keys(_QUERIES, 50), keys(_CORPUS, 0)  # the first ten queries are documents
    corpus.vectors[40:55] = corpus.vectors[:15]
    own = torch.stack([torch.arange(_QUERIES) * 3, torch.where(torch.arange(_QUERIES) % 2 == 0, -1, 41)], 1)
    positives = Keys(corpus.vectors[own.clamp(min=0)], own)
    other = Keys(exact(_CORPUS))
    guide = Pairing(Keys(exact(_QUERIES)), Keys(other.vectors[own.clamp(min=0)]), (other,), 1.0)
    return Pairing(queries, positives, (corpus,), _TEMPERATURE, own >= 0).guided(guide)


def _from_whole_rows(negatives: Negatives, pairing: Pairing, draw: str) -> Tensor:
    """Return the negatives chosen from the dense scores, as the reference."""
    scores = dense(pairing)
    log_w = negatives.log_weights(scores)
    if draw == "gumbel":
        rows = torch.arange(_CORPUS).expand(_QUERIES, -1)
        return gumbel_order(log_w, uniform_of_pairs(0, torch.arange(_QUERIES), rows), _K)
    values, rows = top_of_rows(scores.candidates.masked_fill(log_w == NEVER, NEVER), _K)
    return rows.masked_fill(values == NEVER, -1)
