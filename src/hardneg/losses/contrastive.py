"""ContrastiveLoss: the loss that a trainer calls, with all of its options bound.

A call builds a ``Pairing`` (which anchors are compared with which candidates), chooses a backend
(``kernels.engine.choose``), lets it compute row statistics, and applies the objective and the reduction. The same
object answers ``explain_path`` (which backend, and why) and ``diagnose`` (how hard the negatives are).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_args

import torch
from torch import Tensor, nn

from hardneg.core.diagnose import Diagnosis, diagnose, joined
from hardneg.core.distributed import gathered, mean_over_ranks
from hardneg.core.errors import ArgumentError, argument_error, tensors_checked, warn_once
from hardneg.core.objectives.base import Reduction, RowResult, TauPlus, corrects
from hardneg.core.objectives.info_nce import Denominator, InfoNCE, NumNegatives, debiased
from hardneg.core.pairing import Pairing
from hardneg.core.schedules import Schedule, adaptive
from hardneg.core.scoring import dense, from_matrix
from hardneg.core.tensors import fields_of_rows, is_per_anchor, tensor_fields, typed_as, with_fields, without_autocast
from hardneg.core.types import Scores, View
from hardneg.core.views import Guides, Pools, PositivesBy, ViewOptions, Views, check_parts, check_temperature
from hardneg.kernels.engine import Impl, Path, check_streamable, choose, compute_rows, explain
from hardneg.negatives.base import Mask, Negatives, Product, Uniform
from hardneg.negatives.grammar import AnyGenerator, AnyObjective, parse, read_generator, read_objective

SCORES_PER_DIAGNOSIS = 2**23
"""Number of scores that are diagnosed at once."""
Temperature = float | Tensor | Schedule


class ContrastiveLoss(nn.Module):
    """A contrastive loss over views with any negatives, objective and positives; returns a scalar.

    Schedules need ``set_progress(step, total)`` before each step or epoch.

    Args:
        negatives: A distribution, or its text such as ``"OtherLabel() * Tilt(1.0)"``.
        temperature: A number, a schedule, or a tensor or parameter to be learnt.
        tau_plus: Probability that a negative has the anchor's class (debiasing): a number, schedule or tensor.
        views: ``"two"`` (SimCLR): all views are anchors and candidates. ``"cross"`` (SimCSE, CLIP): z1 against z2.
            ``"pool"`` (MoCo): z1 against a pool, with z2 as its positive, as any call with ``pool`` does; it raises
            without one.
        positives: ``"view"``: the other views of the instance. ``"label"``: also all candidates with the anchor's label
            (SupCon, H-SCL). Labels are otherwise only read by the distribution.
        same_label_negatives: With ``positives="label"``, let those candidates be negatives too: true positives with
            unlabelled negatives (HCL, Fig. 4; H-SCL's H-UCL).
        num_negatives: The factor of E_q[e^s]: see ``info_nce``.
        positives_in_denominator: ``"own"``, ``"all"`` or ``"none"``: see ``info_nce``.
        reduction: ``"anchors"`` or ``"mean"``, the mean over anchors; ``"pairs"``, the mean over positive pairs; or
            ``"none"``.
        normalize: Whether to bring views and pool to unit norm.
        detach_keys: Whether to stop the gradient to z2 (the keys of MoCo).
        objective: A name, text (``"rince(q=0.1)"``), an Objective, or a function of (positives, row statistics).
        impl: ``"dense"`` (matrices of scores), ``"streamed"`` (Triton kernels on a GPU if they support the loss, tiles
            otherwise; raises for what needs whole rows), or ``"auto"``: Triton where it can run, otherwise dense for
            small batches and inside torch.compile. ``path`` is the choice of the last call; ``explain_path`` predicts
            it. Streamed losses have a first derivative only.
        generate: A generator of additional candidates, such as ``"mochi(num_hardest=64)"``; not inside torch.compile.
        gather: Under torch.distributed, use the candidates of all ranks, which may have different numbers of rows. Each
            rank compares its own anchors with them; value and gradient, averaged over the ranks as
            DistributedDataParallel does, equal those of one process with the whole batch. A pool is used as given and
            must be the same on all ranks. ``reduction="none"`` returns the losses of the rank's own anchors.

    Raises:
        ArgumentError: If an argument is not valid, by its name.

    Example:
        >>> loss = ContrastiveLoss("Tilt(1.0)", temperature=0.5, tau_plus=0.1)
        >>> z1, z2 = torch.randn(16, 8), torch.randn(16, 8)
        >>> loss(z1, z2).shape
        torch.Size([])
    """

    def __init__(
        self,
        negatives: Negatives | str = Uniform(),
        temperature: Temperature = 0.5,
        tau_plus: TauPlus = 0.0,
        views: Views = "two",
        *,
        positives: PositivesBy = "view",
        same_label_negatives: bool = False,
        num_negatives: NumNegatives = "support",
        positives_in_denominator: Denominator = "own",
        reduction: Reduction = "anchors",
        normalize: bool = True,
        detach_keys: bool = False,
        objective: AnyObjective = "info_nce",
        impl: Impl = "auto",
        generate: AnyGenerator | None = None,
        gather: bool = False,
    ) -> None:
        super().__init__()
        for name, value, known in (
            ("reduction", reduction, get_args(Reduction)),
            ("positives_in_denominator", positives_in_denominator, get_args(Denominator)),
            ("impl", impl, get_args(Impl)),
        ):
            if value not in known:
                raise argument_error("ContrastiveLoss", f"{name} in {known}", name, value)
        self.view_options = ViewOptions(views, positives, same_label_negatives, normalize, detach_keys)
        self.views, self.positives, self.normalize, self.detach_keys = views, positives, normalize, detach_keys
        self.same_label_negatives = same_label_negatives
        self.negatives = parse(negatives) if isinstance(negatives, str) else negatives
        if not isinstance(self.negatives, Negatives):
            raise argument_error("ContrastiveLoss", "a distribution such as Tilt(1.0)", "negatives", negatives)
        if impl == "streamed":
            check_streamable(self.negatives)
        if not isinstance(temperature, Schedule):
            check_temperature("ContrastiveLoss", temperature)
        if isinstance(temperature, Tensor) and not temperature.requires_grad:
            self.register_buffer("temperature", temperature)
        else:
            self.temperature = temperature
        self.reduction, self.impl = reduction, impl
        self.objective = read_objective(
            objective,
            tau_plus=tau_plus,
            num_negatives=num_negatives,
            positives_in_denominator=positives_in_denominator,
        )
        with tensors_checked():  # only here: a check at each step would wait for the GPU
            for holder in (*self.negatives.factors, self.objective):
                with_fields(holder, tensor_fields(holder))
        self._register_fields()
        self.generate = None if generate is None else read_generator(generate)
        self.gather = gather
        self.step: int | None = None  # None: no progress was set
        self.total: int | None = None
        self._current, self._objective = self.negatives, self.objective
        self._temperature: Tensor | None = None  # the value of a schedule at this step
        self._calls = 0
        self.path: Path | None = None  # the choice of the last call

    def _register_fields(self) -> None:
        """Register tensors that are fields of the distribution or objective as parameters or buffers of the loss."""
        self.learnt = nn.ParameterList()
        self._registered: list[tuple[int, str, str | int]] = []  # (holder, field, name or index)
        for place, holder in enumerate((*self.negatives.factors, self.objective)):
            for name, tensor in tensor_fields(holder).items():
                if isinstance(tensor, nn.Parameter):
                    self._registered.append((place, name, len(self.learnt)))
                    self.learnt.append(tensor)
                elif not tensor.requires_grad:
                    self._registered.append((place, name, f"field_{place}_{name}"))
                    self.register_buffer(f"field_{place}_{name}", tensor)

    def _refresh_fields(self) -> None:
        """Put tensors that ``to(device)`` or ``load_state_dict(assign=True)`` replaced back into the fields."""
        if not self._registered:
            return
        holders: list[Any] = [*self.negatives.factors, self.objective]
        changes: list[dict[str, Tensor]] = [{} for _ in holders]
        for place, name, key in self._registered:
            tensor = self.learnt[key] if isinstance(key, int) else getattr(self, key)
            if tensor is not getattr(holders[place], name):
                changes[place][name] = tensor
        if not any(changes):
            return
        *factors, self.objective = map(with_fields, holders, changes)
        self.negatives = factors[0] if len(factors) == 1 else Product(tuple(factors))
        self._current, self._objective = self.negatives, self.objective
        if self.step is not None:
            self.set_progress(self.step, self.total)

    @property
    def tau_plus(self) -> TauPlus:
        """The tau_plus of the objective, passed to it or to the loss; 0 if it has none."""
        tau_plus: TauPlus = getattr(self.objective, "tau_plus", 0.0)
        return tau_plus

    @property
    def num_negatives(self) -> NumNegatives:
        """The num_negatives of the objective, passed to it or to the loss; "support" if it has none."""
        number: NumNegatives = getattr(self.objective, "num_negatives", "support")
        return number

    @property
    def positives_in_denominator(self) -> str:
        """The option of the objective, passed to it or to the loss; "own" if it has none."""
        return str(getattr(self.objective, "positives_in_denominator", "own"))

    def set_progress(self, step: int, total: int | None = None) -> None:
        """Evaluate all schedules; call it before each step or epoch.

        It runs outside any compiled graph, so that new numbers do not cause a recompilation.

        Args:
            step: The current step or epoch, from 0.
            total: The total number, for schedules that need it.
        """
        self.step, self.total = step, total
        self._current, self._objective = self.negatives.at(step, total), self.objective.at(step, total)
        if isinstance(self.temperature, Schedule):
            self._temperature = torch.tensor(self.temperature(step, total), dtype=torch.float64)

    def pairing(
        self,
        z1: View | Sequence[View],
        z2: View | None = None,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        pool: Pools | None = None,
        clusters: Tensor | None = None,
        *,
        temperature: Tensor | None = None,
        guide: Guides | None = None,
        all_anchors: bool = False,
    ) -> Pairing:
        """Build the pairing from which the loss is computed: which anchors are compared with which candidates.

        The arguments are those of the call. With ``gather``, the anchors are those of this rank, or of all ranks with
        ``all_anchors``.

        Returns:
            The pairing; ``of`` computes its loss.

        Raises:
            ArgumentError: If views are not tensors, shapes do not match, or ``generate`` is combined with a guide.
        """
        self._refresh_fields()
        if self.generate is not None and guide is not None:
            what = "guide=None with generate (the guide has no vectors for generated candidates)"
            raise argument_error("ContrastiveLoss", what, "generate", self.generate)
        views = [z1] if isinstance(z1, Tensor) else list(z1)
        views += [] if z2 is None else [z2]
        if wrong := [view for view in views if not isinstance(view, Tensor)]:
            got = type(wrong[0]).__name__
            raise ArgumentError("ContrastiveLoss", "views that are tensors", got, "use torch.as_tensor")
        own = self.temperature_now() if temperature is None else temperature
        pairing = self.view_options.pairing(views, own, ids, labels, pool, clusters, guide)
        check_per_anchor((*self._current.factors, self._objective), len(views[0]), len(pairing))
        if self.gather:
            pairing = gathered(pairing, candidates=pool is None, anchors=self._of_all_anchors() or all_anchors)
        return pairing if self.generate is None else self.generate(pairing.prepared(), self._calls)

    def scores(self, *args: Any, **kwargs: Any) -> Scores:
        """Compute the dense scores; the arguments are those of the call."""
        return dense(self.pairing(*args, **kwargs))

    def of_matrix(
        self, similarity: Tensor, positives: Tensor, *, lowest: Annotated[Tensor, "b 1"] | None = None, **parts: Any
    ) -> Annotated[Tensor, "b n"]:
        """Compute the loss of each pair from similarities of any scorer; not reduced, and never streamed.

        Args:
            similarity: Similarities of b anchors and n candidates, [b, n].
            positives: True for the positive pairs, [b, n].
            lowest: Lowest possible similarity of each anchor, a negative number, [b, 1]: the lower bound of the
                correction by ``tau_plus`` is e^(lowest / temperature). By default -1, that of cosines.
            **parts: Further arguments of ``from_matrix``.

        Returns:
            Losses [b, n]; 0 for pairs that are not positives.
        """
        if self.generate is not None:
            what = "generate=None for a matrix (it has no vectors to generate candidates from)"
            raise argument_error("ContrastiveLoss", what, "generate", self.generate)
        self._refresh_fields()
        scores = from_matrix(similarity, positives, self.temperature_now(), **parts)
        row = self._objective.dense_row(scores, self._current.log_weights(scores))
        if lowest is not None:
            # Scores are divided already: only the lower bound of the correction reads the temperature of the row.
            row.temperature = row.temperature / (-lowest).clamp(min=1e-6)
        found = RowResult(row, scores.positives, scores.positive_valid)
        if not torch.compiler.is_compiling():
            self._warn(found, similarity.shape[1])
        return self._objective.real_losses(found.positives, found.row, scores.positive_valid)

    def forward(
        self,
        z1: View | Sequence[View],
        z2: View | None = None,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        pool: Pools | None = None,
        clusters: Tensor | None = None,
        *,
        temperature: Tensor | None = None,
        guide: Guides | None = None,
    ) -> Tensor:
        """Compute the loss of two views, or of a list of views.

        Args:
            z1: First view [b, d], or a list of views.
            z2: Second view [b, d].
            ids: Ids of the instances [b]; candidates with the anchor's id are never negatives. By default every row
                is a separate instance.
            labels: Labels of the instances, [b].
            pool: Candidates from outside the batch: a queue, a bank, Keys, or several of them.
            clusters: Cluster of each instance, [b] or [b, r].
            temperature: A temperature for each instance [b], instead of that of the loss.
            guide: The same views under another model, for ``by="guide"``; with a pool, also the pool's vectors.

        Returns:
            A scalar; the losses of all anchors with ``reduction="none"``.
        """
        return self.of(self.pairing(z1, z2, ids, labels, pool, clusters, temperature=temperature, guide=guide))

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> Any:
            """Return what ``forward`` returns."""

    def of(self, pairing: Pairing, first: Mask | None = None) -> Tensor:
        """Compute the loss of a pairing that was built elsewhere.

        Args:
            pairing: The anchors, positives and candidates.
            first: A mask that is applied before the negatives of the loss.
        """
        self._refresh_fields()
        check_parts(pairing, "ContrastiveLoss")
        self.path = choose(pairing, self._current, self._objective, self.impl, first)
        negatives = self._current if first is None else Product((first, self._current))
        with without_autocast(pairing.anchors.vectors.device):
            found = compute_rows(self.path, pairing, negatives, self._objective)
            loss = found.loss(self._objective, self.reduction)
        if not torch.compiler.is_compiling():
            self._warn(found, pairing.num_candidates)
        return self._mean(loss, pairing)

    def explain_path(self, *args: Any, **kwargs: Any) -> str:
        """Return which backend computes the loss of these arguments, and why.

        Example:
            >>> z1, z2 = torch.randn(4, 8), torch.randn(4, 8)
            >>> ContrastiveLoss("Tilt(1.0)").explain_path(z1, z2).split("; ")[0]
            'dense: 64 scores are few'
        """
        parts = self.pairing(*args, **kwargs), self._current, self._objective
        return explain(choose(*parts, self.impl), *parts)

    def diagnose(self, *args: Any, bins: int = 0, **kwargs: Any) -> Diagnosis:
        """Measure the negatives of a batch: how hard they are, how many, and how many share the anchor's label.

        The arguments are those of the call, and the number of ``bins`` of the histograms of similarities. The result
        is exact, also under ``no_grad``. Where the loss would be streamed, the anchors are diagnosed in blocks. With
        ``gather``, the anchors of all ranks are included.
        """
        return self.diagnosis_of(self.pairing(*args, **kwargs, all_anchors=True), bins=bins)

    def diagnosis_of(self, pairing: Pairing, first: Mask | None = None, bins: int = 0) -> Diagnosis:
        """Measure the negatives of a pairing that was built elsewhere; see ``diagnose``."""
        pairing, current = pairing.prepared(), self._current
        size, path = len(pairing), choose(pairing, current, self._objective, self.impl, first)
        if path.name != "dense" and not any(factor.batch_scope for factor in current.factors):
            size = max(1, SCORES_PER_DIAGNOSIS // max(pairing.num_candidates, 1))
        if size >= len(pairing):
            return self._diagnose(_left(dense(pairing), first), current, self._tau_plus(), bins)
        parts = []
        for low in range(0, len(pairing), size):
            rows = slice(low, low + size)
            mask = fields_of_rows(first, rows, len(pairing))
            tau_plus = getattr(fields_of_rows(self._objective, rows, len(pairing)), "tau_plus", 0.0)
            negatives = Product(tuple(fields_of_rows(each, rows, len(pairing)) for each in current.factors))
            parts.append(self._diagnose(_left(dense(pairing.of_rows(rows)), mask), negatives, tau_plus, bins))
        return joined(parts)

    def _diagnose(self, scores: Scores, negatives: Negatives, tau_plus: float | Tensor, bins: int) -> Diagnosis:
        with torch.enable_grad():  # the gradient by the scores shows which negatives are attracted
            scores = scores.changed(
                positives=scores.positives.detach(), candidates=scores.candidates.detach().requires_grad_()
            )
            return diagnose(scores, negatives.log_weights(scores), tau_plus=tau_plus, bins=bins)

    def _of_all_anchors(self) -> bool:
        """True if every rank must compute the loss of all anchors, not only of its own."""
        whole = any(factor.batch_scope for factor in self._current.factors)
        return whole or self.generate is not None or self.reduction == "pairs"

    def _mean(self, loss: Tensor, pairing: Pairing) -> Tensor:
        """Average the loss over the anchors of all ranks."""
        if not self.gather or self.reduction == "none" or self._of_all_anchors():
            return loss
        return mean_over_ranks(loss, len(pairing))

    def temperature_now(self) -> float | Tensor:
        """Return the temperature at the current step."""
        if isinstance(self.temperature, (float, Tensor)) or not isinstance(self.temperature, Schedule):
            return self.temperature
        return float(self.temperature) if self._temperature is None else self._temperature  # raises if not set

    def _tau_plus(self) -> float | Tensor:
        """Return the tau_plus of the objective at the current step; 0 if it has none."""
        tau_plus: float | Tensor = getattr(self._objective, "tau_plus", 0.0)
        return tau_plus

    def _warn(self, found: RowResult, num_candidates: int) -> None:
        """Warn about anchors without negatives and floored terms at calls 1, 2, 4, 8 ...; a check waits for the GPU.

        An empty pool is not reported, because every queue is empty at the start.
        """
        self._calls += 1
        if self._calls & (self._calls - 1) or not num_candidates:
            return
        row, tau_plus = found.row, self._tau_plus()
        check_temperature("ContrastiveLoss", torch.as_tensor(row.temperature).cpu())
        empty = row.support.detach() == 0
        if self._objective.needs_negatives:  # otherwise the positives are contrasted with each other
            _warn_of_empty(empty.float().mean().item(), self._current)
        if not corrects(tau_plus) or "log_mean" not in row.statistics:
            return
        with torch.no_grad():
            real = ~empty if found.real is None else found.real & ~empty
            objective = self._objective
            by = objective.correction(found.positives, row) if isinstance(objective, InfoNCE) else found.positives
            floored = debiased(row.log_mean, by, tau_plus, row.temperature)[1] & real
            share = floored.sum() / real.expand_as(floored).sum().clamp(min=1)
        _warn_of_floor(float(share), tau_plus, row.temperature)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``, and the path of the last call."""
        shown = f"{self.negatives!r}, temperature={self.temperature}, tau_plus={self.tau_plus}, views={self.views!r}"
        return shown if self.path is None else f"{shown}, path={str(self.path)!r}"

    def get_extra_state(self) -> Tensor:
        """Return step, total, calls, then value and last metric of each adaptive schedule; NaN stands for None."""
        numbers = [self.step, self.total, self._calls]
        for schedule in self._adaptive():
            numbers += [schedule.state_dict()["value"], schedule.state_dict()["last"]]
        return torch.tensor([math.nan if each is None else each for each in numbers], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore what ``get_extra_state`` returned."""
        numbers = [None if math.isnan(each) else each for each in state.tolist()]
        step, total, self._calls = (each if each is None else int(each) for each in numbers[:3])  # type: ignore[assignment]
        for schedule, value, last in zip(self._adaptive(), numbers[3::2], numbers[4::2], strict=True):
            schedule.load_state_dict({"value": value, "last": last})
        if step is not None:
            self.set_progress(step, total)

    def _adaptive(self) -> list[adaptive]:
        schedules = [*self.negatives.schedules(), self.temperature, *self.objective.schedules()]
        return [schedule for schedule in schedules if isinstance(schedule, adaptive)]


def _left(scores: Scores, mask: Mask | None) -> Scores:
    """Restrict the scores to the candidates that the mask keeps."""
    return scores if mask is None else scores.narrowed(mask.allows(scores.tile()))


def check_per_anchor(holders: Iterable[Any], instances: int, anchors: int) -> None:
    """Raise if a field holds one number per instance although each view of an instance is an anchor.

    Args:
        holders: Distributions and objectives.
        instances: Number of instances in the batch.
        anchors: Number of anchors.
    """
    if instances == anchors or instances == 1:
        return
    for holder in holders:
        for name, tensor in tensor_fields(holder).items():
            if is_per_anchor(tensor, name, instances):
                what = f"one number for each of the {anchors} anchors (the views, concatenated)"
                fix = f"use torch.cat([{name}] * {anchors // instances})"
                raise ArgumentError("ContrastiveLoss", what, f"{name}={tuple(tensor.shape)}", fix)


def _warn_of_empty(share: float, negatives: Negatives) -> None:
    """Warn if more than half of the anchors have no negative."""
    if share > 0.5:
        advice = {
            factor.if_empty: None for factor in negatives.factors if factor.removes
        }  # a dict removes duplicates and keeps the order
        warn_once(
            f"empty:{negatives!r}",
            f"{share:.0%} of the anchors have no negative under {negatives!r} and a loss of 0. "
            f"{' '.join(advice) or Negatives.if_empty}",
        )


def _warn_of_floor(share: float, tau_plus: float | Tensor, temperature: float | Tensor) -> None:
    """Warn if more than half of the debiased terms are at their floor."""
    if share > 0.5:
        number, size = (torch.as_tensor(value).double().mean().item() for value in (tau_plus, temperature))
        warn_once(
            f"clamped:{number}:{size}",
            f"{share:.0%} of the debiased terms are at their floor, where negatives have no gradient: "
            f"tau_plus={number:.3g} is too large for temperature={size:.3g}. "
            "Lower tau_plus or raise the temperature.",
        )
