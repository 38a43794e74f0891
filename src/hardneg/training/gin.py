"""GIN (Xu et al. 2019) from torch-geometric's layers: three of width 32, with sum aggregation and sum readout.

    h_v <- norm(relu(mlp(h_v + sum of h_u over the neighbours u of v)))

A node's features are the concatenated outputs of all layers, and a graph's are the sums over its nodes, as in the code
of InfoGraph and GraphCL: 96 numbers. The norm "batch" normalises over the nodes of a batch, as they do; "layer"
normalises each node by itself, so that a graph's features depend neither on its batch nor on the number of ranks.

``torch_geometric.nn.models.GIN`` is not used: it ends in a linear layer where outputs are concatenated, and sums in the
type that it is given. ``GraphData.rebuilt`` (data/graphs.py) builds this one with GraphCL's head; InfoGraph's recipe
also uses its node features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor, nn

from hardneg.core.errors import check_among, optional
from hardneg.core.tensors import widened
from hardneg.training.augmentation.graphs import Graphs
from hardneg.training.encoders import seeded

NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


class GIN(nn.Module):
    """Graph isomorphism network: features [g, width * num_layers] of a batch of graphs.

    Args:
        in_features: Number of features of each node.
        width: Width of each layer.
        num_layers: Number of message-passing layers.
        norm: "batch" or "layer".
        seed: Seed of the weights; None draws them from torch's generator.

    Raises:
        MissingExtra: If torch-geometric is not installed.

    Example:
        >>> graphs = Graphs(torch.ones(3, 1), torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 0, 1]), 2)
        >>> GIN(1, norm="layer")(graphs).shape
        torch.Size([2, 96])
    """

    def __init__(
        self, in_features: int, width: int = 32, num_layers: int = 3, norm: str = "batch", seed: int | None = None
    ) -> None:
        super().__init__()
        check_among("GIN", "norm", norm, tuple(NORMS))
        library = optional("torch_geometric.nn", "GIN", extra="graphs")
        self.feature_dim = width * num_layers
        self.sum_over_graphs = library.global_add_pool
        self.convs = nn.ModuleList(library.GINConv(nn.Identity()) for _ in range(num_layers))
        with seeded(seed):
            for i, conv in enumerate(self.convs):  # GINConv would reset the weights of a network that it is built with
                conv.nn = two_layers(width if i else in_features, width, width)
        self.norms = nn.ModuleList(NORMS[norm](width) for _ in self.convs)

    def nodes(self, graphs: Graphs) -> Annotated[Tensor, "n d"]:
        """Return the features of all nodes of the batch, [n, width * num_layers]."""
        dtype = next(self.parameters()).dtype
        h, all_layers = graphs.x.to(dtype), []
        for conv, norm in zip(self.convs, self.norms, strict=True):
            # The sum is in float32: bfloat16 cannot count, a GPU's sum of 300 ones is 256.
            h = norm(conv(widened(h), graphs.edge_index).relu())
            all_layers.append(h)
        return torch.cat(all_layers, dim=1).to(dtype)

    def pooled(self, nodes: Annotated[Tensor, "n d"], graphs: Graphs) -> Annotated[Tensor, "g d"]:
        """Sum node features over each graph: [n, d] -> [g, d]; a graph without nodes gets zeros."""
        whole: Tensor = self.sum_over_graphs(widened(nodes), graphs.batch, len(graphs))
        return whole.to(nodes.dtype)

    def forward(self, graphs: Graphs) -> Annotated[Tensor, "g d"]:
        """Return the features of the graphs, [g, width * num_layers]: sums over their nodes."""
        return self.pooled(self.nodes(graphs), graphs)


class Perceptron(nn.Sequential):
    """Layers whose input is converted to the type of their weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layers, [..., out_features]."""
        projected: Tensor = super().forward(x.to(next(self.parameters()).dtype))  # type: ignore[no-untyped-call]
        return projected


def two_layers(in_features: int, width: int, out_features: int) -> nn.Sequential:
    """Return a perceptron with one hidden layer and ReLU, initialised as in GraphCL."""
    return Perceptron(xavier(in_features, width), nn.ReLU(), xavier(width, out_features))


def xavier(in_features: int, out_features: int) -> nn.Linear:
    """Return a linear layer with Xavier-uniform weights and zero bias, as in InfoGraph and GraphCL."""
    layer = nn.Linear(in_features, out_features)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
