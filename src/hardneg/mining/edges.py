"""Edges of a window of ranks in rows too long to hold: histograms of one byte at a time, summed over shards.

A score, and among equal scores a row number, is an integer whose bytes are in its order. Each pass
counts one byte of those candidates whose leading bytes equal those of the edge: four passes for
float32, and up to four more if equal scores lie on both sides of an edge.

``start_edges`` begins, then for each pass ``count_bytes`` runs on every shard and ``narrowed`` on
the sum; ``finished`` returns the edges as a ring uses them. Called by ``stages.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from hardneg.core.bounds import Bound, Edge, Window
from hardneg.core.tiles import Tile

COUNT_BYTES, PASSES = 2 * 256 * 4 + 8, 8
"""Bytes of the histograms of a query in one pass over a shard, and the largest number of passes for float32."""
_COLUMNS = 4  # bytes of a row number, by which the first of equal scores is preferred


class WindowEdges(NamedTuple):
    """The state of the search for the two edges of a window, [b, 2] each.

    Attributes:
        rank: Number of candidates inside the edge.
        missing: Number of those that are in ``bin``.
        bin: Number of candidates whose leading bytes equal those found so far.
        value: Leading bytes of the score.
        row: Leading bytes of the row number.
        level: Number of passes done.
    """

    rank: Tensor
    missing: Tensor
    bin: Tensor
    value: Tensor
    row: Tensor
    level: int = 0

    def is_open(self, bytes_of_value: int) -> bool:
        """Return whether another pass is needed."""
        if self.level < bytes_of_value:
            return True
        return self.level < bytes_of_value + _COLUMNS and bool((self.missing != self.bin).any())


def is_wide(bound: Bound) -> TypeGuard[Window]:
    """Return whether the state of a bound is as long as a row of scores."""
    return isinstance(bound, Window) and bound.nearest is None


def start_edges(window: Window, earlier: Mapping[str, Any]) -> WindowEdges:
    """Return the state before the first pass.

    Args:
        window: The window of ranks.
        earlier: Bounds found before, with the number of candidates under ``"count"``.
    """
    rank = torch.cat([torch.broadcast_to(place, earlier["count"].shape) for place in window.places(earlier)], 1)
    rank = rank.long().clamp(min=0).minimum(earlier["count"])
    zero = torch.zeros_like(rank)
    return WindowEdges(rank, rank, zero, zero, zero)


def count_bytes(
    window: Window, tile: Tile, mask: Annotated[Tensor, "b m"], edges: WindowEdges | None
) -> Annotated[Tensor, "b 2 256"]:
    """Return the histogram of the next byte of the scores at each edge.

    Args:
        window: The window of ranks.
        tile: Scores of a block of the corpus [b, m].
        mask: Candidates that count.
        edges: State after the earlier passes; None for the first pass.
    """
    value = window.value(tile)
    number, size = _ordered(value), value.dtype.itemsize
    if edges is None:
        place, at = mask.nonzero().unbind(1)
        return _counted(place, (number[place, at] >> 8 * (size - 1)) + 128, len(mask))[:, None].expand(-1, 2, -1)
    column = ((1 << 8 * _COLUMNS) - 1 - tile.column)[None].expand(number.shape)
    counts = []
    for edge in range(2):
        inside = mask & (number >> 8 * max(size - edges.level, 0) == edges.value[:, edge, None])
        if edges.level > size:
            inside = inside & (column >> 8 * (_COLUMNS + size - edges.level) == edges.row[:, edge, None])
        place, at = inside.nonzero().unbind(1)
        chosen, last = (number, size - 1) if edges.level < size else (column, size + _COLUMNS - 1)
        counts.append(_counted(place, (chosen[place, at] >> 8 * (last - edges.level)) & 255, len(mask)))
    return torch.stack(counts, 1)


def _counted(place: Tensor, byte: Tensor, rows: int) -> Annotated[Tensor, "b 256"]:
    return torch.bincount(place * 256 + byte, minlength=256 * rows).view(rows, 256).to(torch.int32)


def narrowed(edges: WindowEdges, counts: Annotated[Tensor, "b 2 256"], bytes_of_value: int) -> WindowEdges:
    """Return the edges with one more byte known.

    Args:
        edges: State before the pass.
        counts: Histograms of all shards, summed.
        bytes_of_value: Bytes of a score; the passes after them find the row number.
    """
    from_top = counts.long().flip(-1)
    reached = from_top.cumsum(-1)
    place = (reached < edges.missing[..., None]).sum(-1, keepdim=True).clamp(max=255)
    inside = from_top.gather(-1, place)[..., 0]
    missing = edges.missing - (reached.gather(-1, place)[..., 0] - inside)
    byte = 255 - place[..., 0]
    edges = edges._replace(missing=missing, bin=inside, level=edges.level + 1)
    if edges.level > bytes_of_value:
        return edges._replace(row=(edges.row << 8) | byte)
    return edges._replace(value=byte - 128 if edges.level == 1 else (edges.value << 8) | byte)


def finished(window: Window, edges: WindowEdges, dtype: torch.dtype, rows: int) -> tuple[Edge | None, Edge | None]:
    """Return value and column of the last candidate inside each edge, as ``Window.finish`` does.

    Args:
        window: The window of ranks.
        edges: State after the last pass.
        dtype: Type of the scores.
        rows: Size of the corpus.
    """
    value = _as_float(edges.value, dtype)
    unknown = 8 * (
        dtype.itemsize + _COLUMNS - edges.level
    )  # bits of the row not yet found: every row with the same leading bits is inside
    column = (1 << 8 * _COLUMNS) - 1 - (edges.row << unknown)
    some = edges.rank > 0
    value, column = torch.where(some, value, torch.inf), torch.where(some, column, -1)
    before, after = ((value[:, i : i + 1], column[:, i : i + 1]) for i in range(2))
    return before if window.skipped(rows) else None, after if window.farthest(rows) else None


def _ordered(value: Tensor) -> Tensor:
    """Map floats to integers in the same order: the bits of negative ones are flipped."""
    bits = (value + 0.0).contiguous().view(torch.int32 if value.dtype.itemsize == 4 else torch.int64).long()
    return _flipped(bits, value.dtype.itemsize)


def _flipped(bits: Tensor, size: int) -> Tensor:
    return bits ^ ((bits >> (8 * size - 1)) & ((1 << (8 * size - 1)) - 1))


def _as_float(number: Tensor, dtype: torch.dtype) -> Tensor:
    bits = _flipped(number, dtype.itemsize)
    return (bits.to(torch.int32) if dtype.itemsize == 4 else bits).view(dtype)
