"""GIN on batches of graphs against a plain loop over single graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hardneg.core.errors import ArgumentError
from hardneg.training.augmentation.graphs import Graphs
from hardneg.training.gin import GIN
from support.graphs import adjacency, packed, random_graphs

pytest.importorskip("torch_geometric", reason="graphs need the extra graphs")


def batch_of(num: int, **how: int) -> Graphs:
    return Graphs.collate(random_graphs(num, **how))


def by_matrices(model: GIN, graphs: Graphs) -> torch.Tensor:
    """Each graph by itself, its neighbours summed by its adjacency matrix."""
    rows = []
    for i, matrix in enumerate(adjacency(graphs)):
        h, layers = graphs.x[graphs.batch == i].double(), []
        for conv, norm in zip(model.convs, model.norms, strict=True):
            h = norm(torch.relu(conv.nn(h + matrix @ h)))
            layers.append(h.sum(0))
        rows.append(torch.cat(layers))
    return torch.stack(rows)


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_graphs_are_encoded_one_by_one(norm: str) -> None:
    graphs, model = batch_of(6), GIN(3, norm=norm, seed=0).double().eval()
    expected = by_matrices(model, graphs)
    torch.testing.assert_close(model(graphs), expected)
    torch.testing.assert_close(model(graphs[2:5]), expected[2:5])
    torch.testing.assert_close(model(graphs[4:].joined([graphs[:1]])), expected[[4, 5, 0]])


def test_the_layer_norm_makes_a_graph_independent_of_its_batch() -> None:
    graphs, model = batch_of(6), GIN(3, norm="layer", seed=0).double().train()
    torch.testing.assert_close(model(graphs)[:2], model(graphs[0:2]))
    model = GIN(3, norm="batch", seed=0).double().train()
    assert not torch.allclose(model(graphs)[:2], model(graphs[0:2]))


def test_the_order_of_the_nodes_does_not_matter() -> None:
    graphs, model = batch_of(1, low=8, high=9), GIN(3, norm="layer", seed=0).double()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    place = torch.argsort(order)
    other = Graphs.collate(packed([graphs.x[order]], [place[graphs.edges]]))
    assert not torch.equal(other.edge_index, graphs.edge_index)
    torch.testing.assert_close(model(other), model(graphs))
    torch.testing.assert_close(model.nodes(other), model.nodes(graphs)[order])


def test_the_gradient_is_that_of_the_loop() -> None:
    graphs, model = batch_of(4), GIN(3, norm="layer", seed=0).double()
    upstream = torch.randn(4, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad((model(graphs) * upstream).sum(), model.convs.parameters())
    expected = torch.autograd.grad((by_matrices(model, graphs) * upstream).sum(), model.convs.parameters())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_seed_makes_the_weights() -> None:
    torch.manual_seed(5)
    one, other = GIN(3, seed=2), GIN(3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert isinstance(one.norms[0], nn.BatchNorm1d)
    with pytest.raises(ArgumentError, match="batch, layer"):
        GIN(3, norm="group")


def test_nodes_are_summed_in_full_precision() -> None:
    """A GPU adds in the type that it is given: in bfloat16 a sum of ones stays at 256."""
    n = 2001
    edges = torch.stack([torch.zeros(n - 1, dtype=torch.int64), torch.arange(1, n)])
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    star = Graphs(torch.ones(n, 1, dtype=torch.bfloat16), edges, torch.zeros(n, dtype=torch.int64), 1)
    seen = []
    model = GIN(1, width=1, num_layers=2, seed=0)
    assert model.pooled(star.x, star).tolist() == [[2000.0]]  # the nearest to 2001
    model.norms[0] = nn.Sequential(nn.Threshold(1e9, 1.0), Half())  # ones, as batch normalisation gives them there
    model.convs[1].nn.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(star).dtype == torch.float32
    assert seen[0][0].tolist() == [2001.0]


def test_features_have_the_type_of_the_weights() -> None:
    """A projection of a model in bfloat16 takes nothing else."""
    graphs, model = batch_of(6), nn.Sequential(GIN(3, seed=0), nn.Linear(96, 2)).bfloat16()
    assert model(graphs).dtype == torch.bfloat16


class Half(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16()
