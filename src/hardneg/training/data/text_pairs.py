"""Pairs of related texts: a question and its answer, a sentence and the next one.

    pairs:faq.jsonl[question,answer]   columns of a table; ``negative`` or negative_1, negative_2, ... are mined
                                       negatives, as ``hardneg mine`` writes them
    pairs:qqp.csv[a,b,is_duplicate=1]  only the rows with this label; a column that may be a label is never ignored
    pairs:story.txt                    consecutive lines; an empty line starts a new document

A candidate is a text, not a row: equal texts share an id, and so do second texts with the same first text, so that the
positive of one row is never a negative of another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.io.tables import read_table
from hardneg.training.data.items import MinedRows, Shown
from hardneg.training.data.text_files import (
    is_table,
    negatives_in,
    pair_columns,
    positive_rows,
    read_lines,
    split_columns,
    texts_in,
)
from hardneg.training.data.texts import TextItems, shortened
from hardneg.training.data.tokens import Ragged, Tokenizer, Tokens
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
        """Build pairs, with one id for all second texts and negatives that belong together.

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
        """Return the mined negatives of the rows at positions [b], or None without any."""
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
