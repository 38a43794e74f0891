"""What `hardneg judge` judges: the mined pairs of every rule, with their ids, texts and known positives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardneg.core.types import hash_text
from hardneg.judging.asking import RowPair
from hardneg.judging.design import PairIndices, Population, equal_texts
from hardneg.judging.entry import some_positives
from hardneg.judging.folder import load_populations, store_populations
from hardneg.judging.rules import population_of, read_rules
from hardneg.mining.engines import Local
from hardneg.mining.inputs import StageProgress, embeddings, load_problem, make_miner
from hardneg.mining.judgements import read_grades
from hardneg.mining.options import MineOptions
from hardneg.mining.pairs import as_pairs
from hardneg.mining.problem import Problem
from hardneg.mining.table_values import key_of


@dataclass(eq=False)
class MinedPairs:
    """The pairs of a judgement, read and mined when they are first needed.

    Attributes:
        given: The rules as they were given: expressions and families of them.
        mining: Options of the mining.
        store: File of the mined pairs, which a later run reads.
        progress: Called at the start of each stage.
    """

    given: list[str]
    mining: MineOptions
    store: Path
    progress: StageProgress

    @cached_property
    def rules(self) -> list[tuple[Any, Any]]:
        """The rules with their distributions."""
        return read_rules(self.given)

    @cached_property
    def problem(self) -> Problem:
        """Queries, documents and positives."""
        return load_problem(self.mining)

    @cached_property
    def populations(self) -> list[Population]:
        """The pairs of every rule: stored by an earlier run, or mined now."""
        found = load_populations(self.store)
        if found is None:
            embedded = embeddings(self.mining, self.problem, Local(), self.progress)
            found, done = [], self.progress("mining", len(self.rules))
            for given, negatives in self.rules:
                miner = make_miner(replace(self.mining, negatives=given), self.problem, embedded)
                found.append(population_of(repr(negatives), negatives, miner.joined(miner.mined())))
                done(1)
            store_populations(self.store, found)
        return found

    @cached_property
    def irrelevant(self) -> set[RowPair]:
        """Pairs that the given judgements call irrelevant: answers that cost nothing."""
        path = self.mining.judgements
        graded = [] if path is None else read_grades(path, "judge")
        rows = {self.row(query, document) for grade, query, document in graded if grade <= 0}
        return {pair for pair in rows if min(pair) >= 0}

    def ids_of_rules(self) -> set[tuple[str, str]]:
        """Return the ids of all pairs of the rules."""
        return {
            self.ids_of(pair)
            for one in self.populations
            for pair in zip(one.query.tolist(), one.document.tolist(), strict=True)
        }

    def known(self, number: int) -> list[RowPair]:
        """Return at most this many known positives, drawn with the seed of the mining."""
        lists = self.problem.positives
        query = torch.tensor([number for number, own in enumerate(lists) for _ in own])
        rows = torch.tensor([row for own in lists for row in own])
        return some_positives(as_pairs(query, rows, len(lists)), number, self.mining.seed)

    @cached_property
    def ids(self) -> tuple[list[str], list[str]]:
        """Ids of queries and documents as texts."""
        sides = self.problem.queries, self.problem.corpus
        return tuple([str(key_of(one)) for one in side.ids] for side in sides)  # type: ignore[return-value]

    @cached_property
    def row_of(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Row of each id."""
        return tuple({name: row for row, name in enumerate(names)} for names in self.ids)  # type: ignore[return-value]

    def row(self, query: str, document: str) -> RowPair:
        """Return the rows of a pair of ids; -1 for an id that is not in the data."""
        return self.row_of[0].get(query, -1), self.row_of[1].get(document, -1)

    def ids_of(self, pair: RowPair) -> tuple[str, str]:
        """Return the ids of a pair."""
        return self.ids[0][pair[0]], self.ids[1][pair[1]]

    def texts(self, pair: RowPair) -> tuple[str, str]:
        """Return the texts of a pair, and ids where there are no texts."""
        sides = self.problem.queries, self.problem.corpus
        return tuple(  # type: ignore[return-value]
            names[row] if side.texts is None else side.texts[row]
            for side, names, row in zip(sides, self.ids, pair, strict=True)
        )

    def example(self, pair: RowPair) -> str:
        """Return the text of a known positive of the query, as an example on the sheet."""
        own = self.problem.positives[pair[0]]
        return self.texts((pair[0], own[0]))[1] if own else ""

    def keys(self) -> tuple[PairIndices | None, PairIndices | None]:
        """Return a number per query and per document, equal for equal texts; None without texts."""
        return equal_texts(self.problem.queries.texts), equal_texts(self.problem.corpus.texts)

    def identities(self) -> tuple[PairIndices, PairIndices]:
        """Return a hash of the id of each query and each document."""
        return tuple(np.array([hash_text(name) for name in names], dtype=np.int64) for names in self.ids)  # type: ignore[return-value]

    def same_texts(self, pair: RowPair) -> list[RowPair]:
        """Return the pairs that share the answer of a pair: queries of the same text with the same document."""
        return [(query, pair[1]) for query in self._queries_like[pair[0]]]

    @cached_property
    def _queries_like(self) -> dict[int, list[int]]:
        keys = equal_texts(self.problem.queries.texts)
        if keys is None:
            return {row: [row] for row in range(len(self.problem.queries))}
        groups: dict[int, list[int]] = {}
        for row, key in enumerate(keys.tolist()):
            groups.setdefault(key, []).append(row)
        return {row: groups[key] for row, key in enumerate(keys.tolist())}
