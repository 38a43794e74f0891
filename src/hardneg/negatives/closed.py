"""The closed family: distributions that the fused kernels can compute, described by a few numbers.

A member has log w = beta * score for candidates whose similarity lies in a band, or whose rank lies in a window, and
optionally only for candidates of other labels; all other candidates are excluded. Each distribution returns its
``ClosedForm``, and ``kernels/backends/triton.py`` reads it. Masks by id belong to the pairing, not to the distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.bounds import Window

Ceiling = Callable[[Annotated[Tensor, "b"]], Annotated[Tensor, "b"]]
"""Maps the similarity of each anchor's lowest positive [b] to the highest similarity that a negative may have [b]."""


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """The parameters of one distribution of the closed family, or of a product of several.

    Attributes:
        beta: The tilt, log w = beta * score.
    """

    beta: float = 0.0
    detach: bool = False
    """True if no gradient flows through the tilt."""
    other_labels: bool = False
    """True if candidates with the label of the anchor are excluded."""
    floor: float = -math.inf
    """The lowest similarity of a negative, the same for all anchors; see ``lowest``."""
    ceilings: tuple[Ceiling, ...] = ()
    """Upper limits of the similarity, which depend on the anchor's positives; the lowest limit applies."""
    window: Window | None = None
    """The range of ranks by score; None if the ranks do not matter."""

    @property
    def banded(self) -> bool:
        """True if the similarity is limited from below or from above."""
        return self.floor > -math.inf or bool(self.ceilings)

    def lowest(self, dtype: torch.dtype) -> float:
        """Return the lowest similarity of a negative in this type, where rounding may reduce that of equal vectors."""
        return self.floor - 4.0 * torch.finfo(dtype).eps

    @property
    def cut_from_above(self) -> bool:
        """True if it removes only candidates whose score exceeds a ceiling."""
        return not self.other_labels and self.floor == -math.inf and self.window is None

    def ceiling(self, lowest: Annotated[Tensor, "b"]) -> Annotated[Tensor, "b"] | None:
        """Return the highest similarity of a negative for each anchor; None if there is no limit.

        Args:
            lowest: Similarity of each anchor's lowest positive, [b].
        """
        found: Tensor | None = None
        for each in self.ceilings:
            found = each(lowest) if found is None else torch.minimum(found, each(lowest))
        return found


def product_of(forms: Iterable[ClosedForm | None]) -> ClosedForm | None:
    """Combine the closed forms of the factors of a product.

    Returns:
        The closed form of the product. None if a factor has none, if only some of the tilts are detached, or if the
        ranks of a window depend on which factors come before it.
    """
    known = []
    for form in forms:
        if form is None:
            return None
        known.append(form)
    tilts = [form for form in known if form.beta]
    if len({form.detach for form in tilts}) > 1:
        return None
    windows = [form.window for form in known if form.window is not None]
    if windows and (len(windows) > 1 or any(form.other_labels or form.banded for form in known)):
        return None
    return ClosedForm(
        sum(form.beta for form in tilts),
        bool(tilts) and tilts[0].detach,
        any(form.other_labels for form in known),
        max((form.floor for form in known), default=-math.inf),
        tuple(ceiling for form in known for ceiling in form.ceilings),
        windows[0] if windows else None,
    )
