"""Products that are computed beforehand: cuBLAS multiplies a chunk of the rows, and the kernels sweep the products.

Used for vectors with too many features for a block of the kernels, and for windows of ranks, whose edges are found in
the products. Products are float16, of rows with norm 1 that were rounded to float16, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from hardneg.kernels.plan import write_product
from hardneg.kernels.triton.sides import SweepSide

CHUNK_BYTES = 5 * 2**26
"""Size of the products of a chunk of the rows."""
ROW_MULTIPLE = 32
"""Rows of all chunks but the last are a multiple of this, and so of the rows of every block."""
MAX_CHUNK_ROWS = 2**19
"""Largest number of rows of a chunk.

A CUDA grid has less than 2**16 blocks in its second dimension, here of 16 rows each.
"""


class RowChunk(NamedTuple):
    """The rows ``begin`` to ``end - 1``."""

    begin: int
    end: int

    def programs(self, rows: int) -> int:
        """Return the number of programs if each handles ``rows`` rows."""
        return -(-(self.end - self.begin) // rows)


@dataclass(frozen=True)
class Wide:
    """Both sides of a sweep, and memory for the products of a chunk.

    ``chunks`` iterates over the rows; for each chunk ``product`` fills the memory, a kernel reads it, and in the
    backward pass ``add_up`` multiplies the gradients of the pairs with the columns.
    """

    rows: SweepSide
    columns: SweepSide
    size: int
    """Rows of a chunk."""
    memory: Annotated[Tensor, "r n"]
    """Products of a chunk, always in the same memory, so that more of them stay in the cache."""

    @classmethod
    def of(cls, rows: SweepSide, columns: SweepSide) -> Wide:
        """Choose the size of the chunks and allocate the memory."""
        assert rows.units is not None
        b, n = len(rows.vectors), len(columns.vectors)
        size = min(max(CHUNK_BYTES // (2 * max(n, 1)) // ROW_MULTIPLE, 1) * ROW_MULTIPLE, b, MAX_CHUNK_ROWS)
        return cls(rows, columns, size, rows.units.new_empty(size, n))

    def chunks(self) -> Iterator[RowChunk]:
        """Iterate over the chunks of the rows."""
        for begin in range(0, len(self.rows.vectors), max(self.size, 1)):
            yield RowChunk(begin, min(begin + self.size, len(self.rows.vectors)))

    def product(self, chunk: RowChunk) -> Annotated[Tensor, "r n"]:
        """Compute the products of a chunk into ``memory``."""
        assert self.rows.units is not None
        assert self.columns.units is not None
        memory = self.memory[: chunk.end - chunk.begin]
        return torch.mm(self.rows.units[chunk.begin : chunk.end], self.columns.units.T, out=memory)

    def sample(self, number: int) -> Annotated[Tensor, "b k"]:
        """Compute the products with about ``number`` evenly spaced columns, as a sample of each row."""
        assert self.rows.units is not None
        assert self.columns.units is not None
        return self.rows.units @ self.columns.units[:: max(1, len(self.columns.units) // number)].T

    def pairs(self) -> Annotated[Tensor, "r n"]:
        """Return memory for the gradients of the pairs: that of the products if both have 16 bits."""
        dtype = self.columns.vectors.dtype
        same = dtype.itemsize == self.memory.itemsize
        return self.memory.view(dtype) if same else torch.empty_like(self.memory, dtype=dtype)

    def add_up(self, chunk: RowChunk, e: Annotated[Tensor, "r n"], total: Annotated[Tensor, "b d"]) -> None:
        """Write sum_j e_ij c_j of the rows of a chunk in float32."""
        write_product(total[chunk.begin : chunk.end], e[: chunk.end - chunk.begin], self.columns.vectors)
