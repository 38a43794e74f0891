"""The two sides of a sweep: limits of the inputs, vectors and tags in an order that needs few masks, shapes of blocks.

``why_unsupported`` returns why inputs are not supported, and ``supported_sides`` raises for them. ``sides_of`` prepares
rows and columns as ``SweepSide``; ``block_of`` and ``switches`` give the shapes and constants of a launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.kernels.triton.blocks import normed
from hardneg.kernels.triton.language import installed, interpreted

LARGEST_DIM = 256
"""Largest number of features that a block holds as a whole."""
WIDEST_DIM = 2048
"""Largest number of features in 16 bits, whose products are computed before the sweep: see ``wide``."""
NOT_WIDE = f"more than {LARGEST_DIM} features need normalize=True, no band and no positives by label"
SORTED_FROM = 8192
"""Number of candidates from which rows are sorted by label or id, so that most blocks need no mask."""

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

PerCandidate = Annotated[Tensor, "n"]


class HostTemperature(NamedTuple):
    """A temperature whose value was read on the host once, and its tensor if that gets a gradient."""

    value: float
    learned: Tensor | None = None

    @classmethod
    def of(cls, temperature: float | Tensor | HostTemperature) -> HostTemperature:
        """Read the value of a temperature."""
        if isinstance(temperature, HostTemperature):
            return temperature
        if not isinstance(temperature, Tensor):
            return cls(float(temperature))
        return cls(float(temperature.detach()), temperature if temperature.requires_grad else None)


def why_unsupported(
    anchors: Tensor, candidates: Tensor | None = None, temperature: float | Tensor = 1.0, beta: float = 0.0
) -> str | None:
    """Return why the kernels do not support these vectors; None if they do.

    Args:
        anchors: Vectors [b, d].
        candidates: Vectors [n, d]; None for the anchors themselves.
        temperature: The temperature, which must be one number.
        beta: The tilt.
    """
    others = anchors if candidates is None else candidates
    if not installed:
        return "triton 3.4 or newer is not installed"
    if not anchors.is_cuda:
        return f"the vectors are on {anchors.device.type}, and Triton needs a GPU"
    return why_unsupported_inputs(anchors, others, temperature, beta)


def why_unsupported_inputs(anchors: Tensor, candidates: Tensor, temperature: float | Tensor, beta: float) -> str | None:
    """Return why the kernels do not support these inputs, on a GPU or in the interpreter; None if they do."""
    if anchors.ndim != 2 or candidates.ndim != 2 or anchors.shape[1] != candidates.shape[1]:
        return f"the shapes are {tuple(anchors.shape)} and {tuple(candidates.shape)}, not [b, d] and [n, d]"
    if anchors.dtype not in SUPPORTED_DTYPES or candidates.dtype not in SUPPORTED_DTYPES:
        return f"the vectors are {anchors.dtype} and {candidates.dtype}, not bfloat16, float16 or float32"
    if anchors.device != candidates.device:
        return f"the vectors are on {anchors.device} and {candidates.device}"
    most = LARGEST_DIM if torch.float32 in (anchors.dtype, candidates.dtype) else WIDEST_DIM
    if not 1 <= anchors.shape[1] <= most:
        return f"the vectors have {anchors.shape[1]} features, more than {most}"
    if max(anchors.numel(), candidates.numel()) >= 2**31:
        return "one side has 2**31 elements or more"
    if isinstance(temperature, Tensor) and temperature.numel() != 1:
        return f"there are {temperature.numel()} temperatures instead of one for all anchors"
    if beta < 0:
        return f"the tilt beta={beta} is negative"
    return None


def supported_sides(
    who: str,
    anchors: Tensor,
    candidates: Tensor | None,
    temperature: float | Tensor | HostTemperature,
    beta: float = 0.0,
    wide: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Convert both sides to one type that holds both.

    Args:
        who: Name of the caller, for errors.
        anchors: Vectors [b, d].
        candidates: Vectors [n, d]; None for the anchors themselves.
        temperature: The temperature.
        beta: The tilt.
        wide: Whether more than LARGEST_DIM features are supported here.

    Raises:
        ArgumentError: If the kernels do not support the inputs, with the reason.
    """
    others = anchors if candidates is None else candidates
    given = 1.0 if isinstance(temperature, HostTemperature) else temperature
    reason = (why_unsupported_inputs if interpreted else why_unsupported)(anchors, others, given, beta)
    if reason is None and is_wide(anchors) and not wide:
        reason = NOT_WIDE
    if reason is not None:
        raise ArgumentError(who, "inputs that the Triton kernels support", reason, "use another implementation")
    both = torch.promote_types(anchors.dtype, others.dtype)
    return anchors.to(both), None if candidates is None else candidates.to(both)


Both = tuple[Tensor, Tensor]
"""A tag of the anchors and of the candidates."""


@dataclass(frozen=True, eq=False)
class SideTags:
    """Ids and labels of both sides."""

    ids: Both | None
    labels: Both | None
    few: bool
    """True if there are too few candidates for sorting to pay off: every block is masked."""

    @classmethod
    def of(
        cls,
        anchors: Tensor,
        candidates: Tensor | None,
        anchor_ids: Tensor | None,
        candidate_ids: Tensor | None,
        anchor_labels: Tensor | None,
        candidate_labels: Tensor | None,
    ) -> SideTags:
        """Collect the tags that both sides have.

        A tag that only one side has cannot exclude a pair and is dropped. In self-similarity the candidates have the
        tags of the anchors, and those of the candidates are ignored.
        """
        if candidates is None:
            candidate_ids, candidate_labels = anchor_ids, anchor_labels
        ids = None if anchor_ids is None or candidate_ids is None else (anchor_ids, candidate_ids)
        labels = None if anchor_labels is None or candidate_labels is None else (anchor_labels, candidate_labels)
        few = bool(ids or labels) and (anchors if candidates is None else candidates).shape[0] < SORTED_FROM
        return cls(ids, labels, few)


class SweepSide(NamedTuple):
    """Rows or columns of a sweep; with an order, sorted by label or id, so that few blocks need the mask."""

    vectors: Tensor
    inverse_norms: Tensor | None
    ids: Tensor | None
    labels: Tensor | None
    order: Tensor | None = None
    begin: Tensor | None = None
    """Columns [begin, end) with the label of each row, or with its id where labels do not matter."""
    end: Tensor | None = None
    split: Tensor | None = None
    """True if an id has two labels, and so also columns elsewhere."""
    slopes: Tensor | None = None
    """With norms: factor of the gradients, the inverse norms of the rows as they were given."""
    units: Tensor | None = None
    """The rows of norm 1 in float16, if products are computed beforehand."""


def sides_of(
    anchors: Tensor, candidates: Tensor | None, tags: SideTags, normalize: bool, masked: bool, units: bool = False
) -> tuple[SweepSide, SweepSide]:
    """Prepare rows and columns; they are the same if the candidates are the anchors.

    Args:
        anchors: Vectors [b, d].
        candidates: Vectors [n, d]; None for the anchors themselves.
        tags: Ids and labels of both sides.
        normalize: Whether to divide the vectors by their norms.
        masked: Whether every block is masked; otherwise both sides are sorted by label or id.
        units: Whether to compute float16 rows of norm 1, for products that are computed beforehand.
    """
    ids, labels, split = tags.ids, tags.labels, None
    sort = not masked and bool(ids or labels)
    if sort and ids and labels:
        ids, split = _numbered_ids(ids, labels)
    both = [anchors] if candidates is None else [anchors, candidates]
    parts = [(vectors, ids and ids[i], labels and labels[i], normalize, units) for i, vectors in enumerate(both)]
    if sort:
        found = [_sorted_side(*part) for part in parts]
        sides = [_facing(*mine, others, split) for mine, (_, others) in zip(found, found[::-1], strict=True)]
    else:
        sides = [_side(*part) for part in parts]
    return sides[0], sides[-1]


def sides_from(saved: tuple[Any, ...]) -> tuple[SweepSide, SweepSide, tuple[Any, ...]]:
    """Split the tensors saved by a forward pass into rows, columns and the rest."""
    width = len(SweepSide._fields)
    return SweepSide(*saved[:width]), SweepSide(*saved[width : 2 * width]), saved[2 * width :]


def _side(
    vectors: Tensor,
    ids: Tensor | None,
    labels: Tensor | None,
    normalize: bool,
    units: bool,
    order: Tensor | None = None,
) -> SweepSide:
    """Prepare one side: contiguous vectors in their order, with norms and unit rows if needed."""
    vectors = vectors.detach()
    if not normalize:
        return SweepSide(vectors.contiguous() if order is None else vectors[order], None, ids, labels, order)
    n, d = vectors.shape
    inverse, slopes = vectors.new_empty(2, n, dtype=torch.float32).unbind()
    scaled = vectors.new_empty(n, d)
    of_norm_1 = vectors.new_empty(n, d, dtype=torch.float16) if units else None
    if n:
        normed[(-(-n // 16),)](
            vectors.contiguous(), order, scaled, of_norm_1, inverse, slopes, n, d,
            BM=16, BD=padded(d), SORTED=order is not None, UNIT=units, num_warps=4,
        )  # fmt: skip
    return SweepSide(scaled, inverse, ids, labels, order, slopes=slopes, units=of_norm_1)


def _sorted_side(
    vectors: Tensor, ids: Tensor | None, labels: Tensor | None, normalize: bool, units: bool
) -> tuple[SweepSide, Tensor]:
    """Prepare one side sorted by label, or by id without labels; also return the sorted keys."""
    if labels is None:
        assert ids is not None
        ids, order = ids.sort(stable=True)
        return _side(vectors, ids, None, normalize, units, order), ids
    labels, order = labels.sort(stable=True)
    return _side(vectors, None if ids is None else ids[order], labels, normalize, units, order), labels


def _facing(rows: SweepSide, keys: Tensor, others: Tensor, split: Tensor | None) -> SweepSide:
    """Add to each row the range of columns with its key."""
    begin, end = (torch.searchsorted(others, keys, right=right, out_int32=True) for right in (False, True))
    return rows._replace(begin=begin, end=end, split=split)


def _numbered_ids(ids: Both, labels: Both) -> tuple[Both, Tensor]:
    """Number the ids in 32 bits, -1 for none, and tell whether one id has two labels.

    If so, the columns of a row's id are not all among those of its label.
    """
    itself = ids[1] is ids[0] and labels[1] is labels[0]
    ordered, order = (ids[0] if itself else torch.cat(ids)).sort(stable=True)
    another = ordered[1:] != ordered[:-1]
    named = (labels[0] if itself else torch.cat(labels))[order]
    split = (~another & (named[1:] != named[:-1]) & (ordered[1:] >= 0)).any()
    numbers = torch.nn.functional.pad(another.cumsum(0, dtype=torch.int32), (1, 0))
    numbers = torch.where(ordered < 0, -1, numbers)
    numbers = torch.empty_like(numbers).index_copy_(0, order, numbers)
    return (numbers[: len(ids[0])], numbers[-len(ids[1]) :]), split


class BlockShape(NamedTuple):
    """Rows and columns of a block, and the warps, stages and registers of a launch."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None


def block_of(vectors: Tensor, num_rows: int, backward: bool, given: bool = False) -> BlockShape:
    """Return the shapes that were fastest on an H200.

    They are the same for the same input, so that the bits are too.

    Args:
        vectors: The rows of a sweep, for their type and number of features.
        num_rows: Number of rows.
        backward: Whether the block is for the backward pass.
        given: Whether the products are computed beforehand.
    """
    d = vectors.shape[1]
    if given:
        return BlockShape(16, 256, 4, 2) if backward else BlockShape(4, 512, 4, 4)
    if vectors.dtype == torch.float32:
        return BlockShape(64, 32, 4, 2)
    if num_rows < SORTED_FROM:
        return BlockShape(64, 64, 4, 3)
    if not backward:
        return BlockShape(128, 64, 4, 2) if d <= 128 else BlockShape(128, 64, 8, 3, 128)
    return BlockShape(64, 128, 4, 3 if d <= 64 else 2) if d <= 128 else BlockShape(128, 64, 8, 3)


def is_wide(vectors: Tensor) -> bool:
    """True if a block cannot hold all features."""
    return vectors.shape[1] > LARGEST_DIM


def padded(d: int) -> int:
    """Return the smallest power of two, at least 16, that is not below d."""
    return max(16, 1 << (d - 1).bit_length())


def switches(
    rows: SweepSide, columns: SweepSide, itself: bool, block: BlockShape, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the constants of a launch.

    Args:
        rows: The rows of the sweep.
        columns: The columns of the sweep.
        itself: Whether the columns are the rows.
        block: Shape of the blocks.
        without: Names of constants that the kernel does not have.
    """
    n, d = columns.vectors.shape[0], rows.vectors.shape[1]
    half = rows.vectors.dtype != torch.float32
    every = {
        "BM": block.rows, "BN": block.columns, "BD": padded(d),
        "FULL_D": d == padded(d), "RAGGED": n % block.columns != 0, "SORTED": rows.order is not None,
        "NORMS": rows.inverse_norms is not None, "SELF": itself,
        "IDS": rows.ids is not None and columns.ids is not None,
        "LABELS": rows.labels is not None and columns.labels is not None,
        "PRECISION": "tf32" if half or torch.get_float32_matmul_precision() != "highest" else "ieee",
        "num_warps": block.warps, "num_stages": block.stages, "maxnreg": block.registers,
    }  # fmt: skip
    return {name: value for name, value in every.items() if name not in without} if without else every
