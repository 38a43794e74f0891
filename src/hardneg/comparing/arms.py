"""Arms of a comparison as text: a paper or a recipe with its arguments, and after ``@`` the batch composition.

    simclr(temperature=0.25)
    hcl(beta=1, tau_plus=0.1)
    supervised(negatives="OtherLabel() * Tilt(1.0)") @ proximity(num_candidates=500)

``parse_arm`` reads such a text into an ``Arm``. ``canonical_options`` writes equivalent options in one way, so that
equal arms are found (checks.py), runs get stable folders (runs.py) and runs on disk are matched to arms
(reporting/reading.py).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial, reduce
from operator import mul
from typing import Any, cast

from hardneg import papers
from hardneg.batching.spec import parse_batches
from hardneg.core.errors import ArgumentError, UnknownName, argument_error, located
from hardneg.core.schedules import LONG, Number, Schedule, adaptive, registered_schedules, value_of
from hardneg.core.text import printable
from hardneg.negatives import Negatives, parse
from hardneg.negatives.grammar import read_expression
from hardneg.training.loop.checks import number_of, try_negatives
from hardneg.training.loop.optimisers import read_optimiser, read_rate
from hardneg.training.options import RECIPES, TrainOptions

SCHEDULED = ("temperature", "tau_plus")
"""Options that may be schedules, as text; other schedules are arguments of negatives."""
_expression_readers = {"negatives": parse, "batches": parse_batches, "optimizer": read_optimiser, "schedule": read_rate}
EXPRESSIONS = tuple(_expression_readers)
"""Options that are expressions, and so can be written in several equivalent ways."""
_moments = range(0, LONG + 1, LONG // 100)  # steps at which the extremes of a schedule are looked for


@dataclass(frozen=True)
class Arm:
    """A recipe with the options that differ from its defaults: one line of a comparison.

    Attributes:
        text: The arm as it was written.
        recipe: Name of the recipe that trains it.
        options: Options that the text sets, and options that define the paper.
        defaults: The paper's values of options that the text could have set; common options override them.
        own: Names of the options that define the paper, which common options may not change.
        written: Names of the arguments that the text gives.
        call: Calls the paper again, with further arguments; None for a recipe.
        parameters: Arguments of the paper with their defaults, such as ``beta``.
    """

    text: str
    recipe: str
    options: dict[str, Any]
    defaults: dict[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    written: frozenset[str] = field(default=frozenset(), compare=False)
    call: Callable[..., Arm] | None = field(default=None, compare=False, repr=False)
    parameters: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def complete(self, **common: Any) -> TrainOptions:
        """Return the options of a run: the arm's own, then ``common``, then the paper's defaults."""
        known = {one.name for one in fields(RECIPES[self.recipe])}
        usual = {name: value for name, value in (self.defaults | common).items() if name in known}
        return RECIPES[self.recipe](**usual | self.options)

    def with_defaults(self, common: dict[str, Any]) -> Arm:
        """Return the arm with common options as defaults; what the arm writes wins."""
        return replace(self, defaults=self.defaults | common)

    def with_option(self, name: str, value: Any) -> Arm:
        """Return the arm with one option replaced."""
        return replace(self, options=self.options | {name: value})

    def tunable(self) -> dict[str, Any]:
        """Return the names that ``tuned`` can set, with their present values.

        These are fields of the factors of the negatives, such as ``beta`` of a tilt, arguments of the paper, and
        options of the recipe; of several with one name the last kind counts.
        """
        known = [(name, getattr(factor, name)) for factor in self._negatives().factors for name in _names_in(factor)]
        return dict(known) | self.parameters | {one.name: one.default for one in fields(RECIPES[self.recipe])}

    def tuned(self, values: Mapping[str, float]) -> Arm:
        """Return the arm with other values of options, of arguments of its paper, or of fields of its negatives.

        Args:
            values: Numbers by name; the names are keys of ``tunable()``. Whole numbers become integers where the
                present value is one.

        Example:
            >>> parse_arm("hcl()").tuned({"beta": 2.0, "temperature": 0.2}).options
            {'negatives': 'Tilt(2.0)', 'temperature': 0.2}
            >>> parse_arm("simclr(negatives='Ring(0.1, 0.5)')").tuned({"outer": 0.25}).options["negatives"]
            'Ring(inner=0.1, outer=0.25)'
        """
        present = self.tunable()
        whole = {name: isinstance(present[name], int) and not isinstance(present[name], bool) for name in values}
        given = {name: int(x) if whole[name] and float(x).is_integer() else x for name, x in values.items()}
        options = {one.name for one in fields(RECIPES[self.recipe])}
        arguments = {name: x for name, x in given.items() if name in self.parameters and name not in options}
        remade = self.call(**arguments).options if self.call and arguments else {}
        arm = replace(self, options=self.options | remade)
        if of_factors := {name: x for name, x in given.items() if name not in self.parameters and name not in options}:
            factors = [
                replace(cast(Any, one), **{name: x for name, x in of_factors.items() if name in _names_in(one)})
                for one in arm._negatives().factors
            ]
            arm = arm.with_option("negatives", repr(reduce(mul, factors)))
        return replace(arm, options=arm.options | {name: x for name, x in given.items() if name in options})

    @property
    def temperature(self) -> float:
        """Lowest temperature over its schedule."""
        number = number_of(self.complete().temperature)
        if isinstance(number, adaptive):
            return min(number.start, number.end)
        return min(value_of(number, step, LONG) for step in _moments)

    @property
    def temperature_moves(self) -> bool:
        """True if the temperature follows a schedule."""
        return isinstance(number_of(self.complete().temperature), Schedule)

    @property
    def beta(self) -> float:
        """Total tilt of the negatives at the strongest point of their schedules; 0 for untilted negatives."""
        slopes = [tilt.slope for tilt in self._tilts()]
        return max(sum(_strength(slope, step) for slope in slopes) for step in _moments)

    @property
    def tilt_detached(self) -> bool:
        """True if no gradient flows through the weights of the tilts.

        Only then does the arm repel exactly as it would untilted at its effective temperature.
        """
        return all(tilt.slope_detached for tilt in self._tilts())

    @property
    def tilt_moves(self) -> bool:
        """True if a tilt follows a schedule."""
        return any(isinstance(tilt.slope, Schedule) for tilt in self._tilts())

    @property
    def effective_temperature(self) -> float:
        """Temperature at which untilted negatives repel like these: temperature / (1 + beta)."""
        return self.temperature / (1.0 + self.beta)

    def has_untilted_twin_in(self, other: Arm, *, at_any_temperature: bool = False) -> bool:
        """Return whether ``other`` is the untilted control of this arm.

        That is an arm without a tilt that has this arm's effective temperature (within 2 %) and, apart from
        ``tau_plus``, the same options.

        Args:
            other: Candidate for the control.
            at_any_temperature: Accept any temperature, as when the temperatures are tuned.
        """
        moves = self.temperature_moves or other.temperature_moves
        near = not moves and abs(self.effective_temperature / other.temperature - 1.0) < 0.02
        alike = at_any_temperature or near
        return self.beta > 0.0 and other.beta == 0.0 and alike and self._other_settings() == other._other_settings()

    @property
    def uses_labels(self) -> bool:
        """True if training uses the class of every item."""
        return uses_labels(self.recipe, self.complete().as_dict())

    def trains_like(self, other: Arm) -> bool:
        """Return whether both arms train in the same way, however they are written."""
        mine, theirs = (canonical_options(arm.complete().as_dict()) for arm in (self, other))
        return self.recipe == other.recipe and mine == theirs

    def _negatives(self) -> Negatives:
        return parse(self.complete().negatives)

    def _tilts(self) -> list[Negatives]:
        return [factor for factor in self._negatives().factors if _tilts_all(factor)]

    def _other_settings(self) -> tuple[str, TrainOptions, list[str]]:
        """Everything but the temperature, the tilt, and ``tau_plus``, which is HCL's correction of its tilt."""
        others = replace(self.complete(), negatives="", temperature=1.0, tau_plus=0.0)
        factors = [repr(one) for one in self._negatives().factors if not _tilts_all(one) and one != parse("Uniform()")]
        return self.recipe, others, factors


def parse_arm(text: str) -> Arm:
    """Parse an arm from its text, without loading any data.

    Args:
        text: Call of a paper or a recipe, optionally followed by ``@`` and a call that names the batches.

    Returns:
        The arm with its options checked against the recipe.

    Raises:
        ArgumentError: If the text is not such a call, or an option has an impossible value.
        UnknownName: If the paper, the recipe or an option does not exist; names the closest ones.

    Example:
        >>> parse_arm("hcl(beta=1, tau_plus=0.1) @ knn()").options["negatives"]
        'Tilt(1)'
    """
    with located(printable(text.strip(), 80)):
        return _read_arm(text)


def uses_labels(recipe: str, options: dict[str, Any]) -> bool:
    """Return whether training uses the class of every item.

    True for the supervised recipe, and for negatives that cannot be weighed without labels.

    Args:
        recipe: Name of the recipe.
        options: Options of the run; unknown ones, as of another version, are ignored.
    """
    if recipe == "supervised":
        return True
    return not _can_weigh(recipe, options, labelled=False) and _can_weigh(recipe, options, labelled=True)


def canonical_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in a canonical form, which is equal for options that train alike.

    Expressions are parsed and written again, and whole numbers become floats.

    >>> canonical_options({"negatives": "Tilt(beta=1)", "temperature": 1})
    {'negatives': 'Tilt(1.0)', 'temperature': 1.0}
    """
    return {name: _plain(name, value) for name, value in options.items()}


def _can_weigh(recipe: str, options: dict[str, Any], *, labelled: bool) -> bool:
    """Return whether the negatives of these options can be weighed with, or without, labels."""
    known = {one.name for one in fields(RECIPES[recipe])} if recipe in RECIPES else set()
    try:
        try_negatives(RECIPES[recipe](**{k: v for k, v in options.items() if k in known}), labelled)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # also options of another version
        return False
    return True


def _names_in(factor: Negatives) -> list[str]:
    """Return the names of the arguments of a factor."""
    return [one.name for one in fields(factor)] if is_dataclass(factor) else []


def _tilts_all(factor: Negatives) -> bool:
    """Return whether this factor tilts the weights by the similarity."""
    return isinstance(factor.slope, Schedule) or factor.slope != 0.0


def _strength(beta: Number, step: int) -> float:
    """Return the tilt at a step; an adaptive schedule depends on training, so its far end counts."""
    return max(beta.start, beta.end) if isinstance(beta, adaptive) else value_of(beta, step, LONG)


def _read_arm(text: str) -> Arm:
    method, at, batches = (part.strip() for part in text.partition("@"))
    for recipe in RECIPES:
        if "-" in recipe and method.startswith(f"{recipe}("):  # a name in an expression has no hyphen
            method = recipe.replace("-", "_") + method.removeprefix(recipe)
    arm = read_expression(method, {**_readers(), **registered_schedules()})
    if not isinstance(arm, Arm):
        raise ArgumentError("An arm", "a paper or a recipe, such as 'simclr()'", repr(method))
    if at:
        parse_batches(batches)
        arm = arm.with_option("batches", batches)
    arm = replace(arm, text=text.strip())
    parse(arm.complete().negatives)
    return arm


def _readers() -> dict[str, Callable[..., Arm]]:
    """Return the callables that read arms: papers and recipes by name, a recipe being a paper without parameters."""
    recipes = {one.replace("-", "_"): _reader(one, one, inspect.Signature(), dict) for one in RECIPES}
    made = papers.registered().items()
    return recipes | {name: _reader(name, one.recipe, inspect.signature(one.make), one.options) for name, one in made}


def _reader(
    name: str, recipe: str, signature: inspect.Signature, options_of: Callable[..., dict[str, Any]]
) -> Callable[..., Arm]:
    """Return a callable that turns the arguments of a paper into an arm, with further options of the recipe."""
    parameters, known = signature.parameters, {one.name: one.default for one in fields(RECIPES[recipe])}

    def read(*values: Any, **options: Any) -> Arm:
        own = {one: value for one, value in options.items() if one in parameters}
        given = {*signature.bind(*values, **own).arguments, *options}
        needed = {n: x for n, x in options_of(*values, **own).items() if n in parameters or x != known.get(n)}
        chosen = needed | {one: value for one, value in options.items() if one in known or one not in own}
        _check_options(name, signature, [*dict.fromkeys([*parameters, *known])], chosen)
        # What the paper leaves to the version of its recipe, which common options may set as well.
        left = {n for n, one in parameters.items() if one.default is None and n not in given}
        chosen = {one: value for one, value in chosen.items() if one not in left}
        chosen = {one: repr(value) if isinstance(value, Schedule) else value for one, value in chosen.items()}
        usual = {one: value for one, value in chosen.items() if one in parameters and one not in given}
        defining = tuple(one for one in chosen if one not in parameters and one not in options)
        own_options = {one: value for one, value in chosen.items() if one not in usual}
        defaults_of = {n: one.default for n, one in parameters.items()}
        again = partial(read, *values, **options)
        return Arm("", recipe, own_options, usual, defining, frozenset(given), again, defaults_of)

    return read


def _check_options(name: str, signature: inspect.Signature, known: list[str], options: dict[str, Any]) -> None:
    plain = [str(one.replace(annotation=one.empty)) for one in signature.parameters.values()]
    usage = f"It is called as {name}({', '.join(plain)})" if plain else ""
    for option, value in options.items():
        if option not in known:
            raise UnknownName(option, known, f"in {name}", dict.fromkeys(known, usage))
        if isinstance(value, Schedule) and option not in SCHEDULED:
            raise argument_error(name, f"a number; only {' and '.join(SCHEDULED)} may be schedules", option, value)


def _plain(name: str, value: Any) -> Any:
    if name in SCHEDULED and isinstance(value, str):
        return _with_floats(number_of(value))
    if name not in _expression_readers:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    return _with_floats(_expression_readers[name](value))


def _with_floats(read: object) -> str:
    return ast.unparse(_Floats().visit(ast.parse(repr(read), mode="eval")))


class _Floats(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        whole = isinstance(node.value, int) and not isinstance(node.value, bool)
        return ast.Constant(float(node.value)) if whole else node  # type: ignore[arg-type]
