"""From candidates to the k chosen: apply the factors one after another, then take the most similar or draw.

``select`` is called for each block of queries by ``stages.py``. ``Rule`` is public: the
distribution with its draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import check_counts, check_kind, check_seed
from hardneg.core.keyed import uniform_of_pairs
from hardneg.core.types import NEVER, Scores
from hardneg.mining.corpus_scores import is_copy
from hardneg.mining.fusion import Quotas, by_quotas, compacted
from hardneg.mining.search_depth import depths_of, ends_here
from hardneg.negatives import Negatives
from hardneg.search.draws import draw_at, gumbel_order
from hardneg.search.topk import top_of_rows

VectorsOf = Callable[[Tensor], Tensor]
"""Rows of the corpus [...] -> their unit vectors [..., d]."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Candidates for some queries.

    Attributes:
        scores: Scores as distributions see them; None if the search has applied every factor and
            the list is the support in its order.
        similarity: Similarities before the temperature [b, m].
        rows: Rows of the corpus [b, m]; None if the columns are the whole corpus.
        query: Positions among all queries [b], on which draws depend.
        whole: True for queries without further candidates [b].
        ordered: Whether the closest come first.
        lists: Rows found by each of several retrievers [b, c].
        key: Order of draw "top", largest first [b, m]; None orders by similarity.
        quotas: Keys and numbers of the quotas.
        left: Candidates left by the search after the guard and each factor [b, f].
    """

    scores: Scores | None
    similarity: Annotated[Tensor, "b m"]
    rows: Annotated[Tensor, "b m"] | None
    query: Annotated[Tensor, "b"]
    whole: Annotated[Tensor, "b"]
    ordered: bool = True
    lists: tuple[Annotated[Tensor, "b c"], ...] = ()
    key: Annotated[Tensor, "b m"] | None = None
    quotas: Quotas = ()
    left: Annotated[Tensor, "b f"] | None = None

    def row_numbers(self) -> Tensor:
        """Return the corpus row of each candidate [b, m]."""
        if self.rows is not None:
            return self.rows
        b, n = self.similarity.shape
        return torch.arange(n, device=self.query.device).expand(b, n)


@dataclass(frozen=True, eq=False)
class Selection:
    """The choice for some queries.

    Attributes:
        slots: Columns of the chosen candidates [b, k], -1 where short.
        decided: False where more candidates could change the choice [b].
        left: Candidates at the start and after each factor [b, f].
        copies: Candidates skipped as near-duplicates of a negative chosen before [b].
    """

    slots: Annotated[Tensor, "b k"]
    decided: Annotated[Tensor, "b"]
    left: Annotated[Tensor, "b f"]
    copies: Annotated[Tensor, "b"]


@dataclass(frozen=True)
class Rule:
    """What to choose: a distribution, how many negatives, and by which draw.

    Attributes:
        negatives: The distribution.
        k: Number of negatives per query.
        draw: ``"top"``, ``"gumbel"`` or ``"categorical"``.
        seed: Seed of the draws.
        near_negative: Cosine of near-duplicates of another negative; None keeps them.
    """

    negatives: Negatives
    k: int
    draw: str = "top"
    seed: int = 0
    near_negative: float | None = None

    def __post_init__(self) -> None:
        check_kind("mine", "negatives", self.negatives, Negatives, "a distribution such as Tilt(1.0)")
        check_counts("mine", self, "k")
        object.__setattr__(self, "seed", check_seed("mine", self.seed))


def select(candidates: Candidates, rule: Rule, vectors_of: VectorsOf) -> Selection:
    """Choose the k negatives of each query among its candidates, by the rule.

    Args:
        candidates: Candidates of a block of queries.
        rule: Distribution, k and draw.
        vectors_of: Unit vectors of corpus rows, for near-duplicates.
    """
    if candidates.scores is None:
        assert candidates.left is not None
        assert candidates.rows is not None
        slots = torch.arange(candidates.rows.shape[1], device=candidates.rows.device)
        chosen = _padded(torch.where(candidates.rows >= 0, slots, -1), rule.k)
        chosen = chosen if rule.near_negative is not None else chosen[:, : rule.k]
        left, complete = candidates.left, candidates.whole
        exact = torch.ones_like(complete)
    else:
        log_w, counts, exact, complete = _weigh(candidates.scores, candidates.whole, rule)
        chosen, left = _order(candidates, candidates.scores, log_w, rule), torch.stack(counts, 1)
    copies = torch.zeros(len(chosen), dtype=torch.long, device=chosen.device)
    if rule.near_negative is not None:
        chosen, copies = _without_copies(chosen, candidates.row_numbers(), rule, vectors_of)
    by_order = rule.draw == "top" or candidates.scores is None
    full = chosen[:, -1] >= 0 if by_order else torch.zeros_like(complete)
    return Selection(chosen, exact & (full | complete), left, copies)


def _weigh(scores: Scores, whole: Annotated[Tensor, "b"], rule: Rule) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Return the log-weights of the product, the candidates left after each factor, and two flags per query.

    ``exact``: every factor that looks at other candidates saw all those that it counts, so further
    candidates change no weight. ``complete``: no further candidate could pass.
    """
    total = scores.candidates.new_zeros(scores.valid.shape).masked_fill(~scores.valid, NEVER)
    exact, complete = torch.ones_like(whole), whole
    valid, left = scores.valid, [scores.valid.sum(1)]
    depths = depths_of(rule.negatives, rule.k, rule.draw)
    for factor, depth in zip(rule.negatives.factors, depths, strict=False):
        if factor.looks_around:
            exact = exact & (complete if depth is None else complete | (left[-1] >= depth))
        total = total + factor.log_weights(scores.narrowed(valid))
        after = total != NEVER
        complete = complete | ends_here(factor, scores, valid, after)
        valid = after
        left.append(valid.sum(1))
    return total, left, exact, complete


def _order(candidates: Candidates, scores: Scores, log_w: Tensor, rule: Rule) -> Annotated[Tensor, "b k"]:
    """Return columns of the support in the order in which they are taken, then -1.

    More than k columns if near-duplicates are skipped afterwards.
    """
    if rule.draw == "categorical":
        return _categorical(candidates, log_w, rule)
    b, m = log_w.shape
    wanted = rule.k if rule.near_negative is None else m
    if rule.draw == "gumbel":
        uniforms = uniform_of_pairs(rule.seed, candidates.query, candidates.row_numbers())
        return _padded(gumbel_order(log_w, uniforms, min(wanted, m)), rule.k)
    if candidates.ordered:
        # Already sorted, closest first: the support keeps this order, also among equal scores.
        columns = torch.arange(m, device=log_w.device).expand(b, m).masked_fill(log_w == NEVER, -1)
        return _padded(compacted(columns, wanted), rule.k)
    if candidates.quotas:
        return _padded(by_quotas(log_w != NEVER, candidates.quotas, wanted), rule.k)
    key = scores.candidates if candidates.key is None else candidates.key
    values, index = top_of_rows(key.masked_fill(log_w == NEVER, NEVER), min(wanted, m))
    return _padded(torch.where(values == NEVER, -1, index), rule.k)


def _categorical(candidates: Candidates, log_w: Tensor, rule: Rule) -> Annotated[Tensor, "b k"]:
    """Return k draws with replacement; candidates are sorted by row, so the order of the search has no effect."""
    numbers = torch.arange(rule.k, device=log_w.device).expand(len(log_w), -1)
    uniforms = uniform_of_pairs(rule.seed, candidates.query, numbers)
    if candidates.rows is None or not log_w.shape[1]:
        return draw_at(log_w, uniforms)
    rows = candidates.rows
    by_row = torch.where(rows < 0, torch.iinfo(rows.dtype).max, rows).argsort(dim=1)
    place = draw_at(log_w.gather(1, by_row), uniforms)
    return torch.where(place < 0, -1, by_row.gather(1, place.clamp(min=0)))


def _without_copies(order: Tensor, rows: Tensor, rule: Rule, vectors_of: VectorsOf) -> tuple[Tensor, Tensor]:
    """Skip each candidate too similar to one taken before, in the given order, until k are taken."""
    taken = torch.full((len(order), rule.k), -1, device=order.device)
    copies = torch.zeros(len(order), dtype=torch.long, device=order.device)
    pending = torch.arange(len(order), device=order.device)
    step = 4 * rule.k
    for low in range(0, order.shape[1], step):
        pending = pending[(taken[pending, -1] < 0) & (order[pending, low] >= 0)]
        if not len(pending):
            break
        piece = order[pending, low : low + step]
        taken[pending], passed = _extend(taken[pending], piece, rows[pending], rule, vectors_of)
        copies[pending] += passed
    return taken, copies


def _extend(taken: Tensor, piece: Tensor, rows: Tensor, rule: Rule, vectors_of: VectorsOf) -> tuple[Tensor, Tensor]:
    assert rule.near_negative is not None
    both = torch.cat([taken, piece], 1)
    vectors = vectors_of(rows.gather(1, both.clamp(min=0)))
    alike = is_copy(
        torch.bmm(vectors, vectors.transpose(1, 2)), rule.near_negative, vectors.shape[2]
    )  # [b, k + s, k + s]
    kept = torch.cat([taken >= 0, torch.zeros_like(piece, dtype=torch.bool)], 1)
    passed = torch.zeros(len(both), dtype=torch.long, device=both.device)
    for column in range(rule.k, both.shape[1]):
        wanted = (both[:, column] >= 0) & (kept.sum(1) < rule.k)
        copy = (alike[:, column] & kept).any(1)
        kept[:, column] = wanted & ~copy
        passed += wanted & copy
    return compacted(both.masked_fill(~kept, -1), rule.k), passed


def _padded(slots: Tensor, k: int) -> Tensor:
    return torch.nn.functional.pad(slots, (0, max(k - slots.shape[1], 0)), value=-1)
