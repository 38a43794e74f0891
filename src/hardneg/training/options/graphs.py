"""Options of the graph recipes: ``graphcl`` and ``infograph``.

Defaults are those of small molecule data sets such as MUTAG: few epochs and batches of 128 graphs. InfoGraph scores
by dot products instead of cosine similarities, so its temperature defaults to 1 and its loss to the Jensen-Shannon
estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hardneg.core.errors import ArgumentError
from hardneg.core.options import option
from hardneg.training.options.base import DATA, NEGATIVES, OBJECTIVE, TEMPERATURE, TRAINING, TrainOptions
from hardneg.training.options.images import SimCLROptions

GRAPH_ENCODER = "Encoder: auto or gin (batch norm), or gin-layer (layer norm, independent of the number of ranks)."
GRAPH_VIEWS = 'Augmentation of graphs: auto, random, node_drop, "node_drop+subgraph", "graphcl(ratio=0.1)" ...'


@dataclass(frozen=True)
class GraphOptions(TrainOptions):
    """Options shared by the graph recipes: their data, encoder, and defaults for small data sets."""

    data: str = option("graphs:MUTAG", "Data set: graphs:NAME, graphs:FILE.npz, or a folder of TU text files.", DATA)
    encoder: str = option("auto", GRAPH_ENCODER, DATA)
    dim: int = option(96, "Dimension of the embeddings that the loss compares.", DATA, low=1)
    epochs: int = option(20, "Number of passes over the data.", TRAINING, low=1)
    batch_size: int = option(128, "Graphs per batch, summed over all ranks.", TRAINING, low=2)
    learning_rate: float = option(1e-2, "Learning rate.", TRAINING, low=0.0)


@dataclass(frozen=True)
class GraphCLOptions(GraphOptions, SimCLROptions):
    """A view of each graph against the other views of the batch: GraphCL."""

    augment: str = option("auto", GRAPH_VIEWS, DATA)
    temperature: float | str = option(0.2, TEMPERATURE, NEGATIVES, low=1e-4)
    positives_in_denominator: str = option(
        "none",
        "Positives in the denominator of the loss: that of the pair, all, or none.",
        NEGATIVES,
        among=("own", "all", "none"),
    )


@dataclass(frozen=True)
class InfoGraphOptions(GraphOptions):
    """The nodes of each graph against the graphs of the batch, by raw dot products: InfoGraph."""

    needs: ClassVar[str] = "nodes"
    negatives: str = option(
        "Uniform()", 'Distribution of the negatives; HCL on graphs is "ClippedTilt(1.0)".', NEGATIVES
    )
    temperature: float | str = option(1.0, TEMPERATURE, NEGATIVES, low=1e-4)
    objective: str = option("jsd", OBJECTIVE, NEGATIVES)
    augment: str = option("none", "Augmentation of graphs: none, random, node_drop, subgraph ...", DATA)
    dim: int = option(96, "Dimension of the projected nodes and graphs that the loss compares.", DATA, low=1)

    def check(self) -> None:
        """Raise for encoding in chunks: the anchors are nodes, and chunks of graphs differ in their number of nodes."""
        if self.encode_chunk:
            what = "--encode-chunk of 0, since its anchors are the nodes of whole graphs"
            raise ArgumentError("infograph", what, str(self.encode_chunk))
