"""The rules that an audit measures: those given, the default set of the frontier, and lists that were mined.

``given_rules`` parses expressions, ``default_rules`` adds the frontier, ``check_rules`` reports missing labels, groups
or positives before the work starts. A ``NamedRule`` turns scores into log-weights; ``measure`` does the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, spelled
from hardneg.core.types import NEVER, LogWeights, Scores
from hardneg.mining.checks import check_weights
from hardneg.negatives import Negatives, parse

Expressions = str | Negatives | Sequence[str | Negatives]
"""One rule or several, as text in the grammar or as distributions."""

# The default rules span easy to hard in every family, so that a frontier appears whatever the data.
DEFAULTS = (
    "Uniform()",
    "Tilt(0.5)",
    "Tilt(1.0)",
    "Tilt(2.0)",
    "Tilt(5.0)",
    "Tilt(10.0)",
    "Tilt(20.0)",
    "Ring(0.0, 0.5)",
    "Ring(0.0, 0.1)",
    "Ring(0.0, 0.01)",
    "Ring(0.1, 0.5)",
    "Ring(0.01, 0.1)",
    "Rank(0, 10)",
    "Rank(10, 100)",
    "Rank(50, 200)",
)
BELOW_POSITIVE = tuple(f"BelowPositive(relative={margin}) * Rank(0, 10)" for margin in (0.0, 0.05, 0.1, 0.2, 0.4))
THRESHOLD_QUANTILES = (0.75, 0.95)
"""Thresholds depend on the data, so the default ones are quantiles of its similarities."""


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


def given_rules(expressions: Expressions) -> list[NamedRule]:
    """Parse expressions into rules; different distributions with the same text are numbered: ``... (2)``.

    >>> [rule.name for rule in given_rules(["Tilt(2.0)", "Uniform()", "Tilt(2.0)"])]
    ['Tilt(2.0)', 'Uniform()']
    """
    several = [expressions] if isinstance(expressions, (str, Negatives)) else list(expressions)
    rules: dict[Hashable, NamedRule] = {}
    alike: Counter[str] = Counter()
    for one in several:
        if not isinstance(one, (str, Negatives)):
            raise ArgumentError("audit", "expressions as text or distributions", repr(one))
        negatives = parse(one) if isinstance(one, str) else one
        name = repr(negatives)
        # The text of judged pairs names their number, not the pairs: such factors are equal only if identical.
        key = name if all(factor.textual for factor in negatives.factors) else id(negatives)
        if key not in rules:
            alike[name] += 1
            shown = name if alike[name] == 1 else f"{name} ({alike[name]})"
            rules[key] = NamedRule(shown, "given", negatives)
    return list(rules.values())


def default_rules(has_positives: bool, thresholds: Sequence[float], taken: Sequence[NamedRule]) -> list[NamedRule]:
    """Return the default rules of the frontier: every family at several strengths.

    Args:
        has_positives: Whether positives are known, which ``BelowPositive`` needs.
        thresholds: Similarities for ``Threshold``, from the function of that name.
        taken: Rules that were given already; they are left out.
    """
    texts = [*DEFAULTS, *(f"Threshold({value})" for value in dict.fromkeys(thresholds))]
    texts += BELOW_POSITIVE if has_positives else ()
    names = {rule.name for rule in taken}
    rules = [NamedRule(repr(parse(text)), "default", parse(text)) for text in texts]
    return [rule for rule in rules if rule.name not in names]


def check_rules(rules: Sequence[NamedRule], *, positives: bool, labels: bool, groups: bool) -> None:
    """Raise before the work if a rule needs positives, labels, groups or a guide that are missing."""
    for rule in rules:
        if rule.negatives is None:
            continue
        check_weights("audit", rule.negatives)
        for factor in rule.negatives.factors:
            _check_factor(factor, positives, labels, groups)


def _check_factor(factor: Negatives, positives: bool, labels: bool, groups: bool) -> None:
    """Check one factor of a product."""
    reads = factor.reads()
    if "guide" in reads:
        raise ArgumentError("audit", "expressions that need no guide", repr(factor), "use by='score'")
    if "positives" in reads and not positives:
        given, judged = spelled("audit", "positives"), spelled("audit", "judgements")
        fix = f'give {given} (a second view of each row, or "label": one row of the same label) or {judged}'
        raise ArgumentError(repr(factor), "positives", "embeddings without any", fix)
    for tag, word, known in (("labels", "labels", labels), ("clusters", "groups", groups)):
        if tag in reads and not known:
            fix = f"give {spelled('audit', word)}"
            raise ArgumentError(repr(factor), f"{word} of anchors and candidates", "none", fix)


def thresholds(scores: Scores) -> list[float]:
    """Return the similarities that a quarter and a twentieth of the pairs exceed, rounded to two digits.

    The quantiles are taken from about 100,000 pairs, which is precise enough for two digits.
    """
    values = scores.candidates[scores.valid]
    if not len(values):
        return []
    step = max(1, len(values) // 100_000)
    cut = torch.quantile(
        values[::step].double(), torch.tensor(THRESHOLD_QUANTILES, dtype=torch.float64).to(values.device)
    )
    return [round(value, 2) for value in cut.tolist()]
