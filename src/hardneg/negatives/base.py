"""The base class of all distributions of negatives, their product, and the uniform distribution.

A distribution assigns a log-weight to every (anchor, candidate) pair. Losses, mining, audits and ``hardneg explain``
all call the methods of ``Negatives``; a new distribution is a frozen dataclass with ``log_weight(tile)``
(docs/extend.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from hardneg.core.bounds import Bound, dense_weights
from hardneg.core.errors import ArgumentError, check_among, warn_once
from hardneg.core.schedules import Number, Schedule, schedules_of, short_repr
from hardneg.core.text import summary
from hardneg.core.tiles import Tile
from hardneg.core.types import NEVER, LogWeights, Scores
from hardneg.negatives.closed import ClosedForm, product_of

_registry: dict[str, type[Negatives]] = {}


class Negatives:
    """The distribution q(x-|x): the probability with which each candidate is a negative of an anchor.

    Subclasses are frozen dataclasses that define ``log_weight(tile)``; defining one registers it in the grammar.
    ``log_weight`` returns the log-weight of each pair, up to a constant per anchor, and ``NEVER`` for candidates that
    are not negatives. It may use the pair itself and the values in ``tile.bound``: whatever depends on the whole row of
    an anchor (a threshold at a rank, a maximum) is declared in ``bounds()`` and computed beforehand. ``a * b``
    multiplies two distributions, from left to right: the bounds of ``b`` see only the candidates that ``a`` kept.
    """

    examples: ClassVar[tuple[str, ...]] = ()
    """Calls in the grammar, for help texts and conformance tests; required if a field has no default."""
    masks: ClassVar[bool] = False
    """True if it only removes candidates: every log-weight is 0 or ``NEVER``."""
    removes: ClassVar[bool] = True
    """True if it can remove candidates; False if every log-weight is finite."""
    ranks: ClassVar[bool] = False
    """For a class with only ``log_weights(scores)``: True if a weight depends on which other candidates are valid."""
    if_empty: ClassVar[str] = "Use a larger batch, add a pool, or remove fewer candidates."
    """Advice for the warning that the loss emits if many anchors are left without a negative."""
    textual: ClassVar[bool] = True
    """True if it can be written in the grammar; False if it is built from tensors."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Inputs that it reads besides the scores: "labels", "clusters", "ids", "positives" or "source"."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.textual:
            _registry[cls.__name__] = cls

    def bounds(self) -> Mapping[str, Bound]:
        """Declare the per-anchor values that must be known before any pair can be weighed.

        Returns:
            Bounds by name. They are computed in a sweep over all candidates; ``tile.bound[name]`` holds the results [r,
            1].
        """
        return {}

    def log_weight(self, tile: Tile) -> Tensor:
        """Compute the log-weights of the pairs of a tile.

        Args:
            tile: Scores of r anchors against c candidates, with their tags and the declared bounds.

        Returns:
            Log-weights, [r, c] or broadcastable to it. Invalid candidates are masked by the caller.

        Raises:
            ArgumentError: If the distribution only defines ``log_weights(scores)``, which needs whole rows.
        """
        raise not_pointwise(self, "a tile of candidates")

    def allows(self, tile: Tile) -> Tensor | None:
        """Return which pairs of a tile a ``Mask`` keeps, [r, c]; None for any other distribution."""
        return None

    def log_weights(self, scores: Scores) -> LogWeights:
        """Compute the log-weights of all candidates of every anchor.

        Args:
            scores: Dense scores of b anchors against n candidates.

        Returns:
            Log-weights [b, n]; ``NEVER`` for candidates that are not valid or not negatives.
        """
        if not self.pointwise and self.factors == (self,):
            raise not_pointwise(self, "no log_weights(scores)")
        return dense_weights(self.factors, scores)

    def reads(self) -> frozenset[str]:
        """Return the inputs that it reads: ``needs``, plus "guide" if it uses the similarities of another model."""
        return frozenset((*self.needs, "guide") if getattr(self, "by", "score") == "guide" else self.needs)

    @property
    def pointwise(self) -> bool:
        """True if it defines ``log_weight`` and so works on tiles; otherwise it needs whole rows."""
        return type(self).log_weight is not Negatives.log_weight

    @property
    def looks_around(self) -> bool:
        """True if a weight depends on which other candidates are present."""
        return self.ranks or any(bound.over == "candidates" for bound in self.bounds().values())

    @property
    def batch_scope(self) -> bool:
        """True if a weight depends on which other anchors are in the batch."""
        return any(bound.scope == "batch" for bound in self.bounds().values())

    @property
    def monotone(self) -> bool:
        """True if removing a candidate implies removing all candidates with lower scores."""
        return False

    @property
    def slope(self) -> Number:
        """The beta of log w = beta * score if all candidates are weighed like this; otherwise 0."""
        return 0.0

    @property
    def slope_detached(self) -> bool:
        """True if no gradient flows through the weights of the tilt."""
        return True

    @property
    def most(self) -> int | None:
        """The largest number of candidates that it keeps per anchor; None if it sets no limit."""
        return None

    @property
    def only_source(self) -> str | None:
        """The name of the only source whose candidates it keeps; None if it keeps several."""
        return None

    def closed_form(self) -> ClosedForm | None:
        """Return what the fused kernels need to compute it; None if it is not of the closed family."""
        return None

    def shown(self, wanted: int | None) -> int | None:
        """Return how many of the nearest candidates suffice to find the nearest ``wanted`` that it keeps.

        Args:
            wanted: Number of kept candidates that are needed; None for all of them.

        Returns:
            The number of nearest candidates to inspect; None if that is not known in advance.
        """
        return wanted if self.pointwise and not self.removes and not self.looks_around else None

    def describe(self) -> str:
        """Return a sentence in plain words about what it does with its numbers, for ``hardneg explain``.

        Schedules must have been evaluated with ``at``. The default is the first paragraph of the docstring of the
        class.
        """
        return summary(type(self))

    def __mul__(self, other: Negatives) -> Negatives:
        if not isinstance(other, Negatives):
            return NotImplemented
        product = Product((*self.factors, *other.factors))
        _warn_if_order_matters(product.factors)
        return product

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def factors(self) -> tuple[Negatives, ...]:
        """The factors of a product, from left to right; a distribution that is not a product is its own only factor."""
        return (self,)

    def at(self, step: int, total: int | None = None) -> Negatives:
        """Return this distribution with its schedules evaluated.

        Args:
            step: The current step or epoch.
            total: The total number of steps or epochs, for schedules that need it.
        """
        numbers = {name: schedule(step, total) for name, schedule in schedules_of(self).items()}
        return replace(self, **numbers) if numbers else self  # type: ignore[type-var]

    def schedules(self) -> list[Schedule]:
        """Return the schedules among its numbers."""
        return [schedule for factor in self.factors for schedule in schedules_of(factor).values()]


def not_pointwise(factor: Negatives, where: str) -> ArgumentError:
    """Build the error for a distribution that only works on whole rows where tiles are required."""
    name = type(factor).__name__
    fix = f"write {name}.log_weight(tile), and bounds() for values of whole rows (docs/extend.md)"
    return ArgumentError(
        name, f"whole rows, because it does not define log_weight(tile): not possible with {where}", None, fix
    )


By = Literal["score", "guide"]
"""Whose similarities a distribution reads: those of the model that is trained, or of another model."""


def check_by(who: str, by: By) -> None:
    """Raise unless ``by`` is "score" (the model that is trained) or "guide" (another model)."""
    check_among(who, "by", by, get_args(By))


def registered_negatives() -> dict[str, type[Negatives]]:
    """Return every distribution of the grammar, by name."""
    return dict(_registry)


def keep(scores: Scores | Tile, mask: Tensor) -> LogWeights:
    """Return log-weight 0 for valid candidates inside the mask and ``NEVER`` for all others.

    Args:
        scores: Dense scores [b, n] or a tile of them.
        mask: True for the candidates to keep, broadcastable to [b, n].
    """
    if isinstance(scores, Tile):
        return scores.keep(mask)
    return scores.candidates.new_zeros(scores.valid.shape).masked_fill(~(scores.valid & mask), NEVER)


class Mask(Negatives, ABC):
    """Base class of distributions that are built from tensors and only remove candidates.

    Subclasses define ``allows(tile)``.
    """

    masks: ClassVar = True
    textual: ClassVar = False

    @abstractmethod
    def allows(self, tile: Tile) -> Tensor:
        """Return which pairs of a tile are kept, [r, c] or broadcastable to it."""

    def log_weight(self, tile: Tile) -> Tensor:
        """Return log-weight 0 for the kept pairs and ``NEVER`` for the others."""
        return tile.keep(self.allows(tile))


@dataclass(frozen=True, repr=False)
class Product(Negatives):
    """The product of several distributions, applied from left to right; written ``a * b``.

    >>> from hardneg.negatives import OtherLabel, Tilt
    >>> OtherLabel() * Tilt(1.0)
    OtherLabel() * Tilt(1.0)
    """

    _factors: tuple[Negatives, ...]
    textual: ClassVar = False  # written with *, not by its name

    def __post_init__(self) -> None:
        flat = tuple(each for factor in self._factors for each in factor.factors)
        object.__setattr__(self, "_factors", flat)
        object.__setattr__(self, "masks", all(factor.masks for factor in flat))
        object.__setattr__(self, "removes", any(factor.removes for factor in flat))
        object.__setattr__(self, "ranks", any(factor.ranks for factor in flat))

    def log_weight(self, tile: Tile) -> Tensor:
        """Raise: each factor has its own bounds, which one tile does not hold."""
        what = "to be evaluated factor by factor, each with its own bounds"
        raise ArgumentError("Product", what, "log_weight(tile)", "use weigh(product.factors, tile, bounds)")

    @property
    def factors(self) -> tuple[Negatives, ...]:
        """The factors, from left to right; nested products are flattened."""
        return self._factors

    @property
    def pointwise(self) -> bool:
        """True if every factor is pointwise."""
        return all(factor.pointwise for factor in self._factors)

    @property
    def looks_around(self) -> bool:
        """True if a weight of any factor depends on which other candidates are present."""
        return any(factor.looks_around for factor in self._factors)

    @property
    def batch_scope(self) -> bool:
        """True if a weight of any factor depends on the other anchors of the batch."""
        return any(factor.batch_scope for factor in self._factors)

    @property
    def monotone(self) -> bool:
        """True if some factor removes candidates, and each that does is monotone."""
        removing = [factor for factor in self._factors if factor.removes]
        return bool(removing) and all(factor.monotone for factor in removing)

    @property
    def slope(self) -> Number:
        """The sum of the slopes if every factor is a tilt or uniform; otherwise 0.

        A sum that contains a schedule is only known at a step: call ``at`` first.
        """
        slopes = [factor.slope for factor in self._factors if not isinstance(factor, Uniform)]
        if len(slopes) == 1:
            return slopes[0]
        plain = [each for each in slopes if not isinstance(each, Schedule)]
        tilts = len(plain) == len(slopes) and all(isinstance(each, Tensor) or each != 0.0 for each in plain)
        return sum(plain) if tilts else 0.0

    @property
    def slope_detached(self) -> bool:
        """True if no gradient flows through the tilt of any factor."""
        return all(factor.slope_detached for factor in self._factors)

    def closed_form(self) -> ClosedForm | None:
        """Return the closed form of the product; None if there is none."""
        return product_of(factor.closed_form() for factor in self._factors)

    def shown(self, wanted: int | None) -> int | None:
        """Return how many of the nearest candidates to inspect, from the last factor to the first."""
        for factor in reversed(self._factors):
            wanted = factor.shown(wanted)
        return wanted

    def reads(self) -> frozenset[str]:
        """Return the inputs that any factor reads."""
        return frozenset().union(*(factor.reads() for factor in self._factors))

    @property
    def most(self) -> int | None:
        """The smallest limit of any factor; None if no factor sets one."""
        return min((factor.most for factor in self._factors if factor.most is not None), default=None)

    def at(self, step: int, total: int | None = None) -> Negatives:
        """Return the product with the schedules of all factors evaluated."""
        return Product(tuple(factor.at(step, total) for factor in self._factors))

    def __repr__(self) -> str:
        return " * ".join(repr(factor) for factor in self._factors)


@dataclass(frozen=True, repr=False)
class Uniform(Negatives):
    """Gives every valid candidate the same weight, as SimCLR, MoCo and SimCSE do."""

    removes: ClassVar = False

    def log_weight(self, tile: Tile) -> Tensor:
        """Compute a log-weight of 0 for every pair."""
        return tile.constant(0.0)

    def closed_form(self) -> ClosedForm:
        """Return the closed form without a tilt, band or mask."""
        return ClosedForm()


def _warn_if_order_matters(factors: tuple[Negatives, ...]) -> None:
    """Warn if a mask follows a factor whose weights depend on which candidates are present."""
    for position, factor in enumerate(factors):
        ranked = next((before for before in factors[:position] if before.looks_around), None)
        if ranked is not None and factor.masks and not factor.looks_around:
            name, mask = type(ranked).__name__, type(factor).__name__
            warn_once(
                f"order:{name}*{mask}",
                f"{name} * {mask}: the order matters. {name} selects among all candidates, and {mask} then removes "
                f"some of the selected ones. Write {mask} * {name} to apply {mask} first.",
            )
