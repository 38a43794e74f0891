"""Which way a loss is computed, and why: dense matrices, the Triton kernels, or chunks of rows and columns."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from hardneg.core.checks import check_parts
from hardneg.core.objectives import Objective
from hardneg.core.pairing import Pairing
from hardneg.core.vectors import without_autocast
from hardneg.kernels import chunked, tilted
from hardneg.kernels.chunked import Streamed, streamable
from hardneg.negatives.base import Mask, Negatives
from hardneg.negatives.closed import ClosedForm

MOST_DENSE = {"cpu": 2**22, "cuda": 2**27}
"""Above so many scores, ``impl="auto"`` takes no dense matrix: on a CPU tiles that fit its caches are faster
(benchmarks/algebra.py), elsewhere dense matrices of that size would take several GiB."""


class Path(NamedTuple):
    """``"dense"``, ``"triton"`` or ``"chunked"``, and the reason."""

    name: str
    reason: str
    tilt: ClosedForm | None = None
    """What ``tilted`` computes, by whole rows."""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose(pairing: Pairing, negatives: Negatives, objective: Objective, impl: str, first: Mask | None = None) -> Path:
    """The path, and what ``tilted`` computes of it."""
    path = _choose(pairing, negatives, objective, impl, first)
    if path.name == "triton" or first is not None:
        return path
    tilt = tilted.form_of(pairing, negatives, objective, dense=path.name == "dense")
    return path if tilt is None else Path(path.name, path.reason, tilt)


def _choose(pairing: Pairing, negatives: Negatives, objective: Objective, impl: str, first: Mask | None) -> Path:
    """Triton wherever it serves; otherwise, under "auto", dense matrices as long as they are small.

    So are windows of ranks, which Triton finds among products of 16 bits. ``first``: a factor to the left of the
    negatives, which Triton does not know.
    """
    if impl == "dense":
        return Path("dense", "impl='dense'")
    if torch.compiler.is_compiling():
        return Path("dense" if impl == "auto" else "chunked", "inside torch.compile")
    reason = _why_not_triton(pairing, negatives, objective) if first is None else f"{first!r} is made of tensors"
    number = len(pairing) * pairing.num_candidates
    most = MOST_DENSE.get(pairing.anchors.vectors.device.type, MOST_DENSE["cuda"])
    if reason is None and impl == "auto" and number <= most:
        ranked = getattr(negatives.closed_form(), "window", None) is not None
        reason = "its ranks would be those of products of 16 bits" if ranked else None
    if reason is None:
        return Path("triton", "the distribution is of the closed family")
    if impl == "streamed":
        return Path("chunked", reason)
    if number <= most:
        return Path("dense", f"{number:,} scores are few; no Triton: {reason}")
    if not streamable(negatives):
        return Path("dense", f"{negatives!r} needs whole rows")
    return Path("chunked", f"{number:,} scores are many; no Triton: {reason}")


def streamed(path: Path, pairing: Pairing, negatives: Negatives, objective: Objective, reduction: str) -> Streamed:
    """The loss of a pairing by a path of its own, and the statistics of its rows."""
    if path.name == "chunked" and path.tilt is None:
        return chunked.streamed(pairing, negatives, objective, reduction)
    check_parts(pairing)
    with without_autocast(pairing.anchors.vectors.device):
        if path.tilt is not None:
            return tilted.loss(pairing, path.tilt, objective, reduction, dense=path.name == "dense")
        from hardneg.kernels.triton.loss import triton_loss

        return triton_loss(pairing, negatives, objective, reduction)


def _why_not_triton(pairing: Pairing, negatives: Negatives, objective: Objective) -> str | None:
    device = pairing.anchors.vectors.device.type
    if device != "cuda" and not os.environ.get("TRITON_INTERPRET"):  # Triton, slow to import, is for a GPU
        return f"the vectors are on {device}, and Triton needs a GPU"
    from hardneg.kernels.triton.loss import cannot

    return cannot(pairing, negatives, objective)
