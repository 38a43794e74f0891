"""Pairs of related texts, such as a question and its answer, and pairs of related vectors computed elsewhere.

    pairs:faq.jsonl[question,answer]   columns of a table; ``negative`` or negative_1, negative_2, ... are mined
                                       negatives, as ``hardneg mine`` writes them
    pairs:qqp.csv[a,b,is_duplicate=1]  only the rows with this label; a column that may be a label is never ignored
    pairs:story.txt                    consecutive lines; an empty line starts a new document
    embeddings:pairs.npz               arrays ``first`` [n, d] and ``second`` [n, e], optionally ``labels`` [n],
                                       ``documents`` [n], ``negatives`` [n, k, e] and ``negative_documents`` [n, k];
                                       ``test`` [n] is true for pairs to evaluate on, instead of a random fifth

A candidate of ``TextPairs`` is a text, not a row: equal texts share an id, and so do second texts with the same first
text, so that the positive of one row is never a negative of another. ``VectorPairs`` may be vectors of images and of
their texts (CLIP, Radford et al. 2021), or of texts by a model that is too large to train: a head is trained for each
side, and evaluated by retrieval of the second side from the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from hardneg.core.errors import ArgumentError, NotFinite, UnknownName, located
from hardneg.io.arrays import read_arrays
from hardneg.io.tables import read_table
from hardneg.training.data.inputs import Sided, TwoTowers
from hardneg.training.data.items import Items, MinedRows, Shown, Splits
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
    "documents": "np.array(documents, dtype=str) converts them to text",
    "negatives": "np.array(negatives, dtype=float) has none",
    "negative_documents": "np.array(negative_documents, dtype=str) converts them to text",
    "test": "np.array(test, dtype=bool) has none",
}
_HEADS = ("auto", "linear", "adapter")


class Adapter(nn.Module):
    """A residual hidden layer for vectors of a frozen model; it begins as the identity.

    Args:
        width: Width of the vectors, and of the result.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.hidden, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, vectors: Annotated[Tensor, "b d"]) -> Annotated[Tensor, "b d"]:
        """Return the adapted vectors."""
        return vectors + self.out(gelu(self.hidden(self.norm(vectors))))  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class VectorPairs(Items, prefix="embeddings", form="embeddings:FILE.npz"):
    """Pairs of vectors, optionally with mined negatives.

    Attributes:
        first: Vectors of the first side, float32 [n, d].
        second: Vectors of the second side, float32 [n, e].
        labels: Class of each pair, int64 [n], or None.
        ids: Id of each pair, int64 [n].
        documents: Number of each pair's second item, int64 [n]; equal for pairs that share it.
        negatives: Vectors of mined negatives, float32 [n, k, e], or None.
        negative_documents: Number of each mined negative, int64 [n, k], -1 for items that no pair has; None without
            negatives.
        name: Name of the data.
        classes: Names of the classes.
    """

    first: Annotated[Tensor, "n d"]
    second: Annotated[Tensor, "n e"]
    labels: Annotated[Tensor, "n"] | None
    ids: Annotated[Tensor, "n"]
    documents: Annotated[Tensor, "n"]
    negatives: Annotated[Tensor, "n k e"] | None
    negative_documents: Annotated[Tensor, "n k"] | None
    name: str
    classes: tuple[str, ...] = ()
    noun: ClassVar[str] = "pair"

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        """Raise for unsupported options or a missing file name, without reading data."""
        if options.encoder not in _HEADS:
            raise UnknownName(options.encoder, _HEADS).within("--encoder")
        super().check(replace(options, encoder="auto"))
        with located("--data"):
            if not options.data.partition("embeddings:")[2].strip():
                raise ArgumentError("data", "embeddings:FILE.npz", repr(options.data))

    @classmethod
    def read(cls, path: str, options: TrainOptions) -> VectorPairs | Splits:
        """Read the arrays of an .npz file; with an array ``test``, both splits.

        Args:
            path: Path of the file.
            options: The options of the run.
        """
        found = read_arrays("data", Path(path), _ARRAYS, needed=("first", "second"))
        first, second = (_vectors(found, name, (None, None), path) for name in ("first", "second"))
        n = len(first)
        labels, classes = labels_in(found, "labels", Path(path)) if "labels" in found else (None, ())
        mined = _vectors(found, "negatives", (n, None, second.shape[1]), path) if "negatives" in found else None
        documents, others = _documents(found, (n, 0 if mined is None else mined.shape[1]), path)
        of_mined = None if mined is None else others
        items = cls(first, second, labels, torch.arange(n), documents, mined, of_mined, path, classes)
        if "test" not in found:
            return items
        test = np.asarray(found["test"])
        if test.shape != (n,) or test.dtype != bool or not 0 < test.sum() < n:
            what = f"`test` with {n} booleans, some of them true, in {path}"
            raise ArgumentError("data", what, f"{test.dtype} {list(test.shape)}")
        return Splits(*(items.take(torch.from_numpy(np.nonzero(part)[0])) for part in (~test, test)))

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

    def mined(self, index: Annotated[Tensor, "b"]) -> MinedRows | None:
        """Return the mined negatives of the pairs at positions [b], or None if there are none."""
        if self.negatives is None or self.negative_documents is None:
            return None
        return MinedRows(Sided(second=self.negatives[index].flatten(0, 1)), self.negative_documents[index].flatten())

    @classmethod
    def rebuilt(cls, record: dict[str, Any], options: TrainOptions) -> nn.Module:
        """Build a head for each side: linear, or an adapter.

        Args:
            record: Record of the training pairs, with the widths of both sides.
            options: The options of the run.

        Raises:
            ArgumentError: If the vectors do not have the width that an adapter returns.
        """
        widths = record["widths"]
        if options.encoder == "adapter" and {*widths} != {options.dim}:
            got = f"--dim {options.dim} and vectors of widths {widths[0]} and {widths[1]}"
            fix = f"use --dim {widths[0]}" if widths[0] == widths[1] else "use --encoder linear"
            raise ArgumentError("--encoder adapter", "vectors with --dim dimensions on both sides", got, fix)
        with seeded(options.seed):
            if options.encoder == "adapter":
                return TwoTowers(*(Adapter(width) for width in widths))
            return TwoTowers(*(nn.Linear(width, options.dim) for width in widths))

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


def _vectors(found: dict[str, Any], name: str, shape: tuple[int | None, ...], path: str) -> Tensor:
    """Return an array of finite numbers as float32; None in ``shape`` stands for any size."""
    array = found[name]
    fits = array.ndim == len(shape) and all(
        size in (None, there) for size, there in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype.kind not in "fiu" or len(array) != len(found["first"]):
        what = f"`first` [n, d] and `second` [n, e] in {path}"
        if name == "negatives":
            what = f"`negatives` [n, k, e] = [{shape[0]}, k, {shape[2]}] in {path}"
        raise ArgumentError("data", what, f"{name}={array.shape}")
    vectors = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    if not torch.isfinite(vectors).all():
        raise NotFinite("data", f"finite numbers in {name} of {path}", "NaN or infinite values")
    return vectors


def _documents(found: dict[str, Any], shape: tuple[int, int], path: str) -> tuple[Tensor, Tensor]:
    """Return the number of each pair's second item [n], and that of each mined negative [n, k], -1 where unknown."""
    own, others = found.get("documents"), found.get("negative_documents")
    for name, array, expected in (("documents", own, shape[:1]), ("negative_documents", others, shape)):
        if array is not None and array.shape != expected:
            raise ArgumentError("data", f"`{name}` {list(expected)} in {path}", f"{name}={array.shape}")
    if own is None:
        if others is not None:
            raise ArgumentError("data", f"`documents` beside `negative_documents` in {path}", "none")
        return torch.arange(shape[0]), torch.full(shape, -1)
    names, numbers = np.unique(own.astype(str), return_inverse=True)
    if others is None:
        return torch.from_numpy(numbers.astype(np.int64)), torch.full(shape, -1)
    place = np.searchsorted(names, others.astype(str)).clip(max=len(names) - 1)
    known = np.where(names[place] == others.astype(str), place, -1)
    return torch.from_numpy(numbers.astype(np.int64)), torch.from_numpy(known.astype(np.int64))
