"""The registry of papers: each paper by name, with the recipe that trains it.

``hardneg.papers`` decorates its functions with ``trained_by``; the CLI and the recipes read ``registered()``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.negatives import Uniform, to_text

PaperFunction = TypeVar("PaperFunction", bound=Callable[..., Any])


@dataclass(frozen=True)
class Paper:
    """A paper whose method a recipe of ``hardneg train`` trains.

    Attributes:
        name: Name of the function in ``hardneg.papers``.
        make: That function.
        recipe: Name of the recipe.
        more: Options of the recipe that the loss does not determine.
    """

    name: str
    make: Callable[..., Any]
    recipe: str
    more: Mapping[str, Any]

    def options(self, *values: Any, **arguments: Any) -> dict[str, Any]:
        """Return the options of the recipe for these arguments of the paper.

        They are the options that the paper sets itself, and every option of its loss that differs from the default.

        Example:
            >>> from hardneg import papers
            >>> papers.registered()["hcl"].options(beta=2.0)
            {'temperature': 0.5, 'tau_plus': 0.1, 'negatives': 'Tilt(2.0)'}
        """
        made = self.make(*values, **arguments)
        loss: ContrastiveLoss = getattr(made, "inner", made)
        usual, taken = ContrastiveLoss(loss.negatives), inspect.signature(self.make).parameters
        found: dict[str, Any] = {"temperature": loss.temperature}
        for name in ("tau_plus", "num_negatives", "positives_in_denominator", "reduction", "same_label_negatives"):
            if name in taken or getattr(loss, name) != getattr(usual, name):
                found[name] = getattr(loss, name)
        if loss.negatives != Uniform():
            found["negatives"] = to_text(loss.negatives)
        if loss.objective.name != usual.objective.name:
            found["objective"] = repr(loss.objective)
        if loss.generate is not None:
            found["generate"] = repr(loss.generate)
        return {**found, **self.more}


_registered: dict[str, Paper] = {}


def registered() -> dict[str, Paper]:
    """Return every paper that a recipe trains, by name."""
    return dict(_registered)


def trained_by(recipe: str, **more: Any) -> Callable[[PaperFunction], PaperFunction]:
    """Register a paper with the recipe that trains it.

    Args:
        recipe: Name of the recipe.
        **more: Options of the recipe that the paper's loss does not determine.
    """

    def register(make: PaperFunction) -> PaperFunction:
        _registered[make.__name__] = Paper(make.__name__, make, recipe, more)
        return make

    return register
