"""What a distribution of negatives is: log-weights over candidates, composed by ``*``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
    """q(x-|x): with what probability each candidate is an anchor's negative.

    Subclasses are frozen dataclasses with ``log_weight(tile)``; defining one registers it in the grammar. It says of
    each pair, from the pair and from ``tile.bound``, a log-weight that is known up to a constant per row, and ``NEVER``
    where a candidate is not a negative. What it must know of a whole row it declares in ``bounds()``. ``a * b``
    multiplies the distributions, left to right: the bounds of ``b`` see only the candidates that ``a`` left.
    """

    examples: ClassVar[tuple[str, ...]] = ()
    """Calls in the grammar, for the help and the conformance tests; needed where a field has no default."""
    masks: ClassVar[bool] = False
    """Whether it only removes candidates: a log-weight is 0 or NEVER."""
    removes: ClassVar[bool] = True
    """Whether it can remove candidates; False if every log-weight is finite."""
    ranks: ClassVar[bool] = False
    """For a class with ``log_weights(scores)`` alone: whether a weight depends on which other candidates are valid."""
    if_empty: ClassVar[str] = "Use a larger batch, add a pool, or remove fewer candidates."
    """What to do where it leaves anchors without a negative, for the warning of the loss."""
    textual: ClassVar[bool] = True
    """Whether it can be written in the grammar; not if it is made of tensors."""
    needs: ClassVar[tuple[str, ...]] = ()
    """What it always reads beside the scores: "labels", "clusters", "ids", "positives" or "source"."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.textual:
            _registry[cls.__name__] = cls

    def bounds(self) -> Mapping[str, Bound]:
        """What it must know of a row before it can weigh a pair, by name; ``tile.bound`` holds the answers."""
        return {}

    def log_weight(self, tile: Tile) -> Tensor:
        """Log-weights of the pairs of a tile, [r, c] or broadcastable to it; validity is handled by the caller."""
        raise not_pointwise(self, "a tile of candidates")

    def allows(self, tile: Tile) -> Tensor | None:
        """Return which pairs of a tile stay, for a ``Mask``; None for any other distribution."""
        return None

    def log_weights(self, scores: Scores) -> LogWeights:
        """Log-weights of all candidates, [b, n]; ``NEVER`` where one is not valid."""
        if not self.pointwise and self.factors == (self,):
            raise not_pointwise(self, "no log_weights(scores) either")
        return dense_weights(self.factors, scores)

    def reads(self) -> frozenset[str]:
        """``needs``, and "guide" where it judges by another model."""
        return frozenset((*self.needs, "guide") if getattr(self, "by", "score") == "guide" else self.needs)

    @property
    def pointwise(self) -> bool:
        """Whether it has ``log_weight``, so that it works on tiles; otherwise it needs whole rows."""
        return type(self).log_weight is not Negatives.log_weight

    @property
    def looks_around(self) -> bool:
        """Whether a weight depends on which other candidates there are."""
        return self.ranks or any(bound.over == "candidates" for bound in self.bounds().values())

    @property
    def batch_scope(self) -> bool:
        """Whether a weight depends on which other anchors are in the batch."""
        return any(bound.scope == "batch" for bound in self.bounds().values())

    @property
    def monotone(self) -> bool:
        """Whether a candidate that it removes takes all candidates of lower scores with it."""
        return False

    @property
    def slope(self) -> Number:
        """Beta where log w = beta * score for every candidate, as a tilt has it; else 0."""
        return 0.0

    @property
    def slope_detached(self) -> bool:
        """Whether no gradient flows through the weights of the tilt."""
        return True

    @property
    def most(self) -> int | None:
        """At most how many candidates of a row it keeps; None: no limit of its own."""
        return None

    @property
    def only_source(self) -> str | None:
        """The one source whose candidates it keeps; None: any."""
        return None

    def closed_form(self) -> ClosedForm | None:
        """What the fused kernels need to know of it; None if it is not of the closed family."""
        return None

    def shown(self, wanted: int | None) -> int | None:
        """How many of the nearest candidates it must see to pass on the nearest ``wanted`` (None: all) it keeps.

        None: all of them, or as many as it takes.
        """
        return wanted if self.pointwise and not self.removes and not self.looks_around else None

    def describe(self) -> str:
        """What it does with these numbers, in plain words, for ``hardneg explain``; schedules are evaluated before."""
        return summary(type(self))

    def __mul__(self, other: Negatives) -> Negatives:
        if not isinstance(other, Negatives):
            return NotImplemented
        product = Product((*self.factors, *other.factors))
        _say_if_order_matters(product.factors)
        return product

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def factors(self) -> tuple[Negatives, ...]:
        return (self,)

    def at(self, step: int, total: int | None = None) -> Negatives:
        """This distribution with its schedules evaluated."""
        numbers = {name: schedule(step, total) for name, schedule in schedules_of(self).items()}
        return replace(self, **numbers) if numbers else self  # type: ignore[type-var]

    def schedules(self) -> list[Schedule]:
        return [schedule for factor in self.factors for schedule in schedules_of(factor).values()]


def not_pointwise(factor: Negatives, where: str) -> ArgumentError:
    """The error of a factor that works on whole rows only, where there are none."""
    name = type(factor).__name__
    fix = f"write {name}.log_weight(tile), and bounds() for what it must know of a row (docs/extend.md)"
    return ArgumentError(name, f"whole rows: it has no log_weight(tile), and here is {where}", None, fix)


def check_by(who: str, by: str) -> None:
    """Which model's similarities a distribution judges by."""
    check_among(who, "by", by, ("score", "guide"))


def registered_negatives() -> dict[str, type[Negatives]]:
    """Every distribution that the grammar knows, by name."""
    return dict(_registry)


def keep(scores: Scores | Tile, mask: Tensor) -> LogWeights:
    """Log-weight 0 for the valid candidates in the mask, NEVER for the others."""
    if isinstance(scores, Tile):
        return scores.keep(mask)
    return scores.candidates.new_zeros(scores.valid.shape).masked_fill(~(scores.valid & mask), NEVER)


class Mask(Negatives, ABC):
    """Removes candidates and weighs none; for factors that are made of tensors: ``allows`` says whom it leaves."""

    masks: ClassVar = True
    textual: ClassVar = False

    @abstractmethod
    def allows(self, tile: Tile) -> Tensor:
        """Which pairs of a tile stay, [r, c] or broadcastable to it."""

    def log_weight(self, tile: Tile) -> Tensor:
        return tile.keep(self.allows(tile))


@dataclass(frozen=True, repr=False)
class Product(Negatives):
    """Factors multiplied left to right; written ``a * b``.

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
        """Raises: each factor has bounds of its own, which one tile does not hold."""
        what = "a sweep: each factor has bounds of its own"
        raise ArgumentError("Product", what, "log_weight(tile)", "use weigh(product.factors, tile, bounds)")

    @property
    def factors(self) -> tuple[Negatives, ...]:
        return self._factors

    @property
    def pointwise(self) -> bool:
        return all(factor.pointwise for factor in self._factors)

    @property
    def looks_around(self) -> bool:
        return any(factor.looks_around for factor in self._factors)

    @property
    def batch_scope(self) -> bool:
        return any(factor.batch_scope for factor in self._factors)

    @property
    def monotone(self) -> bool:
        removing = [factor for factor in self._factors if factor.removes]
        return bool(removing) and all(factor.monotone for factor in removing)

    @property
    def slope(self) -> Number:
        """The sum, if every factor is a tilt; a sum with a schedule in it is known at a step only: see ``at``."""
        slopes = [factor.slope for factor in self._factors if not isinstance(factor, Uniform)]
        if len(slopes) == 1:
            return slopes[0]
        plain = [each for each in slopes if not isinstance(each, Schedule)]
        tilts = len(plain) == len(slopes) and all(isinstance(each, Tensor) or each != 0.0 for each in plain)
        return sum(plain) if tilts else 0.0

    @property
    def slope_detached(self) -> bool:
        return all(factor.slope_detached for factor in self._factors)

    def closed_form(self) -> ClosedForm | None:
        return product_of(factor.closed_form() for factor in self._factors)

    def shown(self, wanted: int | None) -> int | None:
        for factor in reversed(self._factors):
            wanted = factor.shown(wanted)
        return wanted

    def reads(self) -> frozenset[str]:
        return frozenset().union(*(factor.reads() for factor in self._factors))

    @property
    def most(self) -> int | None:
        return min((factor.most for factor in self._factors if factor.most is not None), default=None)

    def at(self, step: int, total: int | None = None) -> Negatives:
        return Product(tuple(factor.at(step, total) for factor in self._factors))

    def __repr__(self) -> str:
        return " * ".join(repr(factor) for factor in self._factors)


@dataclass(frozen=True, repr=False)
class Uniform(Negatives):
    """Every valid candidate with the same weight: SimCLR, MoCo, SimCSE."""

    removes: ClassVar = False

    def log_weight(self, tile: Tile) -> Tensor:
        return tile.constant(0.0)

    def closed_form(self) -> ClosedForm:
        return ClosedForm()


def _say_if_order_matters(factors: tuple[Negatives, ...]) -> None:
    for position, factor in enumerate(factors):
        ranked = next((before for before in factors[:position] if before.looks_around), None)
        if ranked is not None and factor.masks and not factor.looks_around:
            name, mask = type(ranked).__name__, type(factor).__name__
            warn_once(
                f"order:{name}*{mask}",
                f"{name} * {mask}: the order matters. {name} looks at all candidates and {mask} then removes some of "
                f"those it chose; write {mask} * {name} to let {name} see only what {mask} leaves.",
            )
