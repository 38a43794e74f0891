"""Options of the recipes of graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hardneg.core.errors import ArgumentError
from hardneg.core.options import option
from hardneg.training.options.base import DATA, NEGATIVES, OBJECTIVE, TEMPERATURE, TRAINING, TrainOptions
from hardneg.training.options.images import SimCLROptions

GRAPH_ENCODER = "auto or gin (batch statistics), or gin-layer (none: the same over any ranks)."
GRAPH_VIEWS = 'The views of graphs: auto, random, node_drop, "node_drop+subgraph", "graphcl(ratio=0.1)" ...'


@dataclass(frozen=True)
class GraphOptions(TrainOptions):
    """What the recipes of graphs share."""

    data: str = option("graphs:MUTAG", "graphs:NAME, graphs:FILE.npz or a folder of TU text files.", DATA)
    encoder: str = option("auto", GRAPH_ENCODER, DATA)
    dim: int = option(96, "Features of the projection that the loss sees.", DATA, low=1)
    epochs: int = option(20, "Passes over the data.", TRAINING, low=1)
    batch_size: int = option(128, "Graphs in a batch, over all ranks together.", TRAINING, low=2)
    learning_rate: float = option(1e-2, "Adam's step size.", TRAINING, low=0.0)


@dataclass(frozen=True)
class GraphCLOptions(GraphOptions, SimCLROptions):
    """A view of each graph against the other views of the batch: GraphCL."""

    augment: str = option("auto", GRAPH_VIEWS, DATA)
    temperature: float | str = option(0.2, TEMPERATURE, NEGATIVES, low=1e-4)
    positives_in_denominator: str = option(
        "none", "Which positives the denominator has.", NEGATIVES, among=("own", "all", "none")
    )


@dataclass(frozen=True)
class InfoGraphOptions(GraphOptions):
    """The nodes of each graph against the graphs of the batch, by raw dot products: InfoGraph."""

    needs: ClassVar[str] = "nodes"
    negatives: str = option("Uniform()", 'Negatives in the grammar; HCL is "ClippedTilt(1.0)".', NEGATIVES)
    temperature: float | str = option(1.0, TEMPERATURE, NEGATIVES, low=1e-4)
    objective: str = option("jsd", OBJECTIVE, NEGATIVES)
    augment: str = option("none", "The views of graphs, if any: random, node_drop, subgraph ...", DATA)
    dim: int = option(96, "Features of the two projections that the loss compares.", DATA, low=1)

    def check(self) -> None:
        if self.encode_chunk:
            what = "--encode-chunk of 0, since its anchors are nodes, which are not encoded one by one"
            raise ArgumentError("infograph", what, str(self.encode_chunk))
