"""The options of the recipes: plain dataclasses, light enough for ``--help``, the same for flags, YAML and Python."""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from typing import Any, ClassVar, get_args, get_type_hints

from hardneg.core.errors import ArgumentError
from hardneg.core.options import option
from hardneg.core.schedules import Schedule

Scheduled = float | str
"""A number, or the text of a schedule such as "linear(0.5, 0.1)"."""

TEMPERATURE = 'Similarities are divided by this; a number or a schedule such as "linear(0.5, 0.1)".'
DATA, NEGATIVES, TRAINING, RUN = "Data and encoder", "Negatives", "Training", "The run"
"""The panels of the help."""


@dataclass(frozen=True)
class TrainOptions:
    """What every recipe takes."""

    data: str = option(
        "digits", "digits, fashion-mnist, cifar10, cifar100, folder:PATH, npz:PATH, hf:NAME, text:FILE ...", DATA
    )
    data_root: str | None = option(None, "Where the data set lies, if not in its usual place.", DATA)
    encoder: str = option(
        "auto",
        "auto, tiny, resnet18, resnet50, resnet18-imagenet, timm:NAME, torchvision:NAME, hf:PATH, file.py:function.",
        DATA,
    )
    dim: int = option(128, "Features of the projection that the loss sees.", DATA, low=1)
    negatives: str = option(
        "Uniform()", 'Negatives in the grammar, such as "Tilt(1.0)"; see: hardneg explain.', NEGATIVES
    )
    temperature: float | str = option(0.5, TEMPERATURE, NEGATIVES, low=1e-4)
    tau_plus: float | str = option(
        0.0,
        'Share of false negatives to correct for (DCL, HCL); also "linear(0, 0.1)".',
        NEGATIVES,
        low=0.0,
        high=0.999,
    )
    batches: str = option(
        "uniform()", 'Who shares a batch: uniform(), "proximity(num_candidates=500)", "knn()" ...', NEGATIVES
    )
    epochs: int = option(50, "Passes over the data.", TRAINING, low=1)
    batch_size: int = option(256, "Items in a batch, over all ranks together.", TRAINING, low=2)
    encode_chunk: int = option(
        0, "Views that are encoded at once, for batches larger than memory; 0: all of them.", TRAINING, low=0
    )
    optimizer: str = option("adam", 'adam, adamw or sgd, or with values "sgd(momentum=0.9, nesterov=True)".', TRAINING)
    learning_rate: float = option(1e-3, "Step size of the optimiser.", TRAINING, low=0.0)
    schedule: str = option(
        "constant", 'Of the learning rate: constant, "cosine(warmup=5)", "steps(30, 40, factor=0.1)"; epochs.', TRAINING
    )
    weight_decay: float = option(1e-6, "Weight decay of the optimiser.", TRAINING, low=0.0)
    clip: float = option(0.0, "Largest norm of the gradient; 0: not clipped.", TRAINING, low=0.0)
    accumulate: int = option(
        1, "Batches whose gradients are averaged for an update; the negatives stay those of a batch.", TRAINING, low=1
    )
    augment: str = option(
        "auto",
        'The views of images: auto, tiny, grey, cifar or kornia, or with values "cifar(blur_probability=0.5)".',
        DATA,
    )
    seed: int = option(0, "Of the weights, the batches and the augmentation.", RUN, low=0, high=2**31 - 1)
    precision: str = option(
        "no", "Mixed precision, for GPUs: on most CPUs bf16 is slower.", RUN, among=("no", "bf16", "fp16")
    )
    device: str = option("auto", "Where to train.", RUN, among=("auto", "cpu", "cuda"))
    compile: bool = option(False, "Compile the training step (worth it on a GPU).", RUN)
    log_every: int = option(20, "Steps between records of loss and diagnostics.", RUN, low=1)
    evaluate_on: str = option(
        "test", "validation holds out some of the training items.", RUN, among=("test", "validation")
    )
    validation_share: float = option(0.2, "Share of the training items that it holds out.", RUN, low=0.001, high=0.999)
    evaluate_with: str | None = option(
        None, "A benchmark for encoders of texts: sts:FILE or sts:FOLDER, beir:FOLDER.", RUN
    )
    save_every: int = option(1, "Epochs between checkpoints.", RUN, low=1)
    save_every_steps: int = option(0, "Batches between further checkpoints in mid-epoch; 0: none.", RUN, low=0)
    monitor: str = option(
        "knn",
        "What is watched, and chooses the best checkpoint: knn, svm, retrieval, \"sts('FILE')\".",
        RUN,
    )
    monitor_every: int = option(0, "Epochs between looks at the monitor; 0: never.", RUN, low=0)

    def __post_init__(self) -> None:
        kinds = kinds_of(type(self))  # type: ignore[arg-type]  # a class can be hashed
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Schedule) or (kinds[one.name] == Scheduled and isinstance(value, str)):
                value = "".join(str(value).split()).replace(",", ", ")  # one spelling, also in files
                object.__setattr__(self, one.name, value)
            check_option("train", one.name, value, kinds[one.name], one.metadata)

    needs: ClassVar[str] = ""  # what the items must have: "nodes", "pixels"

    def check(self) -> None:
        """Raises for options that do not go together; cheap, and before anything is loaded."""

    @property
    def source(self) -> str:
        """What ``From(...)`` calls the candidates."""
        return "batch"

    @property
    def sources(self) -> tuple[str, ...]:
        """All of them."""
        return (self.source,)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


OBJECTIVE = 'What is made of positives and negatives: info_nce, jsd, sigmoid, "rince(q=0.1)" ...'
GENERATE = 'Makes more candidates, such as "mochi(num_hardest=64)".'


@dataclass(frozen=True)
class SimCLROptions(TrainOptions):
    """Two views of each image, both against all others of the batch: SimCLR, DCL, HCL."""

    objective: str = option("info_nce", OBJECTIVE, NEGATIVES)
    generate: str | None = option(None, GENERATE, NEGATIVES)
    positives_in_denominator: str = option(
        "own", "Which positives the denominator has.", NEGATIVES, among=("own", "all", "none")
    )
    num_negatives: str = option(
        "support",
        "What the mean of the negatives is multiplied by.",
        NEGATIVES,
        among=("support", "candidates", "mass"),
    )


@dataclass(frozen=True)
class SupervisedOptions(SimCLROptions):
    """All images of the same label are positives: SupCon, SCL, H-SCL."""

    negatives: str = option("OtherLabel()", 'Negatives in the grammar, such as "OtherLabel() * Tilt(1.0)".', NEGATIVES)
    reduction: str = option("anchors", "anchors (SupCon) or pairs (H-SCL).", NEGATIVES, among=("anchors", "pairs"))
    four_losses: bool = option(
        False, "Record UCL, SCL, H-UCL and H-SCL losses and Assumption 1 (H-SCL, Fig. 4 and 5).", RUN
    )

    def check(self) -> None:
        if self.generate is not None:
            what = "--generate to be none, since made candidates have no label"
            raise ArgumentError("supervised", what, repr(self.generate))


TEXT = "text:FILE (a sentence per line), text:TABLE[column,label], pairs:TABLE[first,second] ..."
TEXT_ENCODER = "auto (hashed subwords, no download), hf:PATH, st:PATH."
HEAD = "What is trained behind the features and left out in evaluation."
TEXT_VIEWS = "auto: passes with other dropout, or the two texts of a pair; there are no others."
GRAPH_ENCODER = "auto or gin (batch statistics), or gin-layer (none: the same over any ranks)."
GRAPH_VIEWS = 'The views of graphs: auto, random, node_drop, "node_drop+subgraph", "graphcl(ratio=0.1)" ...'


@dataclass(frozen=True)
class SimCSEOptions(SimCLROptions):
    """Two dropout passes of each text, the first against the second ones of the batch: SimCSE."""

    data: str = option("text:", TEXT, DATA)
    encoder: str = option("auto", TEXT_ENCODER, DATA)
    augment: str = option("auto", TEXT_VIEWS, DATA)
    dim: int = option(256, "Width of the small encoder, and of a head.", DATA, low=1)
    head: str = option("none", HEAD, DATA, among=("none", "linear", "mlp"))
    temperature: float | str = option(0.05, TEMPERATURE, NEGATIVES, low=1e-4)
    epochs: int = option(1, "Passes over the data.", TRAINING, low=1)


@dataclass(frozen=True)
class PairsOptions(SimCSEOptions):
    """The first text of each pair against the second ones of the batch and mined negatives."""

    data: str = option("pairs:", TEXT, DATA)
    directions: str = option("one", "one (first to second) or both.", NEGATIVES, among=("one", "both"))

    @property
    def sources(self) -> tuple[str, ...]:
        return ("batch", "mined")


@dataclass(frozen=True)
class CLIPOptions(SimCLROptions):
    """Two encoders, both directions, a learnt temperature: CLIP, also on vectors that were made elsewhere."""

    data: str = option("embeddings:", "imagetext:TABLE, imagetext:FOLDER, pairs:FILE or embeddings:FILE.npz.", DATA)
    text_encoder: str = option("auto", f"Of the texts beside images: {TEXT_ENCODER}", DATA)
    temperature: float | str = option(0.07, "Temperature at the start; it is learnt.", NEGATIVES, low=0.01)

    def check(self) -> None:
        if isinstance(self.temperature, str):
            what = "a number as --temperature, since it is learnt from there"
            raise ArgumentError("clip", what, repr(self.temperature))


@dataclass(frozen=True)
class QuickThoughtsOptions(TrainOptions):
    """Each sentence predicts its neighbours among the sentences of the batch, which are consecutive: quick-thoughts."""

    data: str = option("text:", TEXT, DATA)
    encoder: str = option("auto", TEXT_ENCODER, DATA)
    augment: str = option("auto", TEXT_VIEWS, DATA)
    dim: int = option(256, "Width of the small encoder, and of a head.", DATA, low=1)
    head: str = option("none", HEAD, DATA, among=("none", "linear", "mlp"))
    encoders: str = option("two", "one for both sides, or two.", DATA, among=("one", "two"))
    context_size: int = option(1, "How far away a neighbour may stand.", NEGATIVES, low=1)
    temperature: float | str = option(1.0, TEMPERATURE, NEGATIVES, low=1e-4)
    batches: str = option("consecutive()", "Batches of consecutive sentences.", NEGATIVES)
    batch_size: int = option(400, "Sentences in a batch, over all ranks together.", TRAINING, low=2)
    epochs: int = option(1, "Passes over the data.", TRAINING, low=1)

    def check(self) -> None:
        if "".join(self.batches.split()) != "consecutive()":
            what = "--batches to be consecutive(), since the neighbours of a sentence are its positives"
            raise ArgumentError("quick-thoughts", what, self.batches)


@dataclass(frozen=True)
class MoCoOptions(TrainOptions):
    """A momentum encoder: v2 against a queue of its keys (MoCo, Ring), v3 against the keys of the batch."""

    temperature: float | str = option(0.2, TEMPERATURE, NEGATIVES, low=1e-4)
    objective: str = option("info_nce", OBJECTIVE, NEGATIVES)
    generate: str | None = option(None, GENERATE, NEGATIVES)
    version: str = option("v2", "v2 (queue) or v3 (batch, symmetric, predictor).", NEGATIVES, among=("v2", "v3"))
    queue: int = option(4096, "Keys in the queue (v2).", NEGATIVES, low=1)
    momentum: float = option(
        0.99, "Of the momentum encoder; v3 takes it to 1 by a cosine.", TRAINING, low=0.0, high=1.0
    )

    @property
    def source(self) -> str:
        return "queue" if self.version == "v2" else "batch"


@dataclass(frozen=True)
class SogCLROptions(TrainOptions):
    """Two views of each image, both against all of the data set through running normalisers: SogCLR."""

    temperature: float | str = option(0.1, TEMPERATURE, NEGATIVES, low=1e-4)
    gamma: float = option(0.9, "Share of the new in the running normalisers.", NEGATIVES, low=0.0, high=1.0)

    def check(self) -> None:
        _check_fixed("sogclr", self)


@dataclass(frozen=True)
class ISogCLROptions(TrainOptions):
    """Two views of each image, both against all others of the batch, with a learnt temperature per image: iSogCLR."""

    temperature: float | str = option(0.7, "Temperature of every image at the start.", NEGATIVES, low=1e-4)
    rho: float = option(0.3, "Keeps temperatures from falling.", NEGATIVES, low=0.0)

    def check(self) -> None:
        _check_fixed("isogclr", self)


@dataclass(frozen=True)
class EMC2Options(TrainOptions):
    """Two views of each image, both against negatives that Markov chains draw from all of the data set: EMC2."""

    temperature: float | str = option(0.07, TEMPERATURE, NEGATIVES, low=1e-4)
    burn_in: float = option(0.5, "Share of each walk that is not counted.", NEGATIVES, low=0.0, high=0.999)
    num_steps: int = option(0, "Steps of a chain in each batch; 0: as many as candidates.", NEGATIVES, low=0)
    forget: bool = option(False, "Keep no embeddings: a chain outside the batch does not repel.", NEGATIVES)

    def check(self) -> None:
        _check_fixed("emc2", self)
        if "".join(self.negatives.split()) != "Uniform()":
            what = "--negatives to be Uniform(), since it draws its negatives itself"
            raise ArgumentError("emc2", what, repr(self.negatives))


@dataclass(frozen=True)
class BankOptions(TrainOptions):
    """What the recipes with a memory bank share: one vector per image, which follows the encoder."""

    temperature: float | str = option(0.2, TEMPERATURE, NEGATIVES, low=1e-4)
    momentum: float = option(0.5, "Share of the old in the bank's vectors.", NEGATIVES, low=0.0, high=0.999)
    clusters: int = option(0, "Clusters of the bank by k-means, for SameCluster(); 0: none.", NEGATIVES, low=0)
    cluster_runs: int = option(1, "Clusterings from different starts.", NEGATIVES, low=1)
    cluster_every: int = option(1, "Epochs between clusterings.", NEGATIVES, low=1)
    warmup: int = option(0, "Epochs before the first clusters; until then all are one cluster.", NEGATIVES, low=0)
    recipe: ClassVar[str]

    def check(self) -> None:
        _check_fixed(self.recipe, self)
        if self.clustered and self.warmup >= self.epochs:
            what, got = "more --epochs than --warmup, or clusters are never made", f"{self.epochs} and {self.warmup}"
            raise ArgumentError(self.recipe, what, got)

    @property
    def clustered(self) -> bool:
        return self.clusters > 0

    @property
    def source(self) -> str:
        return "bank"


@dataclass(frozen=True)
class InstanceOptions(BankOptions):
    """Each image against its own past in a memory bank: instance discrimination, IRing, Cave."""

    loss: str = option(
        "auto",
        "nce (binary), softmax (Ring), or auto: nce for uniform negatives.",
        NEGATIVES,
        among=("auto", "nce", "softmax"),
    )
    num_draws: int = option(256, "Negatives that each image draws from the bank.", NEGATIVES, low=1)
    recipe: ClassVar[str] = "instance"

    @property
    def binary(self) -> bool:
        """Whether the loss is binary NCE, whose noise is uniform, also in its normaliser Z."""
        return self.loss == "nce" or (self.loss == "auto" and "".join(self.negatives.split()) == "Uniform()")

    def check(self) -> None:
        super().check()
        if self.loss == "nce" and "".join(self.negatives.split()) != "Uniform()":
            what = "--negatives to be Uniform() for --loss nce, which takes its noise for uniform"
            raise ArgumentError(self.recipe, what, repr(self.negatives), "use --loss softmax")
        if "Cluster(" in self.negatives and not self.clusters:
            what = "--clusters of at least 1 for negatives by cluster"
            raise ArgumentError(self.recipe, what, f"{self.negatives!r} and no clusters", "use --clusters 100")


@dataclass(frozen=True)
class CMCOptions(InstanceOptions):
    """Lightness against colour of each image: two encoders, two memory banks, crossed: CMC, CMCRing."""

    recipe: ClassVar[str] = "cmc"
    needs: ClassVar[str] = "pixels"


@dataclass(frozen=True)
class LocalAggregationOptions(BankOptions):
    """The neighbours of each image in its cluster against all that are close: Local Aggregation."""

    negatives: str = option("Rank(0, 4096)", "The background: the closest entries of the bank.", NEGATIVES)
    clusters: int = option(0, "Clusters of the bank by k-means; 0: one for 40 images.", NEGATIVES, low=0)
    cluster_runs: int = option(3, "Clusterings from different starts.", NEGATIVES, low=1)
    warmup: int = option(1, "Epochs before the first clusters; until then each image is its own.", NEGATIVES, low=0)

    recipe: ClassVar[str] = "local-aggregation"

    def check(self) -> None:
        super().check()
        if "Label(" in self.negatives:
            what = "a background without regard to labels, since the image itself is in it"
            raise ArgumentError(self.recipe, what, f"negatives={self.negatives!r}")

    @property
    def clustered(self) -> bool:
        return True


@dataclass(frozen=True)
class NegativeCacheOptions(TrainOptions):
    """Negatives drawn from a cache of old embeddings by Gumbel-max, then encoded afresh: the negative cache."""

    temperature: float | str = option(0.2, TEMPERATURE, NEGATIVES, low=1e-4)
    cache: int = option(4096, "Embeddings in the cache.", NEGATIVES, low=1)
    cache_refresh: float = option(
        0.02, "Share of the cache, the oldest, that is encoded again in each step.", NEGATIVES, low=0.0, high=1.0
    )
    num_draws: int = option(1, "Negatives that each image draws from the cache.", NEGATIVES, low=1)

    def check(self) -> None:
        _check_fixed("negative-cache", self)
        if "".join(self.negatives.split()) != "Uniform()":
            what = "--negatives to be Uniform(), since it draws from the softmax over the cache"
            raise ArgumentError("negative-cache", what, repr(self.negatives))

    @property
    def source(self) -> str:
        return "cache"


@cache
def kinds_of(options: type) -> dict[str, Any]:
    """The types of the fields, which Python evaluates from their text each time; a comparison reads many options."""
    return get_type_hints(options)


@dataclass(frozen=True)
class GraphCLOptions(SimCLROptions):
    """A view of each graph against the other views of the batch: GraphCL."""

    data: str = option("graphs:MUTAG", "graphs:NAME, graphs:FILE.npz or a folder of TU text files.", DATA)
    encoder: str = option("auto", GRAPH_ENCODER, DATA)
    augment: str = option("auto", GRAPH_VIEWS, DATA)
    temperature: float | str = option(0.2, TEMPERATURE, NEGATIVES, low=1e-4)
    positives_in_denominator: str = option(
        "none", "Which positives the denominator has.", NEGATIVES, among=("own", "all", "none")
    )
    dim: int = option(96, "Features of the projection that the loss sees.", DATA, low=1)
    epochs: int = option(20, "Passes over the data.", TRAINING, low=1)
    batch_size: int = option(128, "Graphs in a batch, over all ranks together.", TRAINING, low=2)
    learning_rate: float = option(1e-2, "Adam's step size.", TRAINING, low=0.0)
    weight_decay: float = option(0.0, "Adam's weight decay.", TRAINING, low=0.0)


@dataclass(frozen=True)
class InfoGraphOptions(TrainOptions):
    """The nodes of each graph against the graphs of the batch, by raw dot products: InfoGraph."""

    needs: ClassVar[str] = "nodes"
    data: str = option("graphs:MUTAG", "graphs:NAME, graphs:FILE.npz or a folder of TU text files.", DATA)
    encoder: str = option("auto", GRAPH_ENCODER, DATA)
    negatives: str = option("Uniform()", 'Negatives in the grammar; HCL is "ClippedTilt(1.0)".', NEGATIVES)
    temperature: float | str = option(1.0, TEMPERATURE, NEGATIVES, low=1e-4)
    objective: str = option("jsd", OBJECTIVE, NEGATIVES)
    augment: str = option("none", "The views of graphs, if any: random, node_drop, subgraph ...", DATA)
    dim: int = option(96, "Features of the two projections that the loss compares.", DATA, low=1)
    epochs: int = option(20, "Passes over the data.", TRAINING, low=1)
    batch_size: int = option(128, "Graphs in a batch, over all ranks together.", TRAINING, low=2)
    learning_rate: float = option(1e-2, "Adam's step size.", TRAINING, low=0.0)
    weight_decay: float = option(0.0, "Adam's weight decay.", TRAINING, low=0.0)

    def check(self) -> None:
        if self.encode_chunk:
            what = "--encode-chunk of 0, since its anchors are nodes, which are not encoded one by one"
            raise ArgumentError("infograph", what, str(self.encode_chunk))


def defaults_of(options: TrainOptions) -> dict[str, Any]:
    """Of a recipe's options or a user's own, as far as they have any."""
    return {one.name: one.default for one in fields(options) if one.default is not MISSING}


def check_option(who: str, name: str, value: Any, kind: Any, rules: Any) -> None:
    """Raises before anything is loaded, naming the option and what it allows; the text of a schedule is read later."""
    flag, got = "--" + name.replace("_", "-"), repr(value)
    if rules["among"] and value not in rules["among"]:
        raise ArgumentError(who, f"{flag} to be one of {', '.join(rules['among'])}", got)
    if not _is(kind, value):
        raise ArgumentError(who, f"{flag} to be {called(kind)}", got)
    if rules["low"] is not None and value is not None and not isinstance(value, str):
        check_bounds(who, name, value, rules)


def check_bounds(who: str, name: str, value: float, rules: Any, got: str | None = None) -> None:
    """Raises unless a number is within what its option allows; ``got`` where the number is a part of what was given."""
    low, high = rules["low"], rules["high"]
    if not low <= value <= (math.inf if high is None else high) or value == math.inf:
        raise ArgumentError(who, f"--{name.replace('_', '-')} {allowed(low, high)}", got or repr(value))


def allowed(low: float, high: float | None) -> str:
    return f"of at least {shown(low)}" if high is None else f"between {shown(low)} and {shown(high)}"


def shown(bound: float) -> str:
    """A bound as people write it: a whole number with all its digits."""
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _check_fixed(recipe: str, options: TrainOptions) -> None:
    if options.tau_plus:
        what = "--tau-plus of 0, since a loss over the whole data set has no correction for false negatives"
        raise ArgumentError(recipe, what, repr(options.tau_plus))
    if isinstance(options.temperature, str):
        what = "a number as --temperature, since what it remembers of each image is of one temperature"
        raise ArgumentError(recipe, what, repr(options.temperature))


def from_text(kind: Any, value: Any) -> Any:
    """A value of a YAML file as a flag would have read it: YAML takes 1e-3 for a word and no for False."""
    if isinstance(value, str) and kind in (int, float, Scheduled):
        try:
            return int(value) if kind is int else float(value)
        except ValueError:
            return value
    return {True: "yes", False: "no"}[value] if kind is str and isinstance(value, bool) else value


def _is(kind: Any, value: Any) -> bool:
    if kind == Scheduled and isinstance(value, str):
        return re.fullmatch(r"\w+\(.*\)", value.strip(), re.DOTALL) is not None
    if get_args(kind):
        return any(_is(one, value) for one in get_args(kind))
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind)


def called(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false"}
    return 'a number or a schedule such as "linear(0.5, 0.1)"' if kind == Scheduled else names.get(kind, "text")


RECIPES: dict[str, type[TrainOptions]] = {
    "simclr": SimCLROptions,
    "supervised": SupervisedOptions,
    "simcse": SimCSEOptions,
    "pairs": PairsOptions,
    "clip": CLIPOptions,
    "quick-thoughts": QuickThoughtsOptions,
    "moco": MoCoOptions,
    "sogclr": SogCLROptions,
    "isogclr": ISogCLROptions,
    "emc2": EMC2Options,
    "instance": InstanceOptions,
    "cmc": CMCOptions,
    "local-aggregation": LocalAggregationOptions,
    "negative-cache": NegativeCacheOptions,
    "graphcl": GraphCLOptions,
    "infograph": InfoGraphOptions,
}
