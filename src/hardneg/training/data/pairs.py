"""Pairs of related texts, such as a question and its answer, and pairs of related vectors computed elsewhere.

    pairs:faq.jsonl[question,answer]   columns of a table; ``negative`` or negative_1, negative_2, ... are mined
                                       negatives, as ``hardneg mine`` writes them
    pairs:qqp.csv[a,b,is_duplicate=1]  only the rows with this label; a column that may be a label is never ignored
    pairs:story.txt                    consecutive lines; an empty line starts a new document
    embeddings:pairs.npz               arrays ``first`` [n, d] and ``second`` [n, e], optionally ``labels`` [n]

A candidate of ``TextPairs`` is a text, not a row: equal texts share an id, and so do second texts with the same first
text, so that the positive of one row is never a negative of another. ``VectorPairs`` may be vectors of images and of
their texts (CLIP, Radford et al. 2021): two projection heads are trained, one for each side, and evaluated by retrieval
of the second side from the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, NotFinite, located
from hardneg.io.arrays import read_arrays
from hardneg.io.tables import read_table
from hardneg.training.data.inputs import Sided, TwoTowers
from hardneg.training.data.items import Items, MinedRows, Shown
from hardneg.training.data.text_files import (
    is_table,
    labels_in,
    negatives_in,
    pair_columns,
    positive_rows,
    read_lines,
    split_columns,
    texts_in,
)
from hardneg.training.data.texts import TextItems, shortened
from hardneg.training.data.tokens import Ragged, Tokenizer, Tokens
from hardneg.training.encoders import seeded
from hardneg.training.options import TrainOptions


@dataclass(frozen=True, eq=False)
class TextPairs(TextItems, prefix="pairs", form="pairs:FILE"):
    """Pairs of texts, optionally with mined negatives.

    Attributes:
        firsts: The first texts.
        seconds: The second texts.
        negatives: Mined negatives of each row, the same number in every row, possibly none.
        labels: Always None.
        ids: Id of each row, int64 [n].
        documents: Id of each row's second text, int64 [n]; equal for rows that share a text.
        name: Name of the data.
        classes: Always empty.
        mined_ids: Id of each text among seconds and negatives.
        tokens: The tokens of firsts, seconds and negatives, set by ``prepared``.
        tokenizer: The encoder's tokenizer, set by ``prepared``.
    """

    firsts: list[str]
    seconds: list[str]
    negatives: list[list[str]]
    labels: Annotated[Tensor, "n"] | None
    ids: Annotated[Tensor, "n"]
    documents: Annotated[Tensor, "n"]
    name: str
    classes: tuple[str, ...] = ()
    mined_ids: dict[str, int] = field(default_factory=dict, repr=False)
    tokens: tuple[Ragged, ...] | None = field(default=None, repr=False)
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    columns: ClassVar[tuple[int, int, str]] = (
        2,
        3,
        "pairs:FILE or pairs:TABLE[first,second] or pairs:TABLE[first,second,label=1]",
    )

    @classmethod
    def read(cls, path: str, options: TrainOptions) -> TextPairs:
        """Read pairs from a table or from consecutive lines.

        Args:
            path: Path with optional columns in brackets.
            options: The options of the run.
        """
        file, columns = split_columns(path, *cls.columns)
        negatives: list[list[str]] = []
        if is_table(file):
            table = read_table(file, "data")
            first, second = columns[:2] or pair_columns(table, file)
            table = positive_rows(table, first, second, columns[2:], file)
            firsts, seconds = texts_in(table, first, file), texts_in(table, second, file)
            negatives = negatives_in(table, file)
        else:
            lines = read_lines(file)
            follows = [i for i in range(1, len(lines.places)) if lines.places[i] - lines.places[i - 1] == 1]
            if not follows:
                got = f"none in {file}, where empty lines separate all of them"
                raise ArgumentError("data", "consecutive lines", got)
            firsts, seconds = [lines.texts[i - 1] for i in follows], [lines.texts[i] for i in follows]
        return cls.of(firsts, seconds, negatives, path)

    @classmethod
    def of(cls, firsts: list[str], seconds: list[str], negatives: list[list[str]], name: str) -> TextPairs:
        """Build pairs; equal texts, and second texts of equal first texts, get one id.

        Args:
            firsts: The first texts.
            seconds: The second texts.
            negatives: Mined negatives of each row, or an empty list.
            name: Name of the data.
        """
        numbers: dict[str, int] = {}
        for text in (*seconds, *(one for row in negatives for one in row)):
            numbers.setdefault(text, len(numbers))
        group = grouped(firsts, [numbers[text] for text in seconds], len(numbers))
        numbers = {text: group[number] for text, number in numbers.items()}
        documents = torch.tensor([numbers[text] for text in seconds])
        rows = negatives or [[] for _ in firsts]
        return cls(firsts, seconds, rows, None, torch.arange(len(firsts)), documents, name, mined_ids=numbers)

    def sides(self) -> list[list[str]]:
        """Return firsts, seconds and, if there are any, all negatives row by row."""
        flat = [one for row in self.negatives for one in row]
        return [self.firsts, self.seconds, *([flat] if flat else [])]

    def views_evaluated(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Tokens, Tokens]:
        """Return first and second texts without dropout.

        Args:
            index: Positions [b].
            epoch: Unused.
            seed: Unused.
        """
        return self.batch(0, index), self.batch(1, index)

    def mined(self, index: Annotated[Tensor, "b"]) -> MinedRows | None:
        """Return the mined negatives of the rows at positions [b], or None if there are none."""
        each = len(self.negatives[0])
        if not each:
            return None
        rows = (index[:, None] * each + torch.arange(each, device=index.device)).flatten()
        ids = [self.mined_ids[one] for i in index.tolist() for one in self.negatives[i]]
        return MinedRows(self.batch(2, rows), torch.tensor(ids, device=index.device))

    def shown(self, position: int) -> Shown:
        """Return both texts at a position, shortened."""
        return Shown(text=f"{shortened(self.firsts[position])} → {shortened(self.seconds[position])}")


def grouped(firsts: list[str], seconds: list[int], total: int) -> list[int]:
    """Group numbers that are connected by a common first text; return the lowest number of each group.

    Args:
        firsts: First text of each row.
        seconds: Number of each row's second text.
        total: Number of second texts.

    Returns:
        For each number below ``total``, the lowest one that it is connected to, directly or by a chain.

    Example:
        >>> grouped(["q", "q", "r", "s"], [0, 2, 2, 1], 4)
        [0, 1, 0, 3]
    """
    parent = list(range(total))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    of_first: dict[str, int] = {}
    for first, second in zip(firsts, seconds, strict=True):
        low, high = sorted((root(of_first.setdefault(first, second)), root(second)))
        parent[high] = low
    return [root(number) for number in range(total)]


_ARRAYS = {
    "first": "np.array(first, dtype=float) has none",
    "second": "np.array(second, dtype=float) has none",
    "labels": "np.array(labels, dtype=str) converts them to text",
}


@dataclass(frozen=True, eq=False)
class VectorPairs(Items, prefix="embeddings", form="embeddings:FILE.npz"):
    """Pairs of vectors.

    Attributes:
        first: Vectors of the first side, float32 [n, d].
        second: Vectors of the second side, float32 [n, e].
        labels: Class of each pair, int64 [n], or None.
        ids: Id of each pair, int64 [n].
        name: Name of the data.
        classes: Names of the classes.
    """

    first: Annotated[Tensor, "n d"]
    second: Annotated[Tensor, "n e"]
    labels: Annotated[Tensor, "n"] | None
    ids: Annotated[Tensor, "n"]
    name: str
    classes: tuple[str, ...] = ()
    noun: ClassVar[str] = "pair"

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        """Raise for unsupported options or a missing file name, without reading data."""
        super().check(options)
        with located("--data"):
            if not options.data.partition("embeddings:")[2].strip():
                raise ArgumentError("data", "embeddings:FILE.npz", repr(options.data))

    @classmethod
    def read(cls, path: str, options: TrainOptions) -> VectorPairs:
        """Read the arrays of an .npz file.

        Args:
            path: Path of the file.
            options: The options of the run.
        """
        found = read_arrays("data", Path(path), _ARRAYS, needed=("first", "second"))
        sides = []
        for name in ("first", "second"):
            array = found[name]
            if array.ndim != 2 or array.dtype.kind not in "fiu" or len(array) != len(found["first"]):
                raise ArgumentError("data", f"`first` [n, d] and `second` [n, e] in {path}", f"{name}={array.shape}")
            sides.append(torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)))
            if not torch.isfinite(sides[-1]).all():
                raise NotFinite("data", f"finite numbers in {name} of {path}", "NaN or infinite values")
        labels, classes = labels_in(found, "labels", Path(path)) if "labels" in found else (None, ())
        return cls(sides[0], sides[1], labels, torch.arange(len(sides[0])), path, classes)

    def views(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Sided, Sided]:
        """Return the two sides of the pairs at some positions.

        Args:
            index: Positions [b].
            epoch: Unused.
            seed: Unused.
        """
        return Sided(first=self.first[index]), Sided(second=self.second[index])

    def plain(self, index: Annotated[Tensor, "b"]) -> Sided:
        """Return the first side of the pairs at positions [b]."""
        return Sided(first=self.first[index])

    @classmethod
    def rebuilt(cls, record: dict[str, Any], options: TrainOptions) -> nn.Module:
        """Build a linear head for each side.

        Args:
            record: Record of the training pairs, with the widths of both sides.
            options: The options of the run.
        """
        with seeded(options.seed):
            return TwoTowers(*(nn.Linear(width, options.dim) for width in record["widths"]))

    def record(self) -> dict[str, Any]:
        """Return the record of all kinds, with the widths of both sides."""
        return {**super().record(), "widths": [self.first.shape[1], self.second.shape[1]]}

    def check_like(self, record: dict[str, Any]) -> None:
        """Raise if the widths of the vectors differ from the record."""
        now = self.record()["widths"]
        if (before := record["widths"]) != now:
            raise ArgumentError("evaluate", f"vectors of widths {before}, like the training data", f"{now}")

    def shown(self, position: int) -> Shown:
        """Return the id of the pair at a position: vectors cannot be shown."""
        return Shown(text=f"pair {int(self.ids[position])}")
