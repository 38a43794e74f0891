"""What hurts training and has a fix, in one warning each."""

from __future__ import annotations

import torch
from torch import Tensor

from hardneg.core.errors import warn_once
from hardneg.negatives import Negatives


def warn_of_empty(share: float, negatives: Negatives) -> None:
    """``share`` of the anchors have no negative."""
    if share > 0.5:
        advice = {factor.if_empty: None for factor in negatives.factors if factor.removes}  # each once, in order
        warn_once(
            f"empty:{negatives!r}",
            f"{share:.0%} of the anchors have no negative under {negatives!r} and cost nothing. "
            f"{' '.join(advice) or Negatives.if_empty}",
        )


def warn_of_floor(share: float, tau_plus: float | Tensor, temperature: float | Tensor) -> None:
    """``share`` of the debiased terms are floored."""
    if share > 0.5:
        number, size = (torch.as_tensor(value).double().mean().item() for value in (tau_plus, temperature))
        warn_once(
            f"clamped:{number}:{size}",
            f"{share:.0%} of the debiased terms are at their floor, where negatives have no gradient: "
            f"tau_plus={number:.3g} is too large for temperature={size:.3g}. "
            "Lower tau_plus or raise the temperature.",
        )
