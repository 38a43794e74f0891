"""Options of the recipes for texts, pairs and two encoders.

The first line of each class is shown by ``hardneg train RECIPE --help``, so these docstrings have one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hardneg.core.errors import ArgumentError
from hardneg.core.options import option
from hardneg.training.options.base import DATA, NEGATIVES, TEMPERATURE, TRAINING, TrainOptions, check_fixed
from hardneg.training.options.recipes import SimCLROptions

TEXT = "Data set: text:FILE (one sentence per line), text:TABLE[column,label], pairs:TABLE[first,second] ..."
TEXT_ENCODER = "auto (hashed subwords, no download), gru, hf:PATH or st:PATH."
HEAD = "Projection head on top of the features, used in training only; mlp: a layer with tanh, as in SimCSE"
POOLING = "Features of an encoder hf:PATH: the mean over its tokens, or its first token, cls"
PRETRAINED_RATE = 3e-5
"""Learning rate of SimCSE for BERT; ProSampler has the same."""
TEXT_VIEWS = "Only auto: the views of a text are two dropout passes, those of a pair are its two texts."


@dataclass(frozen=True)
class TextOptions(TrainOptions):
    """Options shared by the text recipes: their data, encoder and head.

    Text has no augmentation: two views of a text differ by dropout only, and those of a pair are its two texts.
    """

    data: str = option("text:", TEXT, DATA)
    encoder: str = option("auto", f"Text encoder: {TEXT_ENCODER}", DATA)
    augment: str = option("auto", TEXT_VIEWS, DATA)
    dim: int = option(256, "Width of the built-in encoder, and of the head.", DATA, low=1)
    head: str = option("none", f"{HEAD}.", DATA, among=("none", "linear", "mlp"))
    token_pooling: str = option("mean", f"{POOLING}.", DATA, among=("mean", "cls"))
    epochs: int = option(1, "Number of passes over the data.", TRAINING, low=1)
    learning_rate: float | None = option(  # type: ignore[assignment]  # None stands for a number until __init__ ends
        None, "Learning rate; default 1e-3, for a transformer (hf:PATH, st:PATH) 3e-5.", TRAINING, low=0.0
    )

    def __post_init__(self) -> None:
        """Replace None with the learning rate for this kind of encoder, then check all options."""
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", PRETRAINED_RATE if is_transformer(self.encoder) else 1e-3)
        super().__post_init__()


def is_transformer(encoder: Any) -> bool:
    """Return whether a text encoder is a pretrained transformer: hf:PATH, and st:PATH unless its model is static."""
    kind, _, path = str(encoder).partition(":")
    modules = Path(path) / "modules.json"
    static = kind == "st" and modules.is_file() and "StaticEmbedding" in modules.read_text(encoding="utf-8")
    return kind in ("hf", "st") and not static


@dataclass(frozen=True)
class SimCSEOptions(TextOptions, SimCLROptions):
    """Two dropout passes of each text, the first against the second ones of the batch: SimCSE."""

    temperature: float | str = option(0.05, TEMPERATURE, NEGATIVES, low=1e-4)
    head: str | None = option(  # type: ignore[assignment]  # None stands for a word until __init__ ends
        None, f"{HEAD}; default mlp for hf:PATH, none for others.", DATA, among=("none", "linear", "mlp")
    )
    token_pooling: str | None = option(  # type: ignore[assignment]
        None, f"{POOLING}; default cls.", DATA, among=("mean", "cls")
    )

    def __post_init__(self) -> None:
        """Replace None with the head and the pooling of SimCSE's code for Transformers models."""
        published = ("mlp", "cls") if str(self.encoder).startswith("hf:") else ("none", "mean")
        for name, value in zip(("head", "token_pooling"), published, strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()


@dataclass(frozen=True)
class TwoSidedOptions(SimCLROptions):
    """Options of the recipes with two sides whose loss may be over the whole data set."""

    denominator: str = option(
        "batch",
        "Denominator of the loss: over the batch; over the data set by sogclr (running normalisers), isogclr (the same "
        "with a learnt temperature per pair) or emc2 (Markov chains).",
        NEGATIVES,
        among=("batch", "sogclr", "emc2", "isogclr"),
    )
    gamma: float = option(
        0.9, "Weight of the new value in sogclr's and isogclr's normalisers.", NEGATIVES, low=0.0, high=1.0
    )
    burn_in: float = option(0.5, "Share of emc2's walks that is discarded.", NEGATIVES, low=0.0, high=0.999)
    rho: float = option(0.3, "Radius of isogclr's KL constraint.", NEGATIVES, low=0.0)

    def check(self) -> None:
        """Raise for options of a loss over the batch with another denominator."""
        if self.denominator == "batch":
            return
        check_fixed(f"--denominator {self.denominator}", self)
        usual = {"objective": "info_nce", "generate": None, "positives_in_denominator": "own"}
        if self.denominator == "emc2":
            usual["negatives"] = "Uniform()"
        for name, value in usual.items():
            if (given := getattr(self, name)) != value:
                what = f"--{name.replace('_', '-')} to be unset, since its loss is over the data set"
                raise ArgumentError(f"--denominator {self.denominator}", what, repr(given))


@dataclass(frozen=True)
class PairsOptions(SimCSEOptions, TwoSidedOptions):
    """The first text of each pair against the second ones of the batch and mined negatives."""

    data: str = option("pairs:", TEXT, DATA)
    head: str = option("none", f"{HEAD}.", DATA, among=("none", "linear", "mlp"))
    token_pooling: str = option("mean", f"{POOLING}.", DATA, among=("mean", "cls"))
    directions: str = option(
        "one", "Directions of the loss: one (first to second) or both.", NEGATIVES, among=("one", "both")
    )
    ids: bool = option(
        True,
        "Never use pairs with the same document as negatives of each other; --no-ids measures what that is worth.",
        DATA,
        "--ids/--no-ids",
    )
    sources: ClassVar[tuple[str, ...]] = ("batch", "mined")

    def check(self) -> None:
        """Raise for a denominator over the data set with one direction, where it needs both."""
        super().check()
        if self.denominator == "sogclr" and self.directions == "one":
            raise ArgumentError("--denominator sogclr", "--directions both, which its code has", "directions='one'")


@dataclass(frozen=True)
class CLIPOptions(TwoSidedOptions):
    """Two encoders, both directions, a learnt temperature: CLIP, also on precomputed vectors."""

    data: str = option(
        "embeddings:", "Data set: imagetext:TABLE, imagetext:FOLDER, pairs:FILE or embeddings:FILE.npz.", DATA
    )
    text_encoder: str = option("auto", f"Text encoder for image-text data: {TEXT_ENCODER}", DATA)
    temperature: float | str = option(
        0.07, "Initial temperature; it is learnt, unless --denominator keeps it.", NEGATIVES, low=0.01
    )

    def check(self) -> None:
        """Raise for a temperature schedule, since the temperature is a parameter of the model."""
        super().check()
        if isinstance(self.temperature, str):
            what = "a number as --temperature, the initial value of the learnt one"
            raise ArgumentError("clip", what, repr(self.temperature))


@dataclass(frozen=True)
class QuickThoughtsOptions(TextOptions):
    """Each sentence predicts its neighbours among the sentences of a batch of consecutive ones: quick-thoughts."""

    encoders: str = option("two", "Use one encoder for both sides, or two.", DATA, among=("one", "two"))
    context_size: int = option(
        1, "Largest distance, in sentences, at which a neighbour is a positive.", NEGATIVES, low=1
    )
    temperature: float | str = option(1.0, TEMPERATURE, NEGATIVES, low=1e-4)
    batches: str = option("consecutive()", "How items are grouped into batches; only consecutive().", NEGATIVES)
    batch_size: int = option(400, "Sentences per batch, summed over all ranks.", TRAINING, low=2)
    has_global_loss: ClassVar[bool] = False

    def check(self) -> None:
        """Raise for other batches than consecutive ones, in which a sentence may have no positive."""
        if "".join(self.batches.split()) != "consecutive()":
            what = "--batches to be consecutive(), since the neighbours of a sentence are its positives"
            raise ArgumentError("quick-thoughts", what, self.batches)
