"""What mining must be given, as tensors and as options, checked before any work is done."""

from __future__ import annotations

import math
from pathlib import Path

from torch import Tensor

from hardneg.core.errors import (
    ArgumentError,
    NotFinite,
    argument_error,
    check_among,
    check_count,
    check_range,
    spelled,
)
from hardneg.core.types import Keys
from hardneg.core.vectors import is_zero
from hardneg.io.outputs import check_output
from hardneg.mining.options import MineOptions, inputs, manifest_of
from hardneg.mining.output import Layout, check_format
from hardneg.mining.select import Rule
from hardneg.negatives import Negatives, parse

_rows_at_once = 65536


def check_inputs(queries: Keys, corpus: Keys, rule: Rule, temperature: float, near_positive: float | None) -> None:
    for name, keys in (("queries", queries), ("corpus", corpus)):
        if keys.private:
            raise ArgumentError("mine", f"{name} [n, d]", f"vectors={tuple(keys.vectors.shape)}")
    if queries.dim != corpus.dim:
        got = f"{queries.dim} and {corpus.dim} features"
        raise ArgumentError("mine", "queries and corpus of the same dimension", got)
    if not len(corpus):
        raise ArgumentError("mine", "a corpus with at least one row", "none")
    check_finite("queries", queries.vectors)
    check_rule(rule, temperature, near_positive)


def check_corpus(vectors: Tensor, cosine: bool, first: int = 0) -> None:
    """Raises for documents that cannot be compared, from the row ``first`` on."""
    check_finite("corpus", vectors, first)
    if cosine:
        check_directions("corpus", vectors, first)


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
    check_weights("mine", rule.negatives, any_batch=rule.draw == "top")


def check_weights(who: str, negatives: Negatives, *, any_batch: bool = False) -> None:
    """Raises for schedules, and for weights that depend on a batch; ``any_batch``: where they remove no candidate."""
    if negatives.schedules():
        fix = "give a number, or evaluate it first: negatives.at(step, total)"
        raise ArgumentError(who, f"numbers in {negatives!r}", "a schedule", fix)
    factor = next((factor for factor in negatives.factors if factor.batch_scope), None)
    if factor is not None and (factor.removes or not any_batch):
        raise ArgumentError(who, "weights that no batch decides", repr(factor), "use Tilt(beta)")


def check_finite(name: str, vectors: Tensor, offset: int = 0) -> None:
    """Raises for NaN and infinite numbers, naming the first row; the sum of a block is finite if all of it is."""
    for low in range(0, len(vectors), _rows_at_once):
        part = vectors[low : low + _rows_at_once]
        if not math.isfinite(float(part.double().sum() if part.dtype.itemsize < 4 else part.sum())):
            bad = ~part.isfinite().all(1)
            if bool(bad.any()):
                first = offset + low + int(bad.int().argmax())
                got = f"NaN or inf in {name}: first in row {first}, {int(bad.sum())} rows in its block"
                raise NotFinite("mine", "finite vectors", got, "look at the encoder's output")


def check_directions(name: str, vectors: Tensor, offset: int = 0) -> None:
    """Raises for zero vectors, naming the first row."""
    for low in range(0, len(vectors), _rows_at_once):
        zero = is_zero(vectors[low : low + _rows_at_once])
        if bool(zero.any()):
            first = offset + low + int(zero.int().argmax())
            got = f"{int(zero.sum())} zero vectors in {name}, first in row {first}"
            fix = "leave those rows out, or compare by the dot product (--similarity dot, normalize=False)"
            raise ArgumentError("mine", "vectors with a direction for the cosine", got, fix)


def rule_of(options: MineOptions) -> Rule:
    return Rule(parse(options.negatives), options.k, options.draw, options.seed, options.near_negative)


def check_options(options: MineOptions) -> None:
    """Everything that can be wrong before any work is done."""
    check_format(Path(options.out))
    reads = [Path(getattr(options, name)) for name in inputs if getattr(options, name) is not None]
    for path in (Path(options.out), manifest_of(options.out), Path(f"{options.out}.work")):
        check_output("mine", path, reads, overwrite=True)
    check_rule(rule_of(options), options.temperature, options.near_positive)
    Layout(options.format, scores=options.scores)
    check_among("mine", "search", options.search, ("exact", "flat", "ivf", "hnsw", "bm25"))
    check_among("mine", "similarity", options.similarity, ("cosine", "dot"))
    check_among("mine", "missing_positives", options.missing_positives, ("error", "drop"))
    check_count("mine", "query_block", options.query_block, least=0)
    check_count("mine", "candidates", options.candidates)
    if options.search == "bm25" and not options.near_positive is options.near_negative is None:
        what = f"embeddings for {spelled('mine', 'near_positive')} and {spelled('mine', 'near_negative')}"
        raise argument_error("mine", what, "search", "bm25")
    if options.model and options.encoder:
        raise ArgumentError("mine", "a model or an encoder", "both")
