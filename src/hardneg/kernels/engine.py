"""The row engine: one contract, three backends, and the choice between them.

A backend reduces the candidates of every anchor to a few numbers, the row statistics, with autograd:

    losses/contrastive.py  ->  choose(...)  ->  backend.rows(pairing, negatives, objective)  ->  RowResult.loss(...)

A backend applies no objective, no reduction and no warning; of the objective it only reads which statistics it
declares. ``RowResult.loss`` (core/objectives/base.py) applies the objective, in one place for all backends.

| backend | memory | used for |
| --- | --- | --- |
| ``dense`` | matrices [b, n] | small batches, distributions that need whole rows, torch.compile |
| ``tiles`` | a few tiles | every pointwise distribution at any size |
| ``triton`` | none beyond the vectors | uniform, tilted, banded and ranked negatives on a GPU |
"""

from __future__ import annotations

import os
from typing import Literal, NamedTuple, Protocol

import torch

from hardneg.core.objectives.base import Objective, RowResult
from hardneg.core.pairing import Pairing
from hardneg.kernels.backends.dense import Dense
from hardneg.kernels.backends.tiles import Tiles
from hardneg.negatives.base import Mask, Negatives

Impl = Literal["auto", "dense", "streamed"]
"""Choice of the backend by the user."""

MAX_DENSE_SCORES = {"cpu": 2**22, "cuda": 2**27}
"""Largest number of scores for which ``impl="auto"`` builds a dense matrix, by device.

Above it, tiles that fit the caches are faster on a CPU (benchmarks/algebra.py), and elsewhere a dense matrix would take
several GiB.
"""


class Backend(Protocol):
    """A way to compute row statistics."""

    def why_not(self, pairing: Pairing, negatives: Negatives, objective: Objective) -> str | None:
        """Return the reason why it does not support these arguments; None if it does."""
        ...

    def rows(self, pairing: Pairing, negatives: Negatives, objective: Objective) -> RowResult:
        """Compute the statistics that the objective declares, and the scores of the anchors' own positives.

        The caller has checked the parts of the pairing and disabled autocast.

        Args:
            pairing: The anchors, positives and candidates of the batch.
            negatives: The distribution of negatives.
            objective: The objective, for the statistics that it declares.
        """
        ...


class Path(NamedTuple):
    """Which backend computes a loss, and why.

    Attributes:
        name: "dense", "chunked" (tiles) or "triton".
        reason: The reason in plain words.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose(pairing: Pairing, negatives: Negatives, objective: Objective, impl: Impl, first: Mask | None = None) -> Path:
    """Choose the backend: Triton where it can run, dense matrices while they are small, tiles otherwise.

    Args:
        pairing: The anchors, positives and candidates of the batch.
        negatives: The distribution of negatives.
        objective: The objective, for the statistics that it declares.
        impl: "auto", "dense" or "streamed", which never builds a dense matrix.
        first: A mask that is applied before the negatives; it is built from tensors, which Triton does not support.

    Returns:
        The name of the backend and the reason.
    """
    if impl == "dense":
        return Path("dense", "impl='dense'")
    if torch.compiler.is_compiling():
        return Path("dense" if impl == "auto" else "chunked", "inside torch.compile")
    reason = _why_not_triton(pairing, negatives, objective) if first is None else f"{first!r} is built from tensors"
    number = len(pairing) * pairing.num_candidates
    most = MAX_DENSE_SCORES.get(pairing.anchors.vectors.device.type, MAX_DENSE_SCORES["cuda"])
    if reason is None and impl == "auto" and number <= most:
        ranked = getattr(negatives.closed_form(), "window", None) is not None
        reason = "its ranks would be computed from 16-bit products" if ranked else None
    if reason is None:
        return Path("triton", "the distribution is of the closed family")
    if impl == "streamed":
        return Path("chunked", reason)
    if number <= most:
        return Path("dense", f"{number:,} scores are few; no Triton: {reason}")
    if whole_rows := _BACKENDS["chunked"].why_not(pairing, negatives, objective):
        return Path("dense", whole_rows)
    return Path("chunked", f"{number:,} scores are many; no Triton: {reason}")


def _why_not_triton(pairing: Pairing, negatives: Negatives, objective: Objective) -> str | None:
    """Return why Triton cannot compute this; None if it can."""
    device = pairing.anchors.vectors.device.type
    if device != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        return f"the vectors are on {device}, and Triton needs a GPU"
    return _triton().why_not(pairing, negatives, objective)


def backend(path: Path) -> Backend:
    """Return the backend of a path."""
    return _triton() if path.name == "triton" else _BACKENDS[path.name]


_BACKENDS: dict[str, Backend] = {"dense": Dense(), "chunked": Tiles()}


def _triton() -> Backend:
    from hardneg.kernels.backends.triton import Triton  # Triton is slow to import

    return Triton()
