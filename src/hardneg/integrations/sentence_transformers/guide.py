"""The guide of GISTEmbed: a frozen model that embeds the same texts, to judge which negatives are false."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from hardneg.batching.refresh import eval_mode
from hardneg.core.errors import optional
from hardneg.io.functions import loading_model


class Guide:
    """The embeddings of a batch under another model; not a module, so that nothing trains or saves it.

    The trainer passes tokens and no texts. They are decoded and tokenised again unless both models have the same
    vocabulary.
    """

    def __init__(self, guide: Any, model: nn.Module) -> None:
        self.name = guide if isinstance(guide, str) else type(guide).__name__
        if isinstance(guide, str):
            library = optional("sentence_transformers", "NegativesLoss(guide=...)", extra="text")
            with loading_model("NegativesLoss(guide=...)", guide):
                guide = library.SentenceTransformer(guide)
        self.guide: Any = guide
        self.device: torch.device | None = None
        own, other = getattr(model, "tokenizer", None), getattr(guide, "tokenizer", None)
        length = [getattr(each, "max_seq_length", None) or 0 for each in (model, guide)]
        same = own is other or (own is not None and other is not None and own.get_vocab() == other.get_vocab())
        self.tokenizer = None if same and length[1] >= length[0] else own

    @torch.no_grad()
    def __call__(self, features: list[dict[str, Any]]) -> list[Annotated[Tensor, "b d"]]:
        """On copies: a model writes its outputs into the features."""
        device = next(each for column in features for each in column.values() if isinstance(each, Tensor)).device
        if self.device != device:
            self.guide.to(device)
            self.device = device
        with eval_mode(self.guide):
            return [self.guide(self._tokens(column, device))["sentence_embedding"] for column in features]

    def _tokens(self, column: dict[str, Any], device: torch.device) -> dict[str, Any]:
        if self.tokenizer is None:
            return dict(column)
        texts = self.tokenizer.batch_decode(column["input_ids"], skip_special_tokens=True)
        again = getattr(self.guide, "preprocess", None) or self.guide.tokenize  # before version 6: tokenize
        return {name: each.to(device) if isinstance(each, Tensor) else each for name, each in again(texts).items()}

    def __repr__(self) -> str:
        return self.name
