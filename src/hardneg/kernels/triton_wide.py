"""Products that are made beforehand: cuBLAS multiplies a chunk of the rows, and the kernels sweep the products.

For vectors of many features, which a block of the kernels would not hold, and for windows of ranks, whose edges are
found in the products. Products are float16, of rows that were multiplied by a power of two
so that their largest entry is below 2 (``normed``): they stay in the range of float16, and each carries 11 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hardneg.kernels.products import multiplied
from hardneg.kernels.triton_sides import Side

CHUNK_BYTES = 2**27
"""Of the products of a chunk of the rows."""


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
    """Rows of a chunk; all, where nothing is multiplied beforehand."""
    halves: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, rows: Side, columns: Side, given: bool) -> Wide:
        if not given:
            return cls(rows, columns, len(rows.vectors), None)
        size = max(CHUNK_BYTES // (2 * max(len(columns.vectors), 1)) // 16 * 16, 16)
        first = rows.vectors.half()
        return cls(rows, columns, size, (first, first if columns is rows else columns.vectors.half()))

    def chunks(self) -> Iterator[Chunk]:
        for begin in range(0, len(self.rows.vectors), max(self.size, 1)):
            yield Chunk(begin, min(begin + self.size, len(self.rows.vectors)))

    def product(self, chunk: Chunk) -> Tensor | None:
        return None if self.halves is None else self.halves[0][chunk.begin : chunk.end] @ self.halves[1].T

    def summed(self, e: Tensor) -> Tensor:
        """sum_j e_ij c_j in float32."""
        return multiplied(e, self.columns.vectors)
