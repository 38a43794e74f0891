"""Graphs as data: ``graphs:NAME``, a file or a folder (graph_files.py).

    graphs:MUTAG            trains on all graphs, without labels, and classifies them by a support vector machine in
                            10-fold cross-validation: the protocol of the graph papers
    graphs:MUTAG@3/10       the fourth of ten stratified folds is the test split, the others are the train split

Recipes and negatives that read labels need the second form, because the first one would show them the labels of test
graphs. A validation split is a fifth of the training graphs, and so is the test split of graphs without labels.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, UnknownName, located, missing_extra
from hardneg.core.scoring import score
from hardneg.core.types import Keys
from hardneg.io.embeddings import pack_bits
from hardneg.negatives import parse
from hardneg.negatives.grammar import read_expression
from hardneg.pages.graph_drawing import graph_drawing
from hardneg.training.augmentation.graphs import GraphAugment, Graphs
from hardneg.training.data.graph_files import read_graphs
from hardneg.training.data.items import CLASSIFIED, Evaluation, Items, Repeated, Shown, Splits, features_of_splits
from hardneg.training.encoders import Encoder, Represent, seeded
from hardneg.training.evaluation.embeddings import evaluate_embeddings, geometry
from hardneg.training.evaluation.measures import register_measure
from hardneg.training.evaluation.pairs import alignment
from hardneg.training.evaluation.svm import svm_correct, svm_predict
from hardneg.training.gin import GIN, two_layers, xavier
from hardneg.training.options import SupervisedOptions, TrainOptions

MakeGraphViews = Callable[[Graphs, Tensor, int, int], tuple[Graphs, Graphs]]
NORMS = {"auto": "batch", "gin": "batch", "gin-layer": "layer"}
"""The encoders, and the normalisation of each."""

USUAL = GraphAugment()

register_measure(
    "svm",
    "SVM accuracy",
    "a support vector machine is fitted to the features; without a test split, in 10-fold cross-validation",
)


@dataclass(frozen=True, eq=False)
class GraphData(Items, prefix="graphs", form="graphs:NAME"):
    """Graphs with ids and, where known, labels.

    Attributes:
        graphs: The graphs as PyG's ``Data``, as ``from_geometric`` (graph_files.py) returns them.
        labels: Class of each graph, int64 [g], or None.
        ids: Id of each graph, int64 [g].
        name: Name of the data.
        classes: Names of the classes.
        augment: The views, set by ``prepared``.
        own_views: A user's callable for views, set by ``prepared``.
    """

    graphs: list[Any]
    labels: Annotated[Tensor, "n"] | None
    ids: Annotated[Tensor, "n"]
    name: str
    classes: tuple[str, ...] = ()
    augment: GraphAugment = USUAL
    own_views: MakeGraphViews | None = None
    noun: ClassVar[str] = "graph"
    has: ClassVar[str] = "nodes"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.graphs) != len(self.ids):
            what = f"one id for each of {len(self.graphs)} graphs"
            raise ArgumentError(f"GraphData {self.name!r}", what, f"{len(self.ids)} ids")

    @classmethod
    def read(cls, path: str, options: TrainOptions) -> Splits | GraphData:
        """Read graphs; with a fold, or without labels, divide them.

        Args:
            path: Name, file or folder with an optional fold after @.
            options: The options of the run.
        """
        path, fold = split_fold(path)
        found = read_graphs(path, None if options.data_root is None else Path(options.data_root))
        labels = None if found.labels is None else torch.from_numpy(found.labels.astype(np.int64))
        data = cls(found.graphs, labels, torch.arange(len(found.graphs)), f"graphs:{path}", found.classes)
        if fold is not None:
            return data.fold(*fold)
        return data if labels is None else Splits(data, data)

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        """Raise for augmentations, encoders and recipes that cannot be used, without reading data."""
        for library in ("torch_geometric", "sklearn"):
            if importlib.util.find_spec(library) is None:
                raise missing_extra("graphs", library, "graphs")
        with located("--augment"):
            augment_for(options.augment)
        with located("--encoder"):
            if options.encoder not in NORMS:
                raise UnknownName(options.encoder, NORMS)
        if options.compile:
            what = "no --compile for graphs, whose batches differ in size and would be recompiled each time"
            raise ArgumentError("train", what, "compile=True")
        if split_fold(options.data)[1] is None and reads_labels(options):
            what = "a separate test split, since training reads labels"
            raise ArgumentError("train", what, f"--data {options.data}", f"use --data {options.data}@0/10")

    def fold(self, number: int, of: int) -> Splits:
        """Return the splits of a fold, stratified by label; the folds are the same for every seed.

        Args:
            number: Fold that is the test split, from 0.
            of: Number of folds.

        Raises:
            ArgumentError: If there are fewer graphs than folds.
        """
        order = np.random.RandomState(0).permutation(len(self))  # its stream is frozen by NumPy
        if self.labels is not None:
            order = order[np.argsort(self.labels.cpu().numpy()[order], kind="stable")]
        where = np.empty(len(self), dtype=np.int64)
        where[order] = np.arange(len(self)) % of
        held = torch.from_numpy(where == number)
        if not 0 < int(held.sum()) < len(self):
            raise ArgumentError("graphs", f"at least {of} graphs for {of} folds", str(len(self)))
        return Splits(self.take(torch.nonzero(~held)[:, 0]), self.take(torch.nonzero(held)[:, 0]))

    def views(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Graphs, Graphs]:
        """Return two views of the graphs at some positions.

        Args:
            index: Positions [b].
            epoch: The epoch.
            seed: The seed.
        """
        make = self.augment.views if self.own_views is None else self.own_views
        return make(self._batch(index), self.ids[index], epoch, seed)

    def plain(self, index: Annotated[Tensor, "b"]) -> Graphs:
        """Return the graphs at positions [b] without augmentation."""
        return self._batch(index).float()

    def _batch(self, index: Annotated[Tensor, "b"]) -> Graphs:
        return Graphs.collate([self.graphs[i] for i in index.tolist()]).to(self.ids.device)

    @classmethod
    def rebuilt(cls, record: dict[str, Any], options: TrainOptions) -> nn.Module:
        """Build GIN with GraphCL's head of two layers, or a linear one; "gin" has batch statistics, "gin-layer" none.

        Args:
            record: Record of the training graphs, with their number of features.
            options: The options of the run.
        """
        backbone = GIN(record["features"], norm=NORMS[options.encoder], seed=options.seed)
        with seeded(options.seed):
            width = backbone.feature_dim
            linear = options.head == "linear"
            head = xavier(width, options.dim) if linear else two_layers(width, width, options.dim)
        return Encoder(backbone, width, head, "gin" if options.encoder == "auto" else options.encoder)

    def record(self) -> dict[str, Any]:
        """Return the record of all kinds, with the number of node features."""
        return {**super().record(), "features": self.graphs[0].num_features}

    def check_like(self, record: dict[str, Any]) -> None:
        """Raise if the number of node features differs from the record."""
        before, now = record["features"], self.graphs[0].num_features
        if before != now:
            raise ArgumentError("evaluate", f"graphs with {before} node features, like the training data", f"{now}")

    def prepared(self, options: TrainOptions, views: Any = None) -> GraphData:
        """Return the graphs with the views of ``--augment`` or a user's own.

        Args:
            options: The options of the run.
            views: A callable (graphs, ids, epoch, seed) -> two batches of graphs (``Graphs``), or None.
        """
        if views is not None and not callable(views):
            raise ArgumentError("train", "views(graphs, ids, epoch, seed) -> (view 1, view 2)", f"views={views!r}")
        return replace(self, augment=augment_for(options.augment), own_views=views)

    def described(self) -> str:
        """Describe the views in one line, for the record of a run."""
        if self.own_views is None:
            return repr(self.augment)
        return re.sub(r" at 0x[0-9a-f]+", "", repr(self.own_views))

    def chosen(self, options: TrainOptions) -> dict[str, Any]:
        """Return the encoder and augmentation that "auto" stands for."""
        return {"encoder": NORMS[options.encoder], "augment": repr(augment_for(options.augment))}

    def shown(self, position: int) -> Shown:
        """Return a drawing of the graph at a position, or its size where it is too large."""
        one = Graphs.collate([self.graphs[position]])
        kinds = one.x.argmax(1).tolist() if one.x.shape[1] > 1 else [0] * len(one.x)
        drawn = graph_drawing(one.edges.numpy(), kinds)
        sizes = f"{len(one.x)} nodes, {one.edges.shape[1]} edges"
        return Shown(text=sizes) if drawn is None else Shown(picture=drawn)

    def measures(self, splits: Splits, options: TrainOptions) -> list[str]:
        """Return the measures: SVM accuracy first where there are classes, else retrieval.

        Args:
            splits: The splits of the run.
            options: The options of the run.
        """
        if not can_classify(splits):
            return ["retrieval"]
        return ["svm"] if cross_validated(splits) else ["svm", *CLASSIFIED]

    def evaluate(self, splits: Splits, represent: Represent, options: TrainOptions) -> Evaluation:
        """Evaluate by a support vector machine where there are classes, else by retrieval of the second view.

        Args:
            splits: The splits of the run.
            represent: The features of the trained encoder.
            options: The options of the run.
        """
        if not can_classify(splits):
            return super().evaluate(splits, represent, options)
        if cross_validated(splits):
            x, y = represent.items(splits.test), splits.test.labels
            figures, arrays, right = geometry(x, y), {"test_x": x, "test_y": y}, svm_correct(x, y)
        else:
            arrays = features_of_splits(splits, represent)
            train_x, train_y, x, y = arrays.values()
            figures, right = evaluate_embeddings(train_x, train_y, x, y), svm_predict(train_x, train_y, x) == y.cpu()
        figures.setdefault("correct", {})["svm"] = pack_bits(right.numpy())
        figures |= {"svm": float(right.double().mean()), "num_test": len(y), "headline": "svm"}
        return Evaluation(figures | {"alignment": alignment(*represent.views(splits.test))}, arrays)

    def content(self) -> Iterator[tuple[str, Tensor | Repeated | list[Any] | None]]:
        """Iterate over what the fingerprint covers: nodes and edges of all graphs, and every other per-item field."""
        whole = Graphs.collate(self.graphs)
        yield from (("x", whole.x), ("edge_index", whole.edge_index), ("num_nodes", whole.num_nodes))
        yield from (part for part in super().content() if part[0] != "graphs")


def split_fold(path: str) -> tuple[str, tuple[int, int] | None]:
    """Split a path into the path and the fold after it, if any.

    Raises:
        ArgumentError: If the fold is out of range.

    Example:
        >>> split_fold("MUTAG@3/10"), split_fold("MUTAG")
        (('MUTAG', (3, 10)), ('MUTAG', None))
    """
    found = re.fullmatch(r"(.+)@(\d+)/(\d+)", path)
    if found is None:
        return path, None
    number, of = int(found[2]), int(found[3])
    if not (of >= 2 and number < of):
        raise ArgumentError("graphs", "a fold such as @0/10, counted from 0, with at least 2 folds", f"@{number}/{of}")
    return found[1], (number, of)


def augment_for(text: str) -> GraphAugment:
    """Return the augmentation of ``--augment``: auto, one or several kinds of views, or graphcl(...) with values.

    >>> augment_for("node_drop+subgraph").first, augment_for('graphcl(first="none", ratio=0.1)').ratio
    ('node_drop+subgraph', 0.1)
    """
    if text in ("auto", "graphcl"):
        return USUAL
    if "(" not in text:
        return GraphAugment(text, text)
    made: GraphAugment = read_expression(text, {"graphcl": GraphAugment})
    return made


def reads_labels(options: TrainOptions) -> bool:
    """Return whether training would read labels: in a supervised recipe, or with negatives that require them."""
    if isinstance(options, SupervisedOptions):
        return True
    keys = Keys(torch.eye(2), torch.arange(2), source=options.sources[0])
    try:
        parse(options.negatives).at(0, 1).log_weights(score(keys, keys, keys, 1.0))
    except ValueError:
        return True
    return False


def can_classify(splits: Splits) -> bool:
    """Return whether there are two classes or more, each with two graphs or more, so that one can be left out."""
    if splits.test.labels is None or splits.fitted.num_labels() < 2:
        return False
    counts = torch.bincount(splits.fitted.labels)
    return int(counts[counts > 0].min()) > 1


def cross_validated(splits: Splits) -> bool:
    """Return whether the test graphs are also the training graphs."""
    return torch.equal(splits.fitted.ids.cpu(), splits.test.ids.cpu())
