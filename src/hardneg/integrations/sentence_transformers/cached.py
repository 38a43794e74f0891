"""NegativesLoss for batches whose activations do not fit in memory, by GradCache (Gao et al. 2021).

The batch is embedded in mini-batches without activations, the gradient of the loss with respect to the embeddings is
computed, and a second forward pass carries it to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError
from hardneg.core.tensors import widened
from hardneg.integrations.sentence_transformers.loss import NegativesLoss
from hardneg.losses.grad_cache import GradCache
from hardneg.state.stateful import check_count

ColumnTokens = dict[str, Any]


class CachedNegativesLoss(NegativesLoss):
    """NegativesLoss with the memory of ``mini_batch_size`` texts, at the cost of a second forward pass.

    With ``Uniform()`` it equals CachedMultipleNegativesRankingLoss.

    Args:
        model: A SentenceTransformer.
        *arguments: Positional arguments of ``NegativesLoss``.
        mini_batch_size: Texts whose activations are kept at a time.
        **options: Options of ``NegativesLoss``.

    Raises:
        ArgumentError: In the forward pass, if MatryoshkaLoss is too old to wrap a cached loss, or if tokens are
            flattened.
    """

    uses_gradient_cache = True
    """Makes MatryoshkaLoss wrap ``calculate_loss`` instead of the forward pass of the model."""

    def __init__(self, model: nn.Module, *arguments: Any, mini_batch_size: int = 32, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        self.mini_batch_size = check_count("CachedNegativesLoss", "mini_batch_size", mini_batch_size)
        self._judged: list[Tensor] | None = None

    def forward(self, sentence_features: Iterable[ColumnTokens], labels: Tensor | None = None) -> Tensor:
        """Embed the columns in mini-batches and return the loss.

        Args:
            sentence_features: Tokens of each column: anchor, positive, negatives ...
            labels: As in ``NegativesLoss.forward``.
        """
        columns = list(sentence_features)
        self._check(columns)
        if self.guide is not None:
            guide = self.guide
            with torch.no_grad():
                self._judged = [self._cached(lambda column: guide([column])[0], column) for column in columns]
        vectors = [self._cached(lambda column: self.model(column)["sentence_embedding"], each) for each in columns]
        if not torch.is_grad_enabled():
            return self.calculate_loss([[each] for each in vectors], labels)
        # The backward pass to the vectors runs here, as MatryoshkaLoss requires; autograd continues from the vectors.
        # In float32, because a GradScaler scales later, when a float16 gradient would already have underflowed to 0.
        leaves = [widened(each.detach()).requires_grad_() for each in vectors]
        learnt = [each for each in self.contrast.parameters() if each.requires_grad]
        before = [each.grad for each in learnt]
        for each in learnt:
            each.grad = None
        loss = self.calculate_loss([[each] for each in leaves], labels, with_backward=True)
        found = [each.grad for each in (*leaves, *learnt)]
        for each, gradient in zip(learnt, before, strict=True):
            each.grad = gradient
        for source, gradient in zip((*vectors, *learnt), found, strict=True):
            if gradient is not None:  # a term of value 0 that has the gradient of the leaf
                loss = loss + ((source - source.detach()) * gradient).sum()
        return loss

    def calculate_loss(
        self, reps: list[list[Annotated[Tensor, "m d"]]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Return the loss of embeddings that are cut into mini-batches.

        Args:
            reps: For each column the mini-batches, each [m, d].
            labels: As in ``NegativesLoss.forward``.
            with_backward: Also run the backward pass into ``reps``, and return the loss detached.
        """
        loss = self.compute_loss_from_embeddings([torch.cat(column) for column in reps], labels, self._judged)
        if with_backward:
            with torch.autocast(
                loss.device.type, enabled=False
            ):  # the backward pass would otherwise multiply in low precision
                loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach() if with_backward else loss

    def _cached(self, encode: Callable[[ColumnTokens], Tensor], column: ColumnTokens) -> Tensor:
        """Embed a column in mini-batches without keeping activations."""
        return GradCache(encode, self.mini_batch_size, self.model)(column)

    def _check(self, columns: list[ColumnTokens]) -> None:
        """Raise ArgumentError for an old MatryoshkaLoss and for tokens that cannot be cut into mini-batches."""
        if type(getattr(self.model, "forward", None)).__name__ == "ForwardDecorator":
            fix = "use NegativesLoss, or a newer sentence-transformers"
            raise ArgumentError(
                "CachedNegativesLoss", "a MatryoshkaLoss that supports cached losses", "an older one", fix
            )
        for name in ("offsets", "cu_seq_lens_q"):
            if any(name in column for column in columns):
                what = "padded tokens, one row per text"
                raise ArgumentError("CachedNegativesLoss", what, f"flattened tokens ({name})", "use NegativesLoss")
