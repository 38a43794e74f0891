"""Build the pairings of a batch of (anchor, positive, negative ...) texts.

`PairingBuilder` turns embedded columns and the ids of ids.py into ``Pairing`` objects, one per direction or one for
all, and `OtherRows` is the factor that excludes the positives of an anchor by id. loss.py calls both. `GuideModel`
embeds the same batch with a second model.

With several directions in one denominator (``partition_mode="joint"``), a row has two anchors, its query and its
document. Both are placed in one vector of twice the features, and candidates are zero in the half that they are not
compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hardneg.batching.refresh import eval_mode
from hardneg.core.distributed import gather
from hardneg.core.errors import argument_error, optional
from hardneg.core.pairing import Pairing, not_infinite
from hardneg.core.tensors import widened
from hardneg.core.tiles import Tile
from hardneg.core.types import Keys
from hardneg.integrations.sentence_transformers.ids import MOST, NONE, BatchRows
from hardneg.io.functions import loading_model
from hardneg.negatives.base import Mask

EmbeddedColumns = Sequence[Annotated[Tensor, "b d"]]
DIRECTIONS = (
    "query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc", "anchor_to_anchor", "positive_to_positive",
)  # fmt: skip
_owner, _partner, _turned = range(3)  # columns of the clusters of a key: row, partner document, query as candidate
_nobody = NONE + 1  # a document without an id; far below 0, so that pair numbers with it stay negative


@dataclass(frozen=True, repr=False, eq=False)
class OtherRows(Mask):
    """Mask that excludes missing texts and every document that is a positive of the anchor in any row of the batch.

    A (query, document) pair is one number, query id * MOST + document id, so that a pair is looked up by bisection.

    Attributes:
        queries: For each anchor, the number of its pair with document 0, [b, 1].
        known: Sorted numbers of all (query, document) pairs of the batch, [m].
        tagged: Keys carry clusters (row, partner, turned). They exclude documents of the anchor's own row, and mark
            queries that are candidates of the anchor's document.
    """

    queries: Annotated[Tensor, "b 1"]
    known: Annotated[Tensor, "m"]
    tagged: bool
    textual: ClassVar = False

    def allows(self, tile: Tile) -> Tensor:
        """Return True, [r, c], for candidates that may be negatives."""
        anchors, others = tile.anchor_tags, tile.candidate_tags
        assert others.ids is not None
        query, document, other = self.queries, others.ids, others.ids != NONE
        if self.tagged:
            assert anchors.clusters is not None
            assert others.clusters is not None
            other = other & (others.clusters[..., _owner] != anchors.clusters[:, None, _owner])
            turned = others.clusters[..., _turned] == 1  # a query that is a candidate of the anchor's document
            query = torch.where(turned, others.ids * MOST, query)
            document = torch.where(turned, anchors.clusters[:, None, _partner], document)
        number = query + document  # negative, unlike all pairs, for a document without an id
        unknown = torch.searchsorted(self.known, number) == torch.searchsorted(self.known, number, right=True)
        return other & unknown

    def reads(self) -> frozenset[str]:
        """Return the tags that the mask reads."""
        return frozenset({"ids", "clusters"} if self.tagged else {"ids"})

    def __repr__(self) -> str:
        return "OtherRows()"


class BuiltPairing(NamedTuple):
    """A pairing and the mask that excludes positives by id; without ids the mask is None and rows identify texts."""

    pairing: Pairing
    first: OtherRows | None


@dataclass(frozen=True)
class PairingBuilder:
    """Builds the pairings of a batch; the blocks of the denominator follow from the options of NegativesLoss.

    Attributes:
        directions: Blocks of similarities in the denominator; must contain "query_to_doc".
        joint: All blocks share one denominator (``partition_mode="joint"``).
        across: Candidates come from all ranks.
        by_group: Positives of all rows of a group are positives of each of its anchors.
        by_source: Negatives refer to the source "mined", so it exists even without explicit negatives.

    Raises:
        ArgumentError: The directions are unknown, or cannot be combined with the other options.
    """

    directions: tuple[str, ...] = ("query_to_doc",)
    joint: bool = True
    across: bool = False
    by_group: bool = False
    by_source: bool = False

    def __post_init__(self) -> None:
        known, given = set(DIRECTIONS), set(self.directions)
        if "query_to_doc" not in given or not given <= known:
            what = f"directions from {DIRECTIONS}, including query_to_doc"
            raise argument_error("NegativesLoss", what, "directions", self.directions)
        if not self.joint and not given <= {"query_to_doc", "doc_to_query"}:
            what = "partition_mode='joint' for blocks without the positive pair"
            raise argument_error("NegativesLoss", what, "directions", self.directions)
        if self.by_group and self.joint and len(given) > 1:
            what = "positives='row' with several directions in one denominator"
            raise argument_error("NegativesLoss", what, "directions", self.directions)

    def __call__(
        self, columns: EmbeddedColumns, rows: BatchRows, temperature: float | Tensor, more: Sequence[Keys]
    ) -> list[BuiltPairing]:
        """Return one pairing per direction, or one for all.

        Args:
            columns: Embedded columns anchor, positive, negatives ..., each [b, d].
            rows: Ids and groups of the batch.
            temperature: Temperature of the pairings.
            more: Documents from outside the batch, such as those of a queue.
        """
        tagged = self.across or len(columns) > 2 or len(self.directions) > 1
        batch = _Batch(columns, rows, self.across, tagged, self.by_group, self.by_source)
        built = [self._forward(batch, temperature, more)]
        if not self.joint and "doc_to_query" in self.directions:
            built.append(self._backward(batch, temperature))
        return built

    def _forward(self, batch: _Batch, temperature: float | Tensor, more: Sequence[Keys]) -> BuiltPairing:
        """Return the pairing with queries as anchors; joint blocks of other directions are added to its candidates."""
        parts = [*batch.documents, *batch.own, *map(batch.outside, more)]
        extra = set(self.directions) - {"query_to_doc"} if self.joint else set()
        if not extra:
            return self._build(batch, batch.anchors, batch.positives, tuple(parts), temperature)
        wide = bool(extra - {"query_to_query", "anchor_to_anchor"})
        if extra & {"query_to_query", "anchor_to_anchor"}:
            parts.append(batch.queries if "query_to_query" in extra else batch.own_queries)
        parts = [_padded(keys, wide, 0) for keys in parts]
        if "doc_to_query" in extra:
            parts.append(_padded(batch.turned, True, 1))
        if extra & {"doc_to_doc", "positive_to_positive"}:
            documents = batch.documents if "doc_to_doc" in extra else batch.documents[:1]
            parts += [_padded(keys.changed(source="documents"), True, 1) for keys in documents]
        anchors = batch.anchors
        if wide:  # two anchors in one: the left half is the query, the right half its document
            both = torch.cat([anchors.vectors, batch.positives.vectors], dim=1)
            anchors = anchors.changed(vectors=both)
        # A query with the same text as the anchor's document must not be its negative.
        positives = _padded(batch.positives.changed(ids=batch.first), wide, 0)
        return self._build(batch, anchors, positives, tuple(parts), temperature)

    def _backward(self, batch: _Batch, temperature: float | Tensor) -> BuiltPairing:
        """Return the pairing with documents as anchors and queries as candidates."""
        queries, documents = batch.anchors, batch.positives
        anchors = queries.changed(vectors=documents.vectors, ids=queries.ids if batch.first is None else batch.first)
        positives = Keys(queries.vectors, queries.ids)
        others = batch.turned.changed(source="batch")
        return self._build(batch, anchors, positives, (others,), temperature)

    def _build(
        self, batch: _Batch, anchors: Keys, positives: Keys, parts: tuple[Keys, ...], temperature: float | Tensor
    ) -> BuiltPairing:
        first = 0 if self.across else 1  # the positives are the first candidates, unless they are gathered
        pairing = Pairing(
            anchors, positives, parts, temperature, label_positives=self.by_group, num_views=first, ready=True
        )
        return BuiltPairing(pairing, batch.known)


class _Batch:
    """The texts of a batch as keys, for use as anchors, positives and candidates.

    Vectors are already normalised. Clusters hold (row, partner document, turned) where `OtherRows` needs them.
    """

    def __init__(
        self, columns: EmbeddedColumns, rows: BatchRows, across: bool, tagged: bool, by_group: bool, by_source: bool
    ) -> None:
        queries, *documents = columns
        self.rows, self.tagged, self.share = rows, tagged and rows.have_ids, gather if across else _same
        ids = rows.owner if rows.anchors is None else rows.anchors
        self.first = rows.documents[0] if rows.have_ids else None
        self.anchors = Keys(queries, ids, rows.group, self._tags(self.first))
        # OtherRows excludes the positive of an anchor; by group, its id prevents counting it twice as a positive.
        self.positives = Keys(documents[0], self.first if by_group else None)
        self.documents = [self.share(self._document(each, i)) for i, each in enumerate(documents)]
        self.own = [self._explicit(documents[1:], queries)] if len(documents) > 1 or by_source else []
        self.known = None if rows.queries is None else self._known(rows.queries * MOST)

    @property
    def own_queries(self) -> Keys:
        """The queries of this rank as candidates of queries."""
        return self.anchors.changed(source="queries")

    @cached_property
    def queries(self) -> Keys:
        """The queries of all ranks, if documents are gathered, as candidates of queries."""
        return self.share(self.own_queries)

    @property
    def turned(self) -> Keys:
        """The queries as candidates of documents, marked as turned."""
        if self.queries.clusters is None:
            return self.queries
        clusters = self.queries.clusters.clone()
        clusters[..., _turned] = 1
        return self.queries.changed(clusters=clusters)

    def outside(self, keys: Keys) -> Keys:
        """Return documents from outside the batch with the same kinds of tags as those of the batch."""
        like, group = not_infinite(widened(keys.vectors)), keys.labels
        if self.rows.group is not None and group is None:
            group = torch.full((len(keys),), NONE, device=like.device)
        clusters = _tags(torch.full((len(keys),), NONE, device=like.device)) if self.tagged else None
        ids = None if keys.ids is None or not self.rows.have_ids else keys.ids.masked_fill(keys.ids < 0, _nobody)
        return Keys(like, ids, group if self.rows.group is not None else None, clusters, keys.source)

    def _document(self, vectors: Tensor, place: int) -> Keys:
        """Return one column of documents as candidates of every row; ``place`` 0 holds the positives."""
        rows = self.rows
        ids = rows.documents[place] if rows.have_ids else rows.owner
        group = None if rows.group is None else rows.group if place == 0 else torch.full_like(rows.group, NONE)
        return Keys(vectors, ids, group, self._tags(rows.queries), source="batch")

    def _explicit(self, documents: EmbeddedColumns, queries: Tensor) -> Keys:
        """Return explicit negatives, [b, columns, d], as private candidates; shared candidates exclude the own row."""
        rows = self.rows
        own = torch.stack(list(documents), dim=1) if documents else queries.new_empty(len(queries), 0, queries.shape[1])
        nobody = torch.full(own.shape[:2], NONE, device=own.device)
        known = rows.have_ids and documents
        ids = torch.stack(rows.documents[1:], dim=1) if known else torch.full_like(nobody, _nobody)
        return Keys(own, ids, None if rows.group is None else nobody, self._tags(None, nobody), source="mined")

    def _tags(self, partner: Tensor | None, owner: Tensor | None = None) -> Tensor | None:
        """Return clusters with the row and the partner of each key; None if no mask reads them."""
        if not self.tagged:
            return None
        known = None if partner is None else partner.clamp(min=_nobody)  # missing documents must not match each other
        return _tags(self.rows.owner if owner is None else owner, known)

    def _known(self, queries: Annotated[Tensor, "b"]) -> OtherRows:
        """Return the mask of the (query, document) pairs of the batch, including those of other ranks if gathered."""
        first = self.documents[0]
        assert first.ids is not None
        numbers = queries if first.clusters is None else first.clusters[:, _partner] * MOST
        return OtherRows(queries[:, None], (numbers + first.ids).sort().values, self.tagged)


def _tags(owner: Tensor, partner: Tensor | None = None) -> Tensor:
    """Stack (row, partner, turned = 0) as clusters, [..., 3]."""
    return torch.stack([owner, torch.zeros_like(owner) if partner is None else partner, torch.zeros_like(owner)], -1)


def _padded(keys: Keys, wide: bool, side: int) -> Keys:
    """Pad vectors to twice the features: side 0 is the half of queries, side 1 that of documents; only if ``wide``."""
    if not wide:
        return keys
    zeros = (0, keys.dim) if side == 0 else (keys.dim, 0)
    return keys.changed(vectors=pad(keys.vectors, zeros))


def _same(keys: Keys) -> Keys:
    return keys


class GuideModel:
    """Embeds a batch with a second model; not a module, so that it is neither trained nor saved.

    The trainer passes tokens instead of texts. Unless both models have the same vocabulary, tokens are decoded and
    tokenised again for the guide.

    Args:
        guide: A model, or a path to load with sentence-transformers.
        model: The trained model, whose tokens the guide receives.
    """

    def __init__(self, guide: Any, model: nn.Module) -> None:
        self.name = guide if isinstance(guide, str) else type(guide).__name__
        if isinstance(guide, str):
            library = optional("sentence_transformers", "NegativesLoss(guide=...)", extra="text")
            with loading_model("NegativesLoss(guide=...)", guide):
                guide = library.SentenceTransformer(guide)
        self.guide: Any = guide
        self.device: torch.device | None = None
        own, other = getattr(model, "tokenizer", None), getattr(guide, "tokenizer", None)
        length = [getattr(each, "max_seq_length", None) or 0 for each in (model, guide)]
        same = own is other or (own is not None and other is not None and own.get_vocab() == other.get_vocab())
        self.tokenizer = None if same and length[1] >= length[0] else own

    @torch.no_grad()
    def __call__(self, features: list[dict[str, Any]]) -> list[Annotated[Tensor, "b d"]]:
        """Return one embedding, [b, d], per column; copies the features, because models write into them."""
        device = next(each for column in features for each in column.values() if isinstance(each, Tensor)).device
        if self.device != device:
            self.guide.to(device)
            self.device = device
        with eval_mode(self.guide):
            return [self.guide(self._tokens(column, device))["sentence_embedding"] for column in features]

    def _tokens(self, column: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Return the tokens of a column for the guide."""
        if self.tokenizer is None:
            return dict(column)
        texts = self.tokenizer.batch_decode(column["input_ids"], skip_special_tokens=True)
        again = getattr(self.guide, "preprocess", None) or self.guide.tokenize  # before version 6: tokenize
        return {name: each.to(device) if isinstance(each, Tensor) else each for name, each in again(texts).items()}

    def __repr__(self) -> str:
        return self.name
