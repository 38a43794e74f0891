"""Options of the recipes for texts and for pairs: ``simcse``, ``pairs``, ``clip`` and ``quick-thoughts``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hardneg.core.errors import ArgumentError
from hardneg.core.options import option
from hardneg.training.options.base import DATA, NEGATIVES, TEMPERATURE, TRAINING, TrainOptions
from hardneg.training.options.images import SimCLROptions

TEXT = "Data set: text:FILE (one sentence per line), text:TABLE[column,label], pairs:TABLE[first,second] ..."
TEXT_ENCODER = "auto (hashed subwords, no download), hf:PATH or st:PATH."
HEAD = "Projection head on top of the features, used in training only."
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
    head: str = option("none", HEAD, DATA, among=("none", "linear", "mlp"))
    epochs: int = option(1, "Number of passes over the data.", TRAINING, low=1)


@dataclass(frozen=True)
class SimCSEOptions(TextOptions, SimCLROptions):
    """Two dropout passes of each text, the first against the second ones of the batch: SimCSE."""

    temperature: float | str = option(0.05, TEMPERATURE, NEGATIVES, low=1e-4)


@dataclass(frozen=True)
class PairsOptions(SimCSEOptions):
    """The first text of each pair against the second ones of the batch and mined negatives."""

    data: str = option("pairs:", TEXT, DATA)
    directions: str = option(
        "one", "Directions of the loss: one (first to second) or both.", NEGATIVES, among=("one", "both")
    )
    sources: ClassVar[tuple[str, ...]] = ("batch", "mined")


@dataclass(frozen=True)
class CLIPOptions(SimCLROptions):
    """Two encoders, both directions, a learnt temperature: CLIP, also on precomputed vectors."""

    data: str = option(
        "embeddings:", "Data set: imagetext:TABLE, imagetext:FOLDER, pairs:FILE or embeddings:FILE.npz.", DATA
    )
    text_encoder: str = option("auto", f"Text encoder for image-text data: {TEXT_ENCODER}", DATA)
    temperature: float | str = option(0.07, "Initial temperature; it is learnt.", NEGATIVES, low=0.01)

    def check(self) -> None:
        """Raise for a temperature schedule, since the temperature is a parameter of the model."""
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

    def check(self) -> None:
        """Raise for other batches than consecutive ones, in which a sentence may have no positive."""
        if "".join(self.batches.split()) != "consecutive()":
            what = "--batches to be consecutive(), since the neighbours of a sentence are its positives"
            raise ArgumentError("quick-thoughts", what, self.batches)
