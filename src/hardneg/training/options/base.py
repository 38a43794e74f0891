"""What every recipe takes."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar

from hardneg.core.errors import ArgumentError
from hardneg.core.options import make_plain, option
from hardneg.core.schedules import Schedule
from hardneg.training.options.values import Scheduled, check_option, kinds_of, unless_none

TEMPERATURE = 'Similarities are divided by this; a number or a schedule such as "linear(0.5, 0.1)".'
DATA, NEGATIVES, TRAINING, RUN = "Data and encoder", "Negatives", "Training", "The run"
"""The panels of the help."""
OBJECTIVE = 'What is made of positives and negatives: info_nce, jsd, sigmoid, "rince(q=0.1)" ...'
GENERATE = 'Makes more candidates, such as "mochi(num_hardest=64)".'


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
    weight_decay: float | None = option(
        None, "Weight decay, not of biases and norms; by default 1e-6 for pixels, 0 for other data.", TRAINING, low=0.0
    )
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
        "knn", "What is watched, and chooses the best checkpoint: knn, svm, retrieval, \"sts('FILE')\".", RUN
    )
    monitor_every: int = option(0, "Epochs between looks at the monitor; 0: never.", RUN, low=0)

    def __post_init__(self) -> None:
        make_plain(self)
        kinds = kinds_of(type(self))  # type: ignore[arg-type]  # a class can be hashed
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Schedule) or (unless_none(kinds[one.name]) == Scheduled and isinstance(value, str)):
                value = "".join(str(value).split()).replace(",", ", ")  # one spelling, also in files
                object.__setattr__(self, one.name, value)
            check_option("train", one.name, value, kinds[one.name], one.metadata)

    needs: ClassVar[str] = ""  # what the items must have: "nodes", "pixels"
    sources: ClassVar[tuple[str, ...]] = ("batch",)  # what ``From(...)`` calls the candidates

    def check(self) -> None:
        """Raises for options that do not go together; cheap, and before anything is loaded."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def defaults_of(options: TrainOptions) -> dict[str, Any]:
    """Of a recipe's options or a user's own, as far as they have any."""
    return {one.name: one.default for one in fields(options) if one.default is not MISSING}


def check_fixed(recipe: str, options: TrainOptions) -> None:
    """Raises for what a loss that remembers the whole data set cannot take."""
    if options.tau_plus:
        what = "--tau-plus of 0, since a loss over the whole data set has no correction for false negatives"
        raise ArgumentError(recipe, what, repr(options.tau_plus))
    if isinstance(options.temperature, str):
        what = "a number as --temperature, since what it remembers of each image is of one temperature"
        raise ArgumentError(recipe, what, repr(options.temperature))
