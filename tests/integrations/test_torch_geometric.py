"""Planned batches in PyG's loader, and the losses on graphs of its batches, against plain loops."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import hardneg as hn
from hardneg.batching import Plan, Refresh, encode

pytest.importorskip("torch_geometric", reason="torch-geometric is not installed")
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool
from torch_geometric.utils import dropout_edge, erdos_renyi_graph


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GINConv(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4)))

    def nodes(self, batch: Any, edges: Tensor | None = None) -> Tensor:
        return self.conv(batch.x, batch.edge_index if edges is None else edges)

    def forward(self, batch: Any, edges: Tensor | None = None) -> Tensor:
        return global_add_pool(self.nodes(batch, edges), batch.batch)


@pytest.fixture
def graphs() -> list[Any]:
    torch.manual_seed(0)
    sizes = torch.randint(3, 8, (24,)).tolist()
    return [Data(x=torch.randn(n, 3), edge_index=erdos_renyi_graph(n, 0.5), id=i) for i, n in enumerate(sizes)]


def test_the_loader_gives_the_graphs_of_the_plan_and_resumes(graphs: list[Any]) -> None:
    model, loader = Encoder(), DataLoader(graphs, batch_size=10)

    def sampler() -> Any:
        return hn.ProximityBatchSampler(24, 6, restart=0.2, segment=2)

    whole = sampler()
    refresh = Refresh(whole, 2, lambda: encode(model, loader, progress=False), num_neighbours=5)
    refresh.now()
    seen, saved = [], None
    for step, batch in enumerate(DataLoader(graphs, batch_sampler=whole), start=1):
        seen.append(batch.id.tolist())
        assert batch.num_graphs == 6
        assert batch.ptr.diff().tolist() == [graphs[i].num_nodes for i in seen[-1]]
        with torch.no_grad():
            model.conv.nn[0].weight.add_(0.5)  # training: the next graph is another one
        refresh(step)
        saved = (whole.plan, whole.graph) if step == 2 else saved
    assert sorted(i for batch in seen for i in batch) == list(range(24))
    assert len({segment.graph for segment in whole.plan.segments}) == 2
    again = sampler()
    again.graph = saved[1]
    again.resume(Plan.from_parts(saved[0].parts()), position=2)
    assert [batch.id.tolist() for batch in DataLoader(graphs, batch_sampler=again, num_workers=2)] == seen[2:]


def test_graphs_are_encoded_in_order(graphs: list[Any]) -> None:
    model = Encoder()
    vectors = encode(model, DataLoader(graphs, batch_size=7), normalize=False, progress=False)
    alone = [model(next(iter(DataLoader([graph])))).detach() for graph in graphs]
    torch.testing.assert_close(vectors, torch.cat(alone))


def test_graphcl_equals_a_plain_loop(graphs: list[Any]) -> None:
    model, batch = Encoder().double(), next(iter(DataLoader(graphs, batch_size=8)))
    batch.x = batch.x.double()
    views = [nn.functional.normalize(model(batch, dropout_edge(batch.edge_index, p=0.2)[0]), dim=1) for _ in range(2)]
    terms = []
    for i in range(8):
        s = views[0][i] @ views[1].T / 0.2
        terms.append(torch.logsumexp(s[torch.arange(8) != i], 0) - s[i])
    torch.testing.assert_close(hn.papers.graphcl(0.2)(*views), torch.stack(terms).mean())


def test_infograph_reads_the_owners_of_the_nodes(graphs: list[Any]) -> None:
    model, batch = Encoder().double(), next(iter(DataLoader(graphs, batch_size=4)))
    batch.x = batch.x.double()
    nodes = model.nodes(batch)
    pooled = global_add_pool(nodes, batch.batch)
    positive, negative = [], []
    for node, owner in zip(nodes, batch.batch.tolist(), strict=True):
        for graph, vector in enumerate(pooled):
            (positive if graph == owner else negative).append(node @ vector)
    expected = (
        softplus(-torch.stack(positive)).mean() + softplus(torch.stack(negative)).mean() - 2 * log(2)
    )  # as the authors
    torch.testing.assert_close(hn.papers.infograph()(nodes, pooled, batch.batch), expected)
