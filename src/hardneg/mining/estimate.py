"""What a run will cost, from a sample of it: nothing is written."""

from __future__ import annotations

import resource
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hardneg.core.errors import FileError
from hardneg.mining.beir import from_beir
from hardneg.mining.checks import check_options
from hardneg.mining.encode import Encoder
from hardneg.mining.engine import Miner
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
    disk_bytes: int
    counts: dict[str, int]


def estimate(options: MineOptions) -> Estimate:
    """Reads all tables, encodes a few texts, mines a few queries, and extrapolates."""
    options = from_beir(options)
    check_options(options)
    problem = load_problem(options)
    seconds = 0.0
    sides = (problem.queries, problem.corpus)
    encoded = [side.vectors is None and options.search != "bm25" for side in sides]
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
    disk = piece_bytes(miner, len(problem.queries))
    for side, is_new in zip(sides, encoded, strict=True):
        disk += side.vectors.nbytes if is_new and side.vectors is not None else 0
    return Estimate(len(problem.queries), len(problem.corpus), seconds, mining, _peak(), disk, problem.counts)


def piece_bytes(miner: Miner, queries: int) -> int:
    """What the pieces of a job take until its output is written: the lists of each shard, and what is chosen.

    Further attempts, for queries whose lists were too short, come on top.
    """
    finder, k = miner.finder, miner.rule.k
    size, _ = next(iter(finder.attempts(False)))
    steps = 2 + len(miner.rule.negatives.factors)
    lists = (24 if miner.rule.draw == "gumbel" else 16) * (size or 0) + 8 * steps
    corpus, dim = miner.meeting.corpus, miner.meeting.queries.dim
    shards = len(corpus.shards(miner.search.shards_for(queries, len(corpus), dim, corpus.device)))
    return queries * (lists * shards * finder.searched + 20 * k + 16 * steps)


def check_disk(miner: Miner, folder: Path) -> None:
    """Raises before the work where the disk has no room for it."""
    needed, free = piece_bytes(miner, len(miner.meeting.queries)), shutil.disk_usage(folder).free
    if needed > free:
        got = f"where {free / 2**30:.1f} GiB are free"
        fix = "make room, use fewer --shards, or another --out"
        raise FileError("mine", f"{needed / 2**30:.1f} GiB for its pieces", folder, got, fix)


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
