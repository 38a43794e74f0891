"""Options of the recipes of texts and of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hardneg.core.errors import ArgumentError
from hardneg.core.options import option
from hardneg.training.options.base import DATA, NEGATIVES, TEMPERATURE, TRAINING, TrainOptions
from hardneg.training.options.images import SimCLROptions

TEXT = "text:FILE (a sentence per line), text:TABLE[column,label], pairs:TABLE[first,second] ..."
TEXT_ENCODER = "auto (hashed subwords, no download), hf:PATH, st:PATH."
HEAD = "What is trained behind the features and left out in evaluation."
TEXT_VIEWS = "auto: passes with other dropout, or the two texts of a pair; there are no others."


@dataclass(frozen=True)
class TextOptions(TrainOptions):
    """What the recipes of texts share."""

    data: str = option("text:", TEXT, DATA)
    encoder: str = option("auto", TEXT_ENCODER, DATA)
    augment: str = option("auto", TEXT_VIEWS, DATA)
    dim: int = option(256, "Width of the small encoder, and of a head.", DATA, low=1)
    head: str = option("none", HEAD, DATA, among=("none", "linear", "mlp"))
    epochs: int = option(1, "Passes over the data.", TRAINING, low=1)


@dataclass(frozen=True)
class SimCSEOptions(TextOptions, SimCLROptions):
    """Two dropout passes of each text, the first against the second ones of the batch: SimCSE."""

    temperature: float | str = option(0.05, TEMPERATURE, NEGATIVES, low=1e-4)


@dataclass(frozen=True)
class PairsOptions(SimCSEOptions):
    """The first text of each pair against the second ones of the batch and mined negatives."""

    data: str = option("pairs:", TEXT, DATA)
    directions: str = option("one", "one (first to second) or both.", NEGATIVES, among=("one", "both"))
    sources: ClassVar[tuple[str, ...]] = ("batch", "mined")


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
class QuickThoughtsOptions(TextOptions):
    """Each sentence predicts its neighbours among the sentences of the batch, which are consecutive: quick-thoughts."""

    encoders: str = option("two", "one for both sides, or two.", DATA, among=("one", "two"))
    context_size: int = option(1, "How far away a neighbour may stand.", NEGATIVES, low=1)
    temperature: float | str = option(1.0, TEMPERATURE, NEGATIVES, low=1e-4)
    batches: str = option("consecutive()", "Batches of consecutive sentences.", NEGATIVES)
    batch_size: int = option(400, "Sentences in a batch, over all ranks together.", TRAINING, low=2)

    def check(self) -> None:
        if "".join(self.batches.split()) != "consecutive()":
            what = "--batches to be consecutive(), since the neighbours of a sentence are its positives"
            raise ArgumentError("quick-thoughts", what, self.batches)
