"""Products of ranked factors with every mask: hn.mine and `hardneg mine` against plain loops over the whole corpus.

The loops sort every document of a query and cut the list, factor by factor; what is drawn is the order in which the
same seed draws from all documents, without those that the loops removed. ``check([SEED])`` repeats one case.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.mining import Search
from support.command import flags, hardneg

QUERIES, DOCUMENTS, CHUNK = 12, 400, 100  # more documents than the first attempt of a search looks at
QUIET = pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")  # masks behind ranks are on purpose
JUDGES = ("AtMost", "Threshold", "BelowPositive", "Rank", "Ring", "Tilt", "Gaussian", "Hardening")
WEIGHTS = ("Tilt", "Gaussian", "Hardening")
OF_FILES = ("AtMost", "Threshold", "BelowPositive", "OtherLabel", "Uniform")
HALF = ("Ring", {"inner": 0.5, "outer": 1.0, "dynamic_inner": False, "at_least": 0})
MASKS: dict[str, list[dict[str, Any]]] = {
    "AtMost": [{"similarity": 0.5}, {"similarity": -0.1}],
    "Threshold": [{"similarity": -0.3}, {"similarity": 0.4}],
    "OtherLabel": [{}],
    "SameCluster": [{}],
    "OtherCluster": [{}],
    "BelowPositive": [{"relative": 0.1}, {"absolute": 0.2}, {"relative": 0.0, "absolute": -0.3}],
    "From": [{"source": "mined"}],
    "Known": [{}],
    "Hardening": [{"log_eta": "threshold", "parameter": 1.2}],
    "Tilt": [{"beta": 1.0}],
    "Gaussian": [{"mu": 0.3, "sigma": 0.5}],
    "Uniform": [{}],
}


@dataclass
class Case:
    """Vectors, tags, positives, an expression, and how it is mined. ``factors``: names with their arguments."""

    queries: hn.Keys
    corpus: hn.Keys
    guides: tuple[Tensor, Tensor]
    positives: list[list[int]]  # rows of the corpus
    factors: list[tuple[str, dict[str, Any]]]
    k: int
    near_positive: float | None = None
    near_negative: float | None = None
    temperature: float = 1.0
    draw: str = "top"
    seed: int = 0
    search: dict[str, Any] = field(default_factory=dict)
    judged: set[tuple[int, int]] = field(default_factory=set)  # pairs of ids that are no negatives

    def __repr__(self) -> str:
        return f"{self.text()} k={self.k} near={self.near_positive}/{self.near_negative} {self.draw} {self.search}"

    def text(self) -> str:
        return " * ".join(
            f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})" for name, given in self.factors
        )

    def expression(self) -> hn.negatives.Negatives:
        made: list[Any] = []
        for name, given in self.factors:
            if name == "Known":
                ids = (torch.tensor(side) for side in zip(*sorted(self.judged), strict=True))
                made.append(hn.Known(hn.negatives.KnownPairs(*ids)))
            else:
                made.append(hn.registered_negatives()[name](**given))
        return math.prod(made[1:], start=made[0])


def make_case(seed: int, of_files: bool = False) -> Case:
    """A random case; every product has two or three ranked factors and up to three masks at any place."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)

    def vectors(size: int) -> Tensor:
        return normalize(torch.randn(size, 5, generator=generator, dtype=torch.float64), dim=1)

    def keys(size: int, ids: Tensor, source: str | None = None) -> hn.Keys:
        labels = torch.randint(3, (size,), generator=generator)
        clusters = torch.randint(3, random.choice([(size,), (size, 1)]), generator=generator)
        return hn.Keys(vectors(size), ids, labels, clusters, source)

    factors = [_ranked(random) for _ in range(random.choice([2, 3]))]
    for name in random.sample(OF_FILES if of_files else list(MASKS), random.choice([0, 1, 2, 3])):
        factors.insert(random.randint(0, len(factors)), (name, dict(random.choice(MASKS[name]))))
    if random.random() < 0.3 and not of_files:
        for name, given in factors:
            given.update({"by": "guide"} if name in JUDGES and random.random() < 0.5 else {})
    ids = 1000 + 7 * torch.randperm(DOCUMENTS, generator=generator)
    own = torch.where(torch.rand(QUERIES, generator=generator) < 0.5, ids[:QUERIES], torch.arange(QUERIES))
    case = Case(
        keys(QUERIES, own),
        keys(DOCUMENTS, ids, "mined"),
        (vectors(QUERIES), vectors(DOCUMENTS)),
        [
            random.sample(range(DOCUMENTS), random.choice([1, 1, 1, 3, 0][: 4 if of_files else 5]))
            for _ in range(QUERIES)
        ],
        factors,
        random.choice([1, 1, 2, 3, 8, 30]),
        random.choice([None, None, 0.8]),
        random.choice([None, None, None, 0.9]),
        random.choice([1.0, 0.5]),
        search=random.choice([{}, {}, {"query_block": 5}, {"shards": 3}, {"corpus_block": 64, "query_block": 7}]),
    )
    case.search = {**case.search, "precision": ("auto", "bfloat16")[seed % 2]}
    case.judged = {(int(random.choice(own)), int(ids[random.randrange(DOCUMENTS)])) for _ in range(400)}
    if random.random() < 0.5:  # masks that remove most documents, so that windows are filled late
        case.near_positive = random.choice([None, 0.1])
        case.corpus = case.corpus.changed(labels=(torch.arange(DOCUMENTS) % 10 == 0).long())
        case.queries = case.queries.changed(labels=torch.zeros(QUERIES, dtype=torch.long))
    if random.random() < 0.2 and not any(name in WEIGHTS for name, _ in factors):
        case.draw, case.seed = "gumbel", random.randrange(100)
    return case


def _ranked(random: Random) -> tuple[str, dict[str, Any]]:
    if random.random() < 0.5:
        start = random.choice([0, 0, 1, 5])
        return "Rank", {"start": start, "stop": random.choice([None, start + 2, start + 10, start + 40])}
    inner, outer = sorted(random.sample([0.0, 0.1, 0.25, 0.5, 0.75, 1.0], 2))
    least = random.choice([0, 0, 0, 4])
    return "Ring", {"inner": inner, "outer": outer, "dynamic_inner": random.random() < 0.3, "at_least": least}


def by_loops(case: Case) -> list[list[int]]:
    """The rows of the negatives of each query."""
    similarity = (case.queries.vectors @ case.corpus.vectors.T).tolist()
    guided = (case.guides[0] @ case.guides[1].T).tolist()
    between = (case.corpus.vectors @ case.corpus.vectors.T).tolist()
    ids, own_ids = case.corpus.ids.tolist(), case.queries.ids.tolist()  # type: ignore[union-attr]
    drawn = None if case.draw == "top" else _drawn(case)
    chosen = []
    for query, scores in enumerate(similarity):
        own, near = case.positives[query], 2.0 if case.near_positive is None else case.near_positive
        left = [row for row in range(DOCUMENTS) if row not in own and all(between[one][row] < near for one in own)]
        left = [row for row in left if ids[row] != own_ids[query]]
        for name, given in case.factors:
            judge = guided[query] if given.get("by") == "guide" else scores
            left.sort(key=lambda row: -judge[row])
            left = _passed(name, given, left, case, query, judge, [judge[one] for one in own])
        order = sorted(left, key=lambda row: -scores[row]) if drawn is None else [r for r in drawn[query] if r in left]
        if case.near_negative is not None:
            order = _greedy(order, between, case.near_negative)
        chosen.append((order + [-1] * case.k)[: case.k])
    return chosen


def _drawn(case: Case) -> list[list[int]]:
    """All documents but the positives, in the order of the seed's draws."""
    positives = [[int(case.corpus.ids[row]) for row in rows] for rows in case.positives]
    everyone = hn.mine(case.queries, case.corpus, positives, "Uniform()", DOCUMENTS, "gumbel", case.seed)
    return [[row for row in rows if row >= 0] for rows in everyone.rows.tolist()]


def _greedy(order: list[int], between: list[list[float]], near: float) -> list[int]:
    taken: list[int] = []
    for row in order:
        if all(between[row][other] < near for other in taken):
            taken.append(row)
    return taken


def _passed(
    name: str, given: dict[str, Any], left: list[int], case: Case, query: int, judge: list[float], own: list[float]
) -> list[int]:
    """What a factor leaves of documents that are sorted by similarity, the closest first."""
    queries, corpus = case.queries, case.corpus
    match name:
        case "Rank":
            return left[given["start"] : given["stop"]]
        case "Ring":
            stop = int(given["outer"] * len(left) + 1e-9)
            start = int(given["inner"] * (stop if given["dynamic_inner"] else len(left)) + 1e-9)
            while stop - start < given["at_least"] and stop < len(left):
                stop += 1
            while stop - start < given["at_least"] and start > 0:
                start -= 1
            return left[start:stop]
        case "AtMost":
            return [row for row in left if judge[row] <= given["similarity"]]
        case "Threshold":
            return [row for row in left if judge[row] >= given["similarity"]]
        case "BelowPositive":
            ceiling = math.inf
            if own and given.get("relative") is not None:
                ceiling = min(own) - given["relative"] * abs(min(own))
            if own and given.get("absolute") is not None:
                ceiling = min(ceiling, min(own) - given["absolute"])
            return [row for row in left if judge[row] <= ceiling]
        case "Hardening":
            return [row for row in left if math.exp(judge[row] / case.temperature) >= given["parameter"]]
        case "Known":
            ids, own_id = corpus.ids.tolist(), int(queries.ids[query])
            return [row for row in left if (own_id, ids[row]) not in case.judged]
        case "OtherLabel":
            other = (corpus.labels != queries.labels[query]).tolist()
            return [row for row in left if other[row]]
        case "SameCluster" | "OtherCluster":
            same = (corpus.clusters.view(-1) == queries.clusters.view(-1)[query]).tolist()
            return [row for row in left if same[row] == (name == "SameCluster")]
        case "From" | "Tilt" | "Gaussian" | "Uniform":
            return left
    raise AssertionError(f"no loop for {name}")


def mined(case: Case) -> list[list[int]]:
    found = hn.mine(
        case.queries,
        case.corpus,
        [[int(case.corpus.ids[row]) for row in rows] for rows in case.positives],
        case.expression(),
        case.k,
        case.draw,
        case.seed,
        temperature=case.temperature,
        near_positive=case.near_positive,
        near_negative=case.near_negative,
        guide=case.guides if any(given.get("by") == "guide" for _, given in case.factors) else None,
        search=Search(**case.search),
    )
    rows: list[list[int]] = found.rows.tolist()
    return rows


def mined_from_files(case: Case, folder: Path) -> list[list[int]]:
    """The same by `hardneg mine`: tables and embeddings in, ids out."""
    names = [f"d{row}" for row in range(DOCUMENTS)]
    queries: list[dict[str, Any]] = [
        {"id": f"q{i}", "query": f"text {i}", "positive": [names[row] for row in rows]}
        for i, rows in enumerate(case.positives)
    ]
    corpus: list[dict[str, Any]] = [{"id": name, "text": f"document {name}"} for name in names]
    if "OtherLabel" in case.text():  # a column of labels that nothing reads is refused
        for rows, labels in ((queries, case.queries.labels), (corpus, case.corpus.labels)):
            for row, label in zip(rows, labels.tolist(), strict=True):
                row["label"] = label
    for which, rows, keys in (("queries", queries, case.queries), ("corpus", corpus, case.corpus)):
        (folder / f"{which}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        np.save(folder / f"{which}.npy", keys.vectors.numpy())
    options = {"negatives": case.text(), "k": case.k, "temperature": case.temperature, "format": "ids"}
    options |= {"near_positive": case.near_positive, "near_negative": case.near_negative}
    options |= {"query_block": case.search.get("query_block"), "shards": case.search.get("shards")}
    options |= {"label_column": "label" if "OtherLabel" in case.text() else None}
    given = [one for key, value in options.items() if value is not None for one in _flag(key, value)]
    files = {
        "corpus": "corpus.jsonl",
        "query_embeddings": "queries.npy",
        "corpus_embeddings": "corpus.npy",
        "out": "mined.jsonl",
    }
    paths = flags({name: str(folder / file) for name, file in files.items()})
    done = hardneg("mine", str(folder / "queries.jsonl"), *paths, *given, "--overwrite")
    assert done.exit_code == 0, done.output
    found = {row["query_id"]: row["negative_ids"] for row in map(json.loads, (folder / "mined.jsonl").open())}
    return [[names.index(name) for name in found.get(f"q{i}", [])] for i in range(QUERIES)]


def _flag(key: str, value: Any) -> list[str]:
    return ["-k", str(value)] if key == "k" else flags({key: value})


def check(seeds: Iterable[int]) -> None:
    different = [f"seed {seed}: {case!r}" for seed in seeds if mined(case := make_case(seed)) != by_loops(case)]
    assert not different, f"{len(different)} differ:\n" + "\n".join(different[:5])


def check_files(seeds: Iterable[int], folder: Path) -> None:
    different = []
    for seed in seeds:
        case = make_case(seed, of_files=True)
        case.draw = "top"
        case.queries = hn.Keys(case.queries.vectors, torch.arange(QUERIES), case.queries.labels)  # of no document
        expected = [[row for row in rows if row >= 0] for rows in by_loops(case)]
        if mined_from_files(case, folder) != expected:
            different.append(f"seed {seed}: {case!r}")
    assert not different, f"{len(different)} differ:\n" + "\n".join(different[:5])


@pytest.mark.parametrize(
    "factors",
    [
        [("AtMost", {"similarity": 0.5}), ("Rank", {"start": 0, "stop": 40}), HALF],
        [("Rank", {"start": 0, "stop": 40}), HALF],
        [("OtherLabel", {}), ("Rank", {"start": 0, "stop": 40}), HALF],
    ],
)
@pytest.mark.parametrize("near_positive", [None, 0.1])
@QUIET
def test_a_ring_counts_the_whole_window_of_ranks_before_it(factors: list[Any], near_positive: float | None) -> None:
    for seed in range(5):
        case = make_case(seed)
        case.factors, case.k, case.near_positive = factors, 8, near_positive
        case.near_negative, case.draw = None, "top"
        rare = torch.arange(DOCUMENTS) % 10 == 0  # one document in ten has another label than the queries
        case.corpus = case.corpus.changed(labels=rare.long())
        case.queries = case.queries.changed(labels=torch.zeros(QUERIES, dtype=torch.long))
        expected = by_loops(case)
        for case.k in (1, 3, 8):
            assert mined(case) == [rows[: case.k] for rows in expected]


@QUIET
def test_products_of_ranked_factors_equal_loops() -> None:
    check(range(60))


@QUIET
def test_products_of_ranked_factors_from_files_equal_loops(tmp_path: Path) -> None:
    check_files(range(6), tmp_path)


@pytest.mark.long
@QUIET
@pytest.mark.parametrize("chunk", range(20))
def test_2000_products_of_ranked_factors_equal_loops(chunk: int) -> None:
    check(range(1000 + chunk * CHUNK, 1000 + (chunk + 1) * CHUNK))


@pytest.mark.long
@QUIET
@pytest.mark.parametrize("chunk", range(4))
def test_200_products_of_ranked_factors_from_files_equal_loops(chunk: int, tmp_path: Path) -> None:
    check_files(range(1000 + chunk * 50, 1000 + (chunk + 1) * 50), tmp_path)
