"""A loss that replaces MultipleNegativesRankingLoss of sentence-transformers and accepts any negatives.

The columns are anchor, positive, negative_1 ...; two lines of a script change::

    from hardneg.integrations.sentence_transformers import NegativesLoss

    loss = NegativesLoss(model, 'Tilt(1.0, source="mined")', temperature=0.05)  # instead of scale=20.0

A forward pass embeds the columns, reads the ids from ``labels`` (ids.py), builds pairings (pairings.py) and hands them
to ``ContrastiveLoss.of``. ``CachedNegativesLoss`` is for batches whose activations do not fit in memory (GradCache, Gao
et al. 2021): it embeds the batch in mini-batches without activations, computes the gradient of the loss with respect to
the embeddings, and carries it to the weights in a second forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from hardneg.core.diagnose import Diagnosis
from hardneg.core.distributed import gather
from hardneg.core.errors import ArgumentError, argument_error, check_kind, warn_once
from hardneg.core.objectives import NumNegatives
from hardneg.core.objectives.base import TauPlus
from hardneg.core.pairing import Pairing, not_infinite
from hardneg.core.tensors import unit, widened
from hardneg.core.types import Keys
from hardneg.integrations.sentence_transformers.ids import BatchRows, read_rows
from hardneg.integrations.sentence_transformers.pairings import (
    BuiltPairing,
    EmbeddedColumns,
    GuideModel,
    PairingBuilder,
)
from hardneg.kernels.engine import Impl
from hardneg.losses.contrastive import ContrastiveLoss, Temperature
from hardneg.losses.global_softmax import EMC2, SogCLR
from hardneg.losses.grad_cache import GradCache
from hardneg.negatives import Negatives, Uniform
from hardneg.negatives.grammar import AnyObjective
from hardneg.state.pools import Queue
from hardneg.state.stateful import check_count

_global = (SogCLR, EMC2)


class NegativesLoss(nn.Module):
    """Contrastive loss over the columns anchor, positive, negative_1 ... with any negatives.

    With ``Uniform()`` it equals MultipleNegativesRankingLoss in value and gradient.

    An anchor has two sources of candidates: "mined", its own explicit negatives, and "batch", the positives and
    negatives of all other rows. ``From("mined")`` keeps only the first, and ``Tilt(5.0, source="mined")`` reweights
    them; a data set without explicit negatives has no candidates of that source. With the ids of ``with_ids``, a
    document that is a positive of the anchor in any row of the batch is never its negative, and missing negatives
    (``""``) are ignored. Without ids, a column ``label`` of whole numbers is the group of an anchor and its positive,
    for ``OtherLabel()``.

    Args:
        model: A SentenceTransformer or SparseEncoder.
        negatives: Distribution over negatives, as an object or in the grammar.
        temperature: 1 / ``scale`` of sentence-transformers; a number, a schedule or a learnt temperature. Schedules
            need the callback ``HardBatches`` or ``LossCallback``.
        tau_plus: Assumed false-negative rate, as in ``ContrastiveLoss``.
        num_negatives: As in ``ContrastiveLoss``.
        objective: As in ``ContrastiveLoss``; or ``SogCLR(n, views="cross")`` or ``EMC2(n, views="cross")``, which need
            ids and exactly two columns, and use their own temperature.
        similarity: ``"cosine"`` or ``"dot"``.
        positives: ``"row"``: each anchor has the positive of its row; ``"group"``: the positives of all rows of its
            group.
        queue: Keeps documents of earlier batches as candidates of the source "queue". Positives enter it after the
            loss.
        guide: Model, or its path, that judges pairs for ``by="guide"``, as in ``BelowPositive(absolute=0.0,
            by="guide")``.
        gather_across_devices: Use the documents of all ranks as candidates.
        directions: As in MultipleNegativesRankingLoss, plus two of GISTEmbedLoss: ``"anchor_to_anchor"`` is
            ``"query_to_query"`` within a rank, and ``"positive_to_positive"`` is ``"doc_to_doc"`` without explicit
            negatives.
        partition_mode: As in MultipleNegativesRankingLoss; the positive counts once in the denominator.
        impl: Backend, as in ``ContrastiveLoss``.

    Raises:
        ArgumentError: The model is a CrossEncoder, or options cannot be combined.
    """

    def __init__(
        self,
        model: nn.Module,
        negatives: Negatives | str = Uniform(),
        temperature: Temperature = 0.05,
        *,
        tau_plus: TauPlus = 0.0,
        num_negatives: NumNegatives = "support",
        objective: AnyObjective | SogCLR | EMC2 = "info_nce",
        similarity: Literal["cosine", "dot"] = "cosine",
        positives: Literal["row", "group"] = "row",
        queue: Queue | None = None,
        guide: Any = None,
        gather_across_devices: bool = False,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        _check_model(model)
        for name, value, known in (
            ("similarity", similarity, ("cosine", "dot")),
            ("positives", positives, ("row", "group")),
            ("partition_mode", partition_mode, ("joint", "per_direction")),
        ):
            if value not in known:
                raise argument_error("NegativesLoss", f"{name} {known[0]!r} or {known[1]!r}", name, value)
        if queue is not None:
            check_kind("NegativesLoss", "queue", queue, Queue, "a Queue, such as hn.Queue(4096, dim)")
        if guide is not None and queue is not None:
            what = "queue=None with a guide, because the guide has not embedded the documents in the queue"
            raise argument_error("NegativesLoss", what, "queue", queue)
        self.model, self.queue, self.similarity = model, queue, similarity
        self.guide = None if guide is None else GuideModel(guide, model)
        self.builder = PairingBuilder(
            tuple(directions), partition_mode == "joint", gather_across_devices, positives == "group"
        )
        self.whole_data = objective if isinstance(objective, _global) else None
        if self.whole_data is not None and (queue is not None or guide is not None or self.whole_data.views != "cross"):
            what = f"{type(objective).__name__}(..., views='cross') without queue and guide"
            raise argument_error("NegativesLoss", what, "objective", objective)
        usual = self.builder == PairingBuilder() and repr(negatives) in ("'Uniform()'", "Uniform()") and tau_plus == 0.0
        if self.whole_data is not None and not usual:
            what = "the defaults of negatives, positives, directions, tau_plus and gather_across_devices"
            raise argument_error("NegativesLoss", f"{what} with an objective over all data", "objective", objective)
        self.contrast = ContrastiveLoss(
            negatives, temperature, tau_plus, "pool", num_negatives=num_negatives, impl=impl,
            objective="info_nce" if isinstance(objective, _global) else objective,
        )  # fmt: skip
        if any(getattr(factor, "source", None) == "mined" for factor in self.negatives.factors):
            self.builder = replace(self.builder, by_source=True)
        self.watch = False
        """Set to True to keep the next training batch, detached, for ``diagnosis()``."""
        self._seen: list[BuiltPairing] = []

    @property
    def negatives(self) -> Negatives:
        """The distribution over negatives, schedules included."""
        return self.contrast.negatives

    def set_progress(self, step: int, total: int | None = None) -> None:
        """Set the schedules to their values at ``step`` of ``total`` steps."""
        self.contrast.set_progress(step, total)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Embed the columns and return the loss.

        Args:
            sentence_features: Tokens of each column: anchor, positive, negatives ...
            labels: [b, 1 + columns], the ids of ``with_ids``; [b], groups; or None.
        """
        features = list(sentence_features)
        judged = None if self.guide is None else self.guide(features)
        return self.compute_loss_from_embeddings(_embedded(self.model, features), labels, judged)

    def compute_loss_from_embeddings(
        self,
        embeddings: list[Annotated[Tensor, "b d"]],
        labels: Tensor | None = None,
        guide: EmbeddedColumns | None = None,
    ) -> Tensor:
        """Return the loss of columns that are already embedded.

        Args:
            embeddings: EmbeddedColumns anchor, positive, negatives ..., each [b, d].
            labels: As in ``forward``.
            guide: The same columns embedded by the guide, or None.

        Raises:
            ArgumentError: There are fewer than two columns, ids are missing, or ``From("mined")`` has no explicit
                negatives.
        """
        if len(embeddings) < 2:
            raise ArgumentError("NegativesLoss", "columns anchor, positive, ...", f"{len(embeddings)} columns")
        columns, rows = self._columns(embeddings), read_rows(labels, len(embeddings), embeddings[0])
        if self.whole_data is not None:
            return self._of_whole_data(columns, rows)
        training = torch.is_grad_enabled() and self.training
        if training and len(columns) == 2 and any(each.only_source == "mined" for each in self.negatives.factors):
            fix = 'add a column of negatives, from "hardneg mine" or FreshNegatives, or train without From("mined")'
            raise ArgumentError("NegativesLoss", 'explicit negatives for From("mined")', "two columns", fix)
        built = self.pairings(columns, rows, guide)
        losses = [self.contrast.of(pairing, first) for pairing, first in built]
        if self.watch and training:
            self._seen, self.watch = [BuiltPairing(_detached(pairing), first) for pairing, first in built], False
        if self.queue is not None and training and columns[1].shape[1] == self.queue.dim:
            self._push(columns[1], rows)
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def pairings(
        self, columns: EmbeddedColumns, rows: BatchRows, guide: EmbeddedColumns | None = None
    ) -> list[BuiltPairing]:
        """Build anchors, positives and candidates from a batch.

        Args:
            columns: Embedded columns, each [b, d], normalised for cosine similarity.
            rows: Ids and groups of the batch.
            guide: The columns embedded by the guide, or None.

        Returns:
            One pairing per direction, or one for all directions with ``partition_mode="joint"``.
        """
        temperature = self.contrast.temperature_now()
        built = self.builder(columns, rows, temperature, self._queued(columns[0].shape[1], rows))
        if guide is None:
            return built
        judged = self.builder([unit(each) for each in guide], rows, 1.0, [])
        return [
            BuiltPairing(mine.pairing.guided(other.pairing), mine.first)
            for mine, other in zip(built, judged, strict=True)
        ]

    def diagnosis(self) -> Diagnosis | None:
        """Return hardness and false-negative rate of the watched batch, once; None if none was watched."""
        if not self._seen:
            return None
        (pairing, first), self._seen = self._seen[0], []
        return self.contrast.diagnosis_of(pairing, first)

    def _columns(self, embeddings: EmbeddedColumns) -> list[Tensor]:
        """Check and normalise all columns in one operation: for small tensors, a GPU is limited by kernel launches."""
        sizes = {each.shape[-1] for each in embeddings}
        if len(sizes) > 1:
            raise ArgumentError("NegativesLoss", "columns of one dimension", f"dimensions {sorted(sizes)}")
        every = torch.cat(list(embeddings))
        every = unit(every) if self.similarity == "cosine" else not_infinite(widened(every))
        return list(every.split_with_sizes([len(each) for each in embeddings]))

    def _queued(self, dim: int, rows: BatchRows) -> list[Keys]:
        """Return the documents in the queue as candidates, cut to ``dim`` features for MatryoshkaLoss."""
        if self.queue is None:
            return []
        if not rows.have_ids:
            warn_once(
                "queue.no_ids",
                "NegativesLoss has a queue but no ids: a document still in the queue when its row is used again "
                "becomes a negative of its own query. Use train = with_ids(train).",
            )
        keys = self.queue.keys()
        if dim == self.queue.dim:
            return [keys]
        if dim > self.queue.dim:
            fix = f"use queue=hn.Queue({self.queue.capacity}, {dim})"
            raise ArgumentError("NegativesLoss", "a queue of the model's dimension", f"dim={self.queue.dim}", fix)
        if not len(keys.vectors):
            warn_once(
                "queue.dim",
                f"NegativesLoss has embeddings of size {dim} and an empty queue of size {self.queue.dim}; only "
                f"embeddings of that size enter the queue. Unless this is a smaller size of a MatryoshkaLoss, use "
                f"queue=hn.Queue({self.queue.capacity}, {dim}).",
            )
        # MatryoshkaLoss calls smaller sizes after the full one, which has already pushed the documents of this step.
        before = self.queue.age() > 0
        parts = (keys.vectors[:, :dim], keys.ids, keys.labels)
        vectors, ids, labels = (None if part is None else part[before] for part in parts)
        assert vectors is not None
        return [Keys(unit(vectors) if self.similarity == "cosine" else vectors, ids, labels, source=keys.source)]

    @torch.no_grad()
    def _push(self, documents: Tensor, rows: BatchRows) -> None:
        """Add the positives of the batch to the queue, those of all ranks if documents are gathered."""
        assert self.queue is not None
        keys = Keys(documents.detach(), rows.documents[0] if rows.have_ids else None, rows.group)
        self.queue.push(gather(keys) if self.builder.across else keys)

    def _of_whole_data(self, columns: EmbeddedColumns, rows: BatchRows) -> Tensor:
        """Return the loss of an objective over the whole data set (SogCLR, EMC2)."""
        name = type(self.whole_data).__name__
        if rows.anchors is None:
            raise ArgumentError(name, "the ids of the anchors", "labels=None", "use train = with_ids(train)")
        if len(columns) != 2:
            raise ArgumentError(name, "two columns, anchor and positive", f"{len(columns)} columns")
        assert self.whole_data is not None
        self.whole_data.train(torch.is_grad_enabled() and self.training)
        loss: Tensor = self.whole_data(columns[0], columns[1], ids=rows.anchors)
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        """Return the options for the model card of sentence-transformers."""
        contrast = self.contrast
        objective = self.whole_data if self.whole_data is not None else contrast.objective
        return {
            "negatives": repr(self.negatives),
            **{name: _shown(getattr(contrast, name)) for name in ("temperature", "tau_plus", "num_negatives")},
            "objective": repr(objective),
            "similarity": self.similarity,
            "positives": "group" if self.builder.by_group else "row",
            "queue": None if self.queue is None else self.queue.capacity,
            "guide": None if self.guide is None else repr(self.guide),
            "gather_across_devices": self.builder.across,
            "directions": self.builder.directions,
            "partition_mode": "joint" if self.builder.joint else "per_direction",
        }


def _check_model(model: nn.Module) -> None:
    """Raise for a CrossEncoder, which scores pairs of texts and has no vectors."""
    if any(kind.__name__ == "CrossEncoder" for kind in type(model).__mro__):
        fix = (
            "use MultipleNegativesRankingLoss or LambdaLoss of sentence_transformers.cross_encoder.losses, with "
            "negatives of hardneg mine --format triplet or labeled-list"
        )
        raise ArgumentError("NegativesLoss", "a model that embeds each text separately", "a CrossEncoder", fix)


def _embedded(model: nn.Module, features: list[dict[str, Tensor]]) -> list[Tensor]:
    """Embed each column; from version 6 of the library, columns of documents share one forward pass if possible."""
    try:
        from sentence_transformers.base.losses.merged_forward import embed_columns
    except ImportError:
        return [model(each)["sentence_embedding"] for each in features]
    embeddings: list[Tensor] = embed_columns(model, features)
    return embeddings


def _shown(value: Any) -> Any:
    return value if isinstance(value, (int, float, str)) else repr(value)


def _detached(pairing: Pairing) -> Pairing:
    """Return the pairing without gradients."""

    def plain(keys: Keys) -> Keys:
        return keys.changed(vectors=keys.vectors.detach())

    return pairing.changed(
        anchors=plain(pairing.anchors),
        positives=plain(pairing.positives),
        candidates=tuple(map(plain, pairing.candidates)),
    )


ColumnTokens = dict[str, Any]


class CachedNegativesLoss(NegativesLoss):
    """NegativesLoss with the memory of ``mini_batch_size`` texts, at the cost of a second forward pass.

    With ``Uniform()`` it equals CachedMultipleNegativesRankingLoss.

    Args:
        model: A SentenceTransformer.
        *arguments: Positional arguments of ``NegativesLoss``.
        mini_batch_size: Texts whose activations are kept at a time.
        **options: Options of ``NegativesLoss``.

    Raises:
        ArgumentError: In the forward pass, if MatryoshkaLoss is too old to wrap a cached loss, or if tokens are
            flattened.
    """

    uses_gradient_cache = True
    """Makes MatryoshkaLoss wrap ``calculate_loss`` instead of the forward pass of the model."""

    def __init__(self, model: nn.Module, *arguments: Any, mini_batch_size: int = 32, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        self.mini_batch_size = check_count("CachedNegativesLoss", "mini_batch_size", mini_batch_size)
        self._judged: list[Tensor] | None = None

    def forward(self, sentence_features: Iterable[ColumnTokens], labels: Tensor | None = None) -> Tensor:
        """Embed the columns in mini-batches and return the loss.

        Args:
            sentence_features: Tokens of each column: anchor, positive, negatives ...
            labels: As in ``NegativesLoss.forward``.
        """
        columns = list(sentence_features)
        self._check(columns)
        if self.guide is not None:
            guide = self.guide
            with torch.no_grad():
                self._judged = [self._cached(lambda column: guide([column])[0], column) for column in columns]
        vectors = [self._cached(lambda column: self.model(column)["sentence_embedding"], each) for each in columns]
        if not torch.is_grad_enabled():
            return self.calculate_loss([[each] for each in vectors], labels)
        # The backward pass to the vectors runs here, as MatryoshkaLoss requires; autograd continues from the vectors.
        # In float32, because a GradScaler scales later, when a float16 gradient would already have underflowed to 0.
        leaves = [widened(each.detach()).requires_grad_() for each in vectors]
        learnt = [each for each in self.contrast.parameters() if each.requires_grad]
        before = [each.grad for each in learnt]
        for each in learnt:
            each.grad = None
        loss = self.calculate_loss([[each] for each in leaves], labels, with_backward=True)
        found = [each.grad for each in (*leaves, *learnt)]
        for each, gradient in zip(learnt, before, strict=True):
            each.grad = gradient
        for source, gradient in zip((*vectors, *learnt), found, strict=True):
            if gradient is not None:  # a term of value 0 that has the gradient of the leaf
                loss = loss + ((source - source.detach()) * gradient).sum()
        return loss

    def calculate_loss(
        self, reps: list[list[Annotated[Tensor, "m d"]]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Return the loss of embeddings that are cut into mini-batches.

        Args:
            reps: For each column the mini-batches, each [m, d].
            labels: As in ``NegativesLoss.forward``.
            with_backward: Also run the backward pass into ``reps``, and return the loss detached.
        """
        loss = self.compute_loss_from_embeddings([torch.cat(column) for column in reps], labels, self._judged)
        if with_backward:
            with torch.autocast(
                loss.device.type, enabled=False
            ):  # the backward pass would otherwise multiply in low precision
                loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach() if with_backward else loss

    def _cached(self, encode: Callable[[ColumnTokens], Tensor], column: ColumnTokens) -> Tensor:
        """Embed a column in mini-batches without keeping activations."""
        return GradCache(encode, self.mini_batch_size, self.model)(column)

    def _check(self, columns: list[ColumnTokens]) -> None:
        """Raise ArgumentError for an old MatryoshkaLoss and for tokens that cannot be cut into mini-batches."""
        if type(getattr(self.model, "forward", None)).__name__ == "ForwardDecorator":
            fix = "use NegativesLoss, or a newer sentence-transformers"
            raise ArgumentError(
                "CachedNegativesLoss", "a MatryoshkaLoss that supports cached losses", "an older one", fix
            )
        for name in ("offsets", "cu_seq_lens_q"):
            if any(name in column for column in columns):
                what = "padded tokens, one row per text"
                raise ArgumentError("CachedNegativesLoss", what, f"flattened tokens ({name})", "use NegativesLoss")
