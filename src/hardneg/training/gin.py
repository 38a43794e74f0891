"""GIN (Xu et al. 2019) in plain torch: three layers of width 32, with sum aggregation and sum readout.

    h_v <- norm(relu(mlp(h_v + sum of h_u over the neighbours u of v)))

A node's features are the concatenated outputs of all layers, and a graph's are the sums over its nodes, as in the code
of InfoGraph and GraphCL: 96 numbers. The norm "batch" normalises over the nodes of a batch, as they do; "layer"
normalises each node by itself, so that a graph's features depend neither on its batch nor on the number of ranks.

``GraphData.rebuilt`` (data/graphs.py) builds it with GraphCL's head; InfoGraph's recipe also uses its node features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor, nn

from hardneg.core.errors import check_among
from hardneg.core.tensors import widened
from hardneg.training.data.packed import Graphs
from hardneg.training.encoders import seeded

NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


class GIN(nn.Module):
    """Graph isomorphism network of packed graphs: features [g, width * num_layers].

    Args:
        in_features: Number of features of each node.
        width: Width of each layer.
        num_layers: Number of message-passing layers.
        norm: "batch" or "layer".
        seed: Seed of the weights; None draws them from torch's generator.

    Example:
        >>> graphs = Graphs(torch.ones(3, 1), torch.tensor([[0], [1]]), torch.tensor([2, 1]), torch.tensor([1, 0]))
        >>> GIN(1, norm="layer")(graphs).shape
        torch.Size([2, 96])
    """

    def __init__(
        self, in_features: int, width: int = 32, num_layers: int = 3, norm: str = "batch", seed: int | None = None
    ) -> None:
        super().__init__()
        check_among("GIN", "norm", norm, tuple(NORMS))
        self.feature_dim = width * num_layers
        with seeded(seed):
            widths = [in_features] + [width] * (num_layers - 1)
            self.layers = nn.ModuleList(two_layers(before, width, width) for before in widths)
        self.norms = nn.ModuleList(NORMS[norm](width) for _ in widths)

    def nodes(self, graphs: Graphs) -> Annotated[Tensor, "n d"]:
        """Return the features of all nodes of the batch, [n, width * num_layers]."""
        source, target = graphs.edge_index
        dtype: torch.dtype = self.layers[0][0].weight.dtype  # type: ignore[index, assignment]
        h, all_layers = graphs.x.to(dtype), []
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = widened(h)  # bfloat16 cannot count: a GPU's sum of 300 ones is 256
            h = norm(layer(h.index_add(0, target, h[source]).to(dtype)).relu())
            all_layers.append(h)
        return torch.cat(all_layers, dim=1).to(dtype)

    def forward(self, graphs: Graphs) -> Annotated[Tensor, "g d"]:
        """Return the features of the graphs, [g, width * num_layers]: sums over their nodes."""
        return pooled(self.nodes(graphs), graphs)


def pooled(nodes: Annotated[Tensor, "n d"], graphs: Graphs) -> Annotated[Tensor, "g d"]:
    """Sum node features over each graph: [n, d] -> [g, d]; a graph without nodes gets zeros."""
    wide = widened(nodes)
    return wide.new_zeros(len(graphs), wide.shape[1]).index_add(0, graphs.batch, wide).to(nodes.dtype)


def two_layers(in_features: int, width: int, out_features: int) -> nn.Sequential:
    """Return a perceptron with one hidden layer and ReLU, initialised as in GraphCL."""
    return nn.Sequential(xavier(in_features, width), nn.ReLU(), xavier(width, out_features))


def xavier(in_features: int, out_features: int) -> nn.Linear:
    """Return a linear layer with Xavier-uniform weights and zero bias, as in InfoGraph and GraphCL."""
    layer = nn.Linear(in_features, out_features)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
