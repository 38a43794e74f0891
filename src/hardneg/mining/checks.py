"""Checks of the input of mining."""

from __future__ import annotations

import math

from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, check_among, check_count, check_range, spelled
from hardneg.core.types import Keys
from hardneg.mining.search_depth import batch_dependent
from hardneg.mining.select import Rule

_rows_at_once = 65536


def check_inputs(queries: Keys, corpus: Keys, rule: Rule, temperature: float, near_positive: float | None) -> None:
    for name, keys in (("queries", queries), ("corpus", corpus)):
        if keys.private:
            raise ArgumentError("mine", f"{name} [n, d]", f"vectors={tuple(keys.vectors.shape)}")
    if queries.dim != corpus.dim:
        raise ArgumentError(
            "mine", "queries and corpus of the same dimension", f"{queries.dim} and {corpus.dim} features"
        )
    if not len(corpus):
        raise ArgumentError("mine", "a corpus with at least one row", "none")
    for name, keys in (("queries", queries), ("corpus", corpus)):
        check_finite(name, keys.vectors)
    check_rule(rule, temperature, near_positive)


def check_rule(rule: Rule, temperature: float, near_positive: float | None) -> None:
    check_count("mine", "k", rule.k)
    check_among("mine", "draw", rule.draw, ("top", "gumbel", "categorical"))
    check_range("mine", "temperature", temperature, 0.0, math.inf, open_high=True)
    if temperature == 0:
        raise argument_error("mine", "a temperature above 0", "temperature", temperature)
    for name, value in (("near_positive", near_positive), ("near_negative", rule.near_negative)):
        if value is not None:
            check_range("mine", name, value, -1.0, 1.0)
    if rule.near_negative is not None and rule.draw == "categorical":
        guard = spelled("mine", "near_negative")
        what = f"draws 'top' or 'gumbel' with {guard}: categorical ones repeat candidates"
        raise argument_error("mine", what, "draw", rule.draw)
    if rule.negatives.schedules():
        fix = "give a number, or evaluate it first: negatives.at(step, total)"
        raise ArgumentError("mine", f"numbers in {rule.negatives!r}", "a schedule", fix)
    factor = batch_dependent(rule.negatives)
    if factor is not None and (rule.draw != "top" or factor.removes):
        raise ArgumentError("mine", "weights that no batch decides", repr(factor), "use Tilt(beta)")


def check_finite(name: str, vectors: Tensor) -> None:
    """Raises for NaN and infinite numbers, naming the first row; the sum of a block is finite if all of it is."""
    for low in range(0, len(vectors), _rows_at_once):
        part = vectors[low : low + _rows_at_once]
        if not math.isfinite(float(part.double().sum() if part.dtype.itemsize < 4 else part.sum())):
            bad = ~part.isfinite().all(1)
            if bool(bad.any()):
                first = low + int(bad.int().argmax())
                raise ArgumentError(
                    "mine",
                    "finite vectors",
                    (f"NaN or inf in {name}: first in row {first}, {int(bad.sum())} rows in its block"),
                    "look at the encoder's output",
                )
