"""ContrastiveLoss: the objective with its options bound; what a trainer calls."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from hardneg.core.diagnose import Diagnosis, diagnose
from hardneg.core.errors import ArgumentError, argument_error, check_kind, check_range, warn_once
from hardneg.core.objectives import NumNegatives, check_num_negatives, info_nce, reduce
from hardneg.core.schedules import Number, Schedule, adaptive, value_of
from hardneg.core.scoring import (
    Pools,
    as_keys,
    check_temperature,
    cross_views,
    same_label_positives,
    score,
    two_views,
)
from hardneg.core.types import Keys, LogWeights, Scores
from hardneg.core.vectors import unit
from hardneg.negatives import Negatives, Uniform, parse

Views = Annotated[Tensor, "b d"]


class ContrastiveLoss(nn.Module):
    """InfoNCE with any negatives; a scalar.

    negatives: a distribution, or its text: ``"OtherLabel() * Tilt(1.0)"``.
    views: ``"two"`` (SimCLR: both views are anchors and candidates) or ``"cross"`` (SimCSE, CLIP: z1 against z2).
        With ``pool``, z1 is compared with the pool only and z2 is its positive; ``"pool"`` (MoCo) insists on one.
    positives: ``"view"``, the other view; ``"label"``, all candidates of the anchor's label too (SupCon, H-SCL).
        Labels are otherwise read by the distribution only. ``same_label_negatives`` lets those candidates stay
        negatives too: true positives with unlabelled negatives (HCL, Fig. 4; H-SCL's H-UCL).
    temperature: a number, a schedule, or a tensor or parameter to be learnt. tau_plus: a number or a schedule.
    normalize: brings z1, z2 and the pool to unit norm. detach_keys: no gradient to z2 (MoCo's keys).
    The other options are those of ``info_nce`` and ``reduce``.

    A schedule needs ``set_progress(step, total)`` before each step or epoch.

    >>> loss = ContrastiveLoss("Tilt(1.0)", temperature=0.5, tau_plus=0.1)
    >>> z1, z2 = torch.randn(16, 8), torch.randn(16, 8)
    >>> loss(z1, z2).shape
    torch.Size([])
    """

    def __init__(
        self,
        negatives: Negatives | str = Uniform(),
        temperature: Number | Tensor = 0.5,
        tau_plus: Number = 0.0,
        views: str = "two",
        *,
        positives: str = "view",
        same_label_negatives: bool = False,
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
        check_kind("ContrastiveLoss", "same_label_negatives", same_label_negatives, bool, "True or False")
        if same_label_negatives and positives != "label":
            fix = "labels make no positives otherwise"
            raise argument_error(
                "ContrastiveLoss", "positives='label' for same_label_negatives", "positives", positives, fix
            )
        if not isinstance(temperature, Schedule):
            check_temperature("ContrastiveLoss", temperature)
        self.negatives = parse(negatives) if isinstance(negatives, str) else negatives
        if not isinstance(self.negatives, Negatives):
            raise argument_error("ContrastiveLoss", "a distribution such as Tilt(1.0)", "negatives", negatives)
        if isinstance(temperature, Tensor) and not temperature.requires_grad:
            self.register_buffer("temperature", temperature)
        else:
            self.temperature = temperature
        self.tau_plus = tau_plus
        self.views, self.positives, self.same_label_negatives = views, positives, same_label_negatives
        self.num_negatives, self.positives_in_denominator = num_negatives, positives_in_denominator
        self.reduction, self.normalize, self.detach_keys = reduction, normalize, detach_keys
        self.step: int | None = None  # None: no progress was set
        self.total: int | None = None
        self._current = self.negatives
        self._numbers: dict[str, Tensor] = {}  # of the schedules at this step; tensors, which do not recompile
        self._calls = 0

    def set_progress(self, step: int, total: int | None = None) -> None:
        """Evaluates the schedules; outside any compiled graph, so that new numbers do not recompile it."""
        self.step, self.total = step, total
        self._current = self.negatives.at(step, total)
        for name, highest in (("temperature", math.inf), ("tau_plus", 1.0)):
            if isinstance(schedule := getattr(self, name), Schedule):
                number = value_of(schedule, step, total)
                check_range("ContrastiveLoss", name, number, 0.0, highest, open_high=True)
                self._numbers[name] = torch.tensor(number, dtype=torch.float64)

    def _now(self, name: str) -> Any:
        """The temperature or tau_plus of this step."""
        value = self._numbers.get(name, getattr(self, name))
        return float(value) if isinstance(value, Schedule) else value  # which says that its progress is not set

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
            raise ArgumentError("ContrastiveLoss", "a pool of candidates", "pool=None", "pass pool=queue")
        parts = None if pool is None else as_keys(pool)
        if self.normalize:
            z1, z2 = unit(z1), unit(z2)
            parts = parts and [replace(keys, vectors=unit(keys.vectors)) for keys in parts]
        if self.detach_keys:
            z2 = z2.detach()
        if parts is not None:
            scores = score(Keys(z1, ids, labels, clusters), z2, parts, self._now("temperature"))
        else:
            build = two_views if self.views == "two" else cross_views
            scores = build(z1, z2, self._now("temperature"), ids, labels, clusters=clusters)
        if self.positives == "view":
            return scores
        return same_label_positives(scores, negatives_too=self.same_label_negatives)

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
            tau_plus=self._now("tau_plus"),
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
            return diagnose(scores, self._current.log_weights(scores), tau_plus=self._now("tau_plus"))

    def extra_repr(self) -> str:
        return f"{self.negatives!r}, temperature={self.temperature}, tau_plus={self.tau_plus}, views={self.views!r}"

    def get_extra_state(self) -> Tensor:
        """Step, total, then value and last metric of each adaptive schedule, NaN for None: safe to store."""
        numbers = [self.step, self.total]
        for schedule in self._adaptive():
            numbers += [schedule.state_dict()["value"], schedule.state_dict()["last"]]
        return torch.tensor([math.nan if each is None else each for each in numbers], dtype=torch.float64)

    def set_extra_state(self, state: Tensor | dict[str, Any]) -> None:
        if isinstance(state, dict):  # of a checkpoint from before
            saved = [(one["value"], one["last"]) for one in state["adaptive"]]
            step, total = state["step"], state["total"]
        else:
            numbers = [None if math.isnan(each) else each for each in state.tolist()]
            step, total = (each if each is None else int(each) for each in numbers[:2])
            saved = list(zip(numbers[2::2], numbers[3::2], strict=True))
        for schedule, (value, last) in zip(self._adaptive(), saved, strict=True):
            schedule.load_state_dict({"value": value, "last": last})
        if step is not None:
            self.set_progress(step, total)

    def _adaptive(self) -> list[adaptive]:
        schedules = [*self.negatives.schedules(), self.temperature, self.tau_plus]
        return [schedule for schedule in schedules if isinstance(schedule, adaptive)]

    def _warn(self, scores: Scores, log_w: LogWeights) -> None:
        """Looks at calls 1, 2, 4, 8 ... only: each look waits for the GPU. A pool that is still empty is no fault."""
        self._calls += 1
        if self._calls & (self._calls - 1) or not scores.candidates.shape[1]:
            return
        with torch.no_grad():
            found = diagnose(scores, log_w, tau_plus=self._now("tau_plus"))
            empty, clamped = found.empty.float().mean().item(), found.clamped_share()
            temperature = torch.as_tensor(scores.temperature).float().mean().item()
        if empty > 0.5 and self.positives_in_denominator != "all":  # there the positives stand against each other
            warn_once(
                f"empty:{self._current!r}",
                f"{empty:.0%} of the anchors have no negative under {self._current!r} and cost nothing. "
                "Widen the band, add a pool, or use a larger batch with more labels in it.",
            )
        if clamped > 0.5:
            warn_once(
                f"clamped:{self.tau_plus}:{temperature}",
                f"{clamped:.0%} of the debiased terms are at their floor, where negatives have no gradient: "
                f"tau_plus={float(self._now('tau_plus')):.3g} is too large for temperature={temperature:.3g}. "
                "Lower tau_plus or raise the temperature.",
            )
