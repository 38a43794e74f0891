"""The products of a streamed loss: tiles of similarities, and what their gradients give the vectors.

float32 and float64 stay what they are. 16-bit inputs on a GPU use its tensor cores: similarities in float16, after a
division by the largest norm, so that none overflows and each carries 11 bits; gradients, whose range is large, in
bfloat16. Sums are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hardneg.core.pairing import Cut, Pairing, Rows, similarity

TENSOR_CORES = ("cuda",)
"""Devices on which 16-bit inputs are multiplied in 16 bits."""
HALF = (torch.float16, torch.bfloat16)


class Multiplicand(NamedTuple):
    """The vectors of the anchors or of a pool as they are multiplied."""

    vectors: Tensor
    norm: Tensor | None
    """By which they were divided."""
    of_gradient: Tensor


class Products:
    """The products of a prepared pairing. It holds nothing of the pairing's own vectors if it uses others."""

    def __init__(self, pairing: Pairing, half: bool = False) -> None:
        self.half = half
        own = pairing.anchors.vectors
        self.anchors = _factor(own.detach(), half)
        self.pools = [
            self.anchors if keys.vectors is own else _factor(keys.vectors.detach(), half) for keys in pairing.candidates
        ]
        self.scales = [_product_of(self.anchors.norm, pool.norm) for pool in self.pools]
        self.dtype = pairing.anchors.vectors.dtype

    def of_pairing(self, pairing: Pairing) -> Pairing:
        """The pairing with the vectors that are multiplied, and with none of its positives."""
        positives = self.anchors.vectors.new_empty(*pairing.positives.vectors.shape[:2], 0)
        pools = zip(pairing.candidates, self.pools, strict=True)
        return pairing.changed(
            anchors=pairing.anchors.changed(vectors=self.anchors.vectors),
            positives=pairing.positives.changed(vectors=positives),
            candidates=tuple(keys.changed(vectors=pool.vectors) for keys, pool in pools),
        )

    @property
    def dtype_of_gradient(self) -> torch.dtype:
        return torch.bfloat16 if self.half else self.dtype

    def of_tile(self, rows: Rows, cut: Cut) -> tuple[Tensor, Tensor | None]:
        """The products of a tile, and the number that makes them similarities."""
        product = similarity(self.anchors.vectors[rows], cut.of(self.pools[cut.pool].vectors, rows))
        return product, self.scales[cut.pool]

    def add_gradient(self, grad: Tensor, rows: Rows, cut: Cut, anchors: Tensor | None, pool: Tensor | None) -> None:
        """Adds what the gradient by the similarities of a tile gives to the sums of the anchors and of the pool."""
        candidates = cut.of(self.pools[cut.pool].of_gradient, rows)
        if anchors is not None:
            if candidates.ndim == 2:
                product = multiplied(grad, candidates)
            else:
                product = torch.bmm(grad[:, None].to(candidates.dtype), candidates)[:, 0]
            add_rows(anchors, rows, product)
        if pool is None:
            return
        own = self.anchors.of_gradient[rows]
        if pool.ndim == 2:
            add_product(pool[cut.low : cut.high], grad.T, own)
        else:
            add_rows(pool[:, cut.low : cut.high], rows, grad[:, :, None] * own[:, None])


def add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Adds a product, where torch can without a tensor for it."""
    if total.is_cuda and first.dtype in HALF and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(total, first, second, total.dtype, out=total)
    else:
        total.add_(multiplied(first, second))


def write_product(out: Tensor, first: Tensor, second: Tensor) -> None:
    """The product of ``multiplied``, where torch can without a tensor for it."""
    if out.is_cuda and first.dtype in HALF and hasattr(torch.ops.aten.mm, "dtype_out"):
        torch.ops.aten.mm.dtype_out(first, second, out.dtype, out=out)
    else:
        out.copy_(multiplied(first, second))


def add_rows(total: Tensor, rows: Rows, values: Tensor) -> None:
    """Adds values to these rows, each of which is there once: to the same bits in every run."""
    if isinstance(rows, Tensor) and total.ndim:
        total.index_add_(0, rows, values.to(total.dtype))
    else:
        (total[rows] if total.ndim else total).add_(values)


def narrows(vectors: Tensor) -> bool:
    """Whether inputs like these are multiplied in 16 bits."""
    return vectors.device.type in TENSOR_CORES and vectors.dtype in HALF


def _factor(vectors: Tensor, half: bool) -> Multiplicand:
    if not half or vectors.ndim == 3:
        return Multiplicand(vectors, None, vectors)
    norms = vectors.norm(dim=-1)
    largest = torch.where(norms.isfinite() & (norms > 0), norms, 0.0).amax() if len(norms) else norms.new_zeros(())
    largest = torch.where(largest > 0, largest, 1.0)
    return Multiplicand((vectors / largest).half(), largest, vectors.bfloat16())


def _product_of(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return first if second is None else second
    return first * second


def multiplied(first: Tensor, second: Tensor) -> Tensor:
    """The product, summed and kept in float32 where the factors have 16 bits."""
    if first.dtype not in HALF:
        dtype = torch.promote_types(first.dtype, second.dtype)  # anchors and a queue may differ
        return first.to(dtype) @ second.to(dtype)
    if first.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(first, second, out_dtype=torch.float32)
    return (first @ second).float()
