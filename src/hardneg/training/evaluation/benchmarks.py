"""Benchmarks that encoders of texts are evaluated with at the end of a run: ``sts:PATH`` and ``beir:PATH``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from hardneg.core.errors import ArgumentError, FileError, NoFile, NotFinite, optional
from hardneg.io.embeddings import pack_numbers
from hardneg.training.evaluation.measures import register_measure
from hardneg.training.evaluation.retrieval import RetrievalSet, evaluate_retrieval, read_beir
from hardneg.training.evaluation.sts import Pair, read_sts

register_measure(
    "sts",
    "Spearman on STS",
    "the correlation of ranks between cosines and people's scores of pairs of sentences, the mean over the tasks",
    unit="x 100",
)
register_measure("ndcg@10", "nDCG@10", "how high the judged documents stand among the ten nearest of each query")

NAMES = {"sts": "sts", "beir": "ndcg@10"}
EncodeDocuments = Callable[[Sequence[str]], Annotated[Tensor, "n d"]]


class Benchmark(NamedTuple):
    name: str  # of its measure
    path: Path


def benchmark_of(text: str | None) -> Benchmark | None:
    """The benchmark that ``--evaluate-with`` names; reads nothing of it."""
    if text is None:
        return None
    kind, _, path = text.partition(":")
    if kind not in NAMES or not path:
        raise ArgumentError("train", "sts:PATH or beir:PATH", repr(text))
    if not Path(path).exists():
        raise NoFile("train", "a benchmark that exists", Path(path))
    return Benchmark(NAMES[kind], Path(path))


def read_benchmark(benchmark: Benchmark, evaluate_on: str) -> RetrievalSet | list[Pair]:
    """Its test split, or its dev split for ``evaluate_on="validation"``, by which values are tuned."""
    split = "dev" if evaluate_on == "validation" else "test"
    if benchmark.name != "ndcg@10":
        return _checked(read_sts(benchmark.path, split), benchmark.path)
    judged = f"qrels/{split}.tsv"
    if not any((benchmark.path / f"{judged}{suffix}").exists() for suffix in ("", ".gz")):
        fix = f"add {judged}, or leave --evaluate-with out while values are tuned on the validation split"
        raise ArgumentError("train", f"a BEIR folder with {judged}", str(benchmark.path), fix)
    return read_beir(benchmark.path, split)


def _checked(pairs: list[Pair], path: Path) -> list[Pair]:
    """Raises for a task whose scores have no ranks."""
    scores: dict[str, set[float]] = {}
    for pair in pairs:
        scores.setdefault(pair.task, set()).add(pair.score)
    for task, found in scores.items():
        if len(found) < 2:
            raise FileError("evaluate", f"scores that differ in {task}", path, f"where all are {found.pop():g}")
    return pairs


def benchmark_figures(benchmark: Benchmark, encode: EncodeDocuments, evaluate_on: str = "test") -> dict[str, Any]:
    """The figures, with one number for each item where the figure is a mean of such."""
    data = read_benchmark(benchmark, evaluate_on)
    if isinstance(data, RetrievalSet):
        found = evaluate_retrieval(data, lambda texts: encode(texts).cpu())
        return found | {"num_items": {"ndcg@10": found.pop("num_queries")}}
    return sts_of(data, encode)


def sts_of(pairs: Sequence[Pair], encode: EncodeDocuments) -> dict[str, Any]:
    """The mean over the tasks of Spearman's correlation, and each pair's part of it."""
    vectors = encode([text for pair in pairs for text in (pair.first, pair.second)])
    cosines = cosine_similarity(vectors[0::2].double(), vectors[1::2].double()).cpu().numpy()
    gold = np.array([pair.score for pair in pairs])
    tasks = list(dict.fromkeys(pair.task for pair in pairs))
    parts, of_tasks = np.empty(len(pairs)), {}
    for task in tasks:
        rows = np.array([pair.task == task for pair in pairs])
        own = spearman_parts(cosines[rows], gold[rows])
        of_tasks[task] = float(own.mean())
        parts[rows] = own * len(pairs) / (len(tasks) * rows.sum())  # so that the mean over all is that of the tasks
    found = {"sts": float(parts.mean()), "sts_tasks": of_tasks, "num_items": {"sts": len(pairs)}}
    return found | {"scores": {"sts": pack_numbers(parts)}}


def spearman_parts(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.float64]:
    """One number per pair, with Spearman's correlation as their mean and its sampling variance as theirs over n.

    With z and w the standardised ranks, rho = mean(z w), and a pair moves it by z w - rho (z^2 + w^2) / 2 (the
    influence function of a correlation), which is 0 in the mean.

    >>> float(spearman_parts(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])).mean())
    0.5
    """
    rank = optional("scipy.stats", "Spearman's correlation", extra="eval").rankdata
    z, w = (rank(side) - (len(side) + 1) / 2.0 for side in (first, second))
    scales = [float(np.sqrt((side**2).mean())) for side in (z, w)]
    if min(scales) == 0.0:
        raise NotFinite("Spearman's correlation", "cosines and scores that differ", "all the same")
    z, w = z / scales[0], w / scales[1]
    rho = float((z * w).mean())
    parts: NDArray[np.float64] = rho + z * w - rho * (z**2 + w**2) / 2.0
    return parts
