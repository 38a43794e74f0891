"""GraphCL's augmentations: what each changes, and that a graph's view is its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, UnknownName
from hardneg.training.augmentation.graphs import AUGMENTATIONS, GraphAugment, Graphs
from support.graphs import adjacency, packed, random_graphs

pytest.importorskip("torch_geometric", reason="graphs need the extra graphs")

RATIO = 0.25


def view(kind: str, graphs: Graphs, *, seed: int = 0, epoch: int = 0, ratio: float = RATIO) -> Graphs:
    return GraphAugment(kind, kind, ratio).views(graphs, torch.arange(len(graphs)), epoch, seed)[0]


@pytest.fixture
def graphs() -> Graphs:
    return Graphs.collate(random_graphs(40, low=2, high=14))


def copies(num: int, x: Tensor, edges: Tensor) -> Graphs:
    return Graphs.collate(packed([x], [edges]) * num)


def same(one: Graphs, other: Graphs) -> bool:
    matrices = zip(adjacency(one), adjacency(other), strict=True)
    return torch.equal(one.x, other.x) and all(torch.equal(first, second) for first, second in matrices)


def rows(graphs: Graphs, i: int) -> set[tuple[float, ...]]:
    return {tuple(row) for row in graphs.x[graphs.batch == i].tolist()}


@pytest.mark.parametrize("kind", [*AUGMENTATIONS, "random"])
def test_a_view_depends_on_seed_epoch_id_and_view_alone(kind: str, graphs: Graphs) -> None:
    augment, ids = GraphAugment(kind, kind), torch.arange(100, 140)
    whole = augment.views(graphs, ids, 3, 7)
    index = torch.tensor([8, 33, 2, 21])
    some = graphs[8:9].joined([graphs[i : i + 1] for i in index[1:].tolist()])
    part = augment.views(some, ids[index], 3, 7)
    for one, other in zip(whole, part, strict=True):
        for place, i in enumerate(index.tolist()):
            assert same(one[i : i + 1], other[place : place + 1])
    changed = [whole[1], *(augment.views(graphs, ids + a, 3 + b, 7 + c)[0] for a, b, c in torch.eye(3).long().tolist())]
    assert not any(same(one, whole[0]) for one in changed)


@pytest.mark.parametrize("kind", [*AUGMENTATIONS, "random"])
def test_views_are_simple_graphs(kind: str, graphs: Graphs) -> None:
    found = view(kind, graphs)
    assert len(found) == len(graphs)
    assert int(found.num_nodes.min()) > 0
    assert len(found.x) == int(found.num_nodes.sum())
    assert bool((found.batch.diff() >= 0).all())
    assert torch.equal(found.batch[found.edge_index[0]], found.batch[found.edge_index[1]])
    codes = found.edge_index[0] * len(found.x) + found.edge_index[1]
    assert len(torch.unique(codes)) == len(codes)  # each edge once in each direction
    assert sum(float(matrix.sum()) for matrix in adjacency(found)) == len(codes)
    assert all(float(matrix.diagonal().sum()) == 0 for matrix in adjacency(found))


def test_dropped_nodes_go_with_their_edges(graphs: Graphs) -> None:
    found = view("node_drop", graphs)
    assert found.num_nodes.tolist() == [n - int(RATIO * n) for n in graphs.num_nodes.tolist()]
    for i, matrix in enumerate(adjacency(found)):
        kept = [tuple(row) in rows(found, i) for row in graphs.x[graphs.batch == i].tolist()]
        assert torch.equal(matrix, adjacency(graphs)[i][kept][:, kept])


def test_all_nodes_are_dropped_equally_often() -> None:
    found = view("node_drop", copies(4000, torch.arange(4.0)[:, None], torch.tensor([[0, 1, 2], [1, 2, 3]])))
    lost = 4000 - torch.bincount(found.x[:, 0].long())
    assert (lost - 1000).abs().max() < 110  # four deviations


def test_masked_features_are_zero_and_nothing_else_changes(graphs: Graphs) -> None:
    found = view("attribute_mask", graphs)
    assert torch.equal(found.edge_index, graphs.edge_index)
    masked = (found.x == 0).all(1)
    counts = torch.bincount(graphs.batch[masked], minlength=len(graphs))
    assert counts.tolist() == [int(RATIO * n) for n in graphs.num_nodes.tolist()]
    assert torch.equal(found.x[~masked], graphs.x[~masked])


def test_edges_are_removed_and_added(graphs: Graphs) -> None:
    found = view("edge_perturb", graphs)
    assert torch.equal(found.x, graphs.x)
    added = 0
    for before, after in zip(adjacency(graphs), adjacency(found), strict=True):
        moved = int(RATIO * int(before.sum() / 2))
        gone, new = int(((before == 1) & (after == 0)).sum() / 2), int(((before == 0) & (after == 1)).sum() / 2)
        assert gone <= moved  # one that was removed may be drawn again
        assert new <= moved
        assert gone >= new
        added += new
    assert added > 20


def test_a_subgraph_is_connected_and_has_its_size(graphs: Graphs) -> None:
    found = view("subgraph", graphs)
    assert found.num_nodes.tolist() == [n - int(RATIO * n) for n in graphs.num_nodes.tolist()]
    for i, matrix in enumerate(adjacency(found)):
        kept = [tuple(row) in rows(found, i) for row in graphs.x[graphs.batch == i].tolist()]
        assert torch.equal(matrix, adjacency(graphs)[i][kept][:, kept])
        reached = torch.linalg.matrix_power(matrix + torch.eye(len(matrix)), len(matrix))[0]
        assert bool((reached > 0).all())


def test_a_subgraph_stays_in_the_piece_of_its_start() -> None:
    two = copies(50, torch.arange(6.0)[:, None], torch.tensor([[0, 1, 3, 4], [1, 2, 4, 5]]))
    found = view("subgraph", two, ratio=0.0)
    assert set(found.num_nodes.tolist()) == {3}
    assert {tuple(sorted(value for (value,) in rows(found, i))) for i in range(50)} == {(0, 1, 2), (3, 4, 5)}


def test_a_subgraph_grows_by_any_neighbour_alike() -> None:
    """Half of the path a - b - c - d, and of its start: of two waiting nodes each joins first half of the time."""
    path = copies(6000, torch.arange(4.0)[:, None], torch.tensor([[0, 1, 2], [1, 2, 3]]))
    found = view("subgraph", path, ratio=0.5)
    pairs = found.x[:, 0].view(-1, 2).long()
    shares = [float((pairs == torch.tensor(pair)).all(1).double().mean()) for pair in ((0, 1), (1, 2), (2, 3))]
    # From an end there is one way; from the middle two: (1/4 + 1/8, 1/8 + 1/8, 1/8 + 1/4).
    assert shares == pytest.approx([0.375, 0.25, 0.375], abs=0.025)


def test_random_takes_each_augmentation_for_its_share() -> None:
    one = torch.arange(1.0, 11)[:, None], torch.stack([torch.arange(9), torch.arange(1, 10)])
    found = view("random", copies(2000, *one), ratio=0.5)
    masked = torch.bincount(found.batch[found.x[:, 0] == 0], minlength=2000) > 0
    smaller = found.num_nodes == 5
    rewired = (found.num_nodes == 10) & ~masked
    for share in (masked, rewired):
        assert float(share.double().mean()) == pytest.approx(0.25, abs=0.04)
    assert float(smaller.double().mean()) == pytest.approx(0.5, abs=0.045)
    only = view("attribute_mask+node_drop", copies(400, *one), ratio=0.5)
    assert set(only.num_nodes.tolist()) == {5, 10}


def test_none_leaves_the_graphs_as_they_are(graphs: Graphs) -> None:
    found = view("none", graphs)
    assert torch.equal(found.x, graphs.x)
    assert torch.equal(found.edge_index, graphs.edge_index)


def test_tiny_graphs_survive() -> None:
    alone = copies(1, torch.ones(1, 2), torch.zeros(2, 0, dtype=torch.int64))
    for kind in AUGMENTATIONS:
        assert view(kind, alone, ratio=0.9).num_nodes.tolist() == [1]


def test_bad_augmentations_raise() -> None:
    with pytest.raises(UnknownName, match="node_drop"):
        GraphAugment("node_drp")
    with pytest.raises(ArgumentError, match="ratio"):
        GraphAugment(ratio=1.0)
