"""Options of the recipes for images, and of those for graphs; texts.py has those for texts and pairs.

``SimCLROptions`` is the base of most others, whose losses take the same arguments. Defaults of the graph recipes are
those of small molecule data sets such as MUTAG: few epochs and batches of 128 graphs. InfoGraph scores by dot products
instead of cosine similarities, so its temperature defaults to 1 and its loss to the Jensen-Shannon estimate. The first
line of each class is shown by ``hardneg train RECIPE --help``, so these docstrings have one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hardneg.core.errors import ArgumentError
from hardneg.core.options import option
from hardneg.core.published import MOCO
from hardneg.training.options.base import (
    DATA,
    GENERATE,
    NEGATIVES,
    OBJECTIVE,
    RUN,
    TEMPERATURE,
    TRAINING,
    HeadShape,
    TrainOptions,
    check_fixed,
    check_without_negatives,
)

DENOMINATOR = "Positives in the denominator of the loss: that of the pair, all, or none."
HIDDEN_DIM = (
    "Width of the hidden layers of projection head and predictor; default 4096, at most 8 times that of the features."
)


HEAD_NORM = (
    "Normalisation in projection head and predictor: batch (the paper), or layer, which does not depend on the number "
    "of ranks."
)


def _wide(layers: int, options: MoCoOptions | BYOLOptions | NNCLROptions, last_norm: bool = False) -> HeadShape:
    """Return the shape of a head whose hidden layers are wider than the features."""
    width, limit = (4096, 8) if options.hidden_dim is None else (options.hidden_dim, None)
    return HeadShape(layers, width, limit, last_norm, options.head_norm)


@dataclass(frozen=True)
class SimCLROptions(TrainOptions):
    """Two views of each image, both against all others of the batch: SimCLR, DCL, HCL."""

    objective: str = option("info_nce", OBJECTIVE, NEGATIVES)
    generate: str | None = option(None, GENERATE, NEGATIVES)
    positives_in_denominator: str = option("own", DENOMINATOR, NEGATIVES, among=("own", "all", "none"))
    num_negatives: str = option(
        "support",
        "Factor of the mean over negatives: count of the support, of all candidates, or the total weight.",
        NEGATIVES,
        among=("support", "candidates", "mass"),
    )


@dataclass(frozen=True)
class SupervisedOptions(SimCLROptions):
    """All images of the same label are positives: SupCon, SCL, H-SCL."""

    negatives: str = option(
        "OtherLabel()", 'Distribution of the negatives, such as "OtherLabel() * Tilt(1.0)".', NEGATIVES
    )
    reduction: str = option(
        "anchors", "Average over anchors (SupCon) or over pairs (H-SCL).", NEGATIVES, among=("anchors", "pairs")
    )
    same_label_negatives: bool = option(
        False,
        "Keep images of the anchor's label among the negatives: true positives with unlabelled negatives (HCL, Fig. "
        '4); with --negatives such as "Tilt(1.0)".',
        NEGATIVES,
    )
    has_global_loss: ClassVar[bool] = False
    four_losses: bool = option(
        False, "Also record the UCL, SCL, H-UCL and H-SCL losses and Assumption 1 (H-SCL, Fig. 4 and 5).", RUN
    )

    def check(self) -> None:
        """Raise for synthesised candidates, which have no label and could be positives, and for contradictions."""
        if self.same_label_negatives and "OtherLabel(" in self.negatives:
            what, fix = "--negatives without OtherLabel() with --same-label-negatives", 'use --negatives "Uniform()"'
            raise ArgumentError("supervised", what, repr(self.negatives), fix)
        if self.generate is not None:
            what = "--generate to be unset, since synthesised candidates have no label"
            raise ArgumentError("supervised", what, repr(self.generate))


@dataclass(frozen=True)
class MoCoOptions(TrainOptions):
    """A momentum encoder: v1 and v2 against a queue of its keys (MoCo, Ring), v3 against the keys of the batch."""

    temperature: float | str | None = option(  # type: ignore[assignment]  # None stands for a number until __init__ ends
        None, f"{TEMPERATURE} Default 0.07 in v1, 0.2 in v2 and v3.", NEGATIVES, low=1e-4
    )
    objective: str = option("info_nce", OBJECTIVE, NEGATIVES)
    generate: str | None = option(None, GENERATE, NEGATIVES)
    positives_in_denominator: str = option("own", DENOMINATOR, NEGATIVES, among=("own", "all", "none"))
    version: str = option(
        "v1",
        "MoCo version: v1 (queue), v2 (queue, other defaults) or v3 (keys of the batch, symmetric loss, predictor).",
        NEGATIVES,
        among=tuple(MOCO),
    )
    queue: int | None = option(
        None, "Number of keys in the queue (v1, v2); default 65536, at most half of the data.", NEGATIVES, low=1
    )
    momentum: float | None = option(
        None,
        "Momentum of the key encoder; default 0.999 in v1 and v2; in v3 0.99, raised to 1 along a cosine.",
        TRAINING,
        low=0.0,
        high=1.0,
    )
    hidden_dim: int | None = option(None, f"{HIDDEN_DIM[:-1]} (v3 only).", TRAINING, low=1)
    head_norm: str = option("batch", f"{HEAD_NORM[:-1]} (v3 only).", TRAINING, among=("batch", "layer"))

    @property
    def projector(self) -> HeadShape:
        """Three normalised layers in v3, otherwise SimCLR's two."""
        return _wide(3, self, last_norm=True) if self.version == "v3" else HeadShape()

    @property
    def predictor(self) -> HeadShape:
        """The predictor of v3: two normalised layers."""
        return _wide(2, self, last_norm=True)

    def __post_init__(self) -> None:
        """Replace None with the published temperature and momentum of the version, then check all options."""
        for name, value in MOCO[self.version]._asdict().items() if self.version in MOCO else ():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()

    @property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]  # by an option
        """The source of the candidates: the queue in v1 and v2, the batch in v3."""
        return ("batch",) if self.version == "v3" else ("queue",)


@dataclass(frozen=True)
class BYOLOptions(TrainOptions):
    """Each view predicts the other one, as a momentum encoder sees it, without negatives: BYOL."""

    dim: int = option(256, "Dimension of the projections and predictions.", DATA, low=1)
    momentum: float = option(
        0.996, "Momentum of the target encoder, raised to 1 along a cosine.", TRAINING, low=0.0, high=1.0
    )
    hidden_dim: int | None = option(None, HIDDEN_DIM, TRAINING, low=1)
    head_norm: str = option("batch", HEAD_NORM, TRAINING, among=("batch", "layer"))
    has_global_loss: ClassVar[bool] = False

    @property
    def projector(self) -> HeadShape:
        """Two layers, as wide as the predictor's."""
        return _wide(2, self)

    predictor = projector

    def check(self) -> None:
        """Raise for options of negatives, of which BYOL has none, and for a temperature."""
        check_without_negatives("byol", self)
        if self.temperature != 0.5:
            what = "--temperature to be unset, since its loss is a squared distance"
            raise ArgumentError("byol", what, repr(self.temperature))


@dataclass(frozen=True)
class SwAVOptions(TrainOptions):
    """Each view predicts which prototypes the other one is assigned to, without negatives: SwAV."""

    temperature: float | str = option(0.1, "Temperature of the predictions.", TRAINING, low=1e-4)
    hidden_dim: int = option(2048, "Width of the hidden layer of the projection head.", TRAINING, low=1)
    head_norm: str = option("batch", HEAD_NORM, TRAINING, among=("batch", "layer"))
    num_prototypes: int | None = option(
        None, "Number of prototypes; default 3000, at most a tenth of the data.", TRAINING, low=2
    )
    epsilon: float = option(0.05, "Smoothness of the assignments to prototypes.", TRAINING, low=1e-3)
    sinkhorn_steps: int = option(3, "Number of Sinkhorn-Knopp iterations.", TRAINING, low=1)
    queue: int = option(
        0,
        "Number of past embeddings that are assigned along with the batch, for batches smaller than the number of "
        "prototypes (the paper: 3840).",
        TRAINING,
        low=0,
    )
    num_crops: int = option(
        0,
        "Number of further, smaller crops of each image that predict the assignments of both views (the paper: 6).",
        TRAINING,
        low=0,
    )
    frozen_epochs: int = option(1, "Number of epochs before the prototypes are trained.", TRAINING, low=0)
    has_global_loss: ClassVar[bool] = False

    @property
    def projector(self) -> HeadShape:
        """Two layers."""
        return HeadShape(2, self.hidden_dim, norm=self.head_norm)

    def check(self) -> None:
        """Raise for options of negatives, of which SwAV has none."""
        check_without_negatives("swav", self)


@dataclass(frozen=True)
class FNCOptions(TrainOptions):
    """Two views of each image, where candidates that are close to any of its views are false negatives: FNC."""

    temperature: float | str = option(0.1, TEMPERATURE, NEGATIVES, low=1e-4)
    num_support: int = option(
        1,
        "Number of further views of each image, by which false negatives are found, too (the paper: 8).",
        NEGATIVES,
        low=0,
    )
    num_found: int = option(10, "Number of false negatives of each image, at most.", NEGATIVES, low=1)
    threshold: float = option(0.7, "Cosine above which a candidate is a false negative.", NEGATIVES, low=-1.0, high=1.0)
    found: str = option(
        "attract",
        "What becomes of the false negatives: attract (they are positives), or remove.",
        NEGATIVES,
        among=("attract", "remove"),
    )

    def check(self) -> None:
        """Raise for other negatives than those that the method leaves, a correction, or a schedule."""
        check_without_negatives("fnc", self, "it chooses the negatives itself")
        if isinstance(self.temperature, str):
            raise ArgumentError("fnc", "a number as --temperature", repr(self.temperature))


@dataclass(frozen=True)
class NNCLROptions(SimCLROptions):
    """The nearest past embedding of each view against the predictions of the other views: NNCLR."""

    temperature: float | str = option(0.1, TEMPERATURE, NEGATIVES, low=1e-4)
    dim: int = option(256, "Dimension of the projections and predictions.", DATA, low=1)
    queue: int | None = option(
        None,
        "Number of past embeddings among which nearest neighbours are found; default 98304, at most half of the data.",
        NEGATIVES,
        low=1,
    )
    hidden_dim: int | None = option(None, HIDDEN_DIM, TRAINING, low=1)
    head_norm: str = option("batch", HEAD_NORM, TRAINING, among=("batch", "layer"))

    @property
    def projector(self) -> HeadShape:
        """Three normalised layers."""
        return _wide(3, self, last_norm=True)

    @property
    def predictor(self) -> HeadShape:
        """Two layers."""
        return _wide(2, self)


@dataclass(frozen=True)
class SogCLROptions(TrainOptions):
    """Two views of each image, both against the whole data set, through running normalisers: SogCLR."""

    temperature: float | str = option(0.1, TEMPERATURE, NEGATIVES, low=1e-4)
    gamma: float = option(0.9, "Weight of the new value in the running normalisers.", NEGATIVES, low=0.0, high=1.0)

    def check(self) -> None:
        """Raise for options that a loss over the whole data set does not support."""
        check_fixed("sogclr", self)


@dataclass(frozen=True)
class ISogCLROptions(TrainOptions):
    """Two views of each image, both against the whole data set, with a learnt temperature per image: iSogCLR."""

    temperature: float | str = option(
        0.7, "Initial temperature of every image; each image learns its own.", NEGATIVES, low=1e-4
    )
    rho: float = option(
        0.3, "Radius of the KL constraint; a larger value gives lower temperatures.", NEGATIVES, low=0.0
    )

    gamma: float = option(
        0.9,
        "Weight of the new value in the running normalisers (1 = the loss of the batch).",
        NEGATIVES,
        low=0.0,
        high=1.0,
    )

    def check(self) -> None:
        """Raise for a temperature schedule: temperatures are learnt from a constant starting value."""
        check_fixed("isogclr", self)


@dataclass(frozen=True)
class EMC2Options(TrainOptions):
    """Two views of each image, both against negatives that Markov chains draw from the whole data set: EMC2."""

    temperature: float | str = option(0.07, TEMPERATURE, NEGATIVES, low=1e-4)
    burn_in: float = option(0.5, "Share of each walk that is discarded as burn-in.", NEGATIVES, low=0.0, high=0.999)
    num_steps: int = option(0, "Steps of each chain per batch (0 = the number of candidates).", NEGATIVES, low=0)
    forget: bool = option(False, "Store no embeddings; chain states outside the batch then do not repel.", NEGATIVES)
    proposals: str = option(
        "batch",
        "Proposals of the chains: those of the batch, or of the whole data set (Algorithm 1 as printed), by their "
        "stored embeddings.",
        NEGATIVES,
        among=("batch", "data set"),
    )
    reencode: bool = option(
        False,
        "Encode chain states outside the batch again, instead of using their stored embeddings; with --proposals "
        '"data set" every proposal, so use --num-steps.',
        NEGATIVES,
    )

    def check(self) -> None:
        """Raise for non-uniform negatives, since the chains determine how negatives are drawn."""
        check_fixed("emc2", self)
        if self.proposals == "data set" and self.forget and not self.reencode:
            what, fix = "embeddings of the data set for --proposals 'data set'", "drop --forget, or add --reencode"
            raise ArgumentError("emc2", what, "forget=True", fix)
        if self.proposals == "data set" and "".join(self.batches.split()) != "uniform()":
            what = "--batches to be uniform() with --proposals 'data set', whose proposals do not come from the batch"
            raise ArgumentError("emc2", what, self.batches)
        if "".join(self.negatives.split()) != "Uniform()":
            what = "--negatives to be Uniform(), since its Markov chains draw the negatives"
            raise ArgumentError("emc2", what, repr(self.negatives))


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
    positives_in_denominator: str = option("none", DENOMINATOR, NEGATIVES, among=("own", "all", "none"))


@dataclass(frozen=True)
class InfoGraphOptions(GraphOptions):
    """The nodes of each graph against the graphs of the batch, by raw dot products: InfoGraph."""

    needs: ClassVar[str] = "nodes"
    has_global_loss: ClassVar[bool] = False
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
        if self.head != "auto":
            raise ArgumentError("infograph", "--head auto: it has projections of its own", repr(self.head))
