"""Which pairs to judge, in which order, and what the answers say about each rule.

1. A rule's *population* is the filled slots of ``mine(rule, k)``. Rules are ordered by their mean similarity, easiest
   first, before any answer.
2. Each (query, document) has one permanent random number. A population sorted by it is in a uniformly random order, in
   which populations that overlap share their answers.
3. The first pairs of every rule are judged, so that each has a bound. Then the rules are judged one after another, each
   in its order and until it is certified. The first rule that cannot be certified ends the sequence.
4. Judgements that are left then go to all rules in turn, which tightens their bounds.

Only the judged beginning of each order counts in the tests of ``statistics.py``, which are valid at every look. The
fixed order of the rules makes the hardest certified one exceed the level with at most the error of a single test.
``Design`` knows no judge and no file: ``ask`` returns questions, ``value`` holds the answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hardneg.core.keyed import uniform_of_pairs
from hardneg.judging.statistics import (
    answers_needed,
    certified_after,
    exact_lower,
    lower_bound,
    most_allowed,
    upper_bound,
)

PairIndices = NDArray[np.int64]

NOT_ASKED, TRUE, FALSE, UNKNOWN = -1, 0, 1, 2
"""Values of a question: no answer yet, a true negative, a false negative, no usable answer from the judge."""

_stream = 0x6A75646765  # keeps the random numbers apart from those of mining draws, which choose the population
_pilot, _share_of_pilots = 20, 8


@dataclass(frozen=True, eq=False)
class Population:
    """The filled slots of one rule.

    Attributes:
        rule: The rule as it was given.
        name: Its expression.
        query: Row of the query of each slot [n].
        document: Row of the document of each slot [n].
        similarity: Mean similarity of the slots.
    """

    rule: Any
    name: str
    query: PairIndices
    document: PairIndices
    similarity: float

    def __len__(self) -> int:
        return len(self.query)


@dataclass(frozen=True)
class Sensitivity:
    """How many known false negatives an imperfect judge finds, for the bound of a judge that errs.

    Attributes:
        found: Known relevant pairs that the judge flags.
        tried: Known relevant pairs that it judged.
        low: Lower bound of its sensitivity, with a quarter of the error.
        rule: Expression of the rule from whose pairs people drew the relevant ones; empty for known positives.
    """

    found: int
    tried: int
    low: float
    rule: str = ""

    @classmethod
    def of(cls, found: int, tried: int, error: float, rule: str = "") -> Sensitivity:
        """Return the sensitivity with its lower bound, which takes a quarter of the error."""
        return cls(found, tried, exact_lower(found, tried, error / 4), rule)

    @property
    def estimate(self) -> float:
        """Share of the known relevant pairs that the judge found."""
        return self.found / self.tried if self.tried else math.nan


@dataclass(frozen=True)
class RuleState:
    """What the answers say about a rule.

    Attributes:
        size: Number of pairs of the rule.
        judged: Number of answers that count: the judged beginning of its order.
        false: False negatives among them.
        unknown: Questions among them that have no usable answer.
        estimate: Estimated false-negative rate; NaN without answers.
        low: Lower bound of the rate, with half of the error.
        high: Upper bound of the rate. Unanswered questions count as false negatives here, as true ones in ``low``.
        certified: Whether the rate is at most the level, at the confidence of the design.
        exact: Whether every pair of the rule is judged, without an error of the judge.
        needed: Further answers after which the rule would be certified if false negatives keep appearing at the
            estimated rate; None if that is not to be expected.
    """

    size: int
    judged: int
    false: int
    unknown: int
    estimate: float
    low: float
    high: float
    certified: bool
    exact: bool
    needed: int | None


class Design:
    """The questions about several rules, and their order.

    Args:
        populations: Filled slots of each rule.
        level: False-negative rate that is certified.
        confidence: Confidence of the certificates and of the upper bounds.
        seed: Seed of the random numbers.
        query_keys: Number of each query row [q]; rows with the same text share one, and so share answers.
        document_keys: Number of each document row, likewise.
        identities: Numbers from which the random numbers of queries and documents are made, such as hashed ids;
            rows by default.
        sensitivity: Sensitivity of a judge that errs and whose flags a person confirms; None trusts every answer.

    Attributes:
        sensitivity: The same; it may be set before the first question.
        populations: The populations, easiest rule first.
        query: Row of the query of each question [m].
        document: Row of the document of each question [m].
        value: Answer of each question [m]: ``NOT_ASKED``, ``TRUE``, ``FALSE`` or ``UNKNOWN``.
    """

    def __init__(
        self,
        populations: Sequence[Population],
        level: float,
        confidence: float,
        seed: int,
        query_keys: PairIndices | None = None,
        document_keys: PairIndices | None = None,
        identities: tuple[PairIndices, PairIndices] | None = None,
        sensitivity: Sensitivity | None = None,
    ) -> None:
        self.populations = sorted(populations, key=lambda one: (one.similarity, one.name))
        self.level, self.error, self.seed = level, 1.0 - confidence, seed
        self._sensitivity = sensitivity
        query, document = (
            np.concatenate([getattr(one, name) for one in self.populations]) for name in ("query", "document")
        )
        keys = (
            rows if known is None else known[rows] for rows, known in ((query, query_keys), (document, document_keys))
        )
        first, question = _numbered(*keys)
        self.query, self.document = query[first], document[first]
        self.value = np.full(len(first), NOT_ASKED, dtype=np.int8)
        ends = np.cumsum([len(one) for one in self.populations])[:-1]
        self._certificates: dict[int, NDArray[np.int64]] = {}
        self.orders: list[PairIndices] = []
        """Questions of each rule in the order of its judging; slots of the same texts repeat a question."""
        for one, mine in zip(self.populations, np.split(question, ends), strict=True):
            self.orders.append(mine[_order(one, seed, identities)])

    @property
    def sensitivity(self) -> Sensitivity | None:
        """Sensitivity of the judge; None if every answer is trusted."""
        return self._sensitivity

    @sensitivity.setter
    def sensitivity(self, value: Sensitivity | None) -> None:
        self._sensitivity = value
        for name in ("error_of_tests", "allowed", "_certified_after"):
            self.__dict__.pop(name, None)
        self._certificates.clear()

    @cached_property
    def error_of_tests(self) -> float:
        """Error of each test: what the bound of the judge's sensitivity leaves."""
        return self.error if self.sensitivity is None else 0.75 * self.error

    @cached_property
    def allowed(self) -> list[int]:
        """Largest number of (found) false negatives of each rule that is a rate of at most the level."""
        found = 1.0 if self.sensitivity is None else self.sensitivity.low
        return [most_allowed(len(one), self.level * found) for one in self.populations]

    @cached_property
    def _certified_after(self) -> list[PairIndices]:
        return [
            certified_after(len(one), allowed, self.error_of_tests)
            for one, allowed in zip(self.populations, self.allowed, strict=True)
        ]

    def pilot(self, budget: int) -> int:
        """Return the number of pairs of each rule that are judged first: at most 20, and an eighth of the budget."""
        return max(1, min(_pilot, budget // (_share_of_pilots * len(self.populations))))

    def ask(self, budget: int, spent: int) -> PairIndices:
        """Return the next questions, in the order in which they matter; none when everything is decided.

        They are as many as can be judged at once without judging one too many: the rule in turn is certified after
        these answers at the earliest.

        Args:
            budget: Number of answers that may be used in all.
            spent: Number of answers that were used.
        """
        left = max(budget - spent, 0)
        open_questions = np.flatnonzero(self.value == NOT_ASKED)
        if not left or not len(open_questions):
            return open_questions[:0]
        if left >= len(open_questions):
            return open_questions
        first = self.pilot(budget)
        pilots = self._open(np.concatenate([order[:first] for order in self.orders]))
        if len(pilots):
            return pilots[:left]
        for rule, order in enumerate(self.orders):
            if self.certified(rule):
                continue
            wanted = self._open(order[: self._certified_at_best(rule)])
            if not len(wanted):  # two tests of a tiny population disagree: judge on
                wanted = self._open(order)[:1]
            if len(wanted) <= left:
                return wanted
            return self._in_turn()[:left]  # giving up early keeps every certificate valid
        return open_questions[:0]

    def sample(self, number: int) -> PairIndices:
        """Return a simple random sample, possibly with repeats, of the slots of the hardest rule.

        The sample is the start of the rule's order; its size must not depend on the answers.
        """
        return self.orders[-1][:number]

    def certified(self, rule: int) -> bool:
        """Return whether the answers certify a rule, by its number in ``populations``."""
        answers = self._answers(rule, unknown=1)
        before = self._certificates.get(rule)
        if before is not None and np.array_equal(answers[: len(before)], before):
            return True  # more answers cannot take a certificate back
        if len(answers) == len(self.orders[rule]):
            return int(answers.sum()) <= self.allowed[rule]
        after = self._certified_after[rule]
        reached = after[after <= len(answers)]
        false = np.concatenate([[0], answers.cumsum()])
        if not bool((false[reached] <= np.arange(len(reached))).any()):
            return False
        if upper_bound(len(self.orders[rule]), answers, self.error_of_tests) > self.allowed[rule]:
            return False
        self._certificates[rule] = answers
        return True

    def state(self, rule: int) -> RuleState:
        """Return what the answers say about a rule, by its number in ``populations``."""
        size = len(self.orders[rule])
        pessimistic, optimistic = self._answers(rule, unknown=1), self._answers(rule, unknown=0)
        judged, false = len(optimistic), int(optimistic.sum())
        unknown = int(pessimistic.sum()) - false
        estimate = false / (judged - unknown) if judged > unknown else math.nan
        high = upper_bound(size, pessimistic, self.error_of_tests) / size
        low = lower_bound(size, optimistic, self.error / 2) / size
        if self.sensitivity is not None:
            high = min(high / self.sensitivity.low, 1.0) if self.sensitivity.low else 1.0
            estimate = min(estimate / self.sensitivity.estimate, 1.0) if self.sensitivity.found else math.nan
        exact = self.sensitivity is None and judged == size and not unknown
        rate = (false + unknown) / judged if judged else 0.0
        needed = None
        if not (certified := self.certified(rule)) and rate * size <= self.allowed[rule]:
            needed = answers_needed(size, self.allowed[rule], self.error_of_tests, judged, false + unknown, rate)
        return RuleState(size, judged, false, unknown, estimate, low, high, certified, exact, needed)

    def chosen(self) -> int | None:
        """Return the hardest certified rule: along the sequence, or known exactly to be within the level."""
        found, in_sequence = None, True
        for rule in range(len(self.populations)):
            in_sequence = in_sequence and self.certified(rule)
            state_is_exact = self.sensitivity is None and bool((self.value[self.orders[rule]] >= 0).all())
            if in_sequence or (state_is_exact and self.certified(rule)):
                found = rule
        return found

    def probabilities(self) -> Annotated[NDArray[np.float64], "m"]:
        """Return the probability with which each question was judged: the largest judged share of its rules."""
        found = np.zeros(len(self.value))
        for rule, order in enumerate(self.orders):
            np.maximum.at(found, order, self._num_judged(rule) / len(order))
        return found

    def _open(self, questions: PairIndices) -> PairIndices:
        """Return the distinct questions without an answer, in order."""
        questions = questions[self.value[questions] == NOT_ASKED]
        return questions[np.sort(np.unique(questions, return_index=True)[1])]

    def _num_judged(self, rule: int) -> int:
        """Return the length of the judged beginning of a rule's order."""
        waiting = self.value[self.orders[rule]] == NOT_ASKED
        return int(waiting.argmax()) if bool(waiting.any()) else len(waiting)

    def _answers(self, rule: int, unknown: int) -> NDArray[np.int64]:
        """Return the answers that count for a rule, with a value for unknown ones."""
        found = self.value[self.orders[rule][: self._num_judged(rule)]].astype(np.int64)
        return np.where(found == UNKNOWN, unknown, found)

    def _certified_at_best(self, rule: int) -> int:
        """Return after how many answers a rule is certified if no further false negative appears."""
        known = self.value[self.orders[rule]]
        false = np.concatenate([[0], ((known == FALSE) | (known == UNKNOWN)).cumsum()])
        after = self._certified_after[rule]
        fits = false[after] <= np.arange(len(after))
        return int(after[fits.argmax()]) if bool(fits.any()) else len(known)

    def _in_turn(self) -> PairIndices:
        """Return all open questions, one of each rule in turn."""
        lists = [self._open(order) for order in self.orders]
        longest = max(map(len, lists))
        padded = np.stack([np.pad(one, (0, longest - len(one)), constant_values=-1) for one in lists], 1).ravel()
        return self._open(padded[padded >= 0])


def _numbered(query: PairIndices, document: PairIndices) -> tuple[PairIndices, PairIndices]:
    """Number pairs so that equal ones get the same number: the first place of each number, and the number of each."""
    both = query * (int(document.max()) + 1) + document  # rows, whose products fit into 64 bits
    _, first, number = np.unique(both, return_index=True, return_inverse=True)
    return first.astype(np.int64), number.reshape(-1).astype(np.int64)


def _order(population: Population, seed: int, identities: tuple[PairIndices, PairIndices] | None) -> PairIndices:
    """Return the slots of a population sorted by the permanent random number of their pair."""
    query, document = population.query, population.document
    copy = _copies(query, document)
    if identities is not None:
        query, document = identities[0][query], identities[1][document]
    of_query, of_document = (torch.from_numpy(np.ascontiguousarray(rows)) for rows in (query, document))
    numbers = uniform_of_pairs(seed ^ _stream, of_query, of_document[:, None])[:, 0].numpy()
    if bool(copy.any()):  # categorical draws may fill several slots of a query with one document
        again = uniform_of_pairs(seed ^ _stream, of_document, torch.from_numpy(copy)[:, None])[:, 0].numpy()
        numbers = np.where(copy > 0, (numbers + again) % 1.0, numbers)
    return np.lexsort((document, query, numbers)).astype(np.int64)


def _copies(query: PairIndices, document: PairIndices) -> PairIndices:
    """Return, for each slot, how often its pair appears before it."""
    order = np.lexsort((np.arange(len(query)), document, query))
    sorted_query, sorted_document = query[order], document[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (np.diff(sorted_query) != 0) | (np.diff(sorted_document) != 0)
    starts = np.flatnonzero(new)
    within = np.arange(len(order)) - starts[np.cumsum(new) - 1]
    out = np.empty(len(order), dtype=np.int64)
    out[order] = within
    return out


def equal_texts(texts: Sequence[str] | None) -> PairIndices | None:
    """Return the first row with the same text for each row; None without texts.

    >>> equal_texts(["a", "b", "a"]).tolist()
    [0, 1, 0]
    """
    if texts is None:
        return None
    first: dict[str, int] = {}
    return np.array([first.setdefault(text, row) for row, text in enumerate(texts)], dtype=np.int64)
