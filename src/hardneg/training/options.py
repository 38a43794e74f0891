"""The options of the recipes: plain dataclasses, light enough for ``--help``, the same for flags, YAML and Python."""

from __future__ import annotations

import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, get_args, get_type_hints

DATA, NEGATIVES, TRAINING, RUN = "Data and encoder", "Negatives", "Training", "The run"
"""The panels of the help."""


def option(
    default: Any, help: str, panel: str, *, low: float | None = None, high: float | None = None, among: Any = None
) -> Any:
    return field(default=default, metadata={"help": help, "panel": panel, "low": low, "high": high, "among": among})


@dataclass(frozen=True)
class TrainOptions:
    """What every recipe takes."""

    data: str = option("digits", "digits, fashion-mnist, cifar10, cifar100, folder:PATH, npz:PATH or hf:NAME.", DATA)
    data_root: str | None = option(None, "Where the data set lies, if not in its usual place.", DATA)
    encoder: str = option("auto", "auto (tiny up to 28 pixels), tiny, resnet18, resnet50, torchvision:resnet18.", DATA)
    dim: int = option(128, "Features of the projection that the loss sees.", DATA, low=1)
    negatives: str = option(
        "Uniform()", 'Negatives in the grammar, such as "Tilt(1.0)"; see: hardneg explain.', NEGATIVES
    )
    temperature: float = option(0.5, "Similarities are divided by this.", NEGATIVES, low=1e-4)
    tau_plus: float = option(0.0, "Share of false negatives to correct for (DCL, HCL).", NEGATIVES, low=0.0, high=0.999)
    batches: str = option(
        "uniform()", 'Who shares a batch: uniform(), "proximity(num_candidates=500)", "knn()" ...', NEGATIVES
    )
    epochs: int = option(50, "Passes over the data.", TRAINING, low=1)
    batch_size: int = option(256, "Images in a batch, over all ranks together.", TRAINING, low=2)
    learning_rate: float = option(1e-3, "Adam's step size.", TRAINING, low=0.0)
    weight_decay: float = option(1e-6, "Adam's weight decay.", TRAINING, low=0.0)
    augment: str = option(
        "auto", 'The views: auto, tiny, grey, cifar or kornia, or with values "cifar(blur_probability=0.5)".', DATA
    )
    seed: int = option(0, "Of the weights, the batches and the augmentation.", RUN, low=0, high=2**31 - 1)
    precision: str = option(
        "no", "Mixed precision, for GPUs: on most CPUs bf16 is slower.", RUN, among=("no", "bf16", "fp16")
    )
    device: str = option("auto", "Where to train.", RUN, among=("auto", "cpu", "cuda"))
    compile: bool = option(False, "Compile the training step (worth it on a GPU).", RUN)
    log_every: int = option(20, "Steps between records of loss and diagnostics.", RUN, low=1)
    evaluate_on: str = option(
        "test", "validation holds out a fifth of the training images.", RUN, among=("test", "validation")
    )
    save_every: int = option(1, "Epochs between checkpoints.", RUN, low=1)

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for one in fields(self):
            check_option("train", one.name, getattr(self, one.name), kinds[one.name], one.metadata)

    def check(self) -> None:
        """Raises for options that do not go together; cheap, and before anything is loaded."""

    @property
    def source(self) -> str:
        """What ``From(...)`` calls the candidates."""
        return "batch"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SimCLROptions(TrainOptions):
    """Two views of each image, both against all others of the batch: SimCLR, DCL, HCL."""

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


@dataclass(frozen=True)
class MoCoOptions(TrainOptions):
    """A momentum encoder: v2 against a queue of its keys (MoCo, Ring), v3 against the keys of the batch."""

    temperature: float = option(0.2, "Similarities are divided by this.", NEGATIVES, low=1e-4)
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

    temperature: float = option(0.1, "Similarities are divided by this.", NEGATIVES, low=1e-4)
    gamma: float = option(0.9, "Share of the new in the running normalisers.", NEGATIVES, low=0.0, high=1.0)

    def check(self) -> None:
        _check_not_debiased("sogclr", self.tau_plus)


@dataclass(frozen=True)
class EMC2Options(TrainOptions):
    """Two views of each image, both against negatives that Markov chains draw from all of the data set: EMC2."""

    temperature: float = option(0.07, "Similarities are divided by this.", NEGATIVES, low=1e-4)
    burn_in: float = option(0.5, "Share of each walk that is not counted.", NEGATIVES, low=0.0, high=0.999)
    num_steps: int = option(0, "Steps of a chain in each batch; 0: as many as candidates.", NEGATIVES, low=0)
    forget: bool = option(False, "Keep no embeddings: a chain outside the batch does not repel.", NEGATIVES)

    def check(self) -> None:
        _check_not_debiased("emc2", self.tau_plus)
        if "".join(self.negatives.split()) != "Uniform()":
            raise ValueError(
                "emc2 draws its negatives itself and needs --negatives to be Uniform(), "
                f"got negatives={self.negatives!r}."
            )


def defaults_of(options: TrainOptions) -> dict[str, Any]:
    """Of a recipe's options or a user's own, as far as they have any."""
    return {one.name: one.default for one in fields(options) if one.default is not MISSING}


def check_option(who: str, name: str, value: Any, kind: Any, rules: Any) -> None:
    """Raises before anything is loaded, naming the option and what it allows."""
    flag = "--" + name.replace("_", "-")
    if rules["among"] and value not in rules["among"]:
        raise ValueError(f"{who} needs {flag} to be one of {', '.join(rules['among'])}, got {name}={value!r}.")
    if not _is(kind, value):
        raise ValueError(f"{who} needs {flag} to be {_called(kind)}, got {name}={value!r}.")
    low, high = rules["low"], rules["high"]
    if low is None:
        return
    if not low <= value <= (math.inf if high is None else high) or value == math.inf:
        allowed = f"of at least {shown(low)}" if high is None else f"between {shown(low)} and {shown(high)}"
        raise ValueError(f"{who} needs {flag} {allowed}, got {name}={value!r}.")


def shown(bound: float) -> str:
    """A bound as people write it: a whole number with all its digits."""
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _check_not_debiased(recipe: str, tau_plus: float) -> None:
    if tau_plus:
        raise ValueError(
            f"{recipe} needs --tau-plus of 0, since a loss over the whole data set has no correction for false "
            f"negatives, got tau_plus={tau_plus}."
        )


def from_text(kind: Any, value: Any) -> Any:
    """A value of a YAML file as a flag would have read it: YAML takes 1e-3 for a word and no for False."""
    if isinstance(value, str) and kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            return value
    return {True: "yes", False: "no"}[value] if kind is str and isinstance(value, bool) else value


def _is(kind: Any, value: Any) -> bool:
    if get_args(kind):
        return any(_is(one, value) for one in get_args(kind))
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind)


def _called(kind: Any) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")


RECIPES: dict[str, type[TrainOptions]] = {
    "simclr": SimCLROptions,
    "supervised": SupervisedOptions,
    "moco": MoCoOptions,
    "sogclr": SogCLROptions,
    "emc2": EMC2Options,
}
