"""ContrastiveLoss: the objective with its options bound; what a trainer calls."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardneg.core.diagnose import Diagnosis, diagnose
from hardneg.core.errors import argument_error, check_range, warn_once
from hardneg.core.objectives import NumNegatives, check_num_negatives, info_nce, reduce
from hardneg.core.schedules import adaptive
from hardneg.core.scoring import Pools, as_keys, cross_views, same_label_positives, score, two_views
from hardneg.core.types import Keys, LogWeights, Scores
from hardneg.negatives import Negatives, Uniform, parse

Views = Annotated[Tensor, "b d"]


class ContrastiveLoss(nn.Module):
    """InfoNCE with any negatives; a scalar.

    negatives: a distribution, or its text: ``"OtherLabel() * Tilt(1.0)"``.
    views: ``"two"`` (SimCLR: both views are anchors and candidates) or ``"cross"`` (SimCSE, CLIP: z1 against z2).
        With ``pool``, z1 is compared with the pool only and z2 is its positive; ``"pool"`` (MoCo) insists on one.
    positives: ``"view"``, the other view; ``"label"``, all candidates of the anchor's label too (SupCon, H-SCL).
        Labels are otherwise read by the distribution only.
    temperature: a number, or a tensor or parameter to be learnt.
    normalize: brings z1, z2 and the pool to unit norm. detach_keys: no gradient to z2 (MoCo's keys).
    The other options are those of ``info_nce`` and ``reduce``.

    A schedule inside the negatives needs ``set_progress(step, total)`` before each step or epoch.

    >>> loss = ContrastiveLoss("Tilt(1.0)", temperature=0.5, tau_plus=0.1)
    >>> z1, z2 = torch.randn(16, 8), torch.randn(16, 8)
    >>> loss(z1, z2).shape
    torch.Size([])
    """

    def __init__(
        self,
        negatives: Negatives | str = Uniform(),
        temperature: float | Tensor = 0.5,
        tau_plus: float = 0.0,
        views: str = "two",
        *,
        positives: str = "view",
        num_negatives: NumNegatives = "support",
        positives_in_denominator: str = "own",
        reduction: str = "anchors",
        normalize: bool = True,
        detach_keys: bool = False,
    ) -> None:
        super().__init__()
        for name, value, known in (
            ("views", views, ("two", "cross", "pool")),
            ("positives", positives, ("view", "label")),
            ("positives_in_denominator", positives_in_denominator, ("own", "all", "none")),
            ("reduction", reduction, ("anchors", "pairs", "none")),
        ):
            if value not in known:
                raise argument_error("ContrastiveLoss", f"{name} in {known}", name, value)
        check_range("ContrastiveLoss", "tau_plus", tau_plus, 0.0, 1.0, open_high=True)
        check_num_negatives("ContrastiveLoss", num_negatives)
        number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
        if not isinstance(temperature, Tensor) and not (number and 0 < temperature < math.inf):
            raise argument_error("ContrastiveLoss", "a temperature above 0", "temperature", temperature)
        self.negatives = parse(negatives) if isinstance(negatives, str) else negatives
        if not isinstance(self.negatives, Negatives):
            raise argument_error("ContrastiveLoss", "a distribution such as Tilt(1.0)", "negatives", negatives)
        if isinstance(temperature, Tensor) and not temperature.requires_grad:
            self.register_buffer("temperature", temperature)
        else:
            self.temperature = temperature
        self.tau_plus = tau_plus
        self.views, self.positives = views, positives
        self.num_negatives, self.positives_in_denominator = num_negatives, positives_in_denominator
        self.reduction, self.normalize, self.detach_keys = reduction, normalize, detach_keys
        self.step: int | None = None  # None: no progress was set
        self.total: int | None = None
        self._current = self.negatives
        self._calls = 0

    def set_progress(self, step: int, total: int | None = None) -> None:
        """Evaluates the schedules; outside any compiled graph, so that new numbers do not recompile it."""
        self.step, self.total = step, total
        self._current = self.negatives.at(step, total)

    def scores(
        self,
        z1: Views,
        z2: Views,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        pool: Pools | None = None,
        clusters: Tensor | None = None,
    ) -> Scores:
        """The scores that the loss is computed from."""
        if self.views == "pool" and pool is None:
            raise ValueError("ContrastiveLoss needs a pool of candidates, got pool=None; pass pool=queue.")
        parts = None if pool is None else as_keys(pool)
        if self.normalize:
            z1, z2 = _unit(z1), _unit(z2)
            parts = parts and [replace(keys, vectors=_unit(keys.vectors)) for keys in parts]
        if self.detach_keys:
            z2 = z2.detach()
        if parts is not None:
            scores = score(Keys(z1, ids, labels, clusters), z2, parts, self.temperature)
        else:
            build = two_views if self.views == "two" else cross_views
            scores = build(z1, z2, self.temperature, ids, labels, clusters=clusters)
        return same_label_positives(scores) if self.positives == "label" else scores

    def forward(
        self,
        z1: Views,
        z2: Views,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        pool: Pools | None = None,
        clusters: Tensor | None = None,
    ) -> Tensor:
        scores = self.scores(z1, z2, ids, labels, pool, clusters)
        log_w = self._current.log_weights(scores)
        if not torch.compiler.is_compiling():
            self._warn(scores, log_w)
        losses = info_nce(
            scores,
            log_w,
            num_negatives=self.num_negatives,
            tau_plus=self.tau_plus,
            positives_in_denominator=self.positives_in_denominator,
        )
        return reduce(losses, scores, self.reduction)

    def diagnose(
        self,
        z1: Views,
        z2: Views,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        pool: Pools | None = None,
        clusters: Tensor | None = None,
    ) -> Diagnosis:
        """How hard, how false and how many the negatives of this batch are; exact also under ``no_grad``."""
        with torch.enable_grad():  # whether the weights carry a gradient tells who is attracted
            scores = self.scores(z1.detach(), z2.detach(), ids, labels, pool, clusters)
            scores = scores.changed(candidates=scores.candidates.detach().requires_grad_())
            return diagnose(scores, self._current.log_weights(scores), tau_plus=self.tau_plus)

    def extra_repr(self) -> str:
        return f"{self.negatives!r}, temperature={self.temperature}, tau_plus={self.tau_plus}, views={self.views!r}"

    def get_extra_state(self) -> dict[str, Any]:
        return {"step": self.step, "total": self.total, "adaptive": [s.state_dict() for s in self._adaptive()]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        for schedule, saved in zip(self._adaptive(), state["adaptive"], strict=True):
            schedule.load_state_dict(saved)
        if state["step"] is not None:
            self.set_progress(state["step"], state["total"])

    def _adaptive(self) -> list[adaptive]:
        return [schedule for schedule in self.negatives.schedules() if isinstance(schedule, adaptive)]

    def _warn(self, scores: Scores, log_w: LogWeights) -> None:
        """Looks at calls 1, 2, 4, 8 ... only: each look waits for the GPU. A pool that is still empty is no fault."""
        self._calls += 1
        if self._calls & (self._calls - 1) or not scores.candidates.shape[1]:
            return
        with torch.no_grad():
            found = diagnose(scores, log_w, tau_plus=self.tau_plus)
            empty, clamped = found.empty.float().mean().item(), found.clamped_share()
        if empty > 0.5 and self.positives_in_denominator != "all":  # there the positives stand against each other
            warn_once(
                f"empty:{self._current!r}",
                f"{empty:.0%} of the anchors have no negative under {self._current!r} and cost nothing. "
                "Widen the band, add a pool, or use a larger batch with more labels in it.",
            )
        if clamped > 0.5:
            warn_once(
                f"clamped:{self.tau_plus}:{float(self.temperature)}",
                f"{clamped:.0%} of the debiased terms are at their floor, where negatives have no gradient: "
                f"tau_plus={self.tau_plus} is too large for temperature={float(self.temperature):.3g}. "
                "Lower tau_plus or raise the temperature.",
            )


def _unit(vectors: Tensor) -> Tensor:
    return normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1)
