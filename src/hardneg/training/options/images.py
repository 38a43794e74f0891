"""Options of the image recipes: negatives from the batch, from a queue, or from the whole data set.

``SimCLROptions`` is also the base of the options of text, pair and graph recipes, whose losses take the same
arguments. The first line of each class is shown by ``hardneg train RECIPE --help``, so these docstrings have one
line.
"""

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
        "own",
        "Positives in the denominator of the loss: that of the pair, all, or none.",
        NEGATIVES,
        among=("own", "all", "none"),
    )
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
    four_losses: bool = option(
        False, "Also record the UCL, SCL, H-UCL and H-SCL losses and Assumption 1 (H-SCL, Fig. 4 and 5).", RUN
    )

    def check(self) -> None:
        """Raise for synthesised candidates, which have no label and could be positives."""
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

    def __post_init__(self) -> None:
        """Replace None by the published temperature and momentum of the version, then check all options."""
        for name, value in MOCO[self.version]._asdict().items() if self.version in MOCO else ():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()

    @property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]  # by an option
        """The source of the candidates: the queue in v1 and v2, the batch in v3."""
        return ("batch",) if self.version == "v3" else ("queue",)


@dataclass(frozen=True)
class SogCLROptions(TrainOptions):
    """Two views of each image, both against the whole data set, by running normalisers: SogCLR."""

    temperature: float | str = option(0.1, TEMPERATURE, NEGATIVES, low=1e-4)
    gamma: float = option(0.9, "Weight of the new value in the running normalisers.", NEGATIVES, low=0.0, high=1.0)

    def check(self) -> None:
        """Raise for options that a loss over the whole data set does not support."""
        check_fixed("sogclr", self)


@dataclass(frozen=True)
class ISogCLROptions(TrainOptions):
    """Two views of each image, both against all others of the batch, with a learnt temperature each: iSogCLR."""

    temperature: float | str = option(0.7, "Initial temperature of every image; they are learnt.", NEGATIVES, low=1e-4)
    rho: float = option(
        0.3, "Radius of the KL constraint; a larger value gives lower temperatures.", NEGATIVES, low=0.0
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

    def check(self) -> None:
        """Raise for non-uniform negatives, since the chains determine how negatives are drawn."""
        check_fixed("emc2", self)
        if "".join(self.negatives.split()) != "Uniform()":
            what = "--negatives to be Uniform(), since its Markov chains draw the negatives"
            raise ArgumentError("emc2", what, repr(self.negatives))
