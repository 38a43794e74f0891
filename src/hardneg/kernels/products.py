"""The products of a streamed loss: tiles of similarities, and the gradients of the vectors.

float32 and float64 are multiplied as they are. 16-bit inputs on a GPU use its tensor cores: similarities in float16,
after a division by the largest norm, so that none overflows and each carries 11 bits; gradients, whose range is large,
in bfloat16. Sums are float32. ``plan.SweepPlan`` owns a ``Products``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hardneg.core.pairing import Cut, Pairing, Rows, similarity

TENSOR_CORES = ("cuda",)
"""Devices on which 16-bit inputs are multiplied in 16 bits."""
HALF = (torch.float16, torch.bfloat16)
"""The 16-bit types."""


class Multiplicand(NamedTuple):
    """The vectors of the anchors or of a pool as they are multiplied."""

    vectors: Tensor
    norm: Tensor | None
    """The norm by which they were divided; None if they were not."""
    of_gradient: Tensor
    """The vectors for products with gradients: in bfloat16 for 16-bit inputs, otherwise the same."""


class Products:
    """The products of a prepared pairing.

    It keeps none of the pairing's own vectors if it uses converted ones.

    Args:
        pairing: The prepared pairing.
        half: Whether to multiply in 16 bits.
    """

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
        """Return the pairing with the converted vectors, and without the vectors of its positives."""
        positives = self.anchors.vectors.new_empty(*pairing.positives.vectors.shape[:2], 0)
        pools = zip(pairing.candidates, self.pools, strict=True)
        return pairing.changed(
            anchors=pairing.anchors.changed(vectors=self.anchors.vectors),
            positives=pairing.positives.changed(vectors=positives),
            candidates=tuple(keys.changed(vectors=pool.vectors) for keys, pool in pools),
        )

    @property
    def dtype_of_gradient(self) -> torch.dtype:
        """Type of the gradients by the similarities."""
        return torch.bfloat16 if self.half else self.dtype

    def of_tile(self, rows: Rows, cut: Cut) -> tuple[Tensor, Tensor | None]:
        """Compute the products of a tile.

        Returns:
            The products [r, c], and the number that turns them into similarities (None for 1).
        """
        product = similarity(self.anchors.vectors[rows], cut.of(self.pools[cut.pool].vectors, rows))
        return product, self.scales[cut.pool]

    def add_gradient(self, grad: Tensor, rows: Rows, cut: Cut, anchors: Tensor | None, pool: Tensor | None) -> None:
        """Add the contribution of a tile to the gradients of the anchors and of the pool.

        Args:
            grad: Gradient by the similarities of the tile, [r, c].
            rows: The anchors of the tile.
            cut: The candidates of the tile.
            anchors: Sum of the gradients of the anchors; None if not needed.
            pool: Sum of the gradients of the pool; None if not needed.
        """
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
    """Add a product of matrices to ``total``, without a temporary tensor where torch supports that.

    Args:
        total: Sum of products [m, n] in float32 or wider, changed in place.
        first: Matrix [m, k].
        second: Matrix [k, n].
    """
    if total.is_cuda and first.dtype in HALF and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(total, first, second, total.dtype, out=total)
    else:
        total.add_(multiplied(first, second))


def write_product(out: Tensor, first: Tensor, second: Tensor) -> None:
    """Write a product of matrices to ``out``, without a temporary tensor where torch supports that."""
    if out.is_cuda and first.dtype in HALF and hasattr(torch.ops.aten.mm, "dtype_out"):
        torch.ops.aten.mm.dtype_out(first, second, out.dtype, out=out)
    else:
        out.copy_(multiplied(first, second))


def add_rows(total: Tensor, rows: Rows, values: Tensor) -> None:
    """Add values to these rows, which are distinct: the result has the same bits in every run.

    Args:
        total: Tensor to change in place; all of a scalar.
        rows: The rows, as a slice or as numbers.
        values: One entry per row.
    """
    if isinstance(rows, Tensor) and total.ndim:
        total.index_add_(0, rows, values.to(total.dtype))
    else:
        (total[rows] if total.ndim else total).add_(values)


def narrows(vectors: Tensor) -> bool:
    """True if such inputs are multiplied in 16 bits."""
    return vectors.device.type in TENSOR_CORES and vectors.dtype in HALF


def _factor(vectors: Tensor, half: bool) -> Multiplicand:
    """Convert vectors for the products: with ``half``, to float16 after a division by their largest norm."""
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
    """Multiply matrices; 16-bit factors are summed and returned in float32."""
    if first.dtype not in HALF:
        dtype = torch.promote_types(first.dtype, second.dtype)  # anchors and a queue may differ
        return first.to(dtype) @ second.to(dtype)
    if first.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(first, second, out_dtype=torch.float32)
    return (first @ second).float()
