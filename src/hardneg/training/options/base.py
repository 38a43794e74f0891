"""Options that all training recipes share, and the texts and panels of their help.

``TrainOptions`` is the base of the options of every recipe; a recipe adds fields or changes defaults in a subclass. A
field is declared with ``option(default, help, panel)``: its help text is what ``hardneg train RECIPE --help`` shows.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple

from hardneg.core.errors import ArgumentError
from hardneg.core.options import make_plain, option
from hardneg.core.schedules import Schedule
from hardneg.training.options.values import Scheduled, check_option, kinds_of, unless_none

Weights = Literal["last", "best"]
"""Which weights of a run to use: those of the last epoch, or the best according to the monitor."""
TEMPERATURE = 'Temperature that divides the similarities: a number, or a schedule such as "linear(0.5, 0.1)".'
DATA, NEGATIVES, TRAINING, RUN = "Data and encoder", "Negatives", "Training", "The run"
"""Titles of the panels that group the flags in ``--help``."""
OBJECTIVE = 'Loss function: info_nce, jsd, sigmoid, "rince(q=0.1)" ...'
GENERATE = 'Synthesise extra negatives from the existing ones, such as "mochi(num_hardest=64)".'


class HeadShape(NamedTuple):
    """Shape of a projection head or predictor with hidden layers.

    Attributes:
        layers: Number of linear layers.
        width: Width of the hidden layers; None: that of the features of the encoder.
        limit: Largest width as a multiple of that of the features; None: any.
        last_norm: Whether the output is normalised as well, as in MoCo v3.
        norm: Normalisation between the layers, "batch" or "layer"; None: by batch where the encoder has batch
            normalisation, otherwise none.

    Example:
        >>> HeadShape().width_for(512), HeadShape(3, 4096, limit=8).width_for(128)
        (512, 1024)
    """

    layers: int = 2
    width: int | None = None
    limit: int | None = None
    last_norm: bool = False
    norm: str | None = None

    def width_for(self, features: int) -> int:
        """Return the width of the hidden layers for an encoder with this number of features."""
        width = features if self.width is None else self.width
        return width if self.limit is None else min(width, self.limit * features)


@dataclass(frozen=True)
class TrainOptions:
    """Options of every recipe: data, encoder, negatives, optimisation and the run itself.

    Values are checked one by one when the object is built: type, bounds and allowed words. Combinations that depend
    on the recipe are checked by ``check``, which the training loop calls before it loads anything.

    Example:
        >>> from hardneg.training.options import SimCLROptions
        >>> SimCLROptions(negatives="Tilt(1.0)", temperature="linear(0.5,0.1)").temperature
        'linear(0.5, 0.1)'
        >>> SimCLROptions(batch_size=1)
        Traceback (most recent call last):
        hardneg.core.errors.ArgumentError: train needs --batch-size of at least 2, got 1.
    """

    data: str = option(
        "digits",
        "Data set: digits, cifar10, stl10, folder:PATH, list:FILE, tar:PATH, npz:PATH, hf:NAME, text:FILE ...",
        DATA,
    )
    data_root: str | None = option(None, "Folder that holds the data set, if not the default one.", DATA)
    encoder: str = option(
        "auto",
        "Encoder: auto, tiny, resnet18, resnet50, resnet18-imagenet, timm:NAME, torchvision:NAME, hf:PATH, or "
        "file.py:function.",
        DATA,
    )
    init: str | None = option(
        None,
        "Initial weights of the encoder: a run directory, a torch or safetensors file with the parameter names of "
        "hardneg, torchvision or timm, or published weights as timm:NAME or torchvision:NAME.",
        DATA,
    )
    splits: str = option(
        "",
        "Splits of the data to train and to evaluate on, such as train=a+b,test=val; probe=NAME is a labelled "
        "one that probes are fitted to. By default those with the usual names.",
        DATA,
    )
    cache_images: str = option(
        "auto",
        "Where decoded pixels are kept: memory, disk (shared by ranks and later runs), none (decoded again in every "
        "epoch), or auto: memory for at most 1 GiB, otherwise none.",
        DATA,
        among=("auto", "memory", "disk", "none"),
    )
    bad_images: str = option(
        "stop",
        "What happens with files that cannot be decoded: stop before training and name them, or skip them.",
        DATA,
        among=("stop", "skip"),
    )
    workers: int | None = option(
        None,
        "Number of processes that decode files during training (0 = none; default: the cores of the machine, divided "
        "by its ranks, at most 8). It does not change the result.",
        DATA,
        low=0,
    )
    dim: int = option(128, "Dimension of the embeddings that the loss compares.", DATA, low=1)
    head: str = option(
        "auto",
        "Projection head on top of the features, used in training only: auto (that of the recipe), linear, or mlp (two "
        "layers).",
        DATA,
        among=("auto", "linear", "mlp"),
    )
    negatives: str = option(
        "Uniform()",
        'Distribution of the negatives, such as "Tilt(1.0)"; "hardneg explain" describes an expression.',
        NEGATIVES,
    )
    temperature: float | str = option(0.5, TEMPERATURE, NEGATIVES, low=1e-4)
    tau_plus: float | str = option(
        0.0,
        "Assumed false-negative rate that the loss corrects for (DCL, HCL); a schedule such as 'linear(0, 0.1)'; or "
        "'estimate', from the labels of the training items.",
        NEGATIVES,
        low=0.0,
        high=0.999,
    )
    batches: str = option(
        "uniform()",
        'How items are grouped into batches: uniform(), "proximity(restart=0.1)", "knn()" ...',
        NEGATIVES,
    )
    epochs: int = option(50, "Number of passes over the data.", TRAINING, low=1)
    max_steps: int = option(
        0, "Stop after this number of steps, even within an epoch (0 = train all --epochs).", TRAINING, low=0
    )
    batch_size: int = option(256, "Items per batch, summed over all ranks.", TRAINING, low=2)
    items_per_epoch: int = option(
        0,
        "Number of items in the batches of an epoch, at most (0 = all that fill batches); compare sets it for arms of "
        "different batch sizes.",
        TRAINING,
        low=0,
    )
    encode_chunk: int = option(
        0,
        "Number of views encoded at a time, for batches that do not fit into memory (0 = all at once).",
        TRAINING,
        low=0,
    )
    optimizer: str = option(
        "adam",
        'Optimiser: adam, adamw, sgd, lars, lamb, or with arguments "sgd(momentum=0.9, nesterov=True)". lars and lamb '
        'are for large batches, with --schedule "cosine(warmup=10)".',
        TRAINING,
    )
    learning_rate: float = option(1e-3, "Learning rate.", TRAINING, low=0.0)
    schedule: str = option(
        "constant",
        'Schedule of the learning rate: constant, "cosine(warmup=5)", "steps(30, 40, factor=0.1)"; times in epochs.',
        TRAINING,
    )
    weight_decay: float | None = option(
        None,
        "Weight decay, not applied to biases and normalisation layers; default 1e-6 for pixels, 0 for other data.",
        TRAINING,
        low=0.0,
    )
    clip: float = option(0.0, "Clip the norm of the gradient to this value (0 = no clipping).", TRAINING, low=0.0)
    accumulate: int = option(
        1,
        "Number of batches whose gradients are averaged per update; each batch still has only its own negatives. For "
        "the exact gradient of one large batch use --batch-size with --encode-chunk.",
        TRAINING,
        low=1,
    )
    ema: float = option(
        0.0,
        "Decay of a moving average of the weights, such as 0.999; evaluations and exports use it (0 = none).",
        TRAINING,
        low=0.0,
        high=0.999999,
    )
    augment: str = option(
        "auto",
        "Augmentation of images: auto, tiny, grey, cifar, imagenet, kornia, or with arguments "
        "\"imagenet(crop_scale=(0.2, 1))\"; mean='data' normalises by the mean and std of the training images.",
        DATA,
    )
    num_views: int = option(
        0,
        "Number of pairs of views of each item that are repeated in turn, one pair per epoch (0 = new views in every "
        "epoch).",
        DATA,
        low=0,
    )
    seed: int = option(0, "Random seed of the weights, the batches and the augmentation.", RUN, low=0, high=2**31 - 1)
    precision: str = option(
        "no", "Mixed precision, for GPUs; on most CPUs bf16 is slower than float32.", RUN, among=("no", "bf16", "fp16")
    )
    device: str = option("auto", "Device to train on.", RUN, among=("auto", "cpu", "cuda"))
    compile: bool = option(False, "Compile the training step with torch.compile (pays off on a GPU).", RUN)
    log_every: int = option(20, "Number of steps between two records of the loss and its diagnostics.", RUN, low=1)
    record: str = option(
        "",
        "Further records at some moments, separated by commas: similarities (histograms of the pairs of a batch), "
        "global_loss (the exact loss over the data set).",
        RUN,
    )
    record_at: str = option(
        "auto",
        'Moments of --record: numbers of steps such as "1,500,1000"; auto: six, from the first step to the last.',
        RUN,
    )
    evaluate_on: str = option(
        "test",
        "Split to evaluate on; validation holds out a share of the training items.",
        RUN,
        among=("test", "validation"),
    )
    validation_share: float = option(
        0.2, "Share of the training items held out by --evaluate-on validation.", RUN, low=0.001, high=0.999
    )
    evaluate_with: str | None = option(None, "Benchmark for text encoders: sts:FILE, sts:FOLDER or beir:FOLDER.", RUN)
    save_every: int = option(1, "Number of epochs between two checkpoints.", RUN, low=1)
    save_every_steps: int = option(
        0, "Number of batches between two extra checkpoints within an epoch (0 = none).", RUN, low=0
    )
    monitor: str = option("knn", "Metric that selects the best checkpoint: knn, svm, retrieval, \"sts('FILE')\".", RUN)
    monitor_every: int = option(0, "Number of epochs between two evaluations of --monitor (0 = never).", RUN, low=0)
    patience: int = option(
        0, "Stop once this many evaluations of --monitor in a row were no better than the best (0 = never).", RUN, low=0
    )

    def __post_init__(self) -> None:
        make_plain(self)
        kinds = kinds_of(type(self))  # type: ignore[arg-type]  # a class can be hashed
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Schedule) or (unless_none(kinds[one.name]) == Scheduled and isinstance(value, str)):
                value = "".join(str(value).split()).replace(",", ", ")  # one spelling, also in files
                object.__setattr__(self, one.name, value)
            check_option("train", one.name, value, kinds[one.name], one.metadata)

    needs: ClassVar[str] = ""
    """Feature that the items must have: "nodes" (graphs), "pixels" (images), or "" for any data."""
    has_global_loss: ClassVar[bool] = True
    """Whether ``--record global_loss`` applies: one encoder of two views whose vectors are compared."""
    sources: ClassVar[tuple[str, ...]] = ("batch",)
    """Sources of the candidates, as ``From(...)`` and ``source=`` name them."""

    def epoch_of_views(self, epoch: int) -> int:
        """Return the number that selects the views of an epoch: that of the epoch, or one of ``num_views``."""
        return epoch % self.num_views if self.num_views else epoch

    @property
    def projector(self) -> HeadShape:
        """Shape of the projection head that ``head="auto"`` stands for where the data has no head of its own."""
        return HeadShape()

    def check(self) -> None:
        """Raise ``ArgumentError`` if options contradict each other.

        Subclasses override this with the conditions of their recipe. It must be cheap, since it runs before any data
        is loaded.
        """

    def as_dict(self) -> dict[str, Any]:
        """Return all options as a plain dictionary, as it is stored in config.json."""
        return asdict(self)


def defaults_of(options: TrainOptions) -> dict[str, Any]:
    """Return the default of each option that has one.

    Args:
        options: Options of a recipe, or a dataclass of a user's recipe, whose fields need not have defaults.
    """
    return {one.name: one.default for one in fields(options) if one.default is not MISSING}


def check_fixed(recipe: str, options: TrainOptions) -> None:
    """Raise if a schedule or a correction is set that a loss over the whole data set cannot use.

    Such a loss keeps one state per image, accumulated over many steps. That state is only meaningful for a constant
    temperature, and there is no correction for false negatives.

    Args:
        recipe: Name of the recipe, for the error.
        options: Its options; ``tau_plus`` and ``temperature`` are checked.

    Raises:
        ArgumentError: If ``tau_plus`` is not 0 or ``temperature`` is a schedule.
    """
    if options.tau_plus:
        what = "--tau-plus of 0, since a loss over the whole data set has no correction for false negatives"
        raise ArgumentError(recipe, what, repr(options.tau_plus))
    if isinstance(options.temperature, str):
        what = "a number as --temperature, since the state that it keeps for each image depends on it"
        raise ArgumentError(recipe, what, repr(options.temperature))


def check_without_negatives(recipe: str, options: TrainOptions, reason: str = "it learns without negatives") -> None:
    """Raise if options of the negatives are set in a recipe that has none, or chooses them itself.

    Args:
        recipe: Name of the recipe, for the error.
        options: Its options; ``negatives`` and ``tau_plus`` are checked.
        reason: Why they have no effect.

    Raises:
        ArgumentError: If one of them is not the default.
    """
    for name, flag, default in (("negatives", "--negatives", "Uniform()"), ("tau_plus", "--tau-plus", "0.0")):
        value = getattr(options, name)
        if "".join(str(value).split()) != default:
            what, fix = f"{flag} to be unset, since {reason}", "use hardneg train simclr or moco"
            raise ArgumentError(recipe, what, repr(value), fix)
