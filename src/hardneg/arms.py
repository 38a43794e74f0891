"""Arms of a comparison as text: a paper or a recipe, and after ``@`` who shares the batch.

simclr(temperature=0.25)
hcl(beta=1, tau_plus=0.1)
supervised(negatives="OtherLabel() * Tilt(1.0)") @ proximity(num_candidates=500)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from hardneg.batches import parse_batches
from hardneg.negatives import Tilt, parse
from hardneg.negatives.spec import read_expression
from hardneg.options import RECIPES, TrainOptions
from hardneg.schedules import Number, Schedule, registered_schedules


@dataclass(frozen=True)
class Arm:
    """One thing to compare: a recipe with options that differ from the defaults."""

    text: str
    recipe: str
    options: dict[str, Any]

    def complete(self, **common: Any) -> TrainOptions:
        """The options of a run; those that the arm names win over the common ones."""
        known = {field.name for field in fields(RECIPES[self.recipe])}
        return RECIPES[self.recipe](**{k: v for k, v in common.items() if k in known} | self.options)

    def with_option(self, name: str, value: Any) -> Arm:
        return replace(self, options=self.options | {name: value})

    @property
    def temperature(self) -> float:
        return float(self.options.get("temperature", RECIPES[self.recipe].temperature))

    @property
    def beta(self) -> float:
        """The tilt of its negatives, at the start of training if it is scheduled."""
        negatives = parse(self.options.get("negatives", RECIPES[self.recipe].negatives)).at(0, 1)
        tilts = [f.beta for f in negatives.factors if isinstance(f, Tilt) and f.source is None]
        return sum(float(beta) for beta in tilts)  # type: ignore[arg-type]

    @property
    def effective_temperature(self) -> float:
        return self.temperature / (1.0 + self.beta)


def parse_arm(text: str) -> Arm:
    """Reads an arm; errors name what is wrong before anything is loaded.

    >>> parse_arm("hcl(beta=1, tau_plus=0.1) @ knn()").options["negatives"]
    'Tilt(1)'
    """
    method, at, batches = (part.strip() for part in text.partition("@"))
    made = read_expression(method, {**_papers, **_recipes(), **registered_schedules()})
    if not isinstance(made, tuple):
        raise ValueError(f"an arm needs a paper or a recipe such as 'simclr()', got {method!r}.")
    recipe, options = made
    if at:
        parse_batches(batches)
        options = options | {"batches": batches}
    arm = Arm(text.strip(), recipe, options)
    parse(arm.complete().negatives)
    return arm


Made = tuple[str, dict[str, Any]]


def _simclr(temperature: float = 0.5, **options: Any) -> Made:
    return "simclr", {"temperature": temperature, **options}


def _debiased(temperature: float = 0.5, tau_plus: float = 0.1) -> Made:
    return "simclr", {"temperature": temperature, "tau_plus": tau_plus}


def _hcl(temperature: float = 0.5, tau_plus: float = 0.1, beta: Number = 1.0) -> Made:
    return "simclr", {"temperature": temperature, "tau_plus": tau_plus, "negatives": f"Tilt({beta!r})"}


def _supcon(temperature: float = 0.07) -> Made:
    return "supervised", {"temperature": temperature, "positives_in_denominator": "all"}


def _scl(temperature: float = 0.5) -> Made:
    return "supervised", {"temperature": temperature, "num_negatives": "candidates", "reduction": "pairs"}


def _hscl(temperature: float = 0.5, beta: Number = 1.0, detach: bool = False) -> Made:
    recipe, options = _scl(temperature)
    return recipe, options | {"negatives": f"OtherLabel() * Tilt({beta!r}, detach={detach})"}


def _hscl_threshold(temperature: float = 0.5, threshold: Number = 0.0) -> Made:
    recipe, options = _scl(temperature)
    return recipe, options | {"negatives": f"OtherLabel() * Threshold({threshold!r})"}


def _moco(temperature: float = 0.2, **options: Any) -> Made:
    return "moco", {"temperature": temperature, **options}


def _moco_v3(temperature: float = 0.2, **options: Any) -> Made:
    return "moco", {"temperature": temperature, "version": "v3", **options}


def _ring(
    temperature: float = 0.07, inner: Number = 0.1, outer: Number = 1.0, dynamic_inner: bool = True, **options: Any
) -> Made:
    ring = f"Ring({inner!r}, outer={outer!r}, dynamic_inner={dynamic_inner})"
    return "moco", {"temperature": temperature, "negatives": ring, **options}


_papers: dict[str, Callable[..., Made]] = {
    "simclr": _simclr,
    "debiased": _debiased,
    "hcl": _hcl,
    "supcon": _supcon,
    "scl": _scl,
    "hscl": _hscl,
    "hscl_threshold": _hscl_threshold,
    "moco": _moco,
    "moco_v3": _moco_v3,
    "ring": _ring,
}


def _recipes() -> dict[str, Callable[..., Made]]:
    def named(recipe: str) -> Callable[..., Made]:
        def made(**options: Any) -> Made:
            known = {field.name for field in fields(RECIPES[recipe])}
            for name, value in options.items():
                if name not in known:
                    raise ValueError(f"{recipe} needs options among {', '.join(sorted(known))}, got {name!r}.")
                if isinstance(value, Schedule):
                    raise ValueError(f"{recipe} needs a number, got {name}={value!r}; schedules go into negatives.")
            return recipe, options

        return made

    return {recipe: named(recipe) for recipe in RECIPES if recipe not in _papers}
