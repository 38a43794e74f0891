"""Search beside FAISS: mining, exact and approximate neighbour graphs; audits, which only show how they grow."""

from __future__ import annotations

from typing import Any

from cases import Work, case

K = 5  # negatives of a query
NEIGHBOURS, GRAPH_DIM = 100, 64
MINED = (1_250, 2_500, 5_000, 10_000, 20_000)
GRAPHS = (1_250, 2_500, 5_000, 10_000, 20_000)
INDEXED = (12_500, 25_000, 50_000, 100_000)


def vectors(n: int, dim: int, seed: int, centres: int = 200) -> Any:
    """Return unit vectors around some centres, [n, dim]."""
    import torch

    random = torch.Generator().manual_seed(seed)
    middle = torch.randn(centres, dim, generator=torch.Generator().manual_seed(99))
    around = middle[torch.randint(0, centres, (n,), generator=random)] + torch.randn(n, dim, generator=random)
    return torch.nn.functional.normalize(around, dim=-1)


def flat(corpus: Any, queries: Any, k: int) -> Any:
    """Return the similarities of the k nearest by an exact FAISS index, [q, k]."""
    import faiss

    index = faiss.IndexFlatIP(corpus.shape[1])
    index.add(corpus.numpy())
    return index.search(queries.numpy(), k)[0]


def mining(n: int, rule: str) -> tuple[Work, Work]:
    """Mine the corpus of n rows for n queries, whose positives are the rows of the same number."""
    import torch

    import hardneg as hn

    corpus = vectors(n, 384, 0)
    random = torch.randn(n, 384, generator=torch.Generator().manual_seed(1))
    queries = torch.nn.functional.normalize(corpus + 0.03 * random, dim=-1)
    keys = hn.Keys(queries), hn.Keys(corpus)

    def ours() -> None:
        hn.mine(*keys, torch.arange(n), rule, K)

    def theirs() -> None:
        flat(corpus, queries, K + 1)

    return ours, theirs


@case(
    "mine, top 5",
    "FAISS flat",
    goal=1.0,
    sizes=MINED,
    at=MINED[-1:],
    unit="queries and rows",
    needs=("faiss",),
    growth=2.0,
)
def mine_top(n: int) -> tuple[Work, Work]:
    return mining(n, "Uniform()")


@case(
    "mine, margin",
    "FAISS flat",
    goal=1.1,
    sizes=MINED,
    at=MINED[-1:],
    unit="queries and rows",
    needs=("faiss",),
    growth=2.0,
)
def mine_margin(n: int) -> tuple[Work, Work]:
    return mining(n, "BelowPositive(relative=0.05) * Rank(0, 100)")


@case(
    "exact graph",
    "FAISS flat",
    goal=1.0,
    sizes=GRAPHS,
    at=(20_000, 100_000),
    unit="nodes",
    needs=("faiss",),
    growth=2.0,
    more=(100_000,),
)
def exact_graph(n: int) -> tuple[Work, Work]:
    """The 100 nearest others of each node; both return similarities."""
    import hardneg as hn

    z = vectors(n, GRAPH_DIM, 2)
    return lambda: hn.build_graph(z, NEIGHBOURS, None).similarities, lambda: flat(z, z, NEIGHBOURS + 1)[:, 1:].copy()


@case(
    "IVF graph",
    "the same index in FAISS",
    goal=1.1,
    sizes=INDEXED,
    at=(100_000, 1_000_000),
    unit="nodes",
    needs=("faiss",),
    growth=1.5,
    more=(1_000_000,),
)
def ivf_graph(n: int) -> tuple[Work, Work]:
    """Inverted lists with 4 sqrt(n) cells, of which 16 are searched."""
    import faiss
    import torch

    import hardneg as hn

    z = vectors(n, GRAPH_DIM, 3)

    def theirs() -> None:
        cells = int(4 * n**0.5)
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(GRAPH_DIM), GRAPH_DIM, cells, faiss.METRIC_INNER_PRODUCT)
        index.train(z[torch.linspace(0, n - 1, min(n, 256 * cells)).long()].numpy())
        index.add(z.numpy())
        index.nprobe = 16
        index.search(z.numpy(), NEIGHBOURS + 1)

    def ours() -> None:
        hn.build_graph(z, NEIGHBOURS, None, search="faiss")

    return ours, theirs


@case("audit of two rules", sizes=(6_250, 12_500, 25_000, 50_000, 100_000), unit="rows", growth=1.0)
def audit(n: int) -> tuple[Work, None]:
    """512 anchors, as many as are sampled by default, against all n candidates."""
    import torch

    import hardneg as hn

    z, labels = vectors(n, 128, 4), torch.arange(n) % 100
    rules = ["Tilt(1.0)", "Ring(0.1, 0.5)"]

    def ours() -> None:
        hn.audit(z, rules, labels=labels, frontier=False)

    return ours, None
