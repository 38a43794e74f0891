"""Row statistics of the closed family in Triton: log E_q[e^s] without the pairs, for d <= 256 and one temperature.

    s = similarity / temperature,   log w = beta s inside the row's band and outside the masks by id and label, else -inf

The kernels and their derivation are in ``triton_rows``. What they cannot do ``supports`` names; nothing falls back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hardneg.core.errors import ArgumentError
from hardneg.kernels import triton_rows
from hardneg.kernels.triton_language import installed, interpreted

LOG2_E = math.log2(math.e)
LARGEST_DIM = 256
FIXED_SHIFT_BITS = 118.0
"""Terms of a sum with one shift for all rows may be that many bits below 1 (float32 has 126)."""
SORTED_FROM = 8192
"""Candidates from which on rows are sorted by id, so that blocks without an equal pair skip the mask."""

PerAnchor = Annotated[Tensor, "b"]
PerCandidate = Annotated[Tensor, "n"]


class RowStatistics(NamedTuple):
    """What an objective needs of each anchor's negatives."""

    log_mean: PerAnchor
    """log E_q[e^s]; -inf without a negative."""
    log_mass: PerAnchor
    """LSE(log w), the log of the sum of the weights."""
    support: PerAnchor
    """The number of candidates that q allows, int32."""


def supports(
    anchors: Tensor, candidates: Tensor | None = None, temperature: float | Tensor = 1.0, beta: float = 0.0
) -> str | None:
    """Why the kernels cannot serve these vectors; None if they can."""
    others = anchors if candidates is None else candidates
    if not installed:
        return "triton is not installed"
    if not anchors.is_cuda:
        return f"the vectors are on {anchors.device.type}, and Triton needs a GPU"
    return _cannot(anchors, others, temperature, beta)


def _cannot(anchors: Tensor, candidates: Tensor, temperature: float | Tensor, beta: float) -> str | None:
    if anchors.ndim != 2 or candidates.ndim != 2 or anchors.shape[1] != candidates.shape[1]:
        return f"the shapes are {tuple(anchors.shape)} and {tuple(candidates.shape)}, not [b, d] and [n, d]"
    if anchors.dtype != candidates.dtype or anchors.dtype not in _element_bytes:
        return f"the vectors are {anchors.dtype} and {candidates.dtype}, not both bfloat16, float16 or float32"
    if anchors.device != candidates.device:
        return f"the vectors are on {anchors.device} and {candidates.device}"
    if not 1 <= anchors.shape[1] <= LARGEST_DIM:
        return f"the vectors have {anchors.shape[1]} features, more than {LARGEST_DIM}"
    if max(anchors.numel(), candidates.numel()) >= 2**31:
        return "one side has 2**31 elements or more"
    if isinstance(temperature, Tensor) and temperature.numel() != 1:
        return f"there are {temperature.numel()} temperatures, and not one for all anchors"
    if beta < 0:
        return f"the tilt beta={beta} is negative"
    return None


_element_bytes = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4}


def row_statistics(
    anchors: Annotated[Tensor, "b d"],
    candidates: Annotated[Tensor, "n d"] | None = None,
    *,
    temperature: float | Tensor,
    beta: float = 0.0,
    detach: bool = False,
    anchor_ids: PerAnchor | None = None,
    candidate_ids: PerCandidate | None = None,
    anchor_labels: PerAnchor | None = None,
    candidate_labels: PerCandidate | None = None,
    low: float | PerAnchor | None = None,
    high: float | PerAnchor | None = None,
    normalize: bool = False,
    unit: bool = True,
) -> RowStatistics:
    """log E_q[e^s] and the log-mass of each anchor over the candidates, with gradients and without a [b, n] tensor.

    candidates: None for the anchors themselves (two views in one tensor); then an anchor never meets itself, and the
        tags of the candidates are those of the anchors.
    temperature: a number, or a tensor with one element, which gets a gradient; its value is read on the host.
    beta, detach: the tilt log w = beta s, and whether its gradient is cut.
    anchor_ids, candidate_ids: equal ids are no negatives; a negative id is nobody's.
    anchor_labels, candidate_labels: equal labels are no negatives (OtherLabel).
    low, high: the band of each anchor in plain similarity, ends included.
    normalize: divides vectors by their norms, inside the products.
    unit: the vectors have unit norm; without it (and without ``normalize``) every row keeps a running maximum.
    """
    others = anchors if candidates is None else candidates
    if reason := _unusable(anchors, others, temperature, beta):
        raise ArgumentError("row_statistics", "vectors that the Triton kernels can serve", reason, "use the dense path")
    value = float(temperature.detach()) if isinstance(temperature, Tensor) else float(temperature)
    tags = Tags(
        *_ids(anchor_ids, candidate_ids, anchors, candidates),
        anchor_labels,
        anchor_labels if candidates is None else candidate_labels,
        _bound(low, anchors, -math.inf) if low is not None or high is not None else None,
        _bound(high, anchors, math.inf) if low is not None or high is not None else None,
    )
    bits = (1.0 + beta) * 2.0 * LOG2_E / value
    fixed = (unit or normalize) and bits < FIXED_SHIFT_BITS
    plan = Plan(value, float(beta), detach, normalize, fixed, masked=_masks_every_block(tags, len(others)))
    given = temperature if isinstance(temperature, Tensor) and temperature.requires_grad else None
    return RowStatistics(*_RowStatistics.apply(anchors, candidates, given, tags, plan))


def _unusable(anchors: Tensor, candidates: Tensor, temperature: float | Tensor, beta: float) -> str | None:
    if not interpreted:
        return supports(anchors, candidates, temperature, beta)
    return _cannot(anchors, candidates, temperature, beta)


def _masks_every_block(tags: Tags, num_candidates: int) -> bool:
    if tags.anchor_labels is not None or tags.low is not None:
        return True
    return tags.anchor_ids is not None and num_candidates < SORTED_FROM


@dataclass(frozen=True, eq=False)
class Tags:
    """What is known of the rows besides their vectors."""

    anchor_ids: Tensor | None
    candidate_ids: Tensor | None
    anchor_labels: Tensor | None
    candidate_labels: Tensor | None
    low: Tensor | None
    high: Tensor | None


@dataclass(frozen=True)
class Plan:
    """The numbers and switches of one call."""

    temperature: float
    beta: float
    detach: bool
    normalize: bool
    fixed: bool
    """One shift for all rows, and no running maximum."""
    masked: bool
    """Masks in every block; otherwise rows are sorted by id, and a block compares ids only where ranges overlap."""

    @property
    def scale(self) -> float:
        return LOG2_E / self.temperature

    @property
    def tilt(self) -> int:
        special = {0.0: triton_rows.UNIFORM, 1.0: triton_rows.SQUARE}
        return special.get(self.beta, triton_rows.GENERAL)

    @property
    def single(self) -> bool:
        """Whether the gradient needs the exponentials of one sum only."""
        return self.beta == 0.0 or self.detach


class Side(NamedTuple):
    """Rows or columns of a sweep, sorted by id where that lets blocks skip the mask."""

    vectors: Tensor
    inverse_norms: Tensor | None
    ids: Tensor | None
    labels: Tensor | None
    order: Tensor | None
    begin: Tensor | None
    """Of each row the columns [begin, end) that masks concern, where both sides are sorted."""
    end: Tensor | None

    def sorted(self, values: Tensor | None) -> Tensor | None:
        return values if values is None or self.order is None else values[self.order]

    def unsorted(self, values: Tensor) -> Tensor:
        return values if self.order is None else torch.empty_like(values).index_copy_(0, self.order, values)


class _RowStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchors: Tensor, candidates: Tensor | None, temperature: Tensor | None, tags: Tags, plan: Plan
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.itself, ctx.like_temperature = plan, candidates is None, temperature
        rows = _side(anchors, tags.anchor_ids, tags.anchor_labels, plan)
        columns = rows
        if candidates is not None:
            columns = _side(candidates, tags.candidate_ids, tags.candidate_labels, plan)
        rows, columns = _facing(rows, columns), _facing(columns, rows)
        band = rows.sorted(tags.low), rows.sorted(tags.high)
        found, sums = _sweep(rows, columns, band, plan)
        ctx.save_for_backward(*rows, *columns, *band, *sums)
        outputs = tuple(rows.unsorted(values) for values in found)
        ctx.mark_non_differentiable(outputs[2])
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g_mean: Tensor, g_mass: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        plan, saved = ctx.plan, ctx.saved_tensors
        rows, columns, band, sums = Side(*saved[:7]), Side(*saved[7:14]), saved[14:16], saved[16:]
        upstream = rows.sorted(g_mean), rows.sorted(g_mass)
        coefficients, unit = _coefficients(*upstream, *sums, plan, rows.vectors.dtype)
        grad_anchors = grad_candidates = grad_temperature = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            of_columns = coefficients if ctx.itself else None
            grad_anchors, product = _gradient(
                rows, columns, coefficients, of_columns, band, unit, plan, product_too=ctx.needs_input_grad[2]
            )
            grad_anchors = rows.unsorted(grad_anchors)
            if ctx.needs_input_grad[2]:
                # ds / d temperature = -s / temperature. The sum over pairs of gradient times s is that of the rows'
                # products; in self-similarity every pair is there in both roles.
                total = -product.sum() / (plan.temperature * (2.0 if ctx.itself else 1.0))
                grad_temperature = total.to(ctx.like_temperature.dtype).reshape(ctx.like_temperature.shape)
        if not ctx.itself and ctx.needs_input_grad[1]:
            grad_candidates, _ = _gradient(columns, rows, None, coefficients, band, unit, plan)
            grad_candidates = columns.unsorted(grad_candidates)
        return grad_anchors, grad_candidates, grad_temperature, None, None


def _side(vectors: Tensor, ids: Tensor | None, labels: Tensor | None, plan: Plan) -> Side:
    order = ids.argsort(stable=True) if ids is not None and not plan.masked else None
    vectors = vectors.detach()
    vectors = vectors.contiguous() if order is None else vectors[order]
    norms = None
    if plan.normalize:
        norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32).clamp(min=1e-12).reciprocal()
    if order is None:
        return Side(vectors, norms, ids, labels, None, None, None)
    return Side(vectors, norms, None if ids is None else ids[order], None if labels is None else labels[order], order, None, None)


def _facing(rows: Side, columns: Side) -> Side:
    """The rows, with the columns of each that have its id."""
    if rows.order is None:
        return rows
    begin, end = (torch.searchsorted(columns.ids, rows.ids, right=right, out_int32=True) for right in (False, True))
    return rows._replace(begin=begin, end=end)


def _sweep(rows: Side, columns: Side, band: tuple[Tensor | None, Tensor | None], plan: Plan) -> tuple[Any, Any]:
    b, n, d = len(rows.vectors), len(columns.vectors), rows.vectors.shape[1]
    floats = rows.vectors.new_empty(5, b, dtype=torch.float32)
    log_mean, log_mass, sum0, sum1, shift = floats
    support = rows.vectors.new_empty(b, dtype=torch.int32)
    block = _block(rows.vectors, b, backward=False)
    if b:
        triton_rows.forward[(-(-b // block.rows),)](
            rows.vectors, columns.vectors, rows.inverse_norms, columns.inverse_norms,
            rows.ids, columns.ids, rows.labels, columns.labels, *band,
            rows.begin, rows.end, log_mean, log_mass, support, sum0, sum1, shift,
            b, n, d, plan.scale, plan.beta, plan.scale if plan.fixed else 0.0,
            TILT=plan.tilt, BAND=band[0] is not None, **_switches(rows, columns, plan, block),
        )  # fmt: skip
    return (log_mean + _infinite(rows, columns), log_mass, support), (support, sum0, sum1, shift)


def _coefficients(
    g_mean: Tensor, g_mass: Tensor, support: Tensor, sum0: Tensor, sum1: Tensor, shift: Tensor, plan: Plan, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """A, C and the shifts of the rows, for upstream gradients of at most 1; and what the gradient is to be multiplied by.

    The products of a float16 gradient must neither overflow nor vanish: its largest entry is made about 2^14.
    """
    largest = torch.maximum(g_mean.abs().amax(), g_mass.abs().amax())
    largest = torch.where(largest > 0, largest, 1.0)
    unit = largest * (2.0 + 4.0 * plan.beta) / 2.0**14 if dtype == torch.float16 else largest
    some = support > 0
    power = 1.0 if plan.detach else 1.0 + plan.beta
    a = torch.where(some, power * g_mean / unit / sum1, 0.0)
    c = torch.where(some, plan.beta * (g_mass - g_mean) / unit / sum0, 0.0)
    return (a, c, shift * (1.0 + plan.beta) if plan.single else shift), unit / plan.temperature


def _gradient(
    rows: Side,
    columns: Side,
    of_rows: tuple[Tensor, Tensor, Tensor] | None,
    of_columns: tuple[Tensor, Tensor, Tensor] | None,
    band: tuple[Tensor | None, Tensor | None],
    unit: Tensor,
    plan: Plan,
    product_too: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gradient of the rows, and of each row its product with it; whose coefficients are given are the anchors."""
    b, n, d = len(rows.vectors), len(columns.vectors), rows.vectors.shape[1]
    gradient = torch.empty_like(rows.vectors)
    product = rows.vectors.new_empty(b, dtype=torch.float32)
    block = _block(rows.vectors, b, backward=True)
    power = 1.0 + plan.beta if plan.single else 1.0
    nothing = None, None, None
    if b:
        triton_rows.backward[(-(-b // block.rows),)](
            rows.vectors, columns.vectors, rows.inverse_norms, columns.inverse_norms,
            rows.ids, columns.ids, rows.labels, columns.labels,
            *(band if of_rows else nothing[:2]), *(band if of_columns else nothing[:2]),
            *(of_rows or nothing), *(of_columns or nothing), rows.begin, rows.end, unit, gradient, product,
            b, n, d, plan.scale * power, plan.beta, plan.scale * power if plan.fixed else 0.0,
            TILT=triton_rows.UNIFORM if plan.single else plan.tilt, BAND=band[0] is not None,
            ROW=of_rows is not None, COLUMN=of_columns is not None, PRODUCT=product_too, **_switches(rows, columns, plan, block),
        )  # fmt: skip
    return gradient, product


class Block(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int


def _block(vectors: Tensor, count: int, backward: bool) -> Block:
    """The shapes that were fastest on an H200; the same for the same input, so that the bits are too."""
    if vectors.dtype == torch.float32:
        return Block(64, 32, 4, 2)
    if not backward:
        return Block(256, 64, 8, 3) if count >= 16384 and vectors.shape[1] <= 128 else Block(64, 64, 4, 3)
    return Block(128, 64, 4, 3) if count >= 16384 and vectors.shape[1] <= 128 else Block(64, 64, 4, 3)


def _switches(rows: Side, columns: Side, plan: Plan, block: Block) -> dict[str, Any]:
    n, d = len(columns.vectors), rows.vectors.shape[1]
    padded = max(16, 1 << (d - 1).bit_length())
    half = rows.vectors.dtype != torch.float32
    return {
        "BM": block.rows, "BN": block.columns, "BD": padded,
        "FULL_D": d == padded, "RAGGED": n % block.columns != 0, "SORTED": rows.begin is not None,
        "FIXED": plan.fixed, "NORMS": plan.normalize, "IDS": rows.ids is not None and columns.ids is not None,
        "LABELS": rows.labels is not None and columns.labels is not None, "MASKED": plan.masked,
        "PRECISION": "tf32" if half or torch.get_float32_matmul_precision() != "highest" else "ieee",
        "num_warps": block.warps, "num_stages": block.stages,
    }  # fmt: skip


def _infinite(rows: Side, columns: Side) -> Tensor:
    """0, or NaN where a feature is infinite or NaN: it must not hide in a finite loss."""
    found = sum(torch.linalg.vector_norm(side.vectors, math.inf) for side in {id(s): s for s in (rows, columns)}.values() if side.vectors.numel())
    return torch.as_tensor(found).float() * 0.0


def _ids(
    anchor_ids: Tensor | None, candidate_ids: Tensor | None, anchors: Tensor, candidates: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Ids of which equal ones are the same instance: nobody's ids match nothing, except in self-similarity the row itself."""
    if candidates is None:
        own = torch.arange(len(anchors), device=anchors.device)
        ids = own if anchor_ids is None else torch.where(anchor_ids < 0, own + 2**62, anchor_ids)
        return ids, ids
    if anchor_ids is None or candidate_ids is None:
        return None, None
    return torch.where(anchor_ids < 0, -1, anchor_ids), torch.where(candidate_ids < 0, -2, candidate_ids)


def _bound(value: float | Tensor | None, anchors: Tensor, otherwise: float) -> Tensor:
    value = otherwise if value is None else value
    return torch.as_tensor(value, dtype=torch.float32, device=anchors.device).detach().expand(len(anchors)).contiguous()
