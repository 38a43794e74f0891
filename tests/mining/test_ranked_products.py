"""Products of two and three ranked factors with masks: hn.mine against plain loops over the whole corpus."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn

QUERIES, DOCUMENTS, CHUNK = 12, 400, 100  # more documents than the first attempt of a search looks at
MASKS = (
    "AtMost(0.5)",
    "AtMost(-0.1)",
    "Threshold(-0.3)",
    "OtherLabel()",
    "SameCluster()",
    "OtherCluster()",
    "BelowPositive(relative=0.1)",
    "BelowPositive(absolute=0.2)",
    "Tilt(1.0)",
)


@dataclass
class Case:
    """Vectors, tags, positives and an expression."""

    queries: hn.Keys
    corpus: hn.Keys
    positives: Tensor
    expression: str
    k: int
    near_positive: float | None


def make_case(seed: int) -> Case:
    """A random case; every product has two or three ranked factors and up to three masks at any place."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)

    def keys(size: int) -> hn.Keys:
        vectors = normalize(torch.randn(size, 5, generator=generator, dtype=torch.float64), dim=1)
        labels, clusters = torch.randint(3, (2, size), generator=generator)
        return hn.Keys(vectors, labels=labels, clusters=clusters)

    factors = [_ranked(random) for _ in range(random.choice([2, 3]))]
    for mask in random.sample(MASKS, random.choice([0, 1, 2, 3])):
        factors.insert(random.randint(0, len(factors)), mask)
    positives = torch.randint(DOCUMENTS, (QUERIES,), generator=generator)
    near = random.choice([None, None, 0.8])
    return Case(keys(QUERIES), keys(DOCUMENTS), positives, " * ".join(factors), random.choice([1, 3, 8]), near)


def _ranked(random: Random) -> str:
    if random.random() < 0.5:
        start = random.choice([0, 0, 1, 5])
        stop = random.choice([None, start + 2, start + 10, start + 40])
        return f"Rank({start}, {stop})"
    inner, outer = sorted(random.sample([0.0, 0.1, 0.25, 0.5, 0.75, 1.0], 2))
    return f"Ring({inner}, {outer}, dynamic_inner={random.random() < 0.3})"


def by_loops(case: Case) -> list[list[int]]:
    """The same by sorting every document of each query and cutting the list, factor by factor."""
    similarity = case.queries.vectors @ case.corpus.vectors.T
    between = (case.corpus.vectors @ case.corpus.vectors.T).tolist()
    chosen = []
    for query, scores in enumerate(similarity.tolist()):
        positive = int(case.positives[query])
        near = 2.0 if case.near_positive is None else case.near_positive
        order = sorted(range(DOCUMENTS), key=lambda row: -scores[row])
        left = [row for row in order if row != positive and between[positive][row] < near]
        for factor in hn.parse(case.expression).factors:
            left = _passed(factor, left, case, query, scores, scores[positive])
        chosen.append((left + [-1] * case.k)[: case.k])
    return chosen


def _passed(
    factor: hn.negatives.Negatives, left: list[int], case: Case, query: int, scores: list[float], own: float
) -> list[int]:
    assert case.corpus.labels is not None
    assert case.corpus.clusters is not None
    assert case.queries.labels is not None
    assert case.queries.clusters is not None
    label, cluster = int(case.queries.labels[query]), int(case.queries.clusters[query])
    labels, clusters = case.corpus.labels.tolist(), case.corpus.clusters.tolist()
    match factor:
        case hn.Rank(start, stop):
            return left[start:stop]
        case hn.Ring(inner, outer, dynamic):
            stop = int(outer * len(left) + 1e-9)
            return left[int(inner * (stop if dynamic else len(left)) + 1e-9) : stop]
        case hn.negatives.AtMost(most):
            return [row for row in left if scores[row] <= most]
        case hn.Threshold(least):
            return [row for row in left if scores[row] >= least]
        case hn.OtherLabel():
            return [row for row in left if labels[row] != label]
        case hn.SameCluster():
            return [row for row in left if clusters[row] == cluster]
        case hn.OtherCluster():
            return [row for row in left if clusters[row] != cluster]
        case hn.BelowPositive(relative, absolute):
            margin = relative * abs(own) if relative is not None else absolute
            return [row for row in left if scores[row] <= own - margin]
        case hn.Tilt():
            return left
    raise AssertionError(f"no loop for {factor!r}")


def check(seeds: range) -> None:
    different = []
    for seed in seeds:
        case = make_case(seed)
        found = hn.mine(
            case.queries, case.corpus, case.positives, case.expression, case.k, near_positive=case.near_positive
        )
        if found.ids.tolist() != by_loops(case):
            different.append((seed, case.expression, case.k))
    assert not different, f"{len(different)} of {len(seeds)} differ: {different[:5]}"


@pytest.mark.parametrize("negatives", ["AtMost(0.5) * Rank(0, 40) * Ring(0.5, 1.0)", "Rank(0, 40) * Ring(0.5, 1.0)"])
@pytest.mark.parametrize("near_positive", [None, 0.8])
def test_a_ring_counts_the_whole_window_of_ranks_before_it(negatives: str, near_positive: float | None) -> None:
    for seed in range(5):
        case = make_case(seed)
        case.expression, case.k, case.near_positive = negatives, 3, near_positive
        found = hn.mine(case.queries, case.corpus, case.positives, negatives, 3, near_positive=near_positive)
        assert found.ids.tolist() == by_loops(case)


@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")  # masks behind ranks are on purpose here
def test_products_of_ranked_factors_equal_loops() -> None:
    check(range(60))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")
@pytest.mark.parametrize("chunk", range(20))
def test_2000_products_of_ranked_factors_equal_loops(chunk: int) -> None:
    check(range(1000 + chunk * CHUNK, 1000 + (chunk + 1) * CHUNK))
