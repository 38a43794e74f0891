"""Instance discrimination with any negatives (Wu et al. 2018): each image against its own past in a memory bank.

The loss is binary NCE with uniform draws from the bank, as in the paper, or a softmax over the own entry and the
draws, as in Ring. Ring's IRing is ``negatives="Ring(0.1, outer=linear(1.0, 0.1), dynamic_inner=True)"``, its Cave
``negatives="SameCluster()", clusters=...``, and Ring + C_i is IRing with ``cluster_positives, clusters=...``. The bank
is filled before the first step; with an empty one the first epoch would learn nothing. Every rank computes the loss of
all gathered rows, so that all ranks hold the same bank.

``BankMethod`` is the base of all recipes with a memory bank; ``Instance`` adds the loss and the draws.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardneg.core.diagnose import Diagnosis
from hardneg.core.distributed import gather, of_first_rank
from hardneg.core.errors import ArgumentError
from hardneg.core.types import Keys
from hardneg.losses.bank import BankContrast
from hardneg.negatives import Uniform
from hardneg.search.draws import draw
from hardneg.state.clusters import Clusters
from hardneg.state.pools import Bank
from hardneg.theory.gradients import global_loss
from hardneg.training.data.items import Items
from hardneg.training.loop.method import Batch, EncodeInputs, Method
from hardneg.training.loop.parts import loss_for
from hardneg.training.options.banks import BankOptions, InstanceOptions

ViewList = list[Tensor]
"""Unit vectors of a batch, one [b, d] per bank."""


class BankMethod(Method):
    """Base of the recipes that compare images with memory banks of past embeddings.

    Subclasses set ``encoder`` and implement ``loss_of_views``. ``of_bank`` is a ``ContrastiveLoss`` that holds the
    negatives; it selects and diagnoses them, and is not trained with.

    Args:
        options: Options of the recipe.
        data: The training items; a bank has one entry for each.
        total: Number of steps of the run.
        num_banks: Number of banks; the encoder returns as many vectors, concatenated.
        num_clusters: Number of k-means clusters of the banks; 0 for no clustering.
    """

    banks: Any  # an nn.ModuleList of Bank

    def __init__(
        self, options: BankOptions, data: Items, total: int, num_banks: int = 1, num_clusters: int = 0
    ) -> None:
        super().__init__()
        if num_clusters > len(data):
            raise ArgumentError("train", f"--clusters of at most the {len(data)} {data.noun}s", str(num_clusters))
        self.options, self.data, self.temperature = options, data, float(options.temperature)
        self.of_bank = loss_for(options, views="pool", gather=False)
        self.banks = nn.ModuleList(
            [Bank(len(data), options.dim, options.momentum, seed=options.seed + i) for i in range(num_banks)]
        )
        self.num_clusters, self.steps_an_epoch = num_clusters, max(1, total // options.epochs)
        self.clusters = Clusters(len(data), options.cluster_runs, seed=options.seed) if num_clusters else None
        self.negatives, self.step, self.begun = self.of_bank.negatives, 0, False

    @abstractmethod
    def loss_of_views(self, views: ViewList) -> Tensor:
        """Compute the loss of the last batch, whose ids and labels are in ``keys``.

        Args:
            views: Unit vectors of the batch, one [b, d] per bank.
        """

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """Fill the banks and, when due, cluster them; then compute the loss of the first views of all ranks."""
        self._begin(encode)
        self.keys = gather(Keys(encode(batch.first).float(), batch.ids, batch.labels))
        return self.loss_of_views(self.split(self.keys.vectors))

    def split(self, vectors: Tensor) -> ViewList:
        """Split vectors [b, num_banks * d] into unit vectors [b, d] per bank."""
        return [normalize(part, dim=-1) for part in vectors.chunk(len(self.banks), dim=1)]

    def _begin(self, encode: EncodeInputs) -> None:
        """Fill empty banks with the first views of all items, and cluster the banks when due."""
        if not self.begun and not len(self.banks[0]):
            every, unseen = torch.arange(len(self.data)), self.options.epochs  # views of an epoch that is never trained
            encode_all(encode, self.data, self.options, every, self._push, view=0, epoch=unseen)
        self.begun = True
        epoch, within = divmod(self.step, self.steps_an_epoch)
        since = epoch - self.options.warmup
        if self.clusters is None or within or since < 0 or since % self.options.cluster_every:
            return
        whole = torch.cat([bank.keys().vectors for bank in self.banks], dim=1)
        self.clusters.refresh(Keys(whole, torch.arange(len(whole), device=whole.device)), self.num_clusters)
        of_first_rank(self.clusters.assignments)

    def _push(self, keys: Keys) -> None:
        """Update the entries of a batch in all banks."""
        for bank, view in zip(self.banks, self.split(keys.vectors), strict=True):
            bank.push(keys.changed(vectors=view))

    def after_step(self) -> None:
        """Update the entries of the last batch."""
        self._push(self.keys)

    def bank_arguments(self, z: Tensor, bank: Bank) -> tuple[Any, ...]:
        """Return the arguments of ``of_bank`` for vectors of the last batch against all entries of a bank.

        Args:
            z: Unit vectors of the batch, [b, d].
            bank: The bank whose entries are the candidates; the own entry is the positive.

        Returns:
            Anchors, positives, ids and labels of the batch, the entries of the bank, and the clusters of the anchors.
        """
        ids, members = self.keys.ids, bank.keys()
        assert ids is not None
        clusters = None if self.clusters is None else self.clusters.of(ids)
        members = members if self.clusters is None else self.clusters.tag(members)
        return z.detach(), bank.of(ids).vectors, ids, self.keys.labels, members, clusters

    def diagnose(self, bins: int = 0) -> Diagnosis:
        """Diagnose the first view against the last bank, after the batch was pushed."""
        return self.of_bank.diagnose(*self.bank_arguments(self.split(self.keys.vectors)[0], self.banks[-1]), bins=bins)

    def global_loss(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        """Return the exact loss of the first views against the second ones, which stand for the bank."""
        return global_loss(z1, z2, self.temperature, "cross", index)

    def harvest(self) -> Keys:
        """Return the vectors of all views of an image as one vector of unit norm."""
        vectors = torch.cat(self.split(self.keys.vectors.detach()), dim=1) * len(self.banks) ** -0.5
        return Keys(vectors, self.keys.ids)

    def set_progress(self, step: int, total: int) -> None:
        """Evaluate the schedules of the negatives before a step."""
        self.step = step
        self.of_bank.set_progress(step, total)
        self.negatives = self.of_bank.negatives.at(step, total)


class Instance(BankMethod):
    """Each image against its own entry and entries drawn from a bank.

    With several banks, each view is compared with the bank of another view: ``CMCRecipe`` has two.

    Args:
        options: Options of the recipe.
        data: The training items.
        total: Number of steps of the run.
        num_banks: Number of banks, one per view.
    """

    def __init__(self, options: InstanceOptions, data: Items, total: int, num_banks: int = 1) -> None:
        super().__init__(options, data, total, num_banks, options.clusters)
        self.encoder = self.encoder_for(options, data)
        self.cluster_positives = options.cluster_positives
        if self.clusters is not None and not self.cluster_positives:
            self.clusters.assignments.zero_()  # one cluster until the first clustering: SameCluster() is then uniform
        self.num_draws = options.num_draws or min(options.published_draws, len(data))
        self.draws_chosen = options.num_draws is None
        self.uniform = self.of_bank.negatives == Uniform()
        objective = "nce" if options.binary else "softmax"
        self.contrasts = nn.ModuleList(
            [
                BankContrast(
                    len(data),
                    self.num_draws,
                    self.temperature,
                    objective,
                    positives_in_denominator="none" if options.positives_in_denominator == "none" else "own",
                )
                for _ in self.banks
            ]
        )

    def encoder_for(self, options: InstanceOptions, data: Items) -> nn.Module:
        """Build the encoder; it returns one vector per bank, concatenated."""
        return data.encoder(options)

    def chosen(self) -> dict[str, int]:
        """Return the number of draws if it was derived from the data."""
        return {"num_draws": self.num_draws} if self.draws_chosen else {}

    def loss_of_views(self, views: ViewList) -> Tensor:
        """Return the sum of the losses of the views, each [b, d], against the bank of another view."""
        pairs = zip(self.contrasts, views, reversed(self.banks), strict=True)
        close = self.clusters if self.cluster_positives else None
        losses: list[Tensor] = [one(z, self.keys.ids, bank, self.drawn(z, bank), close) for one, z, bank in pairs]
        return torch.stack(losses).sum()

    @torch.no_grad()
    def drawn(self, z: Tensor, bank: Bank) -> Tensor | None:
        """Draw the negatives of each anchor by their weights over the bank.

        Args:
            z: Unit vectors of the batch, [b, d].
            bank: The bank to draw from.

        Returns:
            Ids of the negatives, [b, k], -1 where an anchor has none; None if the bank draws uniformly itself.
        """
        if self.uniform:
            return None
        arguments = self.bank_arguments(z, bank)
        index = draw(self.negatives.log_weights(self.of_bank.scores(*arguments)), self.num_draws, bank.generator())
        bank.advance()
        return torch.where(index >= 0, arguments[4].ids[index.clamp(min=0)], -1)

    def recorded(self, loss: Tensor) -> Tensor:
        """Return the mean over the views, comparable between one and two banks."""
        return loss / len(self.banks)

    def diagnose(self, bins: int = 0) -> Diagnosis:
        """Diagnose the weights over the bank, bounded by the number of draws.

        Weights from which negatives are drawn have no gradient, so no negative is attracted, and the effective number
        of negatives cannot exceed the number of draws.
        """
        found = super().diagnose(bins)
        number = found.effective_number.clamp(max=float(self.num_draws))
        return replace(found, effective_number=number, attracted=found.attracted * 0.0)


@torch.no_grad()
def encode_all(
    encode: EncodeInputs,
    data: Items,
    options: Any,
    index: Tensor,
    push: Callable[[Keys], None],
    view: int,
    epoch: int = 0,
) -> None:
    """Encode views of many items in batches and pass on their embeddings.

    Args:
        encode: The encoder of the step.
        data: The training items.
        options: Options of the recipe, for the batch size and the seed.
        index: Positions of the items, [n].
        push: Called with the embeddings of each batch.
        view: 0 for the first view, 1 for the second.
        epoch: Epoch whose augmentation is used.
    """
    for part in index.to(data.ids.device).tensor_split(max(1, len(index) // options.batch_size)):
        labels = None if data.labels is None else data.labels[part]
        views = data.views(part, options.epoch_of_views(epoch), options.seed)
        push(Keys(encode(views[view]).float(), part, labels))
