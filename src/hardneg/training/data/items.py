"""The interface of a data kind: items by id, two views of a batch, an encoder, and the evaluation of encoders.

The loop, comparisons, resume and reports use ``Items`` only and know no specific kind. A kind is a frozen dataclass
registered by its prefix; docs/extend.md has a complete example. Fields that are tensors or lists have one entry per
item: they make up the fingerprint that ``DataChanged`` compares, and follow ``take`` and ``to``. Kinds may be defined
in your own file: ``--data file.py:spirals:1000``.

``Inputs`` are a tensor or a small class with ``__len__``, ``__getitem__(slice)``, ``to`` and ``joined`` (inputs.py);
GradCache, ranks and the loop use nothing else. ``represent(inputs)`` and ``represent.items(items)`` return features,
``represent.views(items)`` those of two views. Every figure that comparisons judge comes with one number per test item
whose mean it is: a bit in ``figures["correct"][name]`` (``pack_bits``) or a number in ``figures["scores"][name]``
(``pack_numbers``); their count is ``figures["num_test"]``, or ``figures["num_items"][name]`` where a figure is not over
the test split, such as the pairs of a benchmark.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, argument_error
from hardneg.io.embeddings import pack_bits
from hardneg.training.data.inputs import InputRows, Inputs
from hardneg.training.encoders import Represent
from hardneg.training.evaluation.embeddings import evaluate_embeddings
from hardneg.training.evaluation.pairs import alignment, directions, uniformity
from hardneg.training.options import TrainOptions
from hardneg.training.weights import initialised

TEST_SHARE = 0.2
"""Share of a data set without a test split that is held out as one."""

PREFETCHED = 2
"""Batches that each worker process prepares in advance."""

CLASSIFIED = ("knn", "1nn", "linear")
"""Measures of ``evaluate_embeddings``, the headline first."""

KINDS: dict[str, type[Items]] = {}
"""The data kinds by prefix."""
_forms: dict[str, str] = {}


class Splits(NamedTuple):
    """The data of a run.

    Attributes:
        train: Items to train on.
        test: Items to evaluate on.
        probe: Labelled items that the evaluation is fitted to, if not those of ``train``.
    """

    train: Any
    test: Any
    probe: Any = None

    @property
    def fitted(self) -> Any:
        """The items that probes and kNN are fitted to."""
        return self.train if self.probe is None else self.probe


@dataclass(frozen=True)
class Shown:
    """An item on a page.

    Attributes:
        text: Text of the item.
        picture: A picture as a data URI.
        tiny: Whether the picture is enlarged without smoothing.
    """

    text: str = ""
    picture: str = ""
    tiny: bool = False


class MinedRows(NamedTuple):
    """Mined negatives of a batch: ``k`` rows for each item, grouped by item.

    Attributes:
        inputs: The rows as the encoder's inputs, [b * k].
        ids: Id of each row; equal to an item's id only if the row is that item.
    """

    inputs: Inputs
    ids: Annotated[Tensor, "b*k"]


class Evaluation(NamedTuple):
    """The result of evaluating an encoder.

    Attributes:
        figures: Figures by name, as JSON can hold them.
        arrays: Arrays of embeddings.npz: test_x and, with labels, train_x, train_y and test_y.
    """

    figures: dict[str, Any]
    arrays: dict[str, Tensor]


class Items(ABC):
    """One split of a data set: the base class of all data kinds.

    A subclass registers itself by ``class Spirals(Items, prefix="spirals", form="spirals:NUMBER")`` and implements
    ``read``, ``views``, ``plain``, ``shown`` and either ``encoder`` or ``rebuilt``.

    Attributes:
        noun: Singular name of an item in messages.
        has_benchmarks: Whether ``evaluate`` reads ``--evaluate-with``.
        has: What a recipe may require: "nodes" (infograph), "pixels" (cmc) or "texts" (its encoders have ``encode``).
        how_to_label: Fix in the error about missing labels.
        weight_decay: Default weight decay. Adam with 1e-6 makes full steps where gradients are 0, hence 0.
        max_held_out: Largest held-out split without labels, which is evaluated by retrieval among its items.
        ids: Distinct id of each item, int64 [n].
        labels: Class of each item, int64 [n] in [0, len(classes)), or None.
        name: Name of the data for messages.
        classes: Names of the classes.

    Raises:
        ArgumentError: On construction, if the split is empty, ids repeat, or labels or ids have a wrong shape or type.
    """

    noun: ClassVar[str] = "item"
    has_benchmarks: ClassVar[bool] = False
    has: ClassVar[str] = ""
    how_to_label: ClassVar[str] = "use data that has them"
    weight_decay: ClassVar[float] = 0.0
    max_held_out: ClassVar[float] = 2048
    ids: Annotated[Tensor, "n"]
    labels: Annotated[Tensor, "n"] | None
    name: str
    classes: tuple[str, ...]

    def __init_subclass__(cls, *, prefix: str | None = None, form: str | None = None, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if prefix is not None:
            register(cls, prefix, form or f"{prefix}:...")

    def __post_init__(self) -> None:
        who, n = f"{type(self).__name__} {self.name!r}", len(self)
        if n == 0:
            raise ArgumentError(who, f"at least one {self.noun}", "none")
        for field in ("labels", "ids"):
            value = getattr(self, field)
            if value is not None and (value.shape != (n,) or value.dtype != torch.int64):
                got = f"{tuple(value.shape)} of {value.dtype}"
                raise ArgumentError(who, f"int64 {field}, one per {self.noun} ({n})", f"{field}={got}")
        if (repeated := n - len(np.unique(self.ids.cpu()))) > 0:
            raise ArgumentError(who, "distinct ids", f"{repeated} repeated")
        if self.labels is not None and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            low, high = int(self.labels.min()), int(self.labels.max())
            raise ArgumentError(who, f"labels in [0, {len(self.classes)})", f"labels from {low} to {high}")

    def __len__(self) -> int:
        return len(self.ids)

    # What a kind must implement.

    @classmethod
    @abstractmethod
    def read(cls, path: str, options: TrainOptions) -> Splits | Self:
        """Read the data of a name.

        Args:
            path: The part of ``--data`` after the prefix.
            options: The options of the run.

        Returns:
            One split, which ``splits`` then divides, or all splits.
        """

    @abstractmethod
    def views(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Inputs, Inputs]:
        """Return two views of the items at some positions.

        Row by row they must be a function of (ids[index], epoch, seed) only, so that resumed runs see the same.

        Args:
            index: Positions [b].
            epoch: The epoch.
            seed: The seed.
        """

    @abstractmethod
    def plain(self, index: Annotated[Tensor, "b"]) -> Inputs:
        """Return the items at positions [b] without randomness: what evaluation and ``@encode`` see."""

    def encoder(self, options: TrainOptions) -> nn.Module:
        """Build the encoder to train, [b] ``Inputs`` -> [b, options.dim], with weights that depend only on the seed.

        Its ``features``, if it has them, are evaluated. By default this is ``rebuilt`` of ``record``, with the weights
        of ``--init`` if it is given.
        """
        assert self.rebuilt.__qualname__ != "Items.rebuilt", "a kind has encoder or rebuilt of its own"
        return initialised(self.rebuilt(self.record(), options), options)

    @classmethod
    def rebuilt(cls, record: dict[str, Any], options: TrainOptions) -> nn.Module:
        """Build the encoder of a finished run from the record of its training items.

        By default the items are read again.

        Args:
            record: What ``record`` of the training split returned.
            options: The options of the run.
        """
        encoder: nn.Module = cls.splits(options).train.prepared(options).encoder(options)
        return encoder

    @abstractmethod
    def shown(self, position: int) -> Shown:
        """Return the item at a position as a page shows it."""

    # What a kind may override.

    @property
    def fetches(self) -> bool:
        """Whether worker processes call ``fetch``; ``views`` then has a fourth argument, its result or None."""
        return False

    def fetch(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> Tensor:
        """Return the part of ``views`` that worker processes prepare on the CPU, such as decoded images.

        Args:
            index: Positions [b].
            epoch: The epoch.
            seed: The seed.
        """
        raise NotImplementedError

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        """Raise for option values that the kind does not support, without reading data."""
        for name in ("augment", "encoder", "head"):
            if getattr(options, name) not in ("auto", "none"):
                what = f"--{name} auto, the only choice for {cls.noun}s"
                raise argument_error("train", what, name, getattr(options, name))

    @classmethod
    def splits(cls, options: TrainOptions) -> Splits:
        """Read the splits of a run.

        With ``evaluate_on="validation"``, held-out training items replace the test split.
        """
        found = cls.read(split_name(options.data)[1].partition(":")[2], options)
        splits = found if isinstance(found, Splits) else Splits(*found.held_out())
        if options.evaluate_on != "validation":
            return splits
        rest, held = splits.fitted.held_out(options.validation_share)
        return Splits(rest, held) if splits.probe is None else Splits(splits.train, held, rest)

    @classmethod
    def evaluated(cls, options: TrainOptions) -> Self:
        """Return the items that a run with these options is evaluated on."""
        test: Self = cls.splits(options).test
        return test

    def prepared(self, options: TrainOptions, views: Any = None) -> Self:
        """Return the items with the views, tokens and so on that the options describe.

        Args:
            options: The options of the run.
            views: A user's own callable for views, where the kind supports one.

        Raises:
            ArgumentError: If the kind does not support ``views``.
        """
        if views is not None:
            raise ArgumentError("train", f"views=None for {self.noun}s, whose views are fixed", "views")
        return self

    def described(self) -> str:
        """Describe the views in one line, for the record of a run."""
        return f"{type(self).__name__}.views"

    def estimate(self, batch_size: int, workers: int) -> str:
        """Return a sentence on the size of the data and of what workers hold, to print before training, or "".

        Args:
            batch_size: Items per batch of a rank.
            workers: Number of worker processes of a rank.
        """
        return ""

    def scale(self) -> dict[str, list[float]] | None:
        """Return mean and std of the training images, or None for other data."""
        return None

    def check_views(self, options: TrainOptions) -> None:  # noqa: B027
        """Raise if evaluation would see inputs of another scale or size than a user's own views."""

    def check_like(self, record: dict[str, Any]) -> None:  # noqa: B027
        """Raise if an encoder trained on a split with this record cannot be applied to these items."""

    def chosen(self, options: TrainOptions) -> dict[str, Any]:
        """Return what "auto" stands for, by option; arms of a comparison that differ in nothing else are the same."""
        return {}

    def decay(self, options: TrainOptions) -> float:
        """Return the weight decay of a run: the option, or the kind's default."""
        return self.weight_decay if options.weight_decay is None else options.weight_decay

    def mined(self, index: Annotated[Tensor, "b"]) -> MinedRows | None:
        """Return mined negatives of the items at positions [b], for recipes that use them, or None."""
        return None

    def views_evaluated(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Inputs, Inputs]:
        """Return the views between which the evaluation measures alignment and retrieval; by default those of training.

        Args:
            index: Positions [b].
            epoch: The epoch.
            seed: The seed.
        """
        return self.views(index, epoch, seed)

    def record(self) -> dict[str, Any]:
        """Return what a run records of a split besides its fingerprint."""
        return {"items": len(self), "noun": self.noun, "classes": self.num_labels()}

    def measures(self, splits: Splits, options: TrainOptions) -> list[str]:
        """Return the measures of these splits (names in ``evaluation.measures``), the headline of comparisons first.

        Args:
            splits: The splits of the run.
            options: The options of the run.

        Raises:
            ArgumentError: If nothing can be measured.
        """
        return [*CLASSIFIED, "retrieval"] if _can_classify(splits) else ["retrieval"]

    def evaluate(self, splits: Splits, represent: Represent, options: TrainOptions) -> Evaluation:
        """Evaluate features by classes where there are any, and by retrieval of the second view from the first.

        Args:
            splits: The splits of the run.
            represent: The features of the trained encoder.
            options: The options of the run.
        """
        arrays = features_of_splits(splits, represent)
        found = splits.test.by_retrieval(represent)
        figures: dict[str, Any] = {**found.figures, "headline": self.measures(splits, options)[0]}
        if _can_classify(splits):
            classified = evaluate_embeddings(*arrays.values(), seed=0)
            figures = {**figures, **classified, "correct": {**figures.get("correct", {}), **classified["correct"]}}
        elif len(self) > 1:
            figures["uniformity"] = uniformity(arrays["test_x"])
        return Evaluation(figures, arrays)

    # What all kinds share.

    def by_retrieval(self, represent: Represent) -> Evaluation:
        """Evaluate by how often the second view of an item is the closest one to its first view.

        Args:
            represent: The features of the trained encoder.
        """
        first, second = represent.views(self)
        right = self.retrieved(first, second)
        figures: dict[str, Any] = {"num_test": len(self), "headline": "retrieval"}
        figures |= {"retrieval": right.double().mean().item(), "alignment": alignment(first, second)}
        if len(right) == len(self):
            figures["correct"] = {"retrieval": pack_bits(right.cpu().numpy())}
        return Evaluation(figures, {})

    def retrieved(self, first: Annotated[Tensor, "m d"], second: Annotated[Tensor, "m d"]) -> Annotated[Tensor, "m"]:
        """Return whether each of the first items is closest to its own second view, [m].

        Items of the same document, where a kind has ``documents``, are not counted as wrong answers.

        Args:
            first: Features of the first views of the first m items.
            second: Features of their second views.
        """
        documents: Tensor | None = getattr(self, "documents", None)
        return retrieved(first, second, None if documents is None else documents[: len(first)])

    def labelled(self, who: str) -> Annotated[Tensor, "n"]:
        """Return the labels; raise if there are none, or only one class.

        Args:
            who: What needs the labels, for the error.
        """
        if self.labels is None:
            raise ArgumentError(who, "labels", f"none in {self.name!r}", self.how_to_label)
        if self.num_labels() < 2:
            raise ArgumentError(who, "at least two classes", f"one in {self.name!r}: {self.classes}")
        return self.labels

    def num_labels(self) -> int:
        """Return the number of classes that occur, 0 without labels."""
        return 0 if self.labels is None else len(torch.unique(self.labels))

    def held_out(self, share: float = TEST_SHARE, seed: int = 0) -> tuple[Self, Self]:
        """Divide into the rest and a held-out share, stratified by label.

        Args:
            share: Share of the items to hold out, in (0, 1).
            seed: Seed of the division; the default is fixed, so that all runs hold out the same items.
        """
        if not 0.0 < share < 1.0:
            raise argument_error("held_out", "a share in (0, 1)", "share", share)
        held = self.held_out_rows(share if self.labels is not None else min(share, self.max_held_out / len(self)), seed)
        return self.take(torch.nonzero(~held)[:, 0]), self.take(torch.nonzero(held)[:, 0])

    def held_out_rows(self, share: float, seed: int) -> Annotated[Tensor, "n"]:
        """Return a mask [n] of the items to hold out.

        Args:
            share: Share of the items.
            seed: Seed of the division.
        """
        return stratified(self.labels, len(self), share, seed, f"more {self.noun}s")

    def take(self, index: Annotated[Tensor, "m"]) -> Self:
        """Return the items at positions [m]: the entries of every per-item field."""
        rows = index.tolist()
        parts = {
            name: [part[i] for i in rows] if isinstance(part, list) else part[index] for name, part in self._parts()
        }
        return replace(self, **parts)  # type: ignore[type-var]

    def to(self, device: torch.device | str) -> Self:
        """Move all tensors to a device."""
        parts = {name: part.to(device) for name, part in self._parts() if not isinstance(part, list)}
        return replace(self, **parts)  # type: ignore[type-var]

    def content(self) -> Iterator[tuple[str, Tensor | Repeated | list[Any] | None]]:
        """Iterate over what the fingerprint covers: every per-item field by name, and whether there are labels."""
        yield from self._parts(with_labels=True)

    def _parts(self, *, with_labels: bool = False) -> Iterator[tuple[str, Any]]:
        for one in fields(self):  # type: ignore[arg-type]
            part = getattr(self, one.name)
            more = one.name == "labels" if with_labels else isinstance(part, InputRows | Items)
            if more or isinstance(part, Tensor | list):
                yield one.name, part


@dataclass(frozen=True)
class Repeated:
    """Rows of a tensor, possibly repeated, gathered in blocks to save memory.

    Attributes:
        rows: The distinct rows [m, ...].
        index: Position of each row [n].
    """

    rows: Tensor
    index: Annotated[Tensor, "n"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the gathered tensor."""
        return (len(self.index), *self.rows.shape[1:])

    def blocks(self) -> Iterator[Tensor]:
        """Iterate over the gathered rows, 256 at a time."""
        for start in range(0, len(self.index), 256):
            yield self.rows[self.index[start : start + 256]]


def register(kind: type[Items], prefix: str, form: str) -> None:
    """Register ``prefix:...`` as names of data.

    Args:
        kind: The class that reads them.
        prefix: The prefix.
        form: How such a name is written in the help, such as "text:FILE".
    """
    KINDS[prefix], _forms[prefix] = kind, form


def split_name(name: str) -> tuple[str, str]:
    """Split a name of data into the Python file before it, if any, and the rest.

    >>> split_name("mine.py:spirals:1000")
    ('mine.py', 'spirals:1000')
    """
    file, mark, rest = name.partition(".py:")
    return (f"{file}.py", rest) if mark else ("", name)


def forms() -> list[str]:
    """Return how data of each kind is named; kinds that need no file come first."""
    return sorted(_forms.values(), key=lambda form: ":" in form)


def features_of_splits(splits: Splits, represent: Represent) -> dict[str, Tensor]:
    """Return features and labels of both splits; without labels, features of the test split only, which is small.

    Args:
        splits: The splits of the run.
        represent: The features of the trained encoder.
    """
    if not _can_classify(splits):
        return {"test_x": represent.items(splits.test)}
    train_x, test_x = represent.items(splits.fitted), represent.items(splits.test)
    return {"train_x": train_x, "train_y": splits.fitted.labels, "test_x": test_x, "test_y": splits.test.labels}


def retrieved(
    first: Annotated[Tensor, "n d"], second: Annotated[Tensor, "n d"], documents: Annotated[Tensor, "n"] | None = None
) -> Annotated[Tensor, "n"]:
    """Return whether the nearest second view of each row is its own, [n]; a tie with another row counts as a miss.

    Args:
        first: Embeddings of the first views [n, d].
        second: Embeddings of the second views [n, d].
        documents: Document of each row [n]; rows of the same document are not counted as wrong answers.

    Example:
        >>> retrieved(torch.eye(2), torch.tensor([[1.0, 0.1], [1.0, 0.2]])).tolist()
        [True, True]
    """
    cosines = directions(first) @ directions(second).T
    own = cosines.diagonal().clone()
    cosines.fill_diagonal_(-math.inf)
    if documents is not None:
        cosines.masked_fill_(documents[:, None] == documents, -math.inf)
    return own > cosines.amax(1)


def _can_classify(splits: Splits) -> bool:
    return splits.fitted.num_labels() > 1 and splits.test.labels is not None


def stratified(labels: Tensor | None, n: int, share: float, seed: int, what: str) -> Annotated[Tensor, "n"]:
    """Choose ceil(share n) of the rows, each class in proportion to within one row.

    Args:
        labels: Class of each row [n], or None.
        n: Number of rows.
        share: Share to choose, in (0, 1).
        seed: Seed of the choice.
        what: What to add if there are too few rows, for the error.

    Returns:
        A mask [n].

    Raises:
        ArgumentError: If the share comes to none or all of the rows.

    Example:
        >>> stratified(torch.tensor([0, 0, 1, 1]), 4, 0.5, 0, "more rows").sum().item()
        2
    """
    # RandomState's stream is frozen by NumPy, so the split is the same with every version.
    order = np.random.RandomState(seed).permutation(n)
    classes = np.zeros(n, dtype=np.int64) if labels is None else labels.cpu().numpy()
    position = np.empty(n)
    for label in np.unique(classes):
        members = order[classes[order] == label]
        # Row r of a class of m gets position (r + 0.5) / m: the rows with the lowest positions are held out.
        position[members] = (np.arange(len(members)) + 0.5) / len(members)
    held = np.zeros(n, dtype=bool)
    held[order[np.argsort(position[order], kind="stable")[: math.ceil(share * n - 1e-9)]]] = True
    if not 0 < held.sum() < n:
        raise ArgumentError(f"A split of {share:g}", what, str(n))
    return torch.from_numpy(held)
