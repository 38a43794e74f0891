"""NegativesLoss for batches whose activations do not fit in memory: GradCache (Gao et al. 2021)."""

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

Features = dict[str, Any]


class CachedNegativesLoss(NegativesLoss):
    """NegativesLoss in the memory of ``mini_batch_size`` texts, for a second forward pass.

    The other arguments are those of NegativesLoss. ``Uniform()`` is CachedMultipleNegativesRankingLoss. Where
    MatryoshkaLoss is too old to wrap it, it raises.
    """

    uses_gradient_cache = True
    """MatryoshkaLoss then wraps ``calculate_loss``, and not the forward pass of the model."""

    def __init__(self, model: nn.Module, *arguments: Any, mini_batch_size: int = 32, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        self.mini_batch_size = check_count("CachedNegativesLoss", "mini_batch_size", mini_batch_size)
        self._judged: list[Tensor] | None = None

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        columns = list(sentence_features)
        self._check(columns)
        if self.guide is not None:
            guide = self.guide
            with torch.no_grad():
                self._judged = [self._cached(lambda column: guide([column])[0], column) for column in columns]
        vectors = [self._cached(lambda column: self.model(column)["sentence_embedding"], each) for each in columns]
        if not torch.is_grad_enabled():
            return self.calculate_loss([[each] for each in vectors], labels)
        # The loss is carried back to the vectors here, as MatryoshkaLoss needs it, and from there by autograd.
        # In float32: a GradScaler scales only afterwards, and a gradient of float16 would be 0 by then.
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
            if gradient is not None:  # 0, with the gradient of the leaf
                loss = loss + ((source - source.detach()) * gradient).sum()
        return loss

    def calculate_loss(
        self, reps: list[list[Annotated[Tensor, "m d"]]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of all embeddings; ``with_backward`` leaves the gradient in them, and none in the loss."""
        loss = self.compute_loss_from_embeddings([torch.cat(column) for column in reps], labels, self._judged)
        if with_backward:
            with torch.autocast(loss.device.type, enabled=False):  # the products of the backward pass, too
                loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach() if with_backward else loss

    def _cached(self, encode: Callable[[Features], Tensor], column: Features) -> Tensor:
        return GradCache(encode, self.mini_batch_size, self.model)(column)

    def _check(self, columns: list[Features]) -> None:
        if type(getattr(self.model, "forward", None)).__name__ == "ForwardDecorator":
            fix = "use NegativesLoss, or a newer sentence-transformers"
            raise ArgumentError("CachedNegativesLoss", "a MatryoshkaLoss that knows cached losses", "an older one", fix)
        for name in ("offsets", "cu_seq_lens_q"):
            if any(name in column for column in columns):
                what = "padded tokens, one row per text, that can be cut into mini-batches"
                raise ArgumentError("CachedNegativesLoss", what, f"flattened tokens ({name})", "use NegativesLoss")
