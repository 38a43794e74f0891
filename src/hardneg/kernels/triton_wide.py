"""Vectors of many features: cuBLAS multiplies them, chunk by chunk of the rows, and the kernels sweep the products.

A block of the kernels would not hold such vectors. Products are float16, of rows that were multiplied by a power of two
so that their largest entry is below 2 (``normed``): they stay in the range of float16, and each carries 11 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hardneg.kernels.products import multiplied
from hardneg.kernels.triton_sides import Block, Side, is_wide

CHUNK_BYTES = 2**27
"""Of the products of a chunk of the rows."""


class Chunk(NamedTuple):
    """Rows ``begin`` to ``end - 1``, and how many programs sweep them."""

    begin: int
    end: int
    grid: tuple[int]


@dataclass(frozen=True)
class Wide:
    rows: Side
    columns: Side
    size: int
    """Rows of a chunk; all, where nothing is multiplied beforehand."""
    block: Block
    halves: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, rows: Side, columns: Side, block: Block) -> Wide:
        if not is_wide(rows.vectors):
            return cls(rows, columns, len(rows.vectors), block, None)
        size = max(CHUNK_BYTES // (2 * max(len(columns.vectors), 1)) // 16 * 16, 16)
        first = rows.vectors.half()
        return cls(rows, columns, size, block, (first, first if columns is rows else columns.vectors.half()))

    @property
    def given(self) -> bool:
        """Whether the kernels are given products."""
        return self.halves is not None

    def chunks(self) -> Iterator[Chunk]:
        for begin in range(0, len(self.rows.vectors), max(self.size, 1)):
            end = min(begin + self.size, len(self.rows.vectors))
            yield Chunk(begin, end, (-(-(end - begin) // self.block.rows),))

    def product(self, chunk: Chunk) -> Tensor | None:
        return None if self.halves is None else self.halves[0][chunk.begin : chunk.end] @ self.halves[1].T

    def empty(self, chunk: Chunk) -> Tensor | None:
        """For e of the pairs of a chunk."""
        vectors = self.columns.vectors
        return vectors.new_empty(chunk.end - chunk.begin, len(vectors)) if self.given else None

    def summed(self, e: Tensor) -> Tensor:
        """sum_j e_ij c_j in float32."""
        return multiplied(e, self.columns.vectors)
