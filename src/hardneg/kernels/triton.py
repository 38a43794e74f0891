"""Row statistics of the closed family in Triton: log E_q[e^s] without the pairs, for d <= 256 and one temperature.

    s = similarity / temperature,   log w = beta s inside the row's band and outside the masks by id and label, else -inf

The kernels and their derivation are in ``triton_rows``. What they cannot do ``supports`` names; nothing falls back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    if candidates is None:
        candidate_ids, candidate_labels = anchor_ids, anchor_labels
    tags = Tags(
        *((anchor_ids, candidate_ids) if anchor_ids is not None and candidate_ids is not None else (None, None)),
        *((anchor_labels, candidate_labels) if anchor_labels is not None else (None, None)),
        *_band(low, high, anchors),
    )
    bits = (1.0 + beta) * 2.0 * LOG2_E / value
    fixed = (unit or normalize) and bits < FIXED_SHIFT_BITS
    masked = tags.low is not None or (tags.tagged and len(others) < SORTED_FROM)
    plan = Plan(value, float(beta), detach, normalize, fixed, candidates is None, masked)
    given = temperature if isinstance(temperature, Tensor) and temperature.requires_grad else None
    return RowStatistics(*_RowStatistics.apply(anchors, candidates, given, tags, plan))


def _unusable(anchors: Tensor, candidates: Tensor, temperature: float | Tensor, beta: float) -> str | None:
    if not interpreted:
        return supports(anchors, candidates, temperature, beta)
    return _cannot(anchors, candidates, temperature, beta)


@dataclass(frozen=True, eq=False)
class Tags:
    """What is known of the rows besides their vectors."""

    anchor_ids: Tensor | None
    candidate_ids: Tensor | None
    anchor_labels: Tensor | None
    candidate_labels: Tensor | None
    low: Tensor | None
    high: Tensor | None

    @property
    def tagged(self) -> bool:
        return self.anchor_ids is not None or self.anchor_labels is not None


@dataclass(frozen=True)
class Plan:
    """The numbers and switches of one call."""

    temperature: float
    beta: float
    detach: bool
    normalize: bool
    fixed: bool
    """One shift for all rows, and no running maximum."""
    itself: bool
    """Self-similarity: the candidates are the anchors."""
    masked: bool
    """Masks in every block; otherwise in those that hold ids or labels of the rows, both sides being sorted."""

    @property
    def scale(self) -> float:
        return LOG2_E / self.temperature

    @property
    def tilt(self) -> int:
        special = {0.0: triton_rows.UNIFORM, 1.0: triton_rows.SQUARE}
        return special.get(self.beta, triton_rows.GENERAL)

    @property
    def single(self) -> bool:
        """Whether the gradient needs one exponential of the score only, e^(power s)."""
        return self.beta == 0.0 or self.detach

    @property
    def power(self) -> float:
        return 1.0 + self.beta if self.single else 1.0


class Side(NamedTuple):
    """Rows or columns of a sweep; with an order, sorted by label or id, so that few blocks need the mask."""

    vectors: Tensor
    inverse_norms: Tensor | None
    ids: Tensor | None
    labels: Tensor | None
    order: Tensor | None = None
    begin: Tensor | None = None
    """Of each row the columns [begin, end) that a mask may exclude."""
    end: Tensor | None = None


class Coefficients(NamedTuple):
    """Of each anchor, as in the derivation: A, C and the shift."""

    a: Tensor
    c: Tensor
    shift: Tensor


class _RowStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchors: Tensor, candidates: Tensor | None, temperature: Tensor | None, tags: Tags, plan: Plan
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.plan, ctx.temperature = plan, temperature
        ctx.set_materialize_grads(False)
        rows, columns = _sides(anchors, candidates, tags, plan)
        found, sums = _sweep(rows, columns, (tags.low, tags.high), plan)
        ctx.save_for_backward(*rows, *columns, tags.low, tags.high, *sums)
        ctx.mark_non_differentiable(found[2])
        return found

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g_mean: Tensor | None, g_mass: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        plan, saved = ctx.plan, ctx.saved_tensors
        rows, columns, band, sums = Side(*saved[:7]), Side(*saved[7:14]), saved[14:16], saved[16:]
        grad_anchors = grad_candidates = grad_temperature = None
        if g_mean is None and g_mass is None:
            return None, None, None, None, None
        own, unit = _coefficients(g_mean, g_mass, rows, sums, plan)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            others = own if plan.itself else None
            learn = ctx.needs_input_grad[2]
            grad_anchors, product = _gradient(rows, columns, own, others, band, unit, plan, product_too=learn)
            if learn:
                # ds / d temperature = -s / temperature. The sum over pairs of gradient times s is that of the rows'
                # products; in self-similarity every pair is there in both roles.
                total = -product.sum() / (plan.temperature * (2.0 if plan.itself else 1.0))
                grad_temperature = total.to(ctx.temperature.dtype).reshape(ctx.temperature.shape)
        if not plan.itself and ctx.needs_input_grad[1]:
            grad_candidates, _ = _gradient(columns, rows, None, own, band, unit, plan)
        return grad_anchors, grad_candidates, grad_temperature, None, None


def _sides(anchors: Tensor, candidates: Tensor | None, tags: Tags, plan: Plan) -> tuple[Side, Side]:
    keys = tags.anchor_ids if tags.anchor_labels is None else tags.anchor_labels
    if plan.masked or keys is None:
        rows = _side(anchors, tags.anchor_ids, tags.anchor_labels, plan)
        return rows, rows if candidates is None else _side(
            candidates, tags.candidate_ids, tags.candidate_labels, plan
        )
    rows, row_keys = _sorted_side(anchors, tags.anchor_ids, tags.anchor_labels, plan)
    if candidates is None:
        rows = _facing(rows, row_keys, row_keys, _split_ids(tags))
        return rows, rows
    columns, column_keys = _sorted_side(candidates, tags.candidate_ids, tags.candidate_labels, plan)
    split = _split_ids(tags)
    return _facing(rows, row_keys, column_keys, split), _facing(columns, column_keys, row_keys, split)


def _side(vectors: Tensor, ids: Tensor | None, labels: Tensor | None, plan: Plan) -> Side:
    vectors = vectors.detach().contiguous()
    norms = None
    if plan.normalize:
        norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32).clamp_(min=1e-12).reciprocal_()
    return Side(vectors, norms, ids, labels)


def _sorted_side(vectors: Tensor, ids: Tensor | None, labels: Tensor | None, plan: Plan) -> tuple[Side, Tensor]:
    if labels is None:
        assert ids is not None
        ids, order = ids.sort(stable=True)
        return _side(vectors.detach()[order], ids, None, plan)._replace(order=order), ids
    labels, order = labels.sort(stable=True)
    ids = None if ids is None else ids[order]
    return _side(vectors.detach()[order], ids, labels, plan)._replace(order=order), labels


def _facing(rows: Side, keys: Tensor, others: Tensor, split: Tensor | None) -> Side:
    begin, end = (torch.searchsorted(others, keys, right=right, out_int32=True) for right in (False, True))
    if split is not None:
        begin, end = torch.where(split, 0, begin), torch.where(split, len(others), end)
    return rows._replace(begin=begin, end=end)


def _split_ids(tags: Tags) -> Tensor | None:
    """Whether one id has two labels: then the columns of a row's id are not all among those of its label."""
    if tags.anchor_ids is None or tags.anchor_labels is None:
        return None
    ids, labels = tags.anchor_ids, tags.anchor_labels
    if tags.candidate_ids is not ids or tags.candidate_labels is not labels:
        assert tags.candidate_ids is not None and tags.candidate_labels is not None
        ids, labels = torch.cat([ids, tags.candidate_ids]), torch.cat([labels, tags.candidate_labels])
    ids, order = ids.sort()
    labels = labels[order]
    return ((ids[1:] == ids[:-1]) & (labels[1:] != labels[:-1])).any()


def _sweep(
    rows: Side, columns: Side, band: tuple[Tensor | None, Tensor | None], plan: Plan
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    b, n, d = len(rows.vectors), len(columns.vectors), rows.vectors.shape[1]
    log_mean, log_mass, sum0, sum1, shift = rows.vectors.new_empty(5, b, dtype=torch.float32).unbind()
    support = rows.vectors.new_empty(b, dtype=torch.int32)
    largest = None
    if not plan.itself:
        largest = columns.vectors.new_zeros(()) if n == 0 else torch.linalg.vector_norm(columns.vectors, math.inf)
    block = _block(rows.vectors, b, backward=False)
    if b:
        triton_rows.forward[(-(-b // block.rows),)](
            rows.vectors, columns.vectors, rows.inverse_norms, columns.inverse_norms,
            rows.ids, columns.ids, rows.labels, columns.labels, *band,
            rows.begin, rows.end, rows.order, largest, log_mean, log_mass, support, sum0, sum1, shift,
            b, n, d, plan.scale, plan.beta, plan.scale if plan.fixed else 0.0,
            TILT=plan.tilt, BAND=band[0] is not None, **_switches(rows, columns, plan, block),
        )  # fmt: skip
    return (log_mean, log_mass, support), (sum0, sum1, shift)


def _coefficients(
    g_mean: Tensor | None, g_mass: Tensor | None, rows: Side, sums: Sequence[Tensor], plan: Plan
) -> tuple[Coefficients, Tensor]:
    """The rows' coefficients, in the order of the rows, and what their gradients are to be multiplied by."""
    b = len(rows.vectors)
    a, c, shift = rows.vectors.new_empty(3, b, dtype=torch.float32).unbind()
    unit = rows.vectors.new_empty((), dtype=torch.float32)
    upstream = [None if g is None else g.contiguous() for g in (g_mean, g_mass)]
    largest = [None if g is None else torch.linalg.vector_norm(g, math.inf) for g in upstream]
    headroom = (2.0 + 4.0 * plan.beta) / 2.0**14 if rows.vectors.dtype == torch.float16 else 1.0
    slope, power = 1.0 if plan.detach else 1.0 + plan.beta, plan.power
    if b:
        triton_rows.coefficients[(-(-b // 256),)](
            *upstream, *largest, rows.order, *sums, a, c, shift, unit,
            b, 0.0 if plan.single else plan.beta, slope, power, headroom, plan.temperature,
            BLOCK=256, SORTED=rows.order is not None, MEAN=g_mean is not None, MASS=g_mass is not None,
        )  # fmt: skip
    return Coefficients(a, c, shift), unit


def _gradient(
    rows: Side,
    columns: Side,
    of_rows: Coefficients | None,
    of_columns: Coefficients | None,
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
    scale = plan.scale * plan.power
    nothing = None, None, None
    if b:
        triton_rows.backward[(-(-b // block.rows),)](
            rows.vectors, columns.vectors, rows.inverse_norms, columns.inverse_norms,
            rows.ids, columns.ids, rows.labels, columns.labels,
            *(band if of_rows else nothing[:2]), *(band if of_columns else nothing[:2]),
            *(of_rows or nothing), *(of_columns or nothing), rows.begin, rows.end, rows.order, unit, gradient, product,
            b, n, d, scale, plan.beta, scale if plan.fixed else 0.0,
            TILT=triton_rows.UNIFORM if plan.single else plan.tilt, BAND=band[0] is not None,
            ROW=of_rows is not None, COLUMN=of_columns is not None, PRODUCT=product_too, **_switches(rows, columns, plan, block),
        )  # fmt: skip
    return gradient, product


class Block(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None


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
        "FULL_D": d == padded, "RAGGED": n % block.columns != 0, "SORTED": rows.order is not None,
        "FIXED": plan.fixed, "NORMS": plan.normalize, "SELF": plan.itself, "IDS": rows.ids is not None and columns.ids is not None,
        "LABELS": rows.labels is not None and columns.labels is not None, "MASKED": plan.masked,
        "PRECISION": "tf32" if half or torch.get_float32_matmul_precision() != "highest" else "ieee",
        "num_warps": block.warps, "num_stages": block.stages, "maxnreg": block.registers,
    }  # fmt: skip


def _band(low: float | Tensor | None, high: float | Tensor | None, anchors: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if low is None and high is None:
        return None, None

    def per_anchor(value: float | Tensor) -> Tensor:
        bound = torch.as_tensor(value, dtype=torch.float32, device=anchors.device).detach()
        return bound.expand(len(anchors)).contiguous()

    return per_anchor(-math.inf if low is None else low), per_anchor(math.inf if high is None else high)
