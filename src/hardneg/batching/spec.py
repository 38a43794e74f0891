"""Text form of batch composition: ``uniform()``, ``knn()``, ``proximity(num_candidates=500)`` ...

Each function makes a ``BatchSpec``: a planner, and how often its embeddings are refreshed. ``parse_batches`` is called
by the recipes and by the arms of a comparison. The functions share these arguments:

- ``refresh``: Number of steps between refreshes of the embeddings.
- ``warmup``: Number of uniform epochs at the start.
- ``encode``: Encode the whole data set at each refresh, instead of using the embeddings seen during training.
- ``coverage``: "once" (each instance once per epoch) or "free" (batches may overlap).
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
    """A planner, and how its embeddings are kept fresh.

    Attributes:
        planner: Chooses the batches.
        refresh: Number of steps between refreshes of the embeddings.
        warmup: Number of uniform epochs at the start.
        encode: Encode the whole data set at each refresh; otherwise embeddings seen during training are used.
        coverage: "once" (each instance once per epoch) or "free" (batches may overlap).

    Raises:
        ArgumentError: If a number is too small, the coverage is unknown, or a planner has an adaptive schedule, which
            would need feedback from training.
    """

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
    """Random batches, as usual."""
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
    """ProSampler: random walks with restart over a proximity graph, by default with the paper's values.

    Unlike the paper's batches, those of ``coverage="once"`` have each instance once per epoch. With ``coverage="free"``
    they overlap as in the paper, which makes them harder; the first epoch and the warm-up still cover everything. The
    authors' code also draws candidates with replacement, and makes about three times as many batches per epoch.

    Args:
        num_candidates: Number of random candidates for the neighbours of each instance.
        num_neighbours: Number of neighbours in the graph.
        restart: Restart probability, or a schedule over the epochs.
        refresh: Number of steps between refreshes.
        warmup: Number of uniform epochs at the start.
        encode: Encode the data set at each refresh.
        coverage: "once" or "free".
        kind: "walk" (with restart), "random" (without), "bfs" or "dfs": the searches of the paper's Table 12.
        steps: "uniform", or "similarity" for steps in proportion to the similarity.

    Example:
        >>> proximity(num_candidates=500).refresh
        100
    """
    kind = paper_kinds.get(kind, kind)
    if kind not in kinds:
        raise argument_error("proximity", f"a kind among {(*paper_kinds, *kinds)}", "kind", kind)
    planner = Proximity(restart, kind, steps, num_neighbours, num_candidates)
    return BatchSpec(planner, refresh, warmup, encode, coverage)


def knn(refresh: int = 100, warmup: int = 1, encode: bool = False, coverage: str = "once") -> BatchSpec:
    """A random instance and its nearest neighbours: the hardest batches, with the most false negatives."""
    return BatchSpec(NearestNeighbours(), refresh, warmup, encode, coverage)


def strata(refresh: int = 100, warmup: int = 1, encode: bool = False, coverage: str = "once") -> BatchSpec:
    """Batches from one k-means cluster each."""
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
    """B3: batches joined from small communities of the neighbour graph.

    Args:
        size: Number of instances of a community.
        skip: Number of closest neighbours to leave out as likely false negatives.
        num_neighbours: Number of neighbours to find, the skipped ones included.
        num_candidates: Number of random candidates for the neighbours; None: all instances.
        refresh: Number of steps between refreshes.
        warmup: Number of uniform epochs at the start.
        encode: Encode the data set at each refresh.
        coverage: "once" or "free".
    """
    return BatchSpec(Communities(size, num_neighbours, skip, num_candidates), refresh, warmup, encode, coverage)


def cuthill_mckee(
    num_neighbours: int = 10,
    num_candidates: int | None = None,
    refresh: int = 100,
    warmup: int = 1,
    encode: bool = False,
    coverage: str = "once",
) -> BatchSpec:
    """GCBS: pieces of an order of the data in which neighbours are close to each other.

    Args:
        num_neighbours: Number of neighbours in the graph.
        num_candidates: Number of random candidates for the neighbours; None: all instances.
        refresh: Number of steps between refreshes.
        warmup: Number of uniform epochs at the start.
        encode: Encode the data set at each refresh.
        coverage: "once" or "free".
    """
    return BatchSpec(CuthillMcKee(num_neighbours, num_candidates), refresh, warmup, encode, coverage)


def consecutive() -> BatchSpec:
    """Pieces of the data in its own order, such as the sentences of a text."""
    return BatchSpec(Consecutive(), warmup=0)


_names = {f.__name__: f for f in (uniform, proximity, knn, strata, communities, cuthill_mckee, consecutive)}


def parse_batches(text: str) -> BatchSpec:
    """Parse a text such as ``"proximity(num_candidates=500)"``.

    Args:
        text: Call of one of the functions of this module; arguments may be schedules.

    Raises:
        GrammarError: If the text is not such a call.
        ArgumentError: If an argument has an impossible value.

    Example:
        >>> parse_batches("proximity(num_candidates=500, restart=0.1)").planner.num_candidates
        500
    """
    spec = read_expression(text, {**_names, "falling": falling, **registered_schedules()})
    if not isinstance(spec, BatchSpec):
        raise GrammarError("--batches", "a call such as 'proximity()'", f"text={text!r}", f"known: {', '.join(_names)}")
    return spec
