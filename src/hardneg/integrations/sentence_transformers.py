"""A loss for sentence-transformers, usable wherever MultipleNegativesRankingLoss is, with any negatives.

Columns are anchor, positive, negative_1 ...; two lines of a script change:

    from hardneg.integrations.sentence_transformers import NegativesLoss
    loss = NegativesLoss(model, 'Tilt(1.0, source="mined")', temperature=0.05)    # scale=20.0 there
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardneg.core.distributed import gather
from hardneg.core.errors import ArgumentError, argument_error, check_range
from hardneg.core.objectives import NumNegatives, info_nce, reduce
from hardneg.core.scoring import score
from hardneg.core.types import Keys, Scores
from hardneg.negatives import Negatives, Uniform, parse

_other_rank = 1 << 32


class NegativesLoss(nn.Module):
    """InfoNCE of (anchor, positive, negative_1 ...) columns with any negatives.

    The candidates of an anchor are its own explicit negatives, of the source "mined", and the positives and negatives
    of all other rows, of the source "batch": ``From("mined")`` keeps the first, ``Tilt(5.0, source="mined")`` weighs
    them. ``Uniform()`` is MultipleNegativesRankingLoss, in value and gradient.

    temperature: 1 / scale of sentence-transformers.
    similarity: ``"cosine"`` or ``"dot"``.
    gather_across_devices: whether the documents of all ranks are candidates.
    A column ``label`` is read as the group of an anchor and its positive, for ``OtherLabel()``; explicit negatives
    belong to none, whoever's they are.
    The other options are those of ``info_nce``.
    """

    def __init__(
        self,
        model: nn.Module,
        negatives: Negatives | str = Uniform(),
        temperature: float = 0.05,
        *,
        tau_plus: float = 0.0,
        num_negatives: NumNegatives = "support",
        similarity: str = "cosine",
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise argument_error("NegativesLoss", "a temperature above 0", "temperature", temperature)
        if similarity not in ("cosine", "dot"):
            raise argument_error("NegativesLoss", "similarity 'cosine' or 'dot'", "similarity", similarity)
        check_range("NegativesLoss", "tau_plus", tau_plus, 0.0, 1.0, open_high=True)
        self.model = model
        self.negatives = parse(negatives) if isinstance(negatives, str) else negatives
        self.temperature, self.tau_plus, self.num_negatives = temperature, tau_plus, num_negatives
        self.similarity, self.gather_across_devices = similarity, gather_across_devices
        self._current = self.negatives

    def set_progress(self, step: int, total: int | None = None) -> None:
        """Evaluates the schedules in the negatives."""
        self._current = self.negatives.at(step, total)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        return self.compute_loss_from_embeddings(embeddings, labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        scores = self.scores(embeddings, labels)
        log_w = self._current.log_weights(scores)
        losses = info_nce(scores, log_w, num_negatives=self.num_negatives, tau_plus=self.tau_plus)
        return reduce(losses, scores)

    def scores(self, embeddings: list[Annotated[Tensor, "b d"]], labels: Tensor | None = None) -> Scores:
        """Anchors against the documents of the batch and their own explicit negatives."""
        if len(embeddings) < 2:
            raise ArgumentError("NegativesLoss", "columns anchor, positive, ...", f"{len(embeddings)} of them")
        if self.similarity == "cosine":
            embeddings = [
                normalize(each.to(torch.promote_types(each.dtype, torch.float32)), dim=-1) for each in embeddings
            ]
        anchors, *documents = embeddings
        owner = self._owner(anchors)
        group = labels.long() if labels is not None and labels.ndim == 1 and not labels.is_floating_point() else None
        none = None if group is None else torch.full_like(group, torch.iinfo(torch.long).min)  # equals no real group
        # A document belongs to the anchor of its row, and is not that anchor's negative here.
        batch = [Keys(each, owner, none if i else group, source="batch") for i, each in enumerate(documents)]
        if self.gather_across_devices:
            batch = [gather(keys) for keys in batch]
        pool = batch
        if len(documents) > 1:
            own = torch.stack(documents[1:], dim=1)  # [b, k, d]
            nobody = torch.full(own.shape[:2], -1, device=own.device)
            groups = None if none is None else none[:, None].expand(own.shape[:2])
            pool = [*batch, Keys(own, nobody, groups, source="mined")]
        return score(Keys(anchors, owner, group), documents[0], pool, self.temperature)

    def _owner(self, anchors: Tensor) -> Annotated[Tensor, "b"]:
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        first = torch.distributed.get_rank() * _other_rank if ranks else 0
        return first + torch.arange(len(anchors), device=anchors.device)

    def get_config_dict(self) -> dict[str, Any]:
        return {
            "negatives": repr(self.negatives),
            "temperature": self.temperature,
            "tau_plus": self.tau_plus,
            "num_negatives": self.num_negatives,
            "similarity": self.similarity,
            "gather_across_devices": self.gather_across_devices,
        }
