"""The options of the recipes: plain dataclasses, light enough for ``--help``, the same for flags, YAML and Python."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


def option(default: Any, help: str, *, low: float | None = None, high: float | None = None, among: Any = None) -> Any:
    return field(default=default, metadata={"help": help, "low": low, "high": high, "among": among})


@dataclass(frozen=True)
class TrainOptions:
    """What every recipe takes."""

    data: str = option("digits", "digits, fashion-mnist, cifar10, cifar100, folder:PATH or npz:PATH.")
    data_root: str | None = option(None, "Where the data set lies, if not in its usual place.")
    encoder: str = option("auto", "auto, tiny, resnet18, resnet50 or torchvision:resnet18 ...")
    dim: int = option(128, "Features of the projection that the loss sees.", low=1)
    negatives: str = option("Uniform()", 'Negatives in the grammar, such as "Tilt(1.0)"; see: hardneg explain.')
    temperature: float = option(0.5, "Similarities are divided by this.", low=1e-4)
    tau_plus: float = option(0.0, "Share of false negatives to correct for (DCL, HCL).", low=0.0, high=0.999)
    batches: str = option("uniform()", 'Who shares a batch: uniform(), "proximity(num_candidates=500)", "knn()".')
    epochs: int = option(50, "Passes over the data.", low=1)
    batch_size: int = option(256, "Images in a batch, over all ranks together.", low=2)
    learning_rate: float = option(1e-3, "Adam's step size.", low=0.0)
    weight_decay: float = option(1e-6, "Adam's weight decay.", low=0.0)
    augment: str = option("auto", "auto, tiny, grey or cifar.", among=("auto", "tiny", "grey", "cifar"))
    seed: int = option(0, "Of the weights, the batches and the augmentation.", low=0)
    precision: str = option("no", "no, bf16 or fp16.", among=("no", "bf16", "fp16"))
    device: str = option("auto", "auto, cpu or cuda.", among=("auto", "cpu", "cuda"))
    compile: bool = option(False, "Compile the training step (worth it on a GPU).")
    log_every: int = option(20, "Steps between records of loss and diagnostics.", low=1)
    evaluate_on: str = option(
        "test", "test, or validation: a fifth of the training images is held out.", among=("test", "validation")
    )
    save_every: int = option(1, "Epochs between checkpoints.", low=1)

    def __post_init__(self) -> None:
        for one in fields(self):
            check_option(type(self).__name__, one.name, getattr(self, one.name), one.metadata)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SimCLROptions(TrainOptions):
    """Two views of each image, both against all others of the batch."""

    positives_in_denominator: str = option("own", "own, all or none.", among=("own", "all", "none"))
    num_negatives: str = option("support", "support, candidates or mass.", among=("support", "candidates", "mass"))


@dataclass(frozen=True)
class SupervisedOptions(SimCLROptions):
    """All images of the same label are positives: SupCon, SCL, H-SCL."""

    negatives: str = option("OtherLabel()", 'Negatives in the grammar, such as "OtherLabel() * Tilt(1.0)".')
    reduction: str = option("anchors", "anchors (SupCon) or pairs (H-SCL).", among=("anchors", "pairs"))


@dataclass(frozen=True)
class MoCoOptions(TrainOptions):
    """A momentum encoder; v2 against a queue of its keys, v3 against the keys of the batch."""

    temperature: float = option(0.2, "Similarities are divided by this.", low=1e-4)
    version: str = option("v2", "v2 (queue) or v3 (batch, symmetric, predictor).", among=("v2", "v3"))
    queue: int = option(4096, "Keys in the queue (v2).", low=1)
    momentum: float = option(0.99, "Of the momentum encoder; v3 takes it to 1 by a cosine.", low=0.0, high=1.0)


def check_option(who: str, name: str, value: Any, rules: Any) -> None:
    """Raises before anything is loaded, naming the option and what it allows."""
    flag = "--" + name.replace("_", "-")
    if rules.get("among") and value not in rules["among"]:
        raise ValueError(f"{who} needs {flag} to be one of {', '.join(rules['among'])}, got {name}={value!r}.")
    low, high = rules.get("low"), rules.get("high")
    if (low is None and high is None) or value is None:
        return
    if not isinstance(value, (int, float)) or (low is not None and value < low) or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{who} needs {flag} {allowed}, got {name}={value!r}.")


RECIPES: dict[str, type[TrainOptions]] = {
    "simclr": SimCLROptions,
    "supervised": SupervisedOptions,
    "moco": MoCoOptions,
}
