"""A data kind is one class: items by id, the two views of a batch, an encoder for them, and how encoders are evaluated.

Loop, comparison, resume and report know ``Items`` and no kind. A kind is a frozen dataclass, registered by its prefix;
docs/extend.md has a whole one. Fields that are tensors or lists have an entry per item: they make up the
fingerprint that DataChanged compares, and follow ``take`` and ``to``. Kinds in a file of your own:
``--data file.py:spirals:1000``.

``Inputs`` are a tensor or a small class with ``__len__``, ``__getitem__(slice)``, ``to`` and ``joined`` (inputs.py);
GradCache, ranks and the loop use only that. ``represent(inputs)`` and ``represent.items(items)`` give features,
``represent.views(items)`` those of two views. A figure that a comparison judges comes with one number per test item,
whose mean it is: a yes or no in ``figures["correct"][name]`` (``pack_bits``) or a number in ``figures["scores"][name]``
(``pack_numbers``), and ``figures["num_test"]``, or ``figures["num_items"][name]`` where a figure is of other items than
those of the test split, such as pairs of a benchmark.
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

TEST_SHARE = 0.2

KINDS: dict[str, type[Items]] = {}
"""By their prefixes."""
_forms: dict[str, str] = {}


class Splits(NamedTuple):
    """What is trained on, what is evaluated on, and labelled items to fit the evaluation to, if not those of train."""

    train: Any
    test: Any
    probe: Any = None

    @property
    def fitted(self) -> Any:
        return self.train if self.probe is None else self.probe


@dataclass(frozen=True)
class Shown:
    """An item on a page: a text, or a picture as a data URI; ``tiny`` pictures are enlarged pixel by pixel."""

    text: str = ""
    picture: str = ""
    tiny: bool = False


class MinedRows(NamedTuple):
    """Negatives that were mined for the items of a batch: ``k`` rows for each item, one item behind the other."""

    inputs: Inputs
    ids: Annotated[Tensor, "b*k"]  # no id of an item of the data set, unless it is that item


class Evaluation(NamedTuple):
    figures: dict[str, Any]
    arrays: dict[str, Tensor]  # of embeddings.npz: test_x, and with labels train_x, train_y, test_y


class Items(ABC):
    """One split of a data set."""

    noun: ClassVar[str] = "item"
    has_benchmarks: ClassVar[bool] = False  # whether ``evaluate`` reads --evaluate-with
    has: ClassVar[str] = ""  # "nodes" (infograph needs them), "pixels" (cmc), "texts": its encoders have ``encode``
    how_to_label: ClassVar[str] = "use data that has them"
    weight_decay: ClassVar[float] = 0.0  # by default; of 1e-6 Adam makes whole steps where gradients are 0
    most_held: ClassVar[float] = 2048  # items without labels, which are evaluated by retrieval among themselves
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

    # What a kind gives.

    @classmethod
    @abstractmethod
    def read(cls, path: str, options: TrainOptions) -> Splits | Self:
        """What stands behind the prefix in ``--data``: one split to be divided here, or all of them."""

    @abstractmethod
    def views(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Inputs, Inputs]:
        """Two views of the items at these positions: row by row a function of (ids[index], epoch, seed) only."""

    @abstractmethod
    def plain(self, index: Annotated[Tensor, "b"]) -> Inputs:
        """The items without anything random: what evaluation and ``@encode`` see."""

    def encoder(self, options: TrainOptions) -> nn.Module:
        """A module of [b] Inputs -> [b, options.dim], the same for the same seed; by default that of ``rebuilt``.

        Its ``features``, if it has them, are what is evaluated.
        """
        assert self.rebuilt.__qualname__ != "Items.rebuilt", "a kind has encoder or rebuilt of its own"
        return self.rebuilt(self.record(), options)

    @classmethod
    def rebuilt(cls, record: dict[str, Any], options: TrainOptions) -> nn.Module:
        """The encoder of a finished run, from what the run recorded of its training items; by default they are read."""
        encoder: nn.Module = cls.splits(options).train.prepared(options).encoder(options)
        return encoder

    @abstractmethod
    def shown(self, position: int) -> Shown:
        """An item as a page shows it."""

    # What a kind may replace.

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        """Raises for names that the kind does not know; reads nothing."""
        for name in ("augment", "encoder"):
            if getattr(options, name) != "auto":
                what = f"--{name} auto, since {cls.noun}s have no other"
                raise argument_error("train", what, name, getattr(options, name))

    @classmethod
    def splits(cls, options: TrainOptions) -> Splits:
        """The splits that the options ask for: of ``evaluate_on="validation"``, a part of the training items."""
        found = cls.read(split_name(options.data)[1].partition(":")[2], options)
        splits = found if isinstance(found, Splits) else Splits(*found.held_out())
        if options.evaluate_on != "validation":
            return splits
        rest, held = splits.fitted.held_out(options.validation_share)
        return Splits(rest, held) if splits.probe is None else Splits(splits.train, held, rest)

    @classmethod
    def evaluated(cls, options: TrainOptions) -> Self:
        """The items that a run with these options is evaluated on."""
        test: Self = cls.splits(options).test
        return test

    def prepared(self, options: TrainOptions, views: Any = None) -> Self:
        """The same items with the views, tokens ... that the options describe; ``views`` is a user's own callable."""
        if views is not None:
            raise ArgumentError("train", f"views=None for {self.noun}s, which have views of their own", "views")
        return self

    def described(self) -> str:
        """The views in one line, for the record of a run."""
        return f"{type(self).__name__}.views"

    def scale(self) -> dict[str, list[float]] | None:
        """The mean and std of the images that the encoder is trained on, if it is trained on images."""
        return None

    def check_views(self, options: TrainOptions) -> None:  # noqa: B027
        """Raises if evaluation would see something else than a user's own views show."""

    def check_like(self, record: dict[str, Any]) -> None:  # noqa: B027
        """Raises where an encoder that was trained on a split with this record cannot take these items."""

    def chosen(self, options: TrainOptions) -> dict[str, Any]:
        """What "auto" stands for, by the name of the option: arms that differ in nothing else are the same."""
        return {}

    def decay(self, options: TrainOptions) -> float:
        return self.weight_decay if options.weight_decay is None else options.weight_decay

    def mined(self, index: Annotated[Tensor, "b"]) -> MinedRows | None:
        """Negatives beside the batch, for recipes that take them."""
        return None

    def views_evaluated(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Inputs, Inputs]:
        """The views between which the evaluation measures; without what only training adds."""
        return self.views(index, epoch, seed)

    def record(self) -> dict[str, Any]:
        """What a run records of a split beside its fingerprint."""
        return {"items": len(self), "noun": self.noun, "classes": self.num_labels()}

    def measures(self, splits: Splits, options: TrainOptions) -> list[str]:
        """Names in ``evaluation.measures``, the headline that comparisons judge by first; raises if there is none."""
        return ["knn", "1nn", "linear", "retrieval"] if _can_classify(splits) else ["retrieval"]

    def evaluate(self, splits: Splits, represent: Represent, options: TrainOptions) -> Evaluation:
        """By classes where there are any, and by retrieval of the second view from the first."""
        arrays = features_of_splits(splits, represent)
        first, second = represent.views(splits.test)
        figures: dict[str, Any] = {"num_test": len(splits.test), "headline": self.measures(splits, options)[0]}
        if _can_classify(splits):
            figures |= evaluate_embeddings(*arrays.values(), seed=0)
        elif len(self) > 1:
            figures["uniformity"] = uniformity(arrays["test_x"])
        right = retrieved(first, second)
        figures["retrieval"] = right.double().mean().item()
        if len(right) == len(splits.test):
            figures.setdefault("correct", {})["retrieval"] = pack_bits(right.cpu().numpy())
        return Evaluation(figures | {"alignment": alignment(first, second)}, arrays)

    # What all have.

    def labelled(self, who: str) -> Annotated[Tensor, "n"]:
        """The labels, or an error that says who needs them: none, or one class only, cannot be evaluated."""
        if self.labels is None:
            raise ArgumentError(who, "labels", f"none in {self.name!r}", self.how_to_label)
        if self.num_labels() < 2:
            raise ArgumentError(who, "at least two classes", f"one in {self.name!r}: {self.classes}")
        return self.labels

    def num_labels(self) -> int:
        """How many classes its items really have: 0 without labels, and 1 is too few to evaluate."""
        return 0 if self.labels is None else len(torch.unique(self.labels))

    def held_out(self, share: float = TEST_SHARE, seed: int = 0) -> tuple[Self, Self]:
        """The rest and a held-out share, stratified by label: a validation split that leaves the test split alone."""
        if not 0.0 < share < 1.0:
            raise argument_error("held_out", "a share in (0, 1)", "share", share)
        held = self.held(share if self.labels is not None else min(share, self.most_held / len(self)), seed)
        return self.take(torch.nonzero(~held)[:, 0]), self.take(torch.nonzero(held)[:, 0])

    def held(self, share: float, seed: int) -> Annotated[Tensor, "n"]:
        """True for the items that are held out."""
        return stratified(self.labels, len(self), share, seed, f"more {self.noun}s")

    def take(self, index: Annotated[Tensor, "m"]) -> Self:
        """Some of the items: a part of every field that has an entry per item."""
        rows = index.tolist()
        parts = {
            name: [part[i] for i in rows] if isinstance(part, list) else part[index] for name, part in self._parts()
        }
        return replace(self, **parts)  # type: ignore[type-var]

    def to(self, device: torch.device | str) -> Self:
        parts = {name: part.to(device) for name, part in self._parts() if not isinstance(part, list)}
        return replace(self, **parts)  # type: ignore[type-var]

    def content(self) -> Iterator[tuple[str, Tensor | Repeated | list[Any] | None]]:
        """What the fingerprint is taken of: every field with an entry per item, and whether there are labels."""
        yield from self._parts(with_labels=True)

    def _parts(self, *, with_labels: bool = False) -> Iterator[tuple[str, Any]]:
        for one in fields(self):  # type: ignore[arg-type]
            part = getattr(self, one.name)
            more = one.name == "labels" if with_labels else isinstance(part, InputRows | Items)
            if more or isinstance(part, Tensor | list):
                yield one.name, part


@dataclass(frozen=True)
class Repeated:
    """Rows of a tensor, some of them several times, which are gathered in blocks."""

    rows: Tensor
    index: Annotated[Tensor, "n"]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.index), *self.rows.shape[1:])

    def blocks(self) -> Iterator[Tensor]:
        for start in range(0, len(self.index), 256):
            yield self.rows[self.index[start : start + 256]]


def register(kind: type[Items], prefix: str, form: str) -> None:
    """Makes ``prefix:...`` a name of data; ``form`` is how it is written in the help."""
    KINDS[prefix], _forms[prefix] = kind, form


def split_name(name: str) -> tuple[str, str]:
    """The Python file before a name, if any, and the name.

    >>> split_name("mine.py:spirals:1000")
    ('mine.py', 'spirals:1000')
    """
    file, mark, rest = name.partition(".py:")
    return (f"{file}.py", rest) if mark else ("", name)


def forms() -> list[str]:
    """How data of each kind is named; what needs no file comes first."""
    return sorted(_forms.values(), key=lambda form: ":" in form)


def features_of_splits(splits: Splits, represent: Represent) -> dict[str, Tensor]:
    """Features and labels of both splits; without labels, of the test split alone, which is small."""
    if not _can_classify(splits):
        return {"test_x": represent.items(splits.test)}
    train_x, test_x = represent.items(splits.fitted), represent.items(splits.test)
    return {"train_x": train_x, "train_y": splits.fitted.labels, "test_x": test_x, "test_y": splits.test.labels}


def retrieved(first: Annotated[Tensor, "n d"], second: Annotated[Tensor, "n d"]) -> Annotated[Tensor, "n"]:
    """Whether the nearest of the second views is a row's own; of equal ones, the own does not count as nearest."""
    cosines = directions(first) @ directions(second).T
    own = cosines.diagonal().clone()
    cosines.fill_diagonal_(-math.inf)
    return own > cosines.amax(1)


def _can_classify(splits: Splits) -> bool:
    return splits.fitted.num_labels() > 1 and splits.test.labels is not None


def stratified(labels: Tensor | None, n: int, share: float, seed: int, what: str) -> Annotated[Tensor, "n"]:
    """True for ceil(share n) of the rows, of each class its share to within one row; its error names ``what``."""
    # RandomState's stream is frozen by NumPy, so the split is the same with every version.
    order = np.random.RandomState(seed).permutation(n)
    classes = np.zeros(n, dtype=np.int64) if labels is None else labels.cpu().numpy()
    position = np.empty(n)
    for label in np.unique(classes):
        members = order[classes[order] == label]
        # Row r of a class of m is due at (r + 0.5) / m: the rows due first, over all classes, are held out.
        position[members] = (np.arange(len(members)) + 0.5) / len(members)
    held = np.zeros(n, dtype=bool)
    held[order[np.argsort(position[order], kind="stable")[: math.ceil(share * n - 1e-9)]]] = True
    if not 0 < held.sum() < n:
        raise ArgumentError(f"A split of {share:g}", what, str(n))
    return torch.from_numpy(held)
