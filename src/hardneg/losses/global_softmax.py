"""Losses over the whole data set that are computed from small batches: SogCLR and EMC2.

Each call returns a surrogate, whose gradient is that of the global loss and whose value is not meaningful; the real
loss and its diagnostics are in ``last``. Ids are positions in the data set. In eval mode no state is updated. Both
losses combine a function of ``core.objectives`` (``surrogate``) with a module of ``state`` (``Partition``, ``Chain``).

SogCLR launches twice and EMC2 five times as many small kernels as SimCLR, which takes a host longer than the GPU needs
to run them. ``Replayed`` runs such a loss as one CUDA graph: value, gradient and update of its state in one launch. The
recipes wrap their losses in it.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, argument_error, check_among
from hardneg.core.objectives import info_nce, reduce, surrogate
from hardneg.core.scoring import cross_views, score, two_views
from hardneg.core.tensors import first_derivative_only, outside_graphs, typed_as
from hardneg.core.types import NEVER, Keys, LogWeights, Scores, View
from hardneg.core.views import Pools
from hardneg.kernels.cuda_graphs import capture
from hardneg.negatives import Negatives, Uniform
from hardneg.state.chain import Chain, Walk
from hardneg.state.partition import Partition
from hardneg.state.pools import Bank
from hardneg.state.stateful import Stateful

EncodeViews = Callable[[Annotated[Tensor, "k"], Annotated[Tensor, "k"]], Annotated[Tensor, "k d"]]
"""Function of (ids, views) that returns the vectors of these items at the current parameters."""


class SogCLR(nn.Module):
    """The global contrastive loss through a running normaliser per instance (Yuan et al. 2022).

    The scale is that of the authors: the two directions are added and nothing is divided by the temperature, so the
    gradient is 2 * temperature times that of the mean loss over 2b anchors. Nothing is drawn or encoded: ``seed`` and
    ``encode`` exist so that SogCLR and EMC2 are interchangeable.

    Args:
        num_instances: Size of the data set.
        temperature: Divides the similarities.
        gamma: Share of the new value in the running normaliser.
        views: ``"two"``: one encoder, all views are anchors and candidates. ``"cross"``: two encoders, z1 against z2 in
            both directions, each with its own normaliser of e^(s_ij - s_ii). Its directions are averaged, and each is a
            mean over the candidates (LibAUC's GCLoss_v2 sums over them, which is b - 1 times more).
        seed: Not used.
        divide_by_temperature: Whether to return the scale of NT-Xent instead of the authors'.
        negatives: The distribution of negatives.
        documents: Document of each instance, [num_instances]; instances of one document are never negatives of each
            other.

    Example:
        >>> z1, z2 = torch.nn.functional.normalize(torch.randn(2, 8, 4), dim=-1)
        >>> loss = SogCLR(num_instances=100)
        >>> loss(z1, z2, ids=torch.arange(8)).ndim, sorted(loss.last)
        (0, ['real_loss', 'running_loss'])
    """

    last: dict[str, Tensor]
    documents: Tensor | None

    def __init__(
        self,
        num_instances: int,
        temperature: float = 0.1,
        gamma: float = 0.9,
        *,
        views: Literal["two", "cross"] = "two",
        seed: int = 0,
        divide_by_temperature: bool = False,
        negatives: Negatives = Uniform(),
        documents: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("documents", documents, persistent=False)
        check_among("SogCLR", "views", views, ("two", "cross"))
        self.temperature, self.negatives = temperature, negatives
        self.divide_by_temperature, self.views = divide_by_temperature, views
        self.partitions = nn.ModuleList([Partition(num_instances, gamma) for _ in range(1 if views == "two" else 2)])
        self.last = {}

    def forward(
        self,
        z1: View,
        z2: View,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        encode: EncodeViews | None = None,
    ) -> Tensor:
        """Compute the surrogate loss and update the normalisers.

        Args:
            z1: First view, [b, d], unit vectors.
            z2: Second view, [b, d], unit vectors.
            ids: Positions in the data set, [b].
            labels: Labels [b], for distributions that read them.
            encode: Not used.

        Raises:
            ArgumentError: If ``ids`` is missing.
        """
        if self.views == "cross":
            both = [_relative(cross_views(*pair, self.temperature, ids, labels)) for pair in ((z1, z2), (z2, z1))]
        else:
            both = [two_views(z1, z2, self.temperature, ids, labels)]
        both = [_of_other_documents(scores, self.documents) for scores in both]
        parts = [self._one(*part, ids) for part in zip(both, self.partitions, strict=True)]
        losses, real, running = (torch.stack(values).mean() for values in zip(*parts, strict=True))
        self.last = {"real_loss": real, "running_loss": running}
        scale = 1.0 if self.views == "cross" else 2.0
        return losses * (1.0 if self.divide_by_temperature else scale * self.temperature)

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> Any:
            """Return what ``forward`` returns."""

    def _one(self, scores: Scores, partition: nn.Module, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if ids is None:
            raise ArgumentError("SogCLR", "the ids of the rows", "ids=None", "pass the positions in the data set")
        log_w = self.negatives.log_weights(scores)
        log_norm = partition(scores, log_w)
        losses = surrogate(scores, _mean_one(log_w) + scores.candidates.detach(), log_norm=log_norm)
        some = (log_w != NEVER).any(-1, keepdim=True)
        running = torch.where(some, log_norm[:, None] - scores.positives.detach(), 0.0)
        return reduce(losses, scores), _real(scores, log_w), running.mean()


def _of_other_documents(scores: Scores, documents: Tensor | None) -> Scores:
    """Leave out the candidates that have the document of the anchor."""
    if documents is None:
        return scores
    anchors, candidates = scores.anchor_tags.ids, scores.candidate_tags.ids
    assert anchors is not None
    assert candidates is not None
    return scores.narrowed((documents[anchors][:, None] != documents[candidates.clamp(min=0)]) | (candidates < 0))


def _relative(scores: Scores) -> Scores:
    """Replace s_ij with s_ij - s_ii: here the normaliser also covers the positive."""
    return replace(scores, candidates=scores.candidates - scores.positives, positives=scores.positives * 0.0)


def _mean_one(log_w: LogWeights) -> LogWeights:
    """Scale the weights to mean 1 over their support, as the normaliser expects them."""
    supported = log_w != NEVER
    some = supported.any(-1, keepdim=True)
    mass = torch.logsumexp(torch.where(some, log_w.detach(), 0.0), dim=-1, keepdim=True)
    return log_w.detach() - mass + supported.sum(-1, keepdim=True).clamp(min=1).to(log_w.dtype).log()


def _real(scores: Scores, log_w: Tensor) -> Tensor:
    """Compute the loss of this batch without the positive in the denominator, as in the global loss."""
    with torch.no_grad():
        return reduce(info_nce(scores, log_w, positives_in_denominator="none"), scores)


class EMC2(nn.Module):
    """The global contrastive loss through Markov chains: the mean over the chains' visits replaces the softmax.

    ``pool`` at the call replaces the batch as the source of candidates; with the whole data set in it the chains are
    exact.

    Args:
        num_instances: Size of the data set.
        temperature: Divides the similarities.
        burn_in: Share of the steps that are not counted.
        views: ``"two"``: one encoder and two augmentations, 2b anchors against both views of the others (the paper's
            Fig. 2, but with a chain per row, where the paper has one state per image). ``"cross"``: two encoders, z1
            against z2.
        proposals: ``"batch"``: from the candidates of the batch and the chain's own state, which needs no encoding
            except that of the state. ``"data set"``: from all instances (Algorithm 1 as printed), which needs
            ``encode`` or ``remember``.
        remember: A Bank in which the loss keeps the embeddings of z2 (and, in a copy, of z1 if views="two"), so that a
            state outside the batch still repels with its last embedding. ``encode(ids, views)`` at the call does the
            same with the current parameters and a gradient; a view is 0 for z1 and 1 for z2, and always 1 with two
            encoders. With neither, such a state is compared by its last score, and its visits count in the normaliser
            only; ``last["outside"]`` is their share.
        num_steps: Steps per batch; by default the number of candidates.
        seed: Seed of the chains.
        documents: Document of each instance, [num_instances]; instances of one document are never negatives of each
            other.

    Example:
        >>> z1, z2 = torch.nn.functional.normalize(torch.randn(2, 8, 4), dim=-1)
        >>> loss = EMC2(num_instances=100)
        >>> loss(z1, z2, ids=torch.arange(8)).ndim, sorted(loss.last)
        (0, ['acceptance', 'age', 'outside', 'real_loss'])
    """

    last: dict[str, Tensor]
    documents: Tensor | None

    def __init__(
        self,
        num_instances: int,
        temperature: float = 0.07,
        burn_in: float = 0.5,
        *,
        views: Literal["two", "cross"] = "two",
        proposals: str = "batch",
        remember: Bank | None = None,
        num_steps: int | None = None,
        seed: int = 0,
        documents: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("documents", documents, persistent=False)
        check_among("EMC2", "views", views, ("two", "cross"))
        if proposals not in ("batch", "data set"):
            raise argument_error("EMC2", "proposals 'batch' or 'data set'", "proposals", proposals)
        self.temperature, self.views, self.proposals, self.num_steps = temperature, views, proposals, num_steps
        self.chain = Chain(num_instances, burn_in, num_views=2 if views == "two" else 1, seed=seed)
        self.remember = remember
        self.remember_first = deepcopy(remember) if views == "two" else None
        self.last = {}

    def forward(
        self,
        z1: View,
        z2: View,
        ids: Tensor | None = None,
        pool: Pools | None = None,
        encode: EncodeViews | None = None,
    ) -> Tensor:
        """Compute the surrogate loss and advance the chains.

        Args:
            z1: First view, [b, d], unit vectors.
            z2: Second view, [b, d], unit vectors.
            ids: Positions in the data set, [b].
            pool: Candidates instead of the batch.
            encode: Function of (ids, views) that encodes states with a gradient.

        Raises:
            ArgumentError: If ``ids`` is missing, or embeddings for ``proposals="data set"``.
        """
        ids = Keys(z1, ids).ids  # a list becomes a tensor
        if ids is None:
            raise ArgumentError("EMC2", "the ids of the rows", "ids=None", "pass the positions in the data set")
        anchors, positives, rows = z1, z2, ids
        if self.views == "two":
            anchors, positives, rows = torch.cat([z1, z2]), torch.cat([z2, z1]), torch.cat([ids, ids])
        slots = torch.cat([self.chain.slots(ids, view) for view in range(self.chain.num_views)])
        if pool is not None:
            scores = score(Keys(anchors, rows), positives, pool, self.temperature)
            walk = self.chain.walk(scores, slots, num_steps=self.num_steps)
        elif self.proposals == "batch":
            scores, walk = self._from_batch(z1, z2, ids, slots, encode)
        else:
            scores, walk = self._from_data_set(Keys(anchors, rows), positives, slots, encode)
        losses = surrogate(scores, walk.log_visits, log_norm=walk.log_norm)
        real = scores
        if "state" in scores.source_names:  # the real loss is that of the proposals
            real = scores.narrowed((scores.source != scores.source_names.index("state"))[None])
        self.last = {"real_loss": _real(real, Uniform().log_weights(real)), **walk.summary()}
        if self.training:
            for bank, z in ((self.remember_first, z1), (self.remember, z2)):
                if bank is not None:
                    bank.push(Keys(z.detach(), ids))
        return reduce(losses, scores)

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> Any:
            """Return what ``forward`` returns."""

    def _from_batch(
        self, z1: View, z2: View, ids: Tensor, slots: Tensor, encode: EncodeViews | None
    ) -> tuple[Scores, Walk]:
        """Walk over the batch and the chain's state in each view, which keeps the softmax of the data set.

        ``state.chain`` explains why the state must be among the proposals.
        """
        num_views = self.chain.num_views
        each = torch.arange(num_views, device=ids.device)
        states = self.chain.states_of(slots)
        states = torch.where(_among(states, ids), -1, states)[:, None].expand(-1, num_views)
        own = self._embedded(states, each.expand_as(states), encode, "state", z2)
        build = two_views if self.views == "two" else cross_views
        scores = build(z1, z2, self.temperature, ids, extra=() if own is None else own)
        views, steps = each.repeat_interleave(len(ids))[None], self.num_steps
        if own is not None:
            assert own.ids is not None
            views = torch.cat([views, each[None]], dim=1)
            steps = int(scores.valid[:, :-num_views].sum(-1).max()) if steps is None else steps
            scores = scores.narrowed(_and_known(scores, own.ids))
        scores = _of_other_documents(scores, self.documents)
        return scores, self.chain.walk(scores, slots, views=views, num_steps=steps)

    def _from_data_set(
        self, anchors: Keys, positives: Tensor, slots: Tensor, encode: EncodeViews | None
    ) -> tuple[Scores, Walk]:
        """Walk over proposals of each chain's own, uniform over the views of all other instances (Algorithm 1)."""
        assert anchors.ids is not None
        rows, chain = len(anchors), self.chain
        steps = max(rows - chain.num_views, 1) if self.num_steps is None else self.num_steps
        generator = chain.generator(stream=2)
        others = torch.randint(max(chain.num_instances - 1, 1), (rows, steps), generator=generator).to(slots.device)
        others = others + (others >= anchors.ids[:, None])  # steps over the anchor itself
        others = torch.where(others < chain.num_instances, others, -1)
        views = torch.randint(chain.num_views, (rows, steps), generator=generator).to(slots.device)
        state, view = chain.states_of(slots)[:, None], chain.views_of(slots)[:, None]
        proposed = self._embedded(others, views, encode, "data set", positives)
        if proposed is None or proposed.ids is None or not bool((proposed.ids >= 0).any()):
            fix = "pass encode= at the call, or remember=Bank(...)"
            raise ArgumentError("EMC2", "embeddings of the data set for proposals='data set'", "none", fix)
        own = self._embedded(state, view, encode, "state", positives)
        parts = [proposed] if own is None else [proposed, own]
        known = torch.cat([part.ids for part in parts], dim=1)  # type: ignore[misc]
        scores = score(anchors, positives, parts, self.temperature)
        scores = _of_other_documents(scores.narrowed(_and_known(scores, known)), self.documents)
        order = torch.arange(steps, device=slots.device).expand(rows, -1)
        order = torch.where(scores.valid[:, :steps], order, -1)
        views = torch.cat([views, view], dim=1)[:, : known.shape[1]]
        return scores, chain.walk(scores, slots, views=views, draws=(order, chain.log_uniforms(order)))

    # Compiled, the backward pass would read the bank again, which has changed by then.
    @outside_graphs
    def _embedded(self, ids: Tensor, views: Tensor, encode: EncodeViews | None, source: str, like: View) -> Keys | None:
        """Return these instances as private candidates of their rows, [b, m, d], with id -1 where one is unknown.

        An unknown one holds a row of the batch and is masked: it must be a unit vector to pass the checks. None if
        there is nothing to embed them with.
        """
        filled = like[:1].detach()
        if encode is not None:
            known = ids >= 0
            side = views if self.views == "two" else torch.ones_like(views)
            pairs, which = torch.unique(torch.stack([ids, side], dim=-1)[known], dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
            if not len(pairs):
                return None
            found = encode(pairs[:, 0], pairs[:, 1])[which]
            vectors = filled.to(found).expand(*known.shape, -1).index_put((known,), found)
        elif self.remember is not None:
            vectors, known = self.remember.vectors_of(ids)
            if self.remember_first is not None:
                vectors = torch.where(views[..., None] == 1, vectors, self.remember_first.vectors_of(ids)[0])
            vectors = torch.where(known[..., None], vectors, filled.to(vectors))
        else:
            return None
        return Keys(vectors, torch.where(known, ids, -1), source=source)


def _among(values: Tensor, others: Annotated[Tensor, "b"]) -> Tensor:
    """Compute torch.isin, which would wait for the GPU, by a binary search."""
    if not len(others):
        return torch.zeros_like(values, dtype=torch.bool)
    in_order = others.sort().values
    place = torch.searchsorted(in_order, values).clamp(max=len(others) - 1)
    return in_order[place] == values


def _and_known(scores: Scores, ids: Annotated[Tensor, "b m"]) -> Tensor:
    """Return a mask of the candidates whose last m columns have these ids; False where an id is negative."""
    return torch.nn.functional.pad(ids >= 0, (scores.candidates.shape[1] - ids.shape[1], 0), value=True)


WARMUP_CALLS = 2
"""Calls before a capture: they compile, and load what cannot be loaded during a capture."""
DEVICE = "cuda"
MAX_SHAPES = 4
"""Largest number of batch shapes that are captured; batches of further shapes run without a graph."""


class Replayed:
    """Calls ``loss(z1, z2, *others)`` through a CUDA graph on a GPU, and directly elsewhere.

    All state of the loss must be in its buffers and its diagnostics in ``last``. Everything else that it depends on,
    such as attributes with numbers, must be the same for all batches of one shape. Calls 1, 2, 4, 8 ... run without the
    graph, to check what a graph cannot check: the ids.

    Args:
        loss: The loss to wrap.
    """

    def __init__(self, loss: nn.Module) -> None:
        self.loss: Any = loss
        self._steps: dict[tuple[Any, ...], _Step] = {}

    def __call__(self, z1: Tensor, z2: Tensor, *others: Tensor | None) -> Tensor:
        """Compute the loss of two views; further tensors, such as ids, are passed on."""
        inputs, buffers = (z1, z2, *others), list(self.loss.buffers())
        learns = z1.requires_grad and z2.requires_grad and torch.is_grad_enabled()
        if not learns or z1.device.type != DEVICE:
            return self._plain(*inputs)
        kinds = [None if each is None else (each.shape, each.dtype, each.device) for each in inputs]
        places = [buffer.data_ptr() for buffer in buffers]  # a buffer that moved (by ``to``) needs another graph
        key = (*kinds, *places, self.loss.training, torch.is_autocast_enabled(z1.device.type))
        step = self._steps.get(key)
        if step is None:
            if len(self._steps) >= MAX_SHAPES:
                return self._plain(*inputs)
            step = self._steps[key] = _Step(self.loss, buffers, inputs)
        value, *last = _Replay.apply(step, *inputs)  # type: ignore[no-untyped-call]
        self.loss.last = dict(zip(step.names, last, strict=True))
        found: Tensor = value
        return found

    def _plain(self, *inputs: Tensor | None) -> Tensor:
        value: Tensor = self.loss(*inputs)
        return value


class _Found(NamedTuple):
    numbers: list[Tensor]
    """The value, and the diagnostics in ``last``."""
    gradients: list[Tensor]
    """Gradients of the value by the two views."""


class _Step:
    """One captured step for batches of one shape, with inputs at a fixed place in memory."""

    def __init__(self, loss: Any, buffers: list[Tensor], inputs: tuple[Tensor | None, ...]) -> None:
        self.loss, self.buffers = loss, buffers
        self.inputs = [None if each is None else torch.empty_like(each) for each in inputs]
        self.names: list[str] = []
        self.calls = 0
        self.graph: Any = None
        self.captured = _Found([], [])

    def __call__(self, inputs: tuple[Tensor | None, ...]) -> _Found:
        for mine, given in zip(self.inputs, inputs, strict=True):
            if mine is not None and given is not None:
                mine.copy_(given)
        self.calls += 1
        if self.calls == WARMUP_CALLS + 1:
            self.graph = capture(self._capture, self.buffers[0].device)
        if self.graph is not None and self.calls & (self.calls - 1):
            self.graph.replay()
            found = _Found(*([each.clone() for each in part] for part in self.captured))
        else:
            for each in self.loss.modules():
                if isinstance(each, Stateful):
                    each.check_next()
            found = self._work()
        if (
            self.calls > WARMUP_CALLS
        ):  # values cached from buffers (see ``Stateful``) must notice that the graph changed them
            torch.autograd.graph.increment_version(self.buffers)
        return found

    def _capture(self) -> None:
        self.captured = self._work()

    def _work(self) -> _Found:
        with torch.enable_grad():
            views = [each.detach().requires_grad_() for each in self.inputs[:2] if each is not None]
            value: Tensor = self.loss(*views, *self.inputs[2:])
            gradients = torch.autograd.grad(value, views)
        self.names = list(self.loss.last)
        return _Found([value.detach(), *self.loss.last.values()], list(gradients))


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: _Step, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        numbers, gradients = step(inputs)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(*numbers[1:])
        return tuple(numbers)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, upstream: Tensor, *rest: None) -> tuple[Tensor | None, ...]:
        gradients = (upstream * gradient for gradient in ctx.saved_tensors)
        return None, *gradients, *(None for _ in range(len(ctx.needs_input_grad) - 3))
