"""Checks of tensors and options before any work is done.

``check_inputs`` checks the arguments of ``hn.mine``, ``check_options`` those of `hardneg mine`,
including everything that would otherwise fail after hours of encoding.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

from torch import Tensor

from hardneg.core.errors import (
    ArgumentError,
    NoFile,
    NotFinite,
    argument_error,
    check_among,
    check_range,
    optional,
    spelled,
    written,
)
from hardneg.core.tensors import check_device, is_zero
from hardneg.core.types import Keys
from hardneg.io.functions import load_function, load_imports
from hardneg.io.outputs import check_output
from hardneg.mining.cache_key import key_of_function
from hardneg.mining.fusion import check_quotas, named_source, split_name
from hardneg.mining.options import DrawKind, MineOptions, given_inputs, inputs, manifest_of
from hardneg.mining.output import Layout, check_format
from hardneg.mining.search_depth import check_depth
from hardneg.mining.select import Rule
from hardneg.negatives import BelowPositive, Negatives, parse

_rows_at_once = 65536


def check_inputs(queries: Keys, corpus: Keys, rule: Rule, temperature: float, near_positive: float | None) -> None:
    """Check the arguments of a miner: shapes, finite queries and the rule.

    The corpus is checked later, block by block, while it is read.

    Raises:
        ArgumentError: If dimensions differ, the corpus is empty, or the rule is invalid.
        NotFinite: If a query contains NaN or infinite values.
    """
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


def check_vectors(name: str, vectors: Tensor, cosine: bool, first: int = 0) -> None:
    """Raise for vectors that cannot be compared: not finite or, for the cosine, zero.

    Args:
        name: Name of the vectors in errors.
        vectors: Vectors [n, d].
        cosine: Whether they are compared by the cosine.
        first: Row number of the first vector, for errors.
    """
    check_finite(name, vectors, first)
    if cosine:
        check_directions(name, vectors, first)


def check_rule(rule: Rule, temperature: float, near_positive: float | None) -> None:
    """Raise if the draw, the temperature, a cosine of the guards or the weights cannot be used for mining."""
    check_among("mine", "draw", rule.draw, get_args(DrawKind))
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
    """Raise for schedules and for weights that depend on a batch, which do not exist when mining.

    Args:
        who: Function named in errors.
        negatives: The expression.
        any_batch: Whether such weights are allowed as long as they remove no candidate.
    """
    if negatives.schedules():
        fix = "give a number, or evaluate it first: negatives.at(step, total)"
        raise ArgumentError(who, f"numbers in {negatives!r}", "a schedule", fix)
    factor = next((factor for factor in negatives.factors if factor.batch_scope), None)
    if factor is not None and (factor.removes or not any_batch):
        raise ArgumentError(who, "weights that do not depend on a batch", repr(factor), "use Tilt(beta)")


def check_finite(name: str, vectors: Tensor, offset: int = 0) -> None:
    """Raise for NaN and infinite values, naming the first row.

    The sum of a block is finite only if all its values are, which is faster than testing each.
    """
    for low in range(0, len(vectors), _rows_at_once):
        part = vectors[low : low + _rows_at_once]
        if not math.isfinite(float(part.double().sum() if part.dtype.itemsize < 4 else part.sum())):
            bad = ~part.isfinite().all(1)
            if bool(bad.any()):
                first = offset + low + int(bad.int().argmax())
                got = f"NaN or inf in {name}: first in row {first}, {int(bad.sum())} rows in its block"
                raise NotFinite("mine", "finite vectors", got, "check the encoder's output")


def check_directions(name: str, vectors: Tensor, offset: int = 0) -> None:
    """Raise for zero vectors, naming the first row."""
    for low in range(0, len(vectors), _rows_at_once):
        zero = is_zero(vectors[low : low + _rows_at_once])
        if bool(zero.any()):
            first = offset + low + int(zero.int().argmax())
            got = f"{int(zero.sum())} zero vectors in {name}, first in row {first}"
            fix = "leave those rows out, or compare by the dot product (--similarity dot, normalize=False)"
            raise ArgumentError("mine", "nonzero vectors for the cosine", got, fix)


def rule_of(options: MineOptions) -> Rule:
    """Return the rule that the options describe."""
    return Rule(expression_of(options), options.k, options.draw, options.seed, options.near_negative)


def expression_of(options: MineOptions) -> Negatives:
    """Return the expression; with a veto, the cross-encoder's factor is added unless the expression reads a guide.

    The factor keeps only candidates that the cross-encoder scores below the positive.
    """
    negatives = parse(options.negatives)
    if options.cross_encoder is None or options.cross_encoder_use != "veto" or "guide" in negatives.reads():
        return negatives
    return BelowPositive(absolute=0.0, by="guide") * negatives


def quotas_of(options: MineOptions) -> tuple[tuple[str, int], ...]:
    """Return the quotas as (source, number)."""
    found = []
    for text in options.quotas:
        name, _, number = text.partition("=")
        if not name or not number.isdigit() or not int(number):
            raise argument_error("mine", "quotas as name=number, such as bm25=2", "quotas", text)
        found.append((name, int(number)))
    return tuple(found)


def retriever_names(options: MineOptions) -> tuple[str, ...]:
    """Return the names of the retrievers, as used in ``From`` and quotas."""
    by_words = options.search == "bm25"
    names = [*(() if by_words else ("embedding",)), *(("bm25",) if options.bm25 or by_words else ())]
    for name in (split_name(each)[0] for each in options.runs):
        if name in names:
            raise argument_error(
                "mine", f"a name for the run other than {', '.join(names)}", "runs", name, "write name=file"
            )
        names.append(name)
    return tuple(names)


def check_reads(options: MineOptions, negatives: Negatives) -> None:
    """Raise if the expression reads labels, clusters, a guide or a source that the options do not provide.

    Also raises for a guide that the expression does not read.
    """
    veto = options.cross_encoder is not None and options.cross_encoder_use == "veto"
    labels = options.columns.label is not None and options.positive_label is None  # otherwise they are labels of pairs
    has = {"labels": labels, "clusters": False, "guide": options.guide is not None or veto}
    fixes = {
        "labels": f"give {spelled('mine', 'label_column')}, a column of both tables",
        "clusters": "use labels and OtherLabel(), or hn.mine with Keys(clusters=...)",
        "guide": f"give {spelled('mine', 'guide')}, or {spelled('mine', 'cross_encoder')} with "
        f"{written('mine', 'cross_encoder_use', 'veto')}",
    }
    for factor in negatives.factors:
        for what in sorted(factor.reads() & set(has)):
            if not has[what]:
                raise ArgumentError(repr(factor), what if what != "guide" else "a guide", "none", fixes[what])
        if factor.only_source is not None and factor.only_source not in retriever_names(options):
            more = ", ".join(spelled("mine", name) for name in ("bm25", "runs"))
            raise ArgumentError(
                repr(factor), f"a source among {', '.join(retriever_names(options))}", None, f"add {more}"
            )
    if options.guide is not None and "guide" not in negatives.reads():
        fix = 'multiply it by BelowPositive(absolute=0.0, by="guide"), or leave the guide out'
        raise argument_error(
            "mine", f"an expression that uses the guide, not {negatives!r}", "guide", options.guide, fix
        )


def _check_models(options: MineOptions) -> None:
    for name, known in (("fusion", ("rrf", "similarity")), ("cross_encoder_use", ("rerank", "veto"))):
        check_among("mine", name, getattr(options, name), known)
    if options.dtype is not None:
        check_among("mine", "dtype", options.dtype, ("float32", "float16", "bfloat16"))
    for name in ("query_prompt", "corpus_prompt", "revision", "dtype"):
        if getattr(options, name) is not None and options.model is None:
            raise argument_error("mine", f"{spelled('mine', 'model')} as well", name, getattr(options, name))
    veto = options.cross_encoder is not None and options.cross_encoder_use == "veto"
    twice = [("guide", veto), ("rescore", options.cross_encoder is not None and not veto)]
    for name, both in twice:
        if both and getattr(options, name) is not None:
            raise argument_error(
                "mine",
                f"either {spelled('mine', 'cross_encoder')} or {spelled('mine', name)}",
                name,
                getattr(options, name),
                "leave one of the two out",
            )
    retriever_names(options)
    for _, path in map(split_name, options.runs):
        if not Path(path).is_file():
            raise NoFile("mine", "a TREC run file that exists", path)


def check_parts(options: MineOptions) -> None:
    """Raise for a function without a cache key, whose results the parts of a job could not share."""
    if options.part is None and not options.merge:
        return
    for name in (options.encoder, options.rescore):
        if name is not None and key_of_function(name, load_function(name, "mine"), options.cache_key) is None:
            fix = f"give {spelled('mine', 'cache_key')}, with the same value for each part"
            raise ArgumentError("mine", f"a cache key for {name}, so that parts can share its results", "none", fix)


def check_options(options: MineOptions) -> None:
    """Raise for everything that can be wrong before any work is done.

    Raises:
        ArgumentError: If options are invalid or contradict each other.
        FileError: If a path cannot be read or written.
        MissingExtra: If a package that the options need is not installed.
    """
    load_imports(options.imports)
    for name in (*inputs, "out", "model", "guide", "cross_encoder"):
        # An unset shell variable; an empty path would mean the current folder.
        if getattr(options, name) == "":
            raise argument_error("mine", "a non-empty name", name, "")
    check_format(Path(options.out))
    others = (*(split_name(each)[1] for each in options.runs), *options.imports)
    reads = [*given_inputs(options).values(), *map(Path, others)]
    for path in (Path(options.out), manifest_of(options.out), Path(f"{options.out}.work")):
        check_output("mine", path, reads, overwrite=True)
    _check_models(options)
    rule = rule_of(options)
    check_rule(rule, options.temperature, options.near_positive)
    check_reads(options, rule.negatives)
    named_source(rule.negatives, retriever_names(options))
    check_quotas(quotas_of(options), rule.k, rule.draw, retriever_names(options))
    Layout(options.format, scores=options.scores, ids=options.ids)
    check_among("mine", "search", options.search, ("exact", "flat", "ivf", "hnsw", "bm25"))
    check_among("mine", "similarity", options.similarity, ("cosine", "dot"))
    check_among("mine", "missing_positives", options.missing_positives, ("error", "drop"))
    if options.device is not None and options.engine == "local":  # a cluster may have devices that this machine lacks
        check_device("mine", options.device)
    check_range("mine", "memory", options.memory, 0.0, math.inf, open_high=True)
    if options.search == "bm25" and not options.near_positive is options.near_negative is None:
        what = f"embeddings for {spelled('mine', 'near_positive')} and {spelled('mine', 'near_negative')}"
        raise argument_error("mine", what, "search", "bm25")
    if options.search == "bm25" and options.guide is not None:
        fix = f"use {spelled('mine', 'bm25')} with a {spelled('mine', 'model')}, or leave the guide out"
        raise argument_error("mine", f"embeddings for {spelled('mine', 'guide')}", "search", "bm25", fix)
    if options.model and options.encoder:
        raise ArgumentError("mine", "a model or an encoder", "both")
    if options.shards > 1 and (options.search != "exact" or options.draw == "categorical"):
        what = "an exact search with draw 'top' or 'gumbel' to use shards"
        got = ", ".join(written("mine", name, getattr(options, name)) for name in ("shards", "search", "draw"))
        raise ArgumentError("mine", what, got, f"leave {spelled('mine', 'shards')} out")
    kind, listed = "also" if options.search == "bm25" else options.search, is_listed(options)
    check_depth(rule.negatives, rule.k, rule.draw, kind, options.shards, listed=listed)
    _check_functions(options)


def is_listed(options: MineOptions) -> bool:
    """Return whether candidates are lists of retrievers, or rescored."""
    by_words = options.bm25 or options.search == "bm25"
    return bool(by_words or options.runs or options.rescore or options.cross_encoder)


def _check_functions(options: MineOptions) -> None:
    """Raise for functions and libraries that are needed after encoding and cannot be loaded."""
    if options.rescore is not None:
        load_function(options.rescore, "mine")
    if options.bm25 or options.search == "bm25":
        optional("bm25s", "BM25", extra="lexical")
    if options.search in ("flat", "ivf", "hnsw"):
        optional("faiss", f"Search({options.search!r})", extra="ann")
    for name in ("model", "guide", "cross_encoder"):
        if getattr(options, name) is not None:
            optional("sentence_transformers", spelled("mine", name), extra="text")
