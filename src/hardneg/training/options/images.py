"""Options of the recipes of images: views of the batch, a queue, or the whole data set."""

from __future__ import annotations

from dataclasses import dataclass

from hardneg.core.errors import ArgumentError
from hardneg.core.options import option
from hardneg.core.published import MOCO
from hardneg.training.options.base import (
    GENERATE,
    NEGATIVES,
    OBJECTIVE,
    RUN,
    TEMPERATURE,
    TRAINING,
    TrainOptions,
    check_fixed,
)


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


@dataclass(frozen=True)
class MoCoOptions(TrainOptions):
    """A momentum encoder: v1 and v2 against a queue of its keys (MoCo, Ring), v3 against the keys of the batch."""

    temperature: float | str | None = option(  # type: ignore[assignment]  # None stands for a number until __init__ ends
        None, f"{TEMPERATURE} By default 0.07 in v1 and 0.2 in v2 and v3.", NEGATIVES, low=1e-4
    )
    objective: str = option("info_nce", OBJECTIVE, NEGATIVES)
    generate: str | None = option(None, GENERATE, NEGATIVES)
    version: str = option(
        "v1",
        "v1 (queue), v2 (the same with its own values) or v3 (batch, symmetric, predictor).",
        NEGATIVES,
        among=tuple(MOCO),
    )
    queue: int | None = option(
        None, "Keys in the queue (v1, v2); by default 65536, but at most half of the data.", NEGATIVES, low=1
    )
    momentum: float | None = option(
        None,
        "Of the momentum encoder; by default 0.999, in v3 0.99, which goes to 1 by a cosine.",
        TRAINING,
        low=0.0,
        high=1.0,
    )

    def __post_init__(self) -> None:
        for name, value in MOCO[self.version]._asdict().items() if self.version in MOCO else ():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()

    @property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]  # by an option
        return ("batch",) if self.version == "v3" else ("queue",)


@dataclass(frozen=True)
class SogCLROptions(TrainOptions):
    """Two views of each image, both against all of the data set through running normalisers: SogCLR."""

    temperature: float | str = option(0.1, TEMPERATURE, NEGATIVES, low=1e-4)
    gamma: float = option(0.9, "Share of the new in the running normalisers.", NEGATIVES, low=0.0, high=1.0)

    def check(self) -> None:
        check_fixed("sogclr", self)


@dataclass(frozen=True)
class ISogCLROptions(TrainOptions):
    """Two views of each image, both against all others of the batch, with a learnt temperature per image: iSogCLR."""

    temperature: float | str = option(0.7, "Temperature of every image at the start.", NEGATIVES, low=1e-4)
    rho: float = option(0.3, "Keeps temperatures from falling.", NEGATIVES, low=0.0)

    def check(self) -> None:
        check_fixed("isogclr", self)


@dataclass(frozen=True)
class EMC2Options(TrainOptions):
    """Two views of each image, both against negatives that Markov chains draw from all of the data set: EMC2."""

    temperature: float | str = option(0.07, TEMPERATURE, NEGATIVES, low=1e-4)
    burn_in: float = option(0.5, "Share of each walk that is not counted.", NEGATIVES, low=0.0, high=0.999)
    num_steps: int = option(0, "Steps of a chain in each batch; 0: as many as candidates.", NEGATIVES, low=0)
    forget: bool = option(False, "Keep no embeddings: a chain outside the batch does not repel.", NEGATIVES)

    def check(self) -> None:
        check_fixed("emc2", self)
        if "".join(self.negatives.split()) != "Uniform()":
            what = "--negatives to be Uniform(), since it draws its negatives itself"
            raise ArgumentError("emc2", what, repr(self.negatives))
