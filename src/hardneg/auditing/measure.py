"""The figures of a rule, accumulated chunk by chunk of anchors; no [anchors, candidates] matrix is kept.

Hubness is n * P(two different anchors draw the same negative) = n * (|m|^2 - sum_i |q_i|^2) / (A (A - 1)), where m is
the mass of each item over A anchors and q_i the distribution of anchor i. It is unbiased for any number of anchors,
unlike the mass of single items.

A ``NamedRule`` turns scores into log-weights. ``sampling.measure_rules`` makes one ``AuditChunk`` for all rules and
one ``RuleTally`` for each.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from hardneg.auditing.audited_pairs import AuditedPairs, ComparedAnchors
from hardneg.auditing.result import Hub, RuleFigures
from hardneg.core.diagnose import diagnose
from hardneg.core.objectives import debiased, log_expect_exp
from hardneg.core.types import NEVER, LogWeights, Scores
from hardneg.negatives import Negatives

NUM_HUBS = 10
EVEN_SHARE = 0.1  # share of the uniform probability from which an item counts as some anchor's negative
_piece = 2048  # columns that are summed in float32
_quantities = ("similarity", "false", "judged", "near", "effective", "attracted", "temperature", "clamped")


@dataclass(frozen=True, eq=False)
class NamedRule:
    """A distribution, or mined lists, under the name that it has in the result.

    Attributes:
        name: Name of the row in the result, usually the expression.
        kind: ``"given"``, ``"default"``, ``"suggested"`` or ``"mined"``.
        negatives: The distribution; None for mined lists.
        listed: Mined lists as rows of the candidates, -1 where a list is shorter; None for a distribution.
    """

    name: str
    kind: str
    negatives: Negatives | None = None
    listed: Annotated[Tensor, "a k"] | None = None

    def reads(self, judges: Sequence[str]) -> bool:
        """Whether a factor of the rule uses the data by which false negatives are known."""
        known_by = {"labels": ["labels"], "clusters": ["groups"], "ids": ["judgements", "held-out judgements"]}
        reads = () if self.negatives is None else self.negatives.reads()
        return any(judge in judges for what in reads for judge in known_by.get(what, ()))

    def log_weights(self, scores: Scores, anchors: Annotated[Tensor, "b"]) -> LogWeights:
        """Return the log-weights [b, n] of the candidates under this rule.

        Args:
            scores: Scores of these anchors against all candidates.
            anchors: Rows of the anchors, which choose the mined lists.
        """
        if self.negatives is not None:
            return self.negatives.log_weights(scores)
        assert self.listed is not None
        rows = self.listed[anchors.to(self.listed.device)].to(scores.candidates.device)
        count = torch.zeros_like(scores.candidates).scatter_add_(
            1, rows.clamp(min=0), (rows >= 0).to(scores.candidates)
        )
        return torch.where(count > 0, count.log(), NEVER)  # a row that is listed twice counts twice


@dataclass(frozen=True, eq=False)
class AuditChunk:
    """Some anchors against all candidates, with the values that all rules need.

    Attributes:
        rows: Rows of the anchors [b].
        scores: Their scores.
        similarity: Their similarities [b, n], which are the scores times the temperature.
        false: Candidates known to be false negatives [b, n]; None if nothing is judged.
        judged: Candidates judged to be false or not [b, n]; None if all are, or nothing is.
        known: Anchors with any judgement [b].
        measures: Similarity, near-duplicate, false and judged as numbers [b, n, k]: one product with q gives all means.
        num_valid: Number of valid candidates of each anchor [b], at least 1.
        diagnosed: Whether ``diagnose`` measures this chunk too.
    """

    rows: Annotated[Tensor, "b"]
    scores: Scores
    similarity: Annotated[Tensor, "b n"]
    false: Annotated[Tensor, "b n"] | None
    judged: Annotated[Tensor, "b n"] | None
    known: Annotated[Tensor, "b"]
    measures: Annotated[Tensor, "b n k"]
    num_valid: Annotated[Tensor, "b"]
    diagnosed: bool

    @classmethod
    def of(
        cls, audited: AuditedPairs, compared: ComparedAnchors, temperature: float, diagnosed: bool = False
    ) -> AuditChunk:
        """Compute the values for a chunk of compared anchors.

        Args:
            audited: The pairs of the audit.
            compared: Similarities of these anchors, from ``AuditedPairs.compare``.
            temperature: Temperature of the scores.
            diagnosed: Whether attraction and effective temperature are measured here.
        """
        rows, scores = compared.rows, audited.scores(compared, temperature)
        false = audited.known_false(rows, scores) if audited.judges else None
        similarity = scores.candidates * temperature
        measures = torch.stack([similarity, compared.near.to(similarity)], dim=-1)
        if false is not None:
            measures = torch.cat([measures, false[..., None].to(measures)], dim=-1)
        judged = None if false is None or audited.all_judged else audited.known_pairs(rows, false)
        if judged is not None:
            measures = torch.cat([measures, judged[..., None].to(measures)], dim=-1)
        # Mined lists may hold invalid candidates, so that an anchor without valid ones can have negatives.
        count = scores.num_valid().clamp(min=1)
        known = audited.has_judgements(rows)
        return cls(rows, scores, similarity, false, judged, known, measures, count, diagnosed)


@dataclass
class RuleTally:
    """One rule over all chunks: a value for each anchor, and the mass of each item.

    Attributes:
        rule: The rule.
        mass: Sum of q over anchors for each item [n], in float64.
        reached: Whether each item is a negative of any anchor [n].
        values: Value of each anchor, by quantity.
        empty: Number of anchors without negatives.
        anchors: Number of anchors.
        squares: Sum of |q_i|^2 over anchors, for hubness.
    """

    rule: NamedRule
    mass: Annotated[Tensor, "n"]
    reached: Annotated[Tensor, "n"]
    values: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in _quantities})
    empty: int = 0
    anchors: int = 0
    squares: float = 0.0

    def add(self, chunk: AuditChunk, tau_plus: float) -> None:
        """Measure the rule on a chunk of anchors."""
        scores = chunk.scores
        log_w = self.rule.log_weights(scores, chunk.rows)
        some = log_w.amax(-1) != NEVER
        q = torch.softmax(log_w, dim=-1)
        if not bool(some.all()):
            q = q.masked_fill(~some[:, None], 0.0)  # the softmax of an empty row is NaN
        square = torch.linalg.vector_norm(q, dim=-1, dtype=torch.float64).square()  # sums millions of small numbers
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
        """Append the values of the anchors in ``where``."""
        # As Python floats: small tensors kept between large temporary ones would fragment memory.
        self.values[name].extend(value[where].double().tolist())

    def _count_items(self, q: Tensor, chunk: AuditChunk) -> None:
        """Add to the mass of each item, and mark those with at least EVEN_SHARE of a uniform choice."""
        self.mass += q.sum(0)
        self.reached |= (q * (chunk.num_valid[:, None] / EVEN_SHARE)).amax(0) >= 1.0

    def row(self, audited: AuditedPairs, size: int) -> RuleFigures:
        """Return the figures of the rule.

        Args:
            audited: The pairs of the audit, for names and judges.
            size: Number of anchors that could have been measured, for standard errors.
        """
        similarity, false = self._mean("similarity", size), self._mean("false", size)
        judged = 1.0 if audited.all_judged else self._mean("judged", size)[0]
        if judged == 0.0:  # no negative of this rule is judged, so the share is unknown and not 0
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
        """Return the mean and its standard error for a sample without replacement from ``size`` anchors."""
        values = torch.tensor(self.values[name].tolist(), dtype=torch.float64)
        if not len(values):
            return math.nan, math.nan
        left = math.sqrt(max(0.0, 1.0 - self.anchors / size))
        spread = (
            float(values.std()) / math.sqrt(len(values)) * left if len(values) > 1 else (0.0 if not left else math.nan)
        )
        return float(values.mean()), spread

    def _hubness(self) -> float:
        """Return the hubness of the module docstring; NaN with fewer than two anchors."""
        chosen = self.anchors - self.empty
        if chosen < 2:
            return math.nan
        shared = max(0.0, float(self.mass.square().sum()) - self.squares)
        return len(self.mass) * shared / (chosen * (chosen - 1))

    def _hub_share(self) -> float:
        """Return the share of all choices that fall on the 1 % of items chosen most."""
        total = float(self.mass.sum())
        most = max(1, math.ceil(0.01 * len(self.mass)))
        return float(self.mass.topk(most).values.sum()) / total if total else math.nan


def _expected(q: Annotated[Tensor, "b n"], measures: Annotated[Tensor, "b n k"]) -> Annotated[Tensor, "b k"]:
    """Return E_q of each measure [b, k], summed in pieces.

    In one long float32 sum the many small weights of a tilt would be lost.
    """
    parts = zip(q.split(_piece, 1), measures.split(_piece, 1), strict=True)  # type: ignore[no-untyped-call]
    total = measures.new_zeros(len(q), measures.shape[-1], dtype=torch.float64)
    for weights, values in parts:
        total += torch.bmm(weights[:, None], values)[:, 0]
    mass = q.sum(-1, keepdim=True, dtype=torch.float64)  # 1 up to rounding, 0 without negatives
    return total / mass.clamp(min=0.5)


def hubs_of(mass: Annotated[Tensor, "n"], audited: AuditedPairs) -> tuple[Hub, ...]:
    """Return the items chosen most, with their share of all choices, also relative to a uniform choice."""
    total = float(mass.sum())
    if not total:
        return ()
    top = mass.topk(min(NUM_HUBS, len(mass)))
    return tuple(
        Hub(audited.name_of(row), value / total, value / total * len(mass))
        for row, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        if value > 0
    )
