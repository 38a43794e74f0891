"""Estimate the time, memory and disk space of a job from a sample; nothing is written.

``estimate`` implements `hardneg mine --dry-run`. ``check_disk`` and ``check_disk_before`` use the
same figures to stop a job early.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hardneg.io.files import check_free
from hardneg.io.processes import peak_bytes
from hardneg.mining.checks import check_options, is_listed, rule_of
from hardneg.mining.edges import COUNT_BYTES, PASSES
from hardneg.mining.encode import KeyedEncoder, disk_bytes, fits_in_memory
from hardneg.mining.inputs import Embedded, from_beir, load_encoders, load_guide, load_problem, make_miner
from hardneg.mining.miner import Miner
from hardneg.mining.options import MineOptions
from hardneg.mining.problem import Problem, Side, texts_of
from hardneg.mining.search_depth import reach_of

_sampled_texts = 64
_sampled_queries = 256


@dataclass(frozen=True)
class JobEstimate:
    """The expected cost of a job.

    Attributes:
        queries: Number of queries.
        corpus: Number of documents.
        encoding_seconds: Time to encode all texts.
        mining_seconds: Time to mine with one process.
        peak_bytes: Peak memory; None if the system does not report it.
        disk_bytes: Bytes of embeddings and pieces until the output is written.
        counts: Numbers of queries, documents, duplicates and so on.
    """

    queries: int
    corpus: int
    encoding_seconds: float
    mining_seconds: float
    peak_bytes: int | None
    disk_bytes: int
    counts: dict[str, int]


def estimate(options: MineOptions) -> JobEstimate:
    """Read all tables, encode a few texts, mine a few queries, and extrapolate."""
    options = from_beir(options)
    check_options(options)
    problem = load_problem(options)
    encoding, disk, guide = _encode_samples(options, problem)
    sampled = _sample(problem)
    assert sampled.queries.vectors is not None
    assert problem.corpus.vectors is not None
    number, whole = len(sampled.queries), len(problem.queries)
    judged = None if guide is None else (guide[0][:number], guide[1])
    embedded = Embedded((sampled.queries.vectors, problem.corpus.vectors), guide=judged)
    miner = make_miner(options, sampled, embedded)
    miner.joined(miner.mined())  # the first call also warms up, so the second one is timed
    begin = time.perf_counter()
    miner.joined(miner.mined())
    mining = (time.perf_counter() - begin) * whole / number
    disk += piece_bytes(miner, whole)
    return JobEstimate(whole, len(problem.corpus), encoding, mining, _peak(miner, whole), disk, problem.counts)


def _encode_samples(options: MineOptions, problem: Problem) -> tuple[float, int, tuple[Tensor, Tensor] | None]:
    """Return seconds and bytes to encode all texts, and random vectors for the guide.

    Random vectors of the right shape are assigned to the sides, too.
    """
    sides, seconds, disk = (problem.queries, problem.corpus), 0.0, 0
    if options.search == "bm25":  # as in the job itself, nothing is encoded
        for side in sides:
            side.vectors = torch.ones(len(side), 1)
    if any(side.vectors is None for side in sides):
        for side, encoder in zip(sides, load_encoders(options), strict=True):
            if side.vectors is None:
                more, side.vectors = _stand_in(side, encoder)
                seconds, disk = seconds + more, disk + disk_bytes(side.vectors.nbytes)
    if options.guide is None:
        return seconds, disk, None
    (first, queries), (second, corpus) = map(_stand_in, sides, load_guide(options))
    disk += disk_bytes(queries.nbytes) + disk_bytes(corpus.nbytes)
    return seconds + first + second, disk, (queries, corpus)


def piece_bytes(miner: Miner, queries: int) -> int:
    """Return the bytes of the pieces of a job until its output is written.

    They are the lists of each shard, the histograms for the edges of wide windows, and the chosen
    negatives. Further attempts, for queries whose lists were too short, come on top.
    """
    finder, k = miner.finder, miner.rule.k
    size, _ = next(iter(finder.attempts(False)))
    corpus, dim = miner.scorer.corpus, miner.scorer.queries.dim
    shards = len(corpus.shards(miner.search.shards_for(queries, len(corpus), dim, corpus.device)))
    searched = finder.piece_bytes(size) * finder.searched
    if finder.num_wide and (shards > 1 or not miner.short_rows):
        searched += COUNT_BYTES * PASSES * finder.num_wide
    return queries * (searched * shards + 20 * k + 16 * (2 + len(miner.rule.negatives.factors)))


def check_disk(miner: Miner, folder: Path) -> None:
    """Raise before the search if the disk is too small for the pieces."""
    _check_pieces(folder, piece_bytes(miner, len(miner.scorer.queries)))


def check_disk_before(options: MineOptions, problem: Problem, folder: Path) -> None:
    """Raise before anything is encoded if the disk has less free space than the job certainly needs."""
    rule = rule_of(options)
    size = options.candidates if is_listed(options) else reach_of(rule.negatives, rule.k, rule.draw).size or rule.k
    lists = 16 * min(size, len(problem.corpus)) * max(1, options.shards) * (options.search == "exact")
    _check_pieces(folder, len(problem.queries) * (lists + 20 * rule.k))


def _check_pieces(folder: Path, needed: int) -> None:
    check_free("mine", folder, needed, "for its pieces", "free disk space, use fewer --shards, or another --out")


def _stand_in(side: Side, encoder: KeyedEncoder) -> tuple[float, Tensor]:
    """Return the seconds to encode a side, measured on a sample, and random vectors of its shape."""
    texts = texts_of(side, "mine")
    sample = texts[:: max(1, len(texts) // _sampled_texts)][:_sampled_texts]
    encoder.encode(sample[:1])
    begin = time.perf_counter()
    vectors = torch.as_tensor(encoder.encode(sample))
    seconds = time.perf_counter() - begin
    return seconds * len(side) / len(sample), _random_rows(len(side), vectors.shape[1])


def _random_rows(number: int, dim: int) -> Tensor:
    """Return as many random vectors as the job would have.

    If the job would read them from a file, they share their numbers to save memory: each row starts
    one number after the row before.
    """
    random = torch.Generator().manual_seed(0)
    if fits_in_memory(4 * number * dim):
        return torch.randn(number, dim, generator=random)
    return torch.randn(number + dim - 1, generator=random).unfold(0, dim, 1)


def _sample(problem: Problem) -> Problem:
    some = slice(0, min(_sampled_queries, len(problem.queries)))
    queries = problem.queries.only(list(range(some.stop)))
    judged = problem.judged_negatives[some]
    return replace(
        problem, queries=queries, positives=problem.positives[some], own=problem.own[some], judged_negatives=judged
    )


def _peak(miner: Miner, queries: int) -> int | None:
    """Return the peak memory: that of this process so far, plus the lists of all queries in a search.

    This process has held every table, the vectors of the job and the blocks of a search.
    """
    finder = miner.finder
    size, _ = next(iter(finder.attempts(False)))
    held = min(queries, finder.at_once(size)) * finder.query_bytes(size) if finder.searched else 0
    peak = peak_bytes()
    return None if peak is None else peak + held
