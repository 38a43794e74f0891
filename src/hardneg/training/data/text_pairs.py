"""Pairs of texts that belong together: a question and its answer, a sentence and the next one.

    pairs:faq.jsonl[question,answer]   columns of a table; ``negative`` or negative_1, negative_2 ... are mined
                                       negatives, as ``hardneg mine`` writes them
    pairs:qqp.csv[a,b,is_duplicate=1]  only the rows with this label; a column that may hold one is not ignored
    pairs:story.txt                    consecutive lines; an empty line begins another document

A candidate is a text, not a row: equal texts have one id, and so have second texts with the same first text, so that
the positive of one row is no negative of another.
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
from hardneg.training.data.texts import OfTexts, shortened
from hardneg.training.data.tokens import Ragged, Tokenizer, Tokens
from hardneg.training.options import TrainOptions


@dataclass(frozen=True, eq=False)
class TextPairs(OfTexts, prefix="pairs", form="pairs:FILE"):
    """The first texts, the second ones, and negatives that were mined for each row."""

    firsts: list[str]
    seconds: list[str]
    negatives: list[list[str]]  # of every row as many, perhaps none
    labels: Annotated[Tensor, "n"] | None
    ids: Annotated[Tensor, "n"]
    documents: Annotated[Tensor, "n"]  # the same number for rows that share a text
    name: str
    classes: tuple[str, ...] = ()
    mined_ids: dict[str, int] = field(default_factory=dict, repr=False)
    tokens: tuple[Ragged, ...] | None = field(default=None, repr=False)  # of firsts, seconds, negatives
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    columns: ClassVar[tuple[int, int, str]] = (
        2,
        3,
        "pairs:FILE or pairs:TABLE[first,second] or pairs:TABLE[first,second,label=1]",
    )

    @classmethod
    def read(cls, path: str, options: TrainOptions) -> TextPairs:
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
                raise ArgumentError("data", "consecutive lines", f"none in {file}, where each stands alone")
            firsts, seconds = [lines.texts[i - 1] for i in follows], [lines.texts[i] for i in follows]
        return cls.of(firsts, seconds, negatives, path)

    @classmethod
    def of(cls, firsts: list[str], seconds: list[str], negatives: list[list[str]], name: str) -> TextPairs:
        """Pairs with an id for each text among the seconds and the negatives; the same for all that belong together."""
        numbers: dict[str, int] = {}
        for text in (*seconds, *(one for row in negatives for one in row)):
            numbers.setdefault(text, len(numbers))
        group = grouped(firsts, [numbers[text] for text in seconds], len(numbers))
        numbers = {text: group[number] for text, number in numbers.items()}
        documents = torch.tensor([numbers[text] for text in seconds])
        rows = negatives or [[] for _ in firsts]
        return cls(firsts, seconds, rows, None, torch.arange(len(firsts)), documents, name, mined_ids=numbers)

    def sides(self) -> list[list[str]]:
        flat = [one for row in self.negatives for one in row]
        return [self.firsts, self.seconds, *([flat] if flat else [])]

    def views_evaluated(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Tokens, Tokens]:
        return self.batch(0, index), self.batch(1, index)

    def mined(self, index: Annotated[Tensor, "b"]) -> MinedRows | None:
        each = len(self.negatives[0])
        if not each:
            return None
        rows = (index[:, None] * each + torch.arange(each, device=index.device)).flatten()
        ids = [self.mined_ids[one] for i in index.tolist() for one in self.negatives[i]]
        return MinedRows(self.batch(2, rows), torch.tensor(ids, device=index.device))

    def shown(self, position: int) -> Shown:
        return Shown(text=f"{shortened(self.firsts[position])} → {shortened(self.seconds[position])}")


def grouped(firsts: list[str], seconds: list[int], total: int) -> list[int]:
    """Of each number the lowest one that it is joined to: by a common first text, or by several in a row.

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
