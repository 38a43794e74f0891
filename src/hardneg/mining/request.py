"""What a request to mine must be, checked before any work is done."""

from __future__ import annotations

from pathlib import Path

from hardneg.core.errors import ArgumentError
from hardneg.io.outputs import check_output
from hardneg.mining.checks import check_rule
from hardneg.mining.options import MineOptions, inputs, manifest_of
from hardneg.mining.output import Layout, check_format
from hardneg.mining.search import Search
from hardneg.mining.select import Rule
from hardneg.negatives import parse


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
    if options.search != "bm25":
        Search(options.search, query_block=options.query_block, candidates=options.candidates)
    elif options.near_positive is not None or options.near_negative is not None:
        raise ArgumentError("mine", "embeddings for near_positive and near_negative", "search='bm25'")
    for name, known in (("similarity", ("cosine", "dot")), ("missing_positives", ("error", "drop"))):
        if getattr(options, name) not in known:
            raise ArgumentError("mine", f"{name} in {known}", f"{name}={getattr(options, name)!r}")
    if options.model and options.encoder:
        raise ArgumentError("mine", "a model or an encoder", "both")
