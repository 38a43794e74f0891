"""What a rule does to the anchors looked at, gathered chunk by chunk; no [anchors, candidates] matrix is kept.

Hubness is n * P(two different anchors draw the same negative) = n * (|m|^2 - sum_i |q_i|^2) / (A (A - 1)), m being
the mass of each item over A anchors: unbiased however few anchors are looked at, unlike the mass of single items.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from hardneg.auditing.audited_pairs import AuditedPairs, Compared
from hardneg.auditing.result import Hub, RuleFigures
from hardneg.auditing.rules import NamedRule
from hardneg.core.diagnose import diagnose
from hardneg.core.objectives import debiased, log_expect_exp
from hardneg.core.types import NEVER, Scores

NUM_HUBS = 10
EVEN_SHARE = 0.1  # of an even choice's weight: from there on an item counts as someone's negative
_piece = 2048
_sums = ("similarity", "false", "judged", "near", "effective", "attracted", "temperature", "clamped")


@dataclass(frozen=True, eq=False)
class AuditChunk:
    """Some anchors against all candidates, and what all rules share of them."""

    rows: Annotated[Tensor, "b"]
    scores: Scores
    similarity: Annotated[Tensor, "b n"]
    false: Annotated[Tensor, "b n"] | None
    judged: Annotated[Tensor, "b n"] | None  # whether a judge knows if it is false; None: all, or there is no judge
    known: Annotated[Tensor, "b"]
    measures: Annotated[Tensor, "b n k"]  # similarity, whether near, false, judged: one product with q means all
    num_valid: Annotated[Tensor, "b"]
    diagnosed: bool

    @classmethod
    def of(cls, audited: AuditedPairs, met: Compared, temperature: float, diagnosed: bool = False) -> AuditChunk:
        rows, scores = met.rows, audited.scores(met, temperature)
        false = audited.known_false(rows, scores) if audited.judges else None
        similarity = scores.candidates * temperature
        measures = torch.stack([similarity, met.near.to(similarity)], dim=-1)
        if false is not None:
            measures = torch.cat([measures, false[..., None].to(measures)], dim=-1)
        judged = None if false is None or audited.all_judged else audited.known_pairs(rows, false)
        if judged is not None:
            measures = torch.cat([measures, judged[..., None].to(measures)], dim=-1)
        # A listed negative may be no valid candidate; an even choice is then one of all.
        count = scores.num_valid().clamp(min=1)
        return cls(rows, scores, similarity, false, judged, audited.is_known(rows), measures, count, diagnosed)


@dataclass
class RuleTally:
    """One rule over all chunks: a value for each anchor, and the mass of each item."""

    rule: NamedRule
    mass: Annotated[Tensor, "n"]  # of each item, in float64
    reached: Annotated[Tensor, "n"]  # whether an item is someone's negative
    values: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in _sums})
    empty: int = 0
    anchors: int = 0
    squares: float = 0.0

    def add(self, chunk: AuditChunk, tau_plus: float) -> None:
        scores = chunk.scores
        log_w = self.rule.log_weights(scores, chunk.rows)
        some = log_w.amax(-1) != NEVER
        q = torch.softmax(log_w, dim=-1)
        if not bool(some.all()):
            q = q.masked_fill(~some[:, None], 0.0)  # NaN of an empty row
        square = torch.linalg.vector_norm(q, dim=-1, dtype=torch.float64).square()  # of millions of small numbers
        self.anchors, self.empty = self.anchors + len(some), self.empty + int((~some).sum())
        means = _expected(q, chunk.measures)
        self._keep("similarity", means[:, 0], some)
        self._keep("near", means[:, 1], some)
        if chunk.false is not None:
            self._keep("false", means[:, 2], some & chunk.known)
        if chunk.judged is not None:
            self._keep("judged", means[:, 3], some & chunk.known)
        self._keep("effective", 1.0 / square, some)
        self._count_items(q, chunk)
        self.squares += float(square.double().sum())
        if tau_plus and bool(scores.positive_valid.any()):
            log_mean = log_expect_exp(scores.candidates, log_w)[:, None]
            floored = debiased(log_mean, scores.positives, tau_plus, scores.temperature)[1]
            pairs = scores.positive_valid & some[:, None]
            self._keep("clamped", floored, pairs)
        if chunk.diagnosed:
            found = diagnose(scores, log_w)
            self._keep("attracted", found.attracted, some)
            self._keep("temperature", found.effective_temperature, some)

    def _keep(self, name: str, value: Tensor, where: Tensor) -> None:
        # Small tensors, if kept, would lie between the large ones that come and go, and memory would grow with them.
        self.values[name].extend(value[where].double().tolist())

    def _count_items(self, q: Tensor, chunk: AuditChunk) -> None:
        self.mass += q.sum(0)
        self.reached |= (q * (chunk.num_valid[:, None] / EVEN_SHARE)).amax(0) >= 1.0

    def row(self, audited: AuditedPairs, size: int) -> RuleFigures:
        similarity, false = self._mean("similarity", size), self._mean("false", size)
        judged = 1.0 if audited.all_judged else self._mean("judged", size)[0]
        if judged == 0.0:  # no negative of this rule is judged, so that nothing is known
            false = math.nan, math.nan
        return RuleFigures(
            self.rule.name,
            self.rule.kind,
            *similarity,
            *false,
            self._mean("effective", size)[0],
            self._mean("near", size)[0],
            self._hubness(),
            self._hub_share(),
            float(self.reached.double().mean()),
            self._mean("clamped", size)[0],
            self._mean("attracted", size)[0],
            self._mean("temperature", size)[0],
            self.empty / self.anchors,
            hubs_of(self.mass, audited),
            self.rule.reads(audited.judges),
            judged_share=math.nan if not self.values["false"] else judged,
        )

    def _mean(self, name: str, size: int) -> tuple[float, float]:
        """Mean over anchors and its standard error, as of a sample without replacement from ``size`` anchors."""
        values = torch.tensor(self.values[name].tolist(), dtype=torch.float64)
        if not len(values):
            return math.nan, math.nan
        left = math.sqrt(max(0.0, 1.0 - self.anchors / size))
        spread = (
            float(values.std()) / math.sqrt(len(values)) * left if len(values) > 1 else (0.0 if not left else math.nan)
        )
        return float(values.mean()), spread

    def _hubness(self) -> float:
        chosen = self.anchors - self.empty
        if chosen < 2:
            return math.nan
        shared = max(0.0, float(self.mass.square().sum()) - self.squares)
        return len(self.mass) * shared / (chosen * (chosen - 1))

    def _hub_share(self) -> float:
        total = float(self.mass.sum())
        most = max(1, math.ceil(0.01 * len(self.mass)))
        return float(self.mass.topk(most).values.sum()) / total if total else math.nan


def _expected(q: Annotated[Tensor, "b n"], measures: Annotated[Tensor, "b n k"]) -> Annotated[Tensor, "b k"]:
    """E_q of each column, added up in pieces: in one long float32 sum the many small weights of a tilt are lost."""
    parts = zip(q.split(_piece, 1), measures.split(_piece, 1), strict=True)  # type: ignore[no-untyped-call]
    total = measures.new_zeros(len(q), measures.shape[-1], dtype=torch.float64)
    for weights, values in parts:
        total += torch.bmm(weights[:, None], values)[:, 0]
    mass = q.sum(-1, keepdim=True, dtype=torch.float64)  # 1 but for rounding, 0 without negatives
    return total / mass.clamp(min=0.5)


def hubs_of(mass: Annotated[Tensor, "n"], audited: AuditedPairs) -> tuple[Hub, ...]:
    """The items chosen most, with their share of all choices and how many times that of an even choice it is."""
    total = float(mass.sum())
    if not total:
        return ()
    top = mass.topk(min(NUM_HUBS, len(mass)))
    return tuple(
        Hub(audited.name_of(row), value / total, value / total * len(mass))
        for row, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        if value > 0
    )
