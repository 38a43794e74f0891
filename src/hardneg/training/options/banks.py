"""Options of the recipes that compare images with a memory bank or a cache of past embeddings.

``BankOptions`` is the shared part; ``instance``, ``cmc`` and ``local-aggregation`` derive from it. The negative cache
has its own options, since it encodes its negatives again instead of storing a vector for every image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hardneg.core.errors import ArgumentError
from hardneg.core.options import option
from hardneg.core.published import BANK_TEMPERATURE, CMC_DRAWS, INSTANCE_DRAWS
from hardneg.training.options.base import NEGATIVES, TEMPERATURE, TrainOptions, check_fixed


@dataclass(frozen=True)
class BankOptions(TrainOptions):
    """Options shared by the recipes with a memory bank, which holds one vector per image.

    A step moves the vectors of its images towards their new embeddings: ``new = momentum * old + (1 - momentum) *
    z``. With ``clusters`` the bank is clustered by k-means, so that negatives may be chosen by cluster.
    """

    temperature: float | str = option(BANK_TEMPERATURE, TEMPERATURE, NEGATIVES, low=1e-4)
    momentum: float = option(
        0.5, "Weight of the old vector when an entry of the bank is updated.", NEGATIVES, low=0.0, high=0.999
    )
    clusters: int = option(
        0, "Number of k-means clusters of the bank, for SameCluster() (0 = no clustering).", NEGATIVES, low=0
    )
    cluster_runs: int = option(1, "Number of k-means runs from different starts.", NEGATIVES, low=1)
    cluster_every: int = option(1, "Number of epochs between two clusterings.", NEGATIVES, low=1)
    warmup: int = option(
        0, "Number of epochs before the first clustering; until then all images form one cluster.", NEGATIVES, low=0
    )
    recipe: ClassVar[str]
    """Name of the recipe, for errors."""
    sources: ClassVar[tuple[str, ...]] = ("bank",)

    def check(self) -> None:
        """Raise for options that no loss over a bank supports, and for clusters that would never be computed."""
        check_fixed(self.recipe, self)
        if self.clustered and self.warmup >= self.epochs:
            what, got = "more --epochs than --warmup, or it never clusters", f"{self.epochs} and {self.warmup}"
            raise ArgumentError(self.recipe, what, got)

    @property
    def clustered(self) -> bool:
        """True if the bank is clustered during training."""
        return self.clusters > 0


@dataclass(frozen=True)
class InstanceOptions(BankOptions):
    """Each image against its own past in a memory bank: instance discrimination, IRing, Cave."""

    loss: str = option(
        "auto",
        "Loss: nce (binary), softmax (Ring), or auto (nce for uniform negatives, softmax for others).",
        NEGATIVES,
        among=("auto", "nce", "softmax"),
    )
    num_draws: int | None = option(
        None,
        "Number of negatives drawn from the bank per image; default 4096 (cmc: 16384), at most the number of images.",
        NEGATIVES,
        low=1,
    )
    positives_in_denominator: str = option(
        "own",
        "Positive in the denominator of the softmax: own (the same as all), or none (Algorithm 1 of Ring).",
        NEGATIVES,
        among=("own", "all", "none"),
    )
    cluster_positives: bool = option(
        False, "Members of the image's k-means cluster join its positive: Ring + C_i, with --clusters.", NEGATIVES
    )
    recipe: ClassVar[str] = "instance"
    published_draws: ClassVar[int] = INSTANCE_DRAWS
    """Number of draws in the authors' code, the default of ``num_draws``."""

    @property
    def binary(self) -> bool:
        """True if the loss is binary NCE.

        Its noise distribution is uniform, in the sampling of the negatives and in the normaliser Z alike.
        """
        return self.loss == "nce" or (self.loss == "auto" and "".join(self.negatives.split()) == "Uniform()")

    def check(self) -> None:
        """Raise for binary NCE with non-uniform negatives, and for cluster negatives without clusters."""
        super().check()
        self._check_positives()
        if self.loss == "nce" and "".join(self.negatives.split()) != "Uniform()":
            what = "--negatives to be Uniform() for --loss nce, whose noise distribution is uniform"
            raise ArgumentError(self.recipe, what, repr(self.negatives), "use --loss softmax")
        if "Cluster(" in self.negatives and not self.clusters:
            what = "--clusters of at least 1 for negatives that depend on clusters"
            raise ArgumentError(self.recipe, what, f"{self.negatives!r} and no clusters", "use --clusters 100")

    def _check_positives(self) -> None:
        """Raise for positives that binary NCE does not have, or that need clusters."""
        other, fix = self.positives_in_denominator == "none" or self.cluster_positives, "use --loss softmax"
        if other and self.binary:
            what = "--loss softmax with --positives-in-denominator none or --cluster-positives"
            raise ArgumentError(self.recipe, what, f"loss={self.loss!r} and negatives={self.negatives!r}", fix)
        if self.cluster_positives and not self.clusters:
            raise ArgumentError(self.recipe, "--clusters with --cluster-positives", "none", "use --clusters 100")
        if self.cluster_positives and self.positives_in_denominator == "none":
            what = "--positives-in-denominator own with --cluster-positives"
            raise ArgumentError(self.recipe, what, repr(self.positives_in_denominator))


@dataclass(frozen=True)
class CMCOptions(InstanceOptions):
    """Lightness against colour of each image, with two encoders and two memory banks: CMC, CMCRing."""

    recipe: ClassVar[str] = "cmc"
    published_draws: ClassVar[int] = CMC_DRAWS
    needs: ClassVar[str] = "pixels"
    has_global_loss: ClassVar[bool] = False


@dataclass(frozen=True)
class LocalAggregationOptions(BankOptions):
    """The neighbours of each image in its cluster against all images close to it: Local Aggregation."""

    negatives: str = option("Rank(0, 4096)", "Background set: the closest entries of the bank.", NEGATIVES)
    clusters: int = option(0, "Number of k-means clusters of the bank (0 = one per 40 images).", NEGATIVES, low=0)
    cluster_runs: int = option(3, "Number of k-means runs from different starts.", NEGATIVES, low=1)
    warmup: int = option(
        1,
        "Number of epochs before the first clustering; until then each image is its own cluster.",
        NEGATIVES,
        low=0,
    )

    pooling: str = option(
        "sum",
        "Pooling of close and background neighbours: sum (the authors), or mean (each divided by its number of "
        "neighbours), which changes the loss and not its gradient.",
        NEGATIVES,
        among=("sum", "mean"),
    )

    recipe: ClassVar[str] = "local-aggregation"

    def check(self) -> None:
        """Raise for a background that excludes images by label, and with them the anchor's own entry."""
        super().check()
        if "Label(" in self.negatives:
            what = "a background that does not depend on labels, since it must contain the image itself"
            raise ArgumentError(self.recipe, what, f"negatives={self.negatives!r}")

    @property
    def clustered(self) -> bool:
        """Always True: the positives of this method are the members of clusters."""
        return True


@dataclass(frozen=True)
class NegativeCacheOptions(TrainOptions):
    """Negatives drawn from a cache of old embeddings by Gumbel-max, then encoded again: the negative cache."""

    temperature: float | str = option(BANK_TEMPERATURE, TEMPERATURE, NEGATIVES, low=1e-4)
    cache: int = option(4096, "Number of embeddings in the cache.", NEGATIVES, low=1)
    cache_refresh: float = option(
        0.02,
        "Share of the cache that is encoded again in each step, oldest entries first.",
        NEGATIVES,
        low=0.0,
        high=1.0,
    )
    num_draws: int = option(1, "Number of negatives drawn from the cache per image.", NEGATIVES, low=1)
    sources: ClassVar[tuple[str, ...]] = ("cache",)

    def check(self) -> None:
        """Raise for non-uniform negatives, since the method draws from the softmax over its cache."""
        check_fixed("negative-cache", self)
        if "".join(self.negatives.split()) != "Uniform()":
            what = "--negatives to be Uniform(), since it draws negatives from the softmax over its cache"
            raise ArgumentError("negative-cache", what, repr(self.negatives))
