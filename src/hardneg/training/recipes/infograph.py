"""InfoGraph with any negatives (Sun et al. 2020): the nodes of a graph against the graphs of the batch.

The positive of a node is its own graph, its negatives are the other graphs. Nodes and graphs are projected by
separate networks and compared by unnormalised dot products; the loss is the Jensen-Shannon estimate of their mutual
information. HCL on graphs is ``negatives="ClippedTilt(beta)"``, with the sign of the paper: hard graphs weigh more.
The authors' code has the opposite sign. Graphs are not augmented unless ``--augment`` names a view.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import normalize

from hardneg.core.distributed import gather
from hardneg.core.errors import ArgumentError
from hardneg.core.types import Keys
from hardneg.training.augmentation.graphs import Graphs
from hardneg.training.data.items import Items
from hardneg.training.encoders import seeded
from hardneg.training.gin import GIN, xavier
from hardneg.training.loop.method import Batch, EncodeInputs, Method
from hardneg.training.loop.parts import loss_for
from hardneg.training.options import InfoGraphOptions


class InfoGraph(Method):
    """Nodes against graphs."""

    def __init__(self, options: InfoGraphOptions, data: Items, total: int) -> None:
        super().__init__()
        self.encoder = LocalAndGlobal(data.encoder(options), options.dim, options.seed)
        self.loss = loss_for(options, views="pool")

    @classmethod
    def rebuilt(cls, kind: type[Items], record: dict[str, Any], options: InfoGraphOptions) -> nn.Module:
        """Build the encoder of a finished run with fresh weights."""
        return LocalAndGlobal(kind.rebuilt(record, options), options.dim, options.seed)

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """Compute the loss of all nodes of this rank against the graphs of all ranks."""
        graphs = batch.first
        nodes, projected = encode(graphs)  # [n, d], [b, d]
        owner = graphs.batch  # [n], the graph of each node
        self.pool = gather(Keys(projected.float(), batch.ids, batch.labels, source="batch"))
        labels = None if batch.labels is None else batch.labels[owner]
        self.last = nodes.float(), projected.float()[owner], batch.ids[owner], labels, self.pool
        loss: Tensor = self.loss(*self.last)
        return loss

    def harvest(self) -> Keys:
        """Return the projected graphs of the last batch as unit vectors."""
        return Keys(normalize(self.pool.vectors.detach(), dim=-1), self.pool.ids)


class LocalAndGlobal(nn.Module):
    """GIN with one projection of nodes and one of graphs; the ``features`` are GIN's.

    Args:
        encoder: An encoder of graphs whose backbone is a GIN.
        dim: Dimension of both projections.
        seed: Seed of their weights.

    Raises:
        ArgumentError: If the encoder has no node features.
    """

    def __init__(self, encoder: nn.Module, dim: int, seed: int) -> None:
        super().__init__()
        backbone = getattr(encoder, "backbone", None)
        if not isinstance(backbone, GIN):
            what = "an encoder of graphs with node features"
            raise ArgumentError("infograph", what, type(encoder).__name__, "use --data graphs:NAME")
        self.name = getattr(encoder, "name", None)
        self.backbone = backbone
        with seeded(seed):
            self.of_nodes, self.of_graphs = (Projection(backbone.feature_dim, dim) for _ in range(2))

    def features(self, graphs: Graphs) -> Tensor:
        """Return the features of the graphs, [b, f], which are evaluated."""
        features: Tensor = self.backbone(graphs)
        return features

    def forward(self, graphs: Graphs) -> tuple[Tensor, Tensor]:
        """Return the projected nodes, [n, dim], and graphs, [b, dim]."""
        nodes = self.backbone.nodes(graphs)
        return self.of_nodes(nodes), self.of_graphs(self.backbone.pooled(nodes, graphs))


class Projection(nn.Module):
    """Three layers with a linear shortcut, as in InfoGraph's code.

    Args:
        in_dim: Number of input features.
        dim: Number of hidden and output features.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before in (in_dim, dim, dim):
            layers += [xavier(before, dim), nn.ReLU()]
        self.layers, self.shortcut = nn.Sequential(*layers), xavier(in_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Project features [n, in_dim] to [n, dim]."""
        projected: Tensor = self.layers(x) + self.shortcut(x)
        return projected
