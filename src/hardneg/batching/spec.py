"""Who shares a batch, as text: ``uniform()``, ``proximity(num_candidates=500)``, ``knn()`` ... in recipes and arms.

Each name makes a planner and says how its data is kept fresh: every ``refresh`` steps, after ``warmup`` uniform epochs,
from embeddings harvested during training or, with ``encode=True``, from a fresh pass of the encoder over the data.
"""

from __future__ import annotations

from dataclasses import dataclass

from hardneg.batching.filling import coverages
from hardneg.batching.planners import (
    Communities,
    Consecutive,
    CuthillMcKee,
    NearestNeighbours,
    Planner,
    Proximity,
    Strata,
    UniformPlanner,
    falling,
)
from hardneg.batching.walks import kinds
from hardneg.core.errors import GrammarError, argument_error, check_counts
from hardneg.core.schedules import Number, adaptive, linear, registered_schedules
from hardneg.negatives.grammar import read_expression


@dataclass(frozen=True)
class BatchSpec:
    """A planner, and how its data is kept fresh."""

    planner: Planner
    refresh: int = 100
    warmup: int = 1
    encode: bool = False
    coverage: str = "once"

    def __post_init__(self) -> None:
        check_counts("batches", self, "refresh")
        check_counts("batches", self, "warmup", least=0)
        if self.coverage not in coverages:
            raise argument_error("batches", f"coverage among {coverages}", "coverage", self.coverage)
        for name, value in vars(self.planner).items():
            if isinstance(value, adaptive):  # a planner receives no feedback from training
                raise argument_error("batches", "a schedule of the epochs, such as linear(0.2, 0.05)", name, value)


paper_kinds = {"walk": "restart", "bfs": "breadth_first", "dfs": "depth_first"}
"""The paper's names for the searches of ``walk``, whose own names are accepted as well."""


def uniform() -> BatchSpec:
    """Every instance with every other, as usual."""
    return BatchSpec(UniformPlanner())


def proximity(
    num_candidates: int = 1000,
    num_neighbours: int = 100,
    restart: Number = linear(0.2, 0.05),
    refresh: int = 100,
    warmup: int = 1,
    encode: bool = False,
    coverage: str = "once",
    kind: str = "walk",
    steps: str = "uniform",
) -> BatchSpec:
    """ProSampler: walks with restart over a proximity graph; the paper's values, but each image once an epoch.

    ``coverage="free"`` lets batches overlap, as the paper's do, which makes them harder; the first epoch and the
    warm-up still cover everything. The authors' code also draws candidates with replacement and makes about three
    times as many batches in an epoch. ``kind`` is "walk" (with restart), "random" (without), "bfs" or "dfs": Table 12.
    ``steps="similarity"`` walks in proportion to the edges.
    """
    kind = paper_kinds.get(kind, kind)
    if kind not in kinds:
        raise argument_error("proximity", f"a kind among {(*paper_kinds, *kinds)}", "kind", kind)
    planner = Proximity(restart, kind, steps, num_neighbours, num_candidates)
    return BatchSpec(planner, refresh, warmup, encode, coverage)


def knn(refresh: int = 100, warmup: int = 1, encode: bool = False, coverage: str = "once") -> BatchSpec:
    """A random instance and its nearest neighbours: the hardest and the falsest."""
    return BatchSpec(NearestNeighbours(), refresh, warmup, encode, coverage)


def strata(refresh: int = 100, warmup: int = 1, encode: bool = False, coverage: str = "once") -> BatchSpec:
    """Batches from one k-means cluster."""
    return BatchSpec(Strata(), refresh, warmup, encode, coverage)


def communities(
    size: int = 32,
    skip: int = 30,
    num_neighbours: int = 130,
    num_candidates: int | None = None,
    refresh: int = 100,
    warmup: int = 1,
    encode: bool = False,
    coverage: str = "once",
) -> BatchSpec:
    """B3: batches joined from small communities of the graph of the neighbours of ranks skip to num_neighbours."""
    return BatchSpec(Communities(size, num_neighbours, skip, num_candidates), refresh, warmup, encode, coverage)


def cuthill_mckee(
    num_neighbours: int = 10,
    num_candidates: int | None = None,
    refresh: int = 100,
    warmup: int = 1,
    encode: bool = False,
    coverage: str = "once",
) -> BatchSpec:
    """GCBS: pieces of an order in which neighbours stand near each other."""
    return BatchSpec(CuthillMcKee(num_neighbours, num_candidates), refresh, warmup, encode, coverage)


def consecutive() -> BatchSpec:
    """Pieces of the data in its order, such as the sentences of a text."""
    return BatchSpec(Consecutive(), warmup=0)


_names = {f.__name__: f for f in (uniform, proximity, knn, strata, communities, cuthill_mckee, consecutive)}


def parse_batches(text: str) -> BatchSpec:
    """The batches that this text describes.

    >>> parse_batches("proximity(num_candidates=500, restart=0.1)").planner.num_candidates
    500
    """
    spec = read_expression(text, {**_names, "falling": falling, **registered_schedules()})
    if not isinstance(spec, BatchSpec):
        raise GrammarError("--batches", "a call such as 'proximity()'", f"text={text!r}", f"known: {', '.join(_names)}")
    return spec
