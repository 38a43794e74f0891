"""The conformance suite: checks that every distribution of negatives must pass, built-in or your own.

    from hardneg.testing import check_negatives
    check_negatives(MyNegatives)

``rules`` has one function per check, and ``examples`` the scores and pairings to try a distribution on, which are
useful in tests of your own too.
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
    """Raise AssertionError, with the fix, unless the distribution passes every check.

    Args:
        negatives: A class, which is checked with its ``examples`` or else its default construction; or one instance.
            Schedules are evaluated at step 0 of 10.
        compile: Whether to check torch.compile too, which takes most of the time and resets torch's compiler.

    Example:
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
    """Return the instances to check for a class."""
    try:
        return [parse(text) for text in cls.examples] or [cls()]
    except Exception as error:
        raise AssertionError(
            f"{cls.__name__} cannot be constructed ({error}); give every field a default, or list expressions in "
            f"examples: ClassVar = ('{cls.__name__}(...)',)."
        ) from error


def _apply(rule: Check, negatives: Negatives) -> None:
    """Raise AssertionError if the check fails or raises."""
    try:
        problem = rule(negatives)
    except Exception as error:
        what = (rule.__doc__ or rule.__name__).partition("\n")[0]
        raise AssertionError(
            f"{type(negatives).__name__} raises {type(error).__name__} ({error}). The check: {what}"
        ) from error
    if problem:
        raise AssertionError(f"{negatives!r} {problem}.")
