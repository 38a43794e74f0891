"""NegativesLoss for batches whose activations do not fit: GradCache (Gao et al. 2021).

The texts are embedded in small pieces without activations, the loss gives the gradient of each embedding, and the
backward pass embeds each piece again, with the same random numbers, and carries its gradient on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import get_device_states, set_device_states

from hardneg.core.errors import ArgumentError
from hardneg.core.vectors import widened
from hardneg.integrations.sentence_transformers.loss import NegativesLoss
from hardneg.negatives import Negatives, Uniform
from hardneg.state.stateful import check_count

Features = dict[str, Any]


class CachedNegativesLoss(NegativesLoss):
    """NegativesLoss in the memory of ``mini_batch_size`` texts, for a second forward pass; the options are the same.

    ``Uniform()`` is CachedMultipleNegativesRankingLoss. MatryoshkaLoss wraps it from version 6 on.
    """

    uses_gradient_cache = True
    """MatryoshkaLoss then wraps ``calculate_loss``, and not the forward pass of the model."""

    def __init__(
        self,
        model: nn.Module,
        negatives: Negatives | str = Uniform(),
        temperature: Any = 0.05,
        *,
        mini_batch_size: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(model, negatives, temperature, **options)
        check_count("CachedNegativesLoss", "mini_batch_size", mini_batch_size)
        self.mini_batch_size = mini_batch_size
        self._judged: list[Tensor] | None = None

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        columns = list(sentence_features)
        self._check(columns)
        pieces = [Piece(column, rows) for column in columns for rows in _cut(column, self.mini_batch_size)]
        self._judged = self._guided(columns)
        grad = torch.is_grad_enabled()
        states, vectors = [], []
        with torch.no_grad():
            for piece in pieces:
                states.append(_RandomState(piece) if grad else None)
                vectors.append(self.model(piece.features())["sentence_embedding"].detach().requires_grad_(grad))
        in_columns = iter(vectors)
        parts = [[next(in_columns) for _ in _cut(column, self.mini_batch_size)] for column in columns]
        if not grad:
            return self.calculate_loss(parts, labels)
        loss = self.calculate_loss(parts, labels, with_backward=True).detach().requires_grad_()
        loss.register_hook(partial(self._carry_on, pieces, states, [each.grad for each in vectors]))
        return loss

    def calculate_loss(
        self, reps: list[list[Annotated[Tensor, "m d"]]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of all pieces; ``with_backward`` leaves the gradient in each of them, and none in the loss."""
        embeddings = [torch.cat(column) for column in reps]
        loss = self.compute_loss_from_embeddings(embeddings, labels, self._judged)
        if not with_backward:
            return loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _carry_on(
        self, pieces: list[Piece], states: list[Any], gradients: list[Tensor | None], scale: Tensor
    ) -> None:
        """The second pass; ranks exchange their gradients with the last piece."""
        with torch.enable_grad():
            for number, (piece, state, gradient) in enumerate(zip(pieces, states, gradients, strict=True), 1):
                with _together(self.model, number == len(pieces)), state.again():
                    vectors = self.model(piece.features())["sentence_embedding"]
                    if gradient is not None and vectors.requires_grad:
                        ((widened(vectors) * gradient).sum() * scale).backward()

    def _guided(self, columns: list[Features]) -> list[Tensor] | None:
        if self.guide is None:
            return None
        each = [[Piece(column, rows) for rows in _cut(column, self.mini_batch_size)] for column in columns]
        return [torch.cat([self.guide([piece.features()])[0] for piece in pieces]) for pieces in each]

    def _check(self, columns: list[Features]) -> None:
        if type(getattr(self.model, "forward", None)).__name__ == "ForwardDecorator":
            fix = "use NegativesLoss, or sentence-transformers 6"
            raise ArgumentError("CachedNegativesLoss", "a MatryoshkaLoss that knows cached losses", "an older one", fix)
        for name in ("offsets", "cu_seq_lens_q"):
            if any(name in column for column in columns):
                what = "padded tokens, one row per text, that can be cut into mini-batches"
                raise ArgumentError("CachedNegativesLoss", what, f"flattened tokens ({name})", "use NegativesLoss")


class Piece(NamedTuple):
    """Some rows of a column."""

    column: Features
    rows: slice

    def features(self) -> Features:
        """New at each call, because a model writes its outputs into them."""
        number = _number_of(self.column)
        return {
            name: value[self.rows] if isinstance(value, Tensor) and value.ndim and len(value) == number else value
            for name, value in self.column.items()
        }


class _RandomState:
    """The random numbers and the precision of a forward pass, to do it again."""

    def __init__(self, piece: Piece) -> None:
        tensors = [value for value in piece.column.values() if isinstance(value, Tensor)]
        self.kind = tensors[0].device.type
        self.autocast = torch.is_autocast_enabled(self.kind), torch.get_autocast_dtype(self.kind)
        self.cpu, (self.devices, self.states) = torch.get_rng_state(), get_device_states(*tensors)

    @contextmanager
    def again(self) -> Iterator[None]:
        with torch.random.fork_rng(self.devices, device_type=self.kind if self.kind != "cpu" else "cuda"):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states)
            with torch.autocast(self.kind, enabled=self.autocast[0], dtype=self.autocast[1]):
                yield


def _number_of(column: Features) -> int:
    known = [column[name] for name in ("input_ids", "attention_mask") if isinstance(column.get(name), Tensor)]
    tensors = known or [value for value in column.values() if isinstance(value, Tensor) and value.ndim]
    return len(tensors[0])


def _cut(column: Features, size: int) -> list[slice]:
    number = _number_of(column)
    return [slice(low, min(low + size, number)) for low in range(0, number, size)]


def _together(model: nn.Module, last: bool) -> Any:
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()
