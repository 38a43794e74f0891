"""Scores of (query, document) text pairs: by a CrossEncoder, its path, or any function of pairs.

Used for ``--cross-encoder`` and ``--rescore`` of jobs, and for ``cross_encoder=`` of ``mine_dataset``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import check_callable, optional
from hardneg.io.functions import loading_model
from hardneg.mining.corpus_scores import CorpusScorer, PairGuide
from hardneg.mining.output import Result

OfPairs = Callable[[list[tuple[str, str]]], Any]
"""Function from a list of (query, document) texts to one score each."""


def pair_scorer(model: Any, batch_size: int = 32, device: str | None = None, flag: str = "--cross-encoder") -> OfPairs:
    """Return a function of pairs from a CrossEncoder, its path or name, or such a function.

    Args:
        model: CrossEncoder, path, name or function.
        batch_size: Number of pairs scored at a time.
        device: Device of a model that is loaded here.
        flag: Name of the option in errors.
    """
    if isinstance(model, str):
        cross_encoder = optional("sentence_transformers", flag, extra="text").CrossEncoder
        with loading_model(flag, model):
            model = cross_encoder(model, device=device)
    predict = getattr(model, "predict", None)
    if predict is None:
        check_callable("mine", "cross_encoder", model, "a CrossEncoder, its path, or a function of pairs of texts")
        return model  # type: ignore[no-any-return]
    return lambda pairs: predict(pairs, batch_size=batch_size, show_progress_bar=False, convert_to_numpy=True)


@dataclass(frozen=True, eq=False)
class PairScorer:
    """Scores pairs by position: one score for each query and row of the corpus; a ``rescore`` function of ``mine``.

    Attributes:
        score: Function of text pairs.
        queries: Texts of the queries.
        corpus: Texts of the documents.
        teaches: Whether its scores are written to the output, for distillation.
    """

    score: OfPairs
    queries: Sequence[str]
    corpus: Sequence[str]
    teaches: bool = False

    def __call__(self, query: Annotated[Tensor, "m"], rows: Annotated[Tensor, "m"]) -> Annotated[Tensor, "m"]:
        """Return the scores of the pairs (query[i], rows[i]) [m]."""
        pairs = [(self.queries[q], self.corpus[r]) for q, r in zip(query.tolist(), rows.tolist(), strict=True)]
        return torch.as_tensor(np.asarray(self.score(pairs), dtype=np.float32)) if pairs else torch.zeros(0)


def with_teacher(result: Result, scorer: CorpusScorer) -> Result:
    """Return the result with the cross-encoder's scores of the chosen pairs, for distillation."""
    if getattr(scorer.rescore, "teaches", False):
        return replace(result, teacher=(result.scores, result.positive_scores))
    if not isinstance(scorer.guide, PairGuide):
        return result
    query, column = (torch.from_numpy(each) for each in (result.rows >= 0).nonzero())
    scores = np.full(result.rows.shape, -np.inf, dtype=np.float32)
    found = scorer.guide.pairs(query, torch.from_numpy(result.rows)[query, column])
    scores[query.numpy(), column.numpy()] = found.cpu().numpy()
    count = torch.tensor([len(rows) for rows in result.problem.positives])
    owner = torch.repeat_interleave(torch.arange(len(count)), count)
    own = scorer.guide.pairs(owner, torch.tensor([row for rows in result.problem.positives for row in rows]))
    return replace(result, teacher=(scores, own.cpu().numpy()))
