"""The closed family: what fused kernels know of a distribution, declared by the distribution itself.

log w = beta * score for candidates whose similarity lies in a band, or whose rank in a window, of other labels if it
says so, and NEVER for all others. Masks by id are the pairing's.
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
"""Of each anchor, the similarity of its lowest positive -> the highest similarity of a negative."""


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """One factor, or a product of them."""

    beta: float = 0.0
    detach: bool = False
    """Whether no gradient flows through the tilt."""
    other_labels: bool = False
    floor: float = -math.inf
    """The lowest similarity of a negative, the same for all anchors."""
    ceilings: tuple[Ceiling, ...] = ()
    window: Window | None = None
    """Of the ranks by score."""

    @property
    def banded(self) -> bool:
        return self.floor > -math.inf or bool(self.ceilings)

    @property
    def cut_from_above(self) -> bool:
        """Whether nothing is removed but what scores above a ceiling."""
        return not self.other_labels and self.floor == -math.inf and self.window is None

    def ceiling(self, lowest: Annotated[Tensor, "b"]) -> Annotated[Tensor, "b"] | None:
        found: Tensor | None = None
        for each in self.ceilings:
            found = each(lowest) if found is None else torch.minimum(found, each(lowest))
        return found


def product_of(forms: Iterable[ClosedForm | None]) -> ClosedForm | None:
    """The form of a product.

    None if a factor has none, if only some of the tilts are detached, or if the ranks of a window depend on which
    factors come before it.
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
