"""Options of the recipes with a memory bank or a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hardneg.core.errors import ArgumentError
from hardneg.core.options import option
from hardneg.core.published import BANK_TEMPERATURE, CMC_DRAWS, INSTANCE_DRAWS
from hardneg.training.options.base import NEGATIVES, TEMPERATURE, TrainOptions, check_fixed


@dataclass(frozen=True)
class BankOptions(TrainOptions):
    """What the recipes with a memory bank share: one vector per image, which follows the encoder."""

    temperature: float | str = option(BANK_TEMPERATURE, TEMPERATURE, NEGATIVES, low=1e-4)
    momentum: float = option(0.5, "Share of the old in the bank's vectors.", NEGATIVES, low=0.0, high=0.999)
    clusters: int = option(0, "Clusters of the bank by k-means, for SameCluster(); 0: none.", NEGATIVES, low=0)
    cluster_runs: int = option(1, "Clusterings from different starts.", NEGATIVES, low=1)
    cluster_every: int = option(1, "Epochs between clusterings.", NEGATIVES, low=1)
    warmup: int = option(0, "Epochs before the first clusters; until then all are one cluster.", NEGATIVES, low=0)
    recipe: ClassVar[str]
    sources: ClassVar[tuple[str, ...]] = ("bank",)

    def check(self) -> None:
        check_fixed(self.recipe, self)
        if self.clustered and self.warmup >= self.epochs:
            what, got = "more --epochs than --warmup, or clusters are never made", f"{self.epochs} and {self.warmup}"
            raise ArgumentError(self.recipe, what, got)

    @property
    def clustered(self) -> bool:
        return self.clusters > 0


@dataclass(frozen=True)
class InstanceOptions(BankOptions):
    """Each image against its own past in a memory bank: instance discrimination, IRing, Cave."""

    loss: str = option(
        "auto",
        "nce (binary), softmax (Ring), or auto: nce for uniform negatives.",
        NEGATIVES,
        among=("auto", "nce", "softmax"),
    )
    num_draws: int | None = option(
        None,
        "Negatives that each image draws from the bank; by default 4096 (cmc 16384), but at most as many as images.",
        NEGATIVES,
        low=1,
    )
    recipe: ClassVar[str] = "instance"
    published_draws: ClassVar[int] = INSTANCE_DRAWS

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
    published_draws: ClassVar[int] = CMC_DRAWS
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

    temperature: float | str = option(BANK_TEMPERATURE, TEMPERATURE, NEGATIVES, low=1e-4)
    cache: int = option(4096, "Embeddings in the cache.", NEGATIVES, low=1)
    cache_refresh: float = option(
        0.02, "Share of the cache, the oldest, that is encoded again in each step.", NEGATIVES, low=0.0, high=1.0
    )
    num_draws: int = option(1, "Negatives that each image draws from the cache.", NEGATIVES, low=1)
    sources: ClassVar[tuple[str, ...]] = ("cache",)

    def check(self) -> None:
        check_fixed("negative-cache", self)
        if "".join(self.negatives.split()) != "Uniform()":
            what = "--negatives to be Uniform(), since it draws from the softmax over the cache"
            raise ArgumentError("negative-cache", what, repr(self.negatives))
