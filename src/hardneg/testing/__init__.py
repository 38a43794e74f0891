"""The conformance suite: what every distribution of negatives must do, for the ones here and for yours.

from hardneg.testing import check_negatives
check_negatives(MyNegatives)
"""

from __future__ import annotations

from hardneg.negatives import Negatives, parse
from hardneg.testing.examples import make_pairing as make_pairing
from hardneg.testing.examples import make_scores as make_scores
from hardneg.testing.examples import take_columns as take_columns
from hardneg.testing.examples import take_rows as take_rows
from hardneg.testing.rules import Check, compiles
from hardneg.testing.rules import rules_of_text as rules_of_text
from hardneg.testing.rules import rules_of_weights as rules_of_weights


def check_negatives(negatives: Negatives | type[Negatives], *, compile: bool = True) -> None:
    """Raises AssertionError, with a sentence that says what to fix, unless the distribution keeps every rule.

    A class is checked over its ``examples``, or its default construction where it has none; an instance as it is. Its
    schedules are taken at step 0 of 10. ``compile=False`` leaves out torch.compile, which takes most of the time and
    resets torch's compiler.

    >>> from hardneg import Tilt
    >>> check_negatives(Tilt, compile=False)
    """
    for each in [negatives] if isinstance(negatives, Negatives) else _examples(negatives):
        for rule in rules_of_text:
            _apply(rule, each)
        for rule in rules_of_weights:
            if compile or rule is not compiles:
                _apply(rule, each.at(0, 10))


def _examples(cls: type[Negatives]) -> list[Negatives]:
    try:
        return [parse(text) for text in cls.examples] or [cls()]
    except Exception as error:
        raise AssertionError(
            f"{cls.__name__} cannot be built ({error}); give every field a default, or list calls of the grammar in "
            f"examples: ClassVar = ('{cls.__name__}(...)',)."
        ) from error


def _apply(rule: Check, negatives: Negatives) -> None:
    try:
        problem = rule(negatives)
    except Exception as error:
        raise AssertionError(
            f"{type(negatives).__name__} raises {type(error).__name__} ({error}). The rule: {rule.__doc__}"
        ) from error
    if problem:
        raise AssertionError(f"{negatives!r} {problem}.")
