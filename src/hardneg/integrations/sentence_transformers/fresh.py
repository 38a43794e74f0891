"""Negatives mined repeatedly with the model in training (ANCE: Xiong et al. 2021), for HardBatches.

Rows of the data set receive their negatives when they are loaded, from a table that each refresh replaces. The table is
in shared memory, so that loader processes see the changes. Batches loaded ahead of a refresh keep the previous
negatives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.batching.stored import load_arrays, save_arrays
from hardneg.core.errors import ArgumentError, HardnegWarning, argument_error
from hardneg.core.types import Keys
from hardneg.io.tables import column_of
from hardneg.mining.checks import check_rule
from hardneg.mining.entry import mine_vectors
from hardneg.mining.options import TEMPERATURE, DrawKind
from hardneg.mining.problem import Side, build_problem
from hardneg.mining.select import Rule
from hardneg.negatives import Negatives, parse

_fix = "start a new run without it"


class FreshNegatives:
    """Training set whose negatives are mined again at each refresh of ``HardBatches(..., fresh=...)``.

    The attribute ``dataset`` is the data set to train on, with the columns anchor, positive, negative_1 ... negative_k
    and the ids of all texts in ``label``. Before the first refresh the negatives are random.

    Args:
        dataset: A ``datasets.Dataset`` whose first two columns are the texts of anchors and positives.
        negatives: Distribution over negatives, as in ``hn.mine``.
        k: Negatives per anchor.
        corpus: Further documents to choose negatives from, besides the positives.
        draw: ``"top"``, ``"gumbel"`` or ``"categorical"``, as in ``hn.mine``.
        seed: Seed of the draws and of the first, random negatives.
        temperature: Temperature of the distribution.

    Raises:
        ArgumentError: The data set is not one of text pairs, the rule cannot be mined, or there are too few documents.
    """

    def __init__(
        self,
        dataset: Any,
        negatives: Negatives | str = "BelowPositive(relative=0.05)",
        k: int = 1,
        *,
        corpus: Sequence[str] = (),
        draw: DrawKind = "top",
        seed: int = 0,
        temperature: float = TEMPERATURE,
    ) -> None:
        if not hasattr(dataset, "with_transform") or len(dataset.column_names) < 2:
            raise ArgumentError("FreshNegatives", "a datasets.Dataset of anchors and positives", type(dataset).__name__)
        self.names = tuple(dataset.column_names[:2])
        rule = Rule(parse(negatives) if isinstance(negatives, str) else negatives, k, draw, seed)
        check_rule(rule, temperature, None)  # not at the first refresh
        self.options: dict[str, Any] = {"draw": draw, "seed": seed, "temperature": temperature}
        self.negatives, self.k = rule.negatives, rule.k
        anchors, positives = (column_of(dataset, name) for name in self.names)
        if wrong := [each for each in (*anchors, *positives, *corpus) if not isinstance(each, str)]:
            raise ArgumentError("FreshNegatives", "one text in each row of a column", repr(wrong[0]))
        documents = list(dict.fromkeys([*positives, *corpus]))
        queries, others = (Side(list(range(len(each))), each, named=False) for each in (anchors, documents))
        problem = build_problem(queries, others, [[one] for one in positives])
        self.queries, self.documents = problem.queries.texts or [], problem.corpus.texts or []
        self.positives, self.own = problem.positives, torch.tensor(problem.own)
        if k > len(self.documents) - 1 - max(map(len, self.positives)):
            raise argument_error("FreshNegatives", f"a k that {len(self.documents)} documents allow", "k", k)
        self.rows = self._random(seed).share_memory_()  # type: ignore[no-untyped-call]
        self.mined_at: int | None = None
        self._query = {text: number for number, text in enumerate(self.queries)}
        self._row = {text: row for row, text in enumerate(self.documents)}
        self.dataset = dataset.select_columns(list(self.names)).with_transform(self._filled)
        self.dataset.fresh = self  # lets HardBatches check that its `fresh` belongs to the data set

    def refresh(self, encode: Callable[[list[str], str], Annotated[Tensor, "n d"]], step: int) -> None:
        """Mine new negatives; a query with too few keeps its previous ones in the remaining places.

        Args:
            encode: Function of (texts, name of their column) that returns vectors, [n, d].
            step: Number of optimiser steps so far.
        """
        queries, documents = encode(self.queries, self.names[0]), encode(self.documents, self.names[1])
        with warnings.catch_warnings():
            if (
                self.mined_at is not None
            ):  # warn at the first refresh only: numbers in the texts change, so warn_once would repeat them
                warnings.simplefilter("ignore", HardnegWarning)
            found = mine_vectors(
                Keys(queries, self.own.to(queries.device)),
                Keys(documents, torch.arange(len(documents), device=documents.device)),
                self.positives,
                self.negatives,
                self.k,
                **self.options,
            ).rows
        self.rows.copy_(torch.where(found >= 0, found, self.rows))
        self.mined_at = step

    def age(self, step: int) -> int | None:
        """Return the number of steps since the negatives were mined; None before the first refresh."""
        return None if self.mined_at is None else step - self.mined_at

    def save(self, path: Path) -> int | None:
        """Write the rows of the negatives, [queries, k], to an .npz file; return the step at which they were mined."""
        save_arrays(path, rows=self.rows.numpy())
        return self.mined_at

    def load(self, path: Path, mined_at: int | None) -> None:
        """Read what ``save`` wrote and returned."""
        rows = load_arrays("FreshNegatives", path, lambda parts: torch.from_numpy(parts["rows"]), _fix)
        self.rows.copy_(rows)
        self.mined_at = mined_at

    def _filled(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Return rows of the data set with their negatives and the ids of all texts, in the layout of ids.py."""
        if len(batch) < 2:  # datasets before version 4 calls this for a single column, ``dataset["anchor"]``
            return batch
        anchors, positives = (batch[name] for name in self.names)
        chosen = [self.rows[self._query[text]].tolist() for text in anchors]
        out = {self.names[0]: list(anchors), self.names[1]: list(positives)}
        for place in range(self.k):
            out[f"negative_{place + 1}"] = [self.documents[rows[place]] for rows in chosen]
        first = len(
            self.queries
        )  # equal texts have equal ids: a query that is also a document has the id of the document
        ids = [first + self._row[text] if text in self._row else self._query[text] for text in anchors]
        own = [first + self._row[text] for text in positives]
        rest = [[first + row for row in rows] for rows in chosen]
        out["label"] = [[one, one, other, *more] for one, other, more in zip(ids, own, rest, strict=True)]
        return out

    def _random(self, seed: int) -> Tensor:
        """Draw k documents per query that are not its positives, [queries, k]."""
        random, size = torch.Generator().manual_seed(seed), len(self.documents)
        rows = []
        for own, same in zip(self.positives, self.own.tolist(), strict=True):
            never, taken = {*own, same}, dict[int, None]()
            while len(taken) < self.k:
                drawn = torch.randint(0, size, (2 * self.k + len(never),), generator=random).tolist()
                taken |= dict.fromkeys(row for row in drawn if row not in never)
            rows.append(list(taken)[: self.k])
        return torch.tensor(rows)
