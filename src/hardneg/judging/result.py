"""The result of judging: the rate of each rule with its bounds, the chosen rule, and the judged pairs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from hardneg.judging.asking import Asking
from hardneg.judging.design import FALSE, NOT_ASKED, UNKNOWN, RuleState
from hardneg.judging.statistics import answers_needed, most_allowed


class JudgedPair(NamedTuple):
    """One judged pair.

    Attributes:
        query: Row of the query.
        document: Row of the document.
        false_negative: Whether the document is relevant to the query; None if the judge gave no usable answer.
        grade: The answer as a number, 1 and 0 for yes and no; None if there is no usable answer.
        probability: Probability with which the design judged the pair; 1 / probability is its weight in estimates.
    """

    query: int
    document: int
    false_negative: bool | None
    grade: float | None
    probability: float


@dataclass(frozen=True, eq=False)
class Judged:
    """What a few hundred judgements say about the false negatives of several rules.

    Attributes:
        rates: (estimate, low, high) of the false-negative rate of each rule, keyed by the rule as it was given, easiest
            first. ``high`` is an upper bound with the given confidence, ``low`` a lower bound with half of
            its error; both are valid although the number of judgements was not fixed before.
        chosen: The hardest rule whose rate is certified to be at most the level, or None.
        pairs: The judged pairs, with the probability of each.
        tau_plus: Estimated share of false negatives under the chosen rule, or under the easiest one if none is chosen:
            the ``tau_plus`` of a loss on these negatives. NaN without judgements.
        states: Figures of each rule: size, judged pairs, certificate, judgements needed.
        similarity: Mean similarity of the negatives of each rule.
        level: False-negative rate that was to be certified.
        confidence: Confidence of the certificates.
        spent: Judgements that were used.
        budget: Judgements that were allowed.
        confirmations: Pairs that the judge flagged and a second judge checked.
        sensitivity: (found, tried, lower bound) of the judge on relevant pairs; None if every answer was trusted.
        names: Expression of each rule.
        measured_on: Expression of the rule among whose mined pairs people found these relevant pairs; empty if they are
            known positives.
    """

    rates: dict[Any, tuple[float, float, float]]
    chosen: Any
    pairs: tuple[JudgedPair, ...]
    tau_plus: float
    states: dict[Any, RuleState]
    similarity: dict[Any, float]
    level: float
    confidence: float
    spent: int
    budget: int
    confirmations: int = 0
    sensitivity: tuple[int, int, float] | None = None
    names: dict[Any, str] = field(default_factory=dict)
    measured_on: str = ""

    @property
    def exact(self) -> bool:
        """Whether every pair of every rule was judged, so that the rates are exact."""
        return all(state.exact for state in self.states.values())

    def __repr__(self) -> str:
        """Summarise in one line: judgements, rules and the chosen one."""
        chosen = "none certified" if self.chosen is None else f"chosen {self.names.get(self.chosen, self.chosen)}"
        kind = ", exact" if self.exact else ""
        return f"Judged({self.spent:,} judgements of {len(self.rates)} rules{kind}, {chosen} at {self.level:g})"

    def sentences(self) -> list[str]:
        """Return the main results as sentences: the choice, what would decide further, and the assumptions."""
        level, sure = f"{100 * self.level:g} %", f"{100 * self.confidence:g} %"
        lines = []
        if self.exact:
            lines.append("Every pair was judged: the rates are exact.")
        if self.chosen is None:
            lines.append(f"No rule is certified to have at most {level} false negatives.")
        else:
            estimate, _, high = self.rates[self.chosen]
            bound = "" if self.states[self.chosen].exact else f", at most {percent(high)} with confidence {sure}"
            lines.append(
                f"The hardest rule certified at {level} is {self.names[self.chosen]}: "
                f"{percent(estimate)} false negatives{bound}."
            )
        lines += self._outlook(level)
        unknown = sum(1 for pair in self.pairs if pair.false_negative is None)
        if unknown:
            lines.append(
                f"{unknown:,} pairs have no usable answer; they count as false negatives in upper bounds and as true "
                "ones in lower bounds."
            )
        if self.sensitivity is not None:
            lines += self._about_judge(*self.sensitivity)
        return lines

    def _outlook(self, level: str) -> list[str]:
        """Return how many more judgements would decide the next rule."""
        waiting = [rule for rule, state in self.states.items() if not state.certified]
        if not waiting or all(state.exact for state in self.states.values()):
            return []
        rule = waiting[0]
        state, name = self.states[rule], self.names[rule]
        if state.exact:
            return []
        if state.needed is None and state.unknown and not state.estimate > self.level:
            return [f"{name} may be certified once its {state.unknown:,} pairs without a usable answer have one."]
        if state.needed is None:
            rate = percent(state.estimate)
            return [
                f"{name} has an estimated rate of {rate}; more judgements are not expected to certify it at {level}."
            ]
        return [f"About {state.needed:,} more judgements would certify {name} if its rate is as estimated."]

    def _about_judge(self, found: int, tried: int, low: float) -> list[str]:
        """Return the assumption behind an imperfect judge, and what would help if it is too poor."""
        known = self.measured_on and f"false negatives that people found among the pairs of {self.measured_on}"
        if not tried:
            return [f"The judge's sensitivity is not known: there are no {known or 'known positives'}."]
        others = "in the other rules" if known else "among mined pairs"
        lines = [
            f"The judge found {found} of {tried} {known or 'known positives'}, at least {percent(low)} of all. The "
            f"bounds assume that it finds as large a share of the false negatives {others}."
        ]
        error = 0.75 * (1 - self.confidence)
        least = [
            answers_needed(state.size, most_allowed(state.size, self.level * low), error, 0, 0)
            for state in self.states.values()
        ]
        if all(number is None or number > self.budget for number in least):
            more = "have more mined pairs checked" if known else "give more known positives"
            lines.append(
                "This judge is too poor to certify anything at this level: use a better judge, let a person judge, or "
                f"{more} so that its sensitivity is known better."
            )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values, for JSON."""
        rules = [
            {
                "rule": self.names[rule],
                "similarity": self.similarity[rule],
                "rate": rate,
                "low": low,
                "high": high,
                **asdict(self.states[rule]),
            }
            for rule, (rate, low, high) in self.rates.items()
        ]
        return {
            "rules": rules,
            "chosen": None if self.chosen is None else self.names[self.chosen],
            "tau_plus": self.tau_plus,
            "level": self.level,
            "confidence": self.confidence,
            "judgements": self.spent,
            "budget": self.budget,
            "confirmations": self.confirmations,
            "sensitivity": self.sensitivity,
            "sensitivity_measured_on": self.measured_on or "known positives",
            "sentences": self.sentences(),
        }


def judged_of(asking: Asking, confidence: float, budget: int, confirmations: int = 0) -> Judged:
    """Return the result that the answers to a design give.

    Args:
        asking: The design with its answers.
        confidence: Confidence of the certificates.
        budget: Judgements that were allowed.
        confirmations: Pairs that a second judge checked.
    """
    design, populations = asking.design, asking.design.populations
    states = {one.rule: design.state(number) for number, one in enumerate(populations)}
    chosen = design.chosen()
    probabilities = design.probabilities()
    pairs = tuple(
        JudgedPair(
            int(design.query[question]),
            int(design.document[question]),
            None if design.value[question] == UNKNOWN else _is_false(asking, int(question)),
            asking.grades.get(int(question)),
            float(probabilities[question]),
        )
        for question in (design.value != NOT_ASKED).nonzero()[0]
    )
    sensitivity = design.sensitivity
    return Judged(
        {rule: (state.estimate, state.low, state.high) for rule, state in states.items()},
        None if chosen is None else populations[chosen].rule,
        pairs,
        states[populations[chosen or 0].rule].estimate,
        states,
        {one.rule: one.similarity for one in populations},
        design.level,
        confidence,
        asking.spent,
        budget,
        confirmations,
        None if sensitivity is None else (sensitivity.found, sensitivity.tried, sensitivity.low),
        {one.rule: one.name for one in populations},
        "" if sensitivity is None else sensitivity.rule,
    )


def _is_false(asking: Asking, question: int) -> bool:
    """Whether a question is about a false negative, which the judge or people found."""
    return question in asking.missed or bool(asking.design.value[question] == FALSE)


def percent(share: float) -> str:
    """Format a share with three digits.

    >>> percent(0.01234), percent(float("nan"))
    ('1.23 %', 'unknown')
    """
    return "unknown" if math.isnan(share) else f"{100 * share:.3g} %"
