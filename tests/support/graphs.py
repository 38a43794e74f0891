"""Small graphs for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardneg.training.augmentation.graphs import Graphs
from hardneg.training.data.graph_files import save_graphs, simple


def random_graphs(num: int, *, features: int = 3, low: int = 3, high: int = 9, seed: int = 0) -> list[Any]:
    """Connected graphs: a path, and some more edges."""
    generator = torch.Generator().manual_seed(seed)
    nodes, edges = [], []
    for _ in range(num):
        n = int(torch.randint(low, high, (1,), generator=generator))
        nodes.append(torch.randn(n, features, generator=generator))
        path = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
        edges.append(torch.cat([path, torch.randint(0, n, (2, n), generator=generator)], dim=1))
    return packed(nodes, edges)


def packed(nodes: list[Tensor], edges: list[Tensor]) -> list[Any]:
    """Graphs of the features and the edges of each."""
    sizes = (torch.tensor([len(part) for part in nodes]), torch.tensor([part.shape[1] for part in edges]))
    return simple(torch.cat(nodes), torch.cat(edges, dim=1), *sizes)


def adjacency(graphs: Graphs) -> list[Tensor]:
    """The matrix of each graph."""
    matrices = []
    for i in range(len(graphs)):
        one = graphs[i : i + 1]
        matrix = torch.zeros(len(one.x), len(one.x), dtype=torch.float64)
        matrix[one.edge_index[0], one.edge_index[1]] = 1
        assert torch.equal(matrix, matrix.T)
        matrices.append(matrix)
    return matrices


def graph_file(path: Path, num: int = 48, **how: int) -> str:
    """A file of graphs of two classes that differ in their size; its name as data."""
    small, large = random_graphs(num // 2, low=3, high=8, **how), random_graphs(num // 2, low=6, high=14, seed=1, **how)
    save_graphs(path, small + large, np.repeat([0, 1], num // 2))
    return f"graphs:{path}"
