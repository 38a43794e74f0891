"""Ask a judge the questions of a design until it is decided or the budget is used, and keep every answer.

``Asking`` is the loop that ``hn.judge`` and `hardneg judge` share. A judge is a function of pairs; its answers are
bools or grades, and None where it has none. With ``confirm`` a second judge, usually a person, checks each
pair that the first one flags: then the bounds allow for false negatives that the first one misses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from hardneg.core.errors import ArgumentError
from hardneg.judging.design import FALSE, NOT_ASKED, TRUE, UNKNOWN, Design, PairIndices, Sensitivity

RowPair = tuple[int, int]
Judge = Callable[[list[RowPair]], Iterable[Any]]
"""[(query row, document row), ...] -> for each pair a bool, a grade, or None if there is no answer."""

Keep = Callable[[RowPair, float | None], None]
"""Called with each answer as soon as there is one."""

Grade = float | None


def grade_of(answer: Any) -> Grade:
    """Return an answer as a number; None and NaN mean that there is none.

    Raises:
        ArgumentError: If the answer is neither a number, a bool nor None.
    """
    if answer is None:
        return None
    if hasattr(answer, "item") and getattr(answer, "ndim", 0) == 0:
        answer = answer.item()
    if not isinstance(answer, (bool, int, float)):
        raise ArgumentError("judge", "answers that are bools, grades or None", repr(answer)[:60])
    return None if math.isnan(answer) else float(answer)


def answers_of(judge: Callable[[list[Any]], Iterable[Any]], pairs: list[Any]) -> Iterator[Grade]:
    """Yield the answer of a judge to each pair, as soon as there is one.

    Raises:
        ArgumentError: If the judge returns another number of answers, or other values.
    """
    place = 0
    for place, answer in enumerate(judge(pairs), 1):
        if place > len(pairs):
            break
        yield grade_of(answer)
    if place != len(pairs):
        got = f"{'more than ' * (place > len(pairs))}{min(place, len(pairs))} for {len(pairs)} pairs"
        raise ArgumentError("judge", "one answer for each pair", got)


@dataclass(eq=False)
class Asking:
    """The answers to the questions of a design, and the loop that asks for more.

    Attributes:
        design: The questions.
        above: A pair with a grade above this is a false negative.
        grades: Grade of each question; None where the judge had no answer.
        free: Questions whose answers cost nothing, because they were known before.
        keep: Called with each new answer.
        missed: False negatives that the judge did not flag and people found. They are results, but the tests count
            only what the judge finds, and divide by its sensitivity.
    """

    design: Design
    above: float
    grades: dict[int, Grade] = field(default_factory=dict)
    free: set[int] = field(default_factory=set)
    keep: Keep = lambda pair, grade: None
    missed: set[int] = field(default_factory=set)

    @property
    def spent(self) -> int:
        """Number of answers that count against the budget."""
        return len(self.grades) - len(self.free)

    def put(self, question: int, grade: Grade, false: bool | None = None, *, free: bool = False) -> None:
        """Store the answer to a question.

        Args:
            question: Number of the question.
            grade: The answer; None if there is no usable one.
            false: Whether the pair is a false negative; None decides by the grade.
            free: Whether the answer cost nothing.
        """
        self.grades[question] = grade
        if free:
            self.free.add(question)
        false = grade > self.above if false is None and grade is not None else false
        self.design.value[question] = UNKNOWN if false is None else FALSE if false else TRUE

    @cached_property
    def number_of(self) -> dict[RowPair, int]:
        """Number of the question about a pair of rows; pairs of the same texts are one question."""
        return {pair: question for question, pair in enumerate(self.pairs(np.arange(len(self.design.value))))}

    def next(self, budget: int, begun: Sequence[RowPair] = ()) -> list[RowPair]:
        """Return the pairs to judge next.

        Args:
            budget: Maximum total number of answers.
            begun: The last batch of an earlier run. Its open pairs come first: the next batch depends on all answers to
                this one, so a run that was killed then asks the same pairs as one that was not.
        """
        return self.pairs(self._next(budget, begun))

    def _next(self, budget: int, begun: Sequence[RowPair]) -> PairIndices:
        """Return the questions of ``next``."""
        numbers = np.array([self.number_of[pair] for pair in begun if pair in self.number_of], dtype=np.int64)
        waiting = numbers[self.design.value[numbers] == NOT_ASKED][: max(budget - self.spent, 0)]
        return waiting if len(waiting) else self.design.ask(budget, self.spent)

    def ask(
        self,
        judge: Judge,
        budget: int,
        progress: Callable[[int], None] = lambda done: None,
        begun: Sequence[RowPair] = (),
    ) -> None:
        """Ask the judge until everything is decided or the budget is used up.

        Args:
            judge: The judge.
            budget: Maximum total number of answers.
            progress: Called with the number of new answers.
            begun: The last batch of an earlier run, which is finished first.

        Raises:
            ArgumentError: If the judge returns another number of answers, or other values.
        """
        while len(questions := self._next(budget, begun)):
            pairs = self.pairs(questions)
            for question, pair, grade in zip(questions.tolist(), pairs, answers_of(judge, pairs), strict=True):
                self.keep(pair, grade)
                self.put(question, grade)
                progress(1)

    def put_checked(self, question: int, grade: Grade, by_person: Grade, above_of_people: float) -> None:
        """Store the answers of a judge that errs and of a person to the same pair, whatever the judge says.

        Args:
            question: Number of the question.
            grade: The judge's answer.
            by_person: The person's answer; None if there is no usable one.
            above_of_people: Grade of a person above which a pair is a false negative.
        """
        relevant = None if by_person is None else by_person > above_of_people
        if self.flags(grade) or (grade is None and by_person is None):
            self.put(question, by_person, relevant)
            return
        self.put(question, grade if by_person is None else by_person, False)
        if relevant:
            self.missed.add(question)

    def sensitivity(
        self, sample: PairIndices, grades: Mapping[int, Grade], people: Mapping[int, Grade], above_of_people: float
    ) -> Sensitivity:
        """Return the sensitivity of the judge on a sample of the hardest rule that people have answered.

        Args:
            sample: Questions of the sample, as ``Design.sample`` returns them.
            grades: The judge's answer to each question.
            people: The answer of people to each question.
            above_of_people: Grade of a person above which a pair is a false negative.
        """
        flags = [self.flags(grades[question]) for question in sample.tolist()]
        answers = [people[question] for question in sample.tolist()]
        relevant = [None if answer is None else answer > above_of_people for answer in answers]
        rule = self.design.populations[-1].name
        return Sensitivity.of(*found_in_sample(flags, relevant), self.design.error, rule)

    def flags(self, grade: Grade) -> bool:
        """Whether an answer of the judge calls a pair a false negative."""
        return grade is not None and grade > self.above

    def pairs(self, questions: PairIndices) -> list[RowPair]:
        """Return the pair of rows of each question."""
        queries, documents = self.design.query[questions], self.design.document[questions]
        return list(zip(queries.tolist(), documents.tolist(), strict=True))


def confirmed(judge: Judge, confirm: Judge, above: float, report: Callable[[int], None]) -> Judge:
    """Return a judge whose flags a second judge confirms; pairs that the first does not flag are not confirmed.

    Args:
        judge: The judge that errs.
        confirm: The second judge, usually a person.
        above: Grade above which a pair is flagged.
        report: Called with the number of pairs that the second judge checks.
    """

    def both(pairs: list[RowPair]) -> list[Grade]:
        grades = list(answers_of(judge, pairs))
        flagged = [place for place, grade in enumerate(grades) if grade is not None and grade > above]
        if flagged:
            report(len(flagged))
            for place, grade in zip(flagged, answers_of(confirm, [pairs[place] for place in flagged]), strict=True):
                grades[place] = grade
        return grades

    return both


def found_among(judge: Judge, positives: Sequence[RowPair], above: float) -> tuple[int, int]:
    """Return how many known positives the judge flags, and how many it answered.

    Args:
        judge: The judge.
        positives: Pairs that are known to be relevant.
        above: Grade above which a pair is flagged.
    """
    if not positives:
        return 0, 0
    grades = list(answers_of(judge, list(positives)))
    # A question without an answer is a false negative that would not have been flagged.
    return sum(grade is not None and grade > above for grade in grades), len(grades)


def found_in_sample(flags: Sequence[bool], relevant: Sequence[bool | None]) -> tuple[int, int]:
    """Return how many relevant pairs of a random sample a judge flags, and how many relevant ones there are.

    Where people could not tell, the worse case for the judge counts: a pair that it flags is left out, any other is a
    relevant one that it missed.

    Args:
        flags: Whether the judge flags each pair.
        relevant: The answers of people.

    Example:
        >>> found_in_sample([True, False, True, False], [True, True, None, None])
        (1, 3)
    """
    both = list(zip(flags, relevant, strict=True))
    found = sum(flag and answer is True for flag, answer in both)
    return found, found + sum(not flag and answer is not False for flag, answer in both)
