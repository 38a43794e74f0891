"""What a request to mine must be, checked before any work is done."""

from __future__ import annotations

from pathlib import Path

from hardneg.core.errors import ArgumentError, argument_error, check_among, check_count, spelled
from hardneg.io.outputs import check_output
from hardneg.mining.checks import check_rule
from hardneg.mining.options import MineOptions, inputs, manifest_of
from hardneg.mining.output import Layout, check_format
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
