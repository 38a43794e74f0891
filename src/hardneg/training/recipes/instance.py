"""Instance discrimination with any negatives (Wu et al. 2018): each image against its own past in a memory bank.

Uniform draws from the bank in binary NCE, as in the paper, or a softmax over the own entry and the draws, as Ring
states it. Ring's IRing is ``negatives="Ring(0.1, outer=linear(1.0, 0.1), dynamic_inner=True)"``, its Cave
``negatives="SameCluster()", clusters=...``. The bank is filled before the first step; with an empty one nothing would
be learnt in the first epoch. Every rank computes the loss of all gathered rows, and so keeps the same bank.
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
from hardneg.training.data.items import Items
from hardneg.training.method import Batch, EncodeInputs, Method
from hardneg.training.options.banks import BankOptions, InstanceOptions
from hardneg.training.parts import loss_for

ViewList = list[Tensor]  # of unit vectors [b, d], one for each bank


class BankMethod(Method):
    """Vectors against banks of the past: ``of_views`` is the loss, ``of_bank`` says who the negatives are."""

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
    def of_views(self, views: ViewList) -> Tensor:
        """The loss of the last batch, whose ids and labels are those of ``keys``."""

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        self._begin(encode)
        self.keys = gather(Keys(encode(batch.first).float(), batch.ids, batch.labels))
        return self.of_views(self.split(self.keys.vectors))

    def split(self, vectors: Tensor) -> ViewList:
        return [normalize(part, dim=-1) for part in vectors.chunk(len(self.banks), dim=1)]

    def _begin(self, encode: EncodeInputs) -> None:
        """Fills empty banks with first views, as steps do, and clusters them where it is time to."""
        if not self.begun and not len(self.banks[0]):
            every, unseen = torch.arange(len(self.data)), self.options.epochs  # no anchor has the views of that epoch
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
        for bank, view in zip(self.banks, self.split(keys.vectors), strict=True):
            bank.push(keys.changed(vectors=view))

    def after_step(self) -> None:
        self._push(self.keys)

    def against(self, z: Tensor, bank: Bank) -> tuple[Any, ...]:
        """The arguments of ``of_bank``: these vectors of the last batch, and all that the bank has."""
        ids, members = self.keys.ids, bank.keys()
        assert ids is not None
        clusters = None if self.clusters is None else self.clusters.of(ids)
        members = members if self.clusters is None else self.clusters.tag(members)
        return z.detach(), bank.of(ids).vectors, ids, self.keys.labels, members, clusters

    def diagnose(self) -> Diagnosis:
        """Of the first view; ``after_step`` has pushed it."""
        return self.of_bank.diagnose(*self.against(self.split(self.keys.vectors)[0], self.banks[-1]))

    def harvest(self) -> Keys:
        vectors = torch.cat(self.split(self.keys.vectors.detach()), dim=1) * len(self.banks) ** -0.5
        return Keys(vectors, self.keys.ids)

    def set_progress(self, step: int, total: int) -> None:
        self.step = step
        self.of_bank.set_progress(step, total)
        self.negatives = self.of_bank.negatives.at(step, total)


class Instance(BankMethod):
    """With several views each meets the bank of another one: ``CMC`` has two."""

    def __init__(self, options: InstanceOptions, data: Items, total: int, num_banks: int = 1) -> None:
        super().__init__(options, data, total, num_banks, options.clusters)
        self.encoder = self.encoder_for(options, data)
        if self.clusters is not None:
            self.clusters.assignments.zero_()  # all are one until the first clusters: SameCluster() is then uniform
        self.num_draws = options.num_draws or min(options.published_draws, len(data))
        self.draws_chosen = options.num_draws is None
        self.uniform = self.of_bank.negatives == Uniform()
        objective = "nce" if options.binary else "softmax"
        self.contrasts = nn.ModuleList(
            [BankContrast(len(data), self.num_draws, self.temperature, objective) for _ in self.banks]
        )

    def encoder_for(self, options: InstanceOptions, data: Items) -> nn.Module:
        return data.encoder(options)

    def chosen(self) -> dict[str, int]:
        return {"num_draws": self.num_draws} if self.draws_chosen else {}

    def of_views(self, views: ViewList) -> Tensor:
        pairs = zip(self.contrasts, views, reversed(self.banks), strict=True)
        losses: list[Tensor] = [one(z, self.keys.ids, bank, self.drawn(z, bank)) for one, z, bank in pairs]
        return torch.stack(losses).sum()

    @torch.no_grad()
    def drawn(self, z: Tensor, bank: Bank) -> Tensor | None:
        """Ids [b, k] of the negatives of each anchor, by its weights over the bank; None: the bank draws uniformly."""
        if self.uniform:
            return None
        arguments = self.against(z, bank)
        index = draw(self.negatives.log_weights(self.of_bank.scores(*arguments)), self.num_draws, bank.generator())
        bank.advance()
        return torch.where(index >= 0, arguments[4].ids[index.clamp(min=0)], -1)

    def recorded(self, loss: Tensor) -> Tensor:
        return loss / len(self.banks)

    def diagnose(self) -> Diagnosis:
        """Weights that are drawn from have no gradient, so nothing is attracted; no more are seen than are drawn."""
        found = super().diagnose()
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
    """Pushes the embeddings of the first (0) or second (1) views of these items."""
    for part in index.to(data.ids.device).tensor_split(max(1, len(index) // options.batch_size)):
        labels = None if data.labels is None else data.labels[part]
        push(Keys(encode(data.views(part, epoch, options.seed)[view]).float(), part, labels))
