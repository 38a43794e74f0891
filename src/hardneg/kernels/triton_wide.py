"""Products that are made beforehand: cuBLAS multiplies a chunk of the rows, and the kernels sweep the products.

For vectors of many features, which a block of the kernels would not hold, and for windows of ranks, whose edges are
found in the products. Products are float16, of rows that were multiplied by a power of two
so that their largest entry is below 2 (``normed``): they stay in the range of float16, and each carries 11 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from hardneg.kernels.products import multiplied
from hardneg.kernels.triton_sides import Side

CHUNK_BYTES = 3 * 2**26
"""Of the products of a chunk of the rows."""


MULTIPLE = 32
"""Of the rows of all chunks but the last: a multiple of the rows of every block."""


class Chunk(NamedTuple):
    """Rows ``begin`` to ``end - 1``."""

    begin: int
    end: int

    def programs(self, rows: int) -> int:
        """How many of so many rows each."""
        return -(-(self.end - self.begin) // rows)


@dataclass(frozen=True)
class Wide:
    rows: Side
    columns: Side
    size: int
    """Rows of a chunk."""
    first: Tensor
    second: Tensor

    @classmethod
    def of(cls, rows: Side, columns: Side, unit: bool) -> Wide:
        """``unit``: with columns of unit norm, so that products of a row have the order of its similarities."""
        size = max(CHUNK_BYTES // (2 * max(len(columns.vectors), 1)) // MULTIPLE, 1) * MULTIPLE
        first = rows.vectors.half()
        if not unit:
            return cls(rows, columns, size, first, first if columns is rows else columns.vectors.half())
        assert columns.inverse_norms is not None
        return cls(rows, columns, size, first, (columns.vectors * columns.inverse_norms[:, None]).half())

    def chunks(self) -> Iterator[Chunk]:
        for begin in range(0, len(self.rows.vectors), max(self.size, 1)):
            yield Chunk(begin, min(begin + self.size, len(self.rows.vectors)))

    def product(self, chunk: Chunk) -> Annotated[Tensor, "r n"]:
        return self.first[chunk.begin : chunk.end] @ self.second.T

    def sample(self, number: int) -> Annotated[Tensor, "b k"]:
        """The products with about so many of the columns."""
        return self.first @ self.second[:: max(1, len(self.second) // number)].T

    def pairs_like(self, product: Annotated[Tensor, "r n"]) -> Annotated[Tensor, "r n"]:
        """For the gradients of the pairs: instead of their products, where both have 16 bits."""
        dtype = self.columns.vectors.dtype
        return product.view(dtype) if dtype.itemsize == product.itemsize else torch.empty_like(product, dtype=dtype)

    def summed(self, e: Tensor) -> Tensor:
        """sum_j e_ij c_j in float32."""
        return multiplied(e, self.columns.vectors)
