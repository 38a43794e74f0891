"""Checks of input vectors, temperatures and parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, NotFinite, argument_error, written
from hardneg.core.pairing import Pairing

_checking = False


@contextmanager
def checks(enabled: bool = True) -> Iterator[None]:
    """Checks input vectors: inside, vectors that are not finite or not of unit norm raise.

    Costs one synchronisation per call on a GPU, so it is off by default.

    >>> import torch
    >>> from hardneg import two_views
    >>> with checks():
    ...     two_views(torch.ones(2, 4), torch.ones(2, 4), temperature=0.5)
    Traceback (most recent call last):
    ...
    hardneg.core.errors.ArgumentError: score needs unit vectors, got norms from 2 to 2; use ...
    """
    global _checking
    before, _checking = _checking, enabled
    try:
        yield
    finally:
        _checking = before


def check_parts(pairing: Pairing) -> None:
    """Raises unless the parts fit together."""
    anchors, pool = pairing.anchors, pairing.candidates
    if anchors.private:
        raise ArgumentError("score", "anchors [b, d]", f"vectors={tuple(anchors.vectors.shape)}")
    if not len(anchors):
        raise ArgumentError("score", "at least one anchor", f"vectors={tuple(anchors.vectors.shape)}")
    check_temperature("score", pairing.temperature, len(anchors))
    own = pairing.positives.vectors
    if own.shape[0] != len(anchors):
        raise ArgumentError("score", f"positives of {len(anchors)} anchors", f"positives={tuple(own.shape)}")
    mask, pairs = pairing.positive_mask, (len(anchors), own.shape[1] if pairing.positives.private else 1)
    if mask is not None and (mask.shape != pairs or mask.dtype != torch.bool):
        got = f"positive_mask={tuple(mask.shape)} of {mask.dtype}"
        raise ArgumentError("score", f"a bool positive_mask {pairs}", got)
    if not pool:
        raise ArgumentError("score", "at least one pool of candidates", "pool=()")
    for keys in [pairing.positives, *pool]:
        if keys.dim != anchors.dim:
            raise ArgumentError("score", f"vectors of {anchors.dim} features", str(tuple(keys.vectors.shape)))
    for keys in pool:
        if keys.private and keys.vectors.shape[0] != len(anchors):
            what = f"private candidates of {len(anchors)} anchors"
            raise ArgumentError("score", what, str(tuple(keys.vectors.shape)))
    if _checking and not torch.compiler.is_compiling():
        ready = pairing.prepared()
        for keys in [ready.anchors, ready.positives, *ready.candidates]:
            check_vectors(keys.vectors)


def check_temperature(who: str, temperature: float | Tensor, rows: int | None = None) -> None:
    """Raises unless every temperature is above 0. On a GPU a tensor is looked at inside ``checks()`` only."""
    if isinstance(temperature, Tensor):
        if temperature.ndim and rows is not None and temperature.shape not in ((1,), (rows, 1)):
            what = f"a temperature of shape [] or [{rows}, 1], one per anchor"
            raise ArgumentError(who, what, f"temperature={tuple(temperature.shape)}", "use temperature[:, None]")
        if torch.compiler.is_compiling() or (temperature.is_cuda and not _checking):
            return
        if bool((temperature.detach() > 0).all()):
            return
        fix = "learn its logarithm, and give temperature=log_t.exp() at each call"
        lowest = float(temperature.detach().min())
        raise argument_error(who, "a temperature above 0", "temperature", lowest, fix)
    if temperature is None or isinstance(temperature, (bool, str)):
        raise argument_error(who, "a temperature that is a number, tensor or schedule", "temperature", temperature)
    if not 0 < temperature < math.inf:
        raise argument_error(who, "a temperature above 0", "temperature", temperature)


def check_device(who: str, device: str) -> torch.device:
    """The device; raises for a name that torch does not know, and for a GPU where none is visible."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise argument_error(who, "a device of torch, such as cpu or cuda:0", "device", device) from None
    if found.type == "cuda" and not torch.cuda.is_available():
        what = "a device that is there"
        raise argument_error(who, what, "device", device, f"no GPU is visible: use {written(who, 'device', 'cpu')}")
    return found


def check_vectors(vectors: Tensor) -> None:
    """Raises for vectors that are not finite or not of unit norm."""
    if not vectors.numel():
        return
    if not bool(torch.isfinite(vectors).all()):
        raise NotFinite("score", "finite vectors", "NaN or inf", "look at the encoder's output before the loss")
    norms = vectors.detach().norm(dim=-1)
    low, high = norms.min().item(), norms.max().item()
    if max(abs(low - 1.0), abs(high - 1.0)) > 1e-2:
        got = f"norms from {low:.4g} to {high:.4g}"
        raise ArgumentError("score", "unit vectors", got, "use torch.nn.functional.normalize(vectors, dim=-1)")
