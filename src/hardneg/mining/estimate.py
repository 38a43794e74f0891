"""What a run will cost, from a sample of it: nothing is written."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, replace

import torch

from hardneg.mining.checks import check_options
from hardneg.mining.encode import Encoder
from hardneg.mining.inputs import load_encoders, load_problem, make_miner
from hardneg.mining.options import MineOptions
from hardneg.mining.problem import Problem, Side

_texts = 64
_queries = 256


@dataclass(frozen=True)
class Estimate:
    """Seconds and bytes that the whole run would take, and what the sample was."""

    queries: int
    corpus: int
    encoding_seconds: float
    mining_seconds: float
    peak_bytes: int
    counts: dict[str, int]


def estimate(options: MineOptions) -> Estimate:
    """Reads all tables, encodes a few texts, mines a few queries, and extrapolates."""
    check_options(options)
    problem = load_problem(options)
    seconds = 0.0
    sides = (problem.queries, problem.corpus)
    if options.search == "bm25":  # as in the run itself, nothing is encoded
        for side in sides:
            side.vectors = torch.ones(len(side), 1)
    if any(side.vectors is None for side in sides):
        for side, encoder in zip(sides, load_encoders(options), strict=True):
            seconds += _encoding_seconds(side, encoder)
    sampled = _sample(problem)
    assert problem.queries.vectors is not None
    assert problem.corpus.vectors is not None
    miner = make_miner(options, sampled, sampled.queries.vectors, problem.corpus.vectors)  # type: ignore[arg-type]
    miner.joined(miner.mined())  # the first one also warms up
    begin = time.perf_counter()
    miner.joined(miner.mined())
    mining = (time.perf_counter() - begin) * len(problem.queries) / len(sampled.queries)
    return Estimate(len(problem.queries), len(problem.corpus), seconds, mining, _peak(), problem.counts)


def _encoding_seconds(side: Side, encoder: Encoder) -> float:
    """Encodes a sample; stands in random vectors of the right size for the search."""
    if side.vectors is not None:
        return 0.0
    assert side.texts is not None
    step = max(1, len(side.texts) // _texts)
    sample = side.texts[::step][:_texts]
    encoder.encode(sample[:1])
    begin = time.perf_counter()
    vectors = torch.as_tensor(encoder.encode(sample))
    seconds = time.perf_counter() - begin
    random = torch.Generator().manual_seed(0)
    side.vectors = torch.randn(len(side), vectors.shape[1], generator=random)
    return seconds * len(side) / len(sample)


def _sample(problem: Problem) -> Problem:
    some = slice(0, min(_queries, len(problem.queries)))
    queries = problem.queries.only(list(range(some.stop)))
    return replace(problem, queries=queries, positives=problem.positives[some], own=problem.own[some])


def _peak() -> int:
    """The peak of this process, which held every table and vector and the blocks of a search."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
