"""Mining as stages: maps over pieces that any process may compute in any order, with the same result.

    bounds    statistics of whole rows that some factors need: one piece for each shard of the corpus
    settled   the bounds of all shards, merged: one piece for each block of queries
    lists     the nearest candidates of all queries in a shard: one piece for each shard
    chosen    the lists of all shards, merged, and the negatives chosen: one piece for each block of queries

A stage reads each shard once, and a piece may be computed twice without harm. Queries whose lists
were too short go through another attempt with longer lists.

``chosen_pieces`` decides which stages run, ``Stages`` computes a piece, and a ``Store`` keeps
pieces: in memory for ``Miner.mined``, in files (``FileStore``) for jobs.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from torch import Tensor

from hardneg.core.bounds import Bound, Bounds, State, Window, finish, left_by, reduce_rows
from hardneg.io.arrays import Array, names_in_npz, read_member
from hardneg.io.files import run_again, write_atomically
from hardneg.io.sealed import is_whole, sealing
from hardneg.mining.checks import check_vectors
from hardneg.mining.corpus_scores import ModelVectors
from hardneg.mining.edges import WindowEdges, count_bytes, finished, is_wide, narrowed, start_edges
from hardneg.mining.filters import CorpusRows, bounds_of
from hardneg.mining.select import Selection, select
from hardneg.search.exact import GROUP, DocumentBlock, runs_in_triton
from hardneg.search.nearest import Nearest, merged

if TYPE_CHECKING:
    from hardneg.mining.miner import Miner

PieceArrays = Mapping[str, Array]
"""The arrays of a piece by name."""


@dataclass(frozen=True)
class Stage:
    """One map over pieces; two stages with the same name compute the same pieces.

    Attributes:
        kind: ``"queries"``, ``"bounds"``, ``"settled"``, ``"lists"`` or ``"chosen"``.
        attempt: Number of the attempt and of the group of queries, such as ``"0.2"``.
        size: Candidates in each list; None for whole rows of scores.
        filtered: Whether the leading factors are applied during the search.
        pieces: Number of pieces.
        factor: Number of the factor whose bounds are computed.
        level: Pass over the bytes of the scores that bounds of wide windows need.
        before: Name of the stage that contains the bounds found so far.
    """

    kind: str
    attempt: str
    size: int | None
    filtered: bool
    pieces: int = 0
    factor: int = 0
    level: int = 0
    before: str | None = None

    @property
    def name(self) -> str:
        """Name of the stage in files: attempt, kind, factor and level."""
        return f"{self.attempt}-{self.kind}.{self.factor}.{self.level}"


class Store:
    """Pieces of a job, kept in the memory of one process."""

    in_memory = True

    def __init__(self) -> None:
        self.pieces: dict[tuple[str, int], PieceArrays] = {}

    def read(self, stage: str, piece: int) -> PieceArrays:
        """Return the arrays of a piece."""
        return self.pieces[stage, piece]

    def write(self, stage: str, piece: int, content: PieceArrays) -> None:
        """Store the arrays of a piece."""
        self.pieces[stage, piece] = content

    def has(self, stage: str, piece: int) -> bool:
        """Return whether a piece is stored."""
        return (stage, piece) in self.pieces

    def drop(self, beginning: str) -> None:
        """Delete the pieces of stages whose names have this prefix: they are not needed any more."""
        self.pieces = {key: piece for key, piece in self.pieces.items() if not key[0].startswith(beginning)}


RunStage = Callable[[Stage], None]
"""Computes the pieces of a stage that are missing."""


def chosen_pieces(miner: Miner, store: Store, run: RunStage) -> Iterator[PieceArrays]:
    """Run the stages until every query is decided, and yield the chosen negatives of each block of queries.

    Args:
        miner: The shared state.
        store: Where pieces are kept; pieces of a killed run are used again.
        run: Function that computes the missing pieces of a stage, here or in other processes.

    Yields:
        Arrays of the stage ``chosen``: query [b], rows, scores and found_by [b, k], decided [b],
            and the counts left and removed [b, f] for each step.
    """
    if not store.has("pilot", 0):
        store.write("pilot", 0, {"filter_first": np.array(miner.needs_filters())})
    filter_first = bool(store.read("pilot", 0)["filter_first"])
    pending = np.arange(len(miner.scorer.queries))
    held = len(miner.finder.shards) if store.in_memory else 1  # number of shards whose lists are in memory at a time
    for number, (size, filtered) in enumerate(miner.finder.attempts(filter_first)):
        undecided = [pending[:0]]
        step, groups = miner.finder.at_once(size, held), itertools.count()
        while len(pending):
            attempt = Stage("queries", f"{number}.{next(groups)}", size, filtered)
            if not store.has(attempt.name, 0):
                store.write(attempt.name, 0, {"query": pending[:step]})
            # The pieces of a killed run are used as they are, even if it grouped the queries differently.
            queries = len(store.read(attempt.name, 0)["query"])
            pending = pending[queries:]
            last = _run_attempt(miner, store, run, attempt, queries)
            for piece in range(last.pieces):
                chosen = store.read(last.name, piece)
                undecided.append(chosen["query"][~chosen["decided"]])
                yield chosen
            store.drop(f"{attempt.attempt}-")
        pending = np.concatenate(undecided)
        if not len(pending):
            return
    raise AssertionError(f"{len(pending)} queries stayed undecided; the last attempt sees every candidate.")


def _run_attempt(miner: Miner, store: Store, run: RunStage, attempt: Stage, queries: int) -> Stage:
    """Run the stages of one attempt and return the last."""
    finder, before = miner.finder, None
    blocks = -(-queries // finder.block(attempt.size))
    if finder.applies_all_factors:
        before = _run_bounds(miner, store, run, attempt, blocks)
    if finder.searched:
        run(replace(attempt, kind="lists", pieces=len(finder.shards), before=before))
    last = replace(attempt, kind="chosen", pieces=blocks)
    run(last)
    return last


def _run_bounds(miner: Miner, store: Store, run: RunStage, attempt: Stage, blocks: int) -> str | None:
    """Find the bounds of all factors from left to right, and return the name of the stage that contains them."""
    if miner.short_rows:
        stage = replace(attempt, kind="settled", pieces=blocks)
        run(stage)
        return stage.name
    before: str | None = None
    for i, factor in enumerate(miner.rule.negatives.factors):
        level, is_open = 0, any(bound.over == "candidates" for bound in factor.bounds().values())
        while is_open:
            shards = len(miner.finder.shards)
            stage = replace(attempt, kind="bounds", pieces=shards, factor=i, level=level, before=before)
            run(stage)
            counted, stage = stage.name, replace(stage, kind="settled", pieces=blocks)
            run(stage)
            store.drop(counted)
            before = stage.name
            is_open = any(bool(store.read(before, piece)["open"]) for piece in range(blocks))
            level += 1
    return before


class Stages:
    """Computes pieces from the pieces of earlier stages.

    Args:
        miner: The shared state: scorer, finder and rule.
        store: Where earlier pieces are read from.
    """

    def __init__(self, miner: Miner, store: Store) -> None:
        self.miner, self.store = miner, store
        self.scorer, self.finder, self.corpus = miner.scorer, miner.finder, miner.scorer.corpus
        self.factors = miner.rule.negatives.factors

    def perform(self, stage: Stage, piece: int) -> PieceArrays:
        """Compute one piece.

        Args:
            stage: The stage.
            piece: A shard of the corpus for ``bounds`` and ``lists``, a block of queries for
                ``settled`` and ``chosen``.
        """
        try:
            return {"bounds": self._bounds, "settled": self._settled, "lists": self._lists, "chosen": self._chosen}[
                stage.kind
            ](stage, piece)
        finally:
            self.scorer.forget()

    def _blocks(self, stage: Stage) -> tuple[Tensor, ...]:
        query = torch.from_numpy(self.store.read(replace(stage, kind="queries", factor=0, level=0).name, 0)["query"])
        return torch.split(query.to(self.scorer.device), self.finder.block(stage.size)) if len(query) else ()

    def _lists(self, stage: Stage, shard: int) -> PieceArrays:
        assert stage.size is not None
        lists = []
        low, high = self.finder.shards[shard]
        size = min(stage.size, high - low)
        for b, query in enumerate(self._blocks(stage)):
            bounds = self._known(stage, b, query, len(self.factors))[0] if self.finder.applies_all_factors else None
            lists.append(self.finder.running(query, size, stage.filtered, bounds))
        for low, high in self._documents(stage, shard):
            documents = DocumentBlock.of(self.corpus, low, high, bfloat16=self.miner.bfloat16)
            if not (math.isfinite(documents.norm) and documents.least > 0):
                check_vectors("corpus", documents.raw, self.corpus.cosine, low)
            for each in lists:
                each.add(documents)
        piece: dict[str, Array] = {}
        for b, each in enumerate(lists):
            found = each.found()
            piece[f"{b}.key"], piece[f"{b}.rows"] = found.key.cpu().numpy(), found.rows.cpu().numpy()
            if each.drawn:
                piece[f"{b}.similarity"] = found.similarity.cpu().numpy()
            if each.weigh is not None:
                piece[f"{b}.seen"] = each.weigh.seen.cpu().numpy()
        return piece

    def _documents(self, stage: Stage, shard: int) -> list[tuple[int, int]]:
        """Return the blocks of a shard: larger ones in bfloat16, or if a kernel writes one number per group."""
        low, high = self.finder.shards[shard]
        by_groups = self.miner.bfloat16 and runs_in_triton(self.scorer.device) and not stage.filtered
        step = self.corpus.block * (GROUP if by_groups else 2 if self.miner.bfloat16 else 1)
        return [(one, min(one + step, high)) for one in range(low, high, step)]

    def _chosen(self, stage: Stage, block: int) -> PieceArrays:
        query = self._blocks(stage)[block]
        found, seen = self._found(stage, block) if self.finder.searched else (None, None)
        candidates, counts = self.finder.candidates(query, stage.size, found, seen)
        chosen = select(candidates, self.miner.rule, self.scorer.directions)
        rows, scores, found_by = self.finder.outcome(candidates, chosen.slots)
        left, removed = steps(counts, chosen)
        columns = (query, rows, scores, found_by, chosen.decided, left, removed)
        names = ("query", "rows", "scores", "found_by", "decided", "left", "removed")
        return {name: column.cpu().numpy() for name, column in zip(names, columns, strict=True)}

    def _found(self, stage: Stage, block: int) -> tuple[Nearest, Tensor | None]:
        """Merge the lists of a block of queries from all shards."""
        assert stage.size is not None
        best: Nearest | None = None
        counts = []
        for shard in range(len(self.finder.shards)):
            piece = self.store.read(replace(stage, kind="lists").name, shard)
            key, rows = (self._tensor(piece[f"{block}.{name}"]) for name in ("key", "rows"))
            name = f"{block}.similarity"
            found = Nearest(key, rows, self._tensor(piece[name]) if name in piece else key)
            best = found if best is None else merged(best, found, stage.size)
            counts += [self._tensor(piece[f"{block}.seen"])] if f"{block}.seen" in piece else []
        assert best is not None
        return best, sum(counts[1:], counts[0]) if counts else None

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self.scorer.device)

    def _bounds(self, stage: Stage, shard: int) -> PieceArrays:
        """Compute the bounds of one factor in a shard; for a wide window, the histogram of the next byte."""
        blocks, i = self._blocks(stage), stage.factor
        declared = self.factors[i].bounds()
        known = [self._known(stage, b, query, i) for b, query in enumerate(blocks)]
        states: list[dict[str, State]] = [{} for _ in blocks]
        for part in self.corpus.blocks(self.finder.shards[shard]):
            for b, query in enumerate(blocks):
                bounds, edges = known[b]
                if stage.level and not edges:
                    continue
                ((tile, mask),) = CorpusRows(self.scorer, query, part).tiles()
                mask = left_by(self.factors[:i], bounds[:i])(tile, mask)
                for name, bound in declared.items():
                    if is_wide(bound):
                        state: State = (count_bytes(bound, tile, mask, edges.get(name)),)
                    elif bound.over == "candidates" and not stage.level:
                        state = bound.shortened(bound.of(tile, mask))
                    else:
                        continue
                    states[b][name] = _merged(bound, states[b][name], state) if name in states[b] else state
        return {
            f"{b}.{name}.{j}": each.cpu().numpy()
            for b, found in enumerate(states)
            for name, state in found.items()
            for j, each in enumerate(state)
        }

    def _settled(self, stage: Stage, block: int) -> PieceArrays:
        """Merge the bounds of a factor over shards; ``open`` is true if a wide window needs another pass."""
        query = self._blocks(stage)[block]
        if self.miner.short_rows:
            bounds = bounds_of(self.scorer, query, self.factors, (0, len(self.corpus)))
            return _packed(bounds, {})
        i = stage.factor
        bounds, edges = self._known(stage, block, query, i)
        declared = self.factors[i].bounds()
        shards = self._states(stage, block)
        states = reduce(lambda a, b: {name: _merged(declared[name], a[name], b[name]) for name in a}, shards)
        if not stage.level:
            own = reduce_rows(declared, CorpusRows(self.scorer, query, (0, 0)), left_by((), ()))
            bounds.append(finish({n: b for n, b in declared.items() if not is_wide(b)}, {**states, **own}))
            edges = {name: start_edges(b, bounds[i]) for name, b in declared.items() if is_wide(b)}
        still_open = {}
        for name, window in declared.items():
            if not is_wide(window) or name not in edges:
                continue
            dtype = self._dtype(window)
            each = narrowed(edges[name], states[name][0], dtype.itemsize)
            if each.is_open(dtype.itemsize):
                still_open[name] = each
            else:
                bounds[i] = {**bounds[i], name: finished(window, each, dtype, len(self.corpus))}
        return _packed(bounds, still_open)

    def _states(self, stage: Stage, block: int) -> Iterator[dict[str, State]]:
        """Yield the states of a block of queries, shard by shard."""
        for shard in range(len(self.finder.shards)):
            piece = self.store.read(replace(stage, kind="bounds").name, shard)
            found: dict[str, State] = {}
            for name in self.factors[stage.factor].bounds():
                keys = itertools.takewhile(piece.__contains__, (f"{block}.{name}.{j}" for j in itertools.count()))
                if state := tuple(self._tensor(piece[key]) for key in keys):
                    found[name] = state
            yield found

    def _known(
        self, stage: Stage, block: int, query: Tensor, number: int
    ) -> tuple[list[Bounds], dict[str, WindowEdges]]:
        """Return the bounds of the first factors, as far as earlier stages found them, and edges still open."""
        bounds: list[Bounds] = []
        edges: dict[str, WindowEdges] = {}
        if stage.before is not None:
            bounds, edges = _unpacked(self.store.read(stage.before, block), self.scorer.device)
        # The other factors need no bounds, or bounds of the positives only, which are cheap.
        return bounds + bounds_of(self.scorer, query, self.factors[len(bounds) : number]), edges

    def _dtype(self, window: Window) -> torch.dtype:
        """Return the dtype of the scores whose ranks a window counts: those of the guide or of the vectors."""
        guide = self.scorer.guide
        return guide.corpus.dtype if window.by == "guide" and isinstance(guide, ModelVectors) else self.corpus.dtype


def _merged(bound: Bound, first: State, second: State) -> State:
    return (first[0] + second[0],) if is_wide(bound) else bound.merge(first, second)


def _packed(bounds: list[Bounds], edges: Mapping[str, WindowEdges]) -> PieceArrays:
    file = io.BytesIO()
    # Plain tuples, because torch.load(weights_only=True) refuses other classes.
    torch.save((bounds, {name: (tuple(each[:-1]), each.level) for name, each in edges.items()}), file)
    return {"bounds": np.frombuffer(file.getvalue(), dtype=np.uint8), "open": np.array(bool(edges))}


def _unpacked(piece: PieceArrays, device: torch.device) -> tuple[list[Bounds], dict[str, WindowEdges]]:
    file = io.BytesIO(piece["bounds"].tobytes())
    bounds, edges = torch.load(file, map_location=device, weights_only=True)
    return bounds, {name: WindowEdges(*tensors)._replace(level=level) for name, (tensors, level) in edges.items()}


def steps(seen: Annotated[Tensor, "b f"], chosen: Selection) -> tuple[Tensor, Tensor]:
    """Return the number of candidates left after each step, and the number that each step removed.

    Args:
        seen: Candidates at the start, after the guard near the positives, and after each factor
            applied during the search, which counts whole rows [b, 2 + applied].
        chosen: The selection, whose later factors counted only the candidates of the list.

    Returns:
        Left [b, 2 + factors] and removed [b, 2 + factors]; the last column of removed are copies of
        other negatives.
    """
    listed = chosen.left[:, seen.shape[1] - 1 :]
    last = chosen.left[:, seen.shape[1] - 2 : seen.shape[1] - 1]
    removed = [-seen.diff(dim=1), -torch.cat([last, listed], 1).diff(dim=1), chosen.copies[:, None]]
    return torch.cat([seen, listed], 1), torch.cat(removed, 1)


_most_open = 512
"""Files that a store keeps open at a time; half the usual limit of a process."""


class FileStore(Store):
    """The store of a job: a folder with one .npz file for each piece.

    Args:
        folder: Folder of the pieces.
        job: Digest of the job, part of the file names: a part that was started with other data and
            still runs cannot leave a piece to this job.
    """

    in_memory = False

    def __init__(self, folder: Path, job: str = "") -> None:
        self.folder, self.job, self._owner = folder, job, os.getpid()
        self._open: dict[Path, StoredPiece] = {}

    def path(self, stage: str, piece: int) -> Path:
        """Return the file of a piece."""
        return self.folder / f"{stage}-{piece:06d}{f'.{self.job}' if self.job else ''}.npz"

    def read(self, stage: str, piece: int) -> PieceArrays:
        """Return the arrays of a piece, each read from the open file when it is used."""
        path = self.path(stage, piece)
        if self._owner != os.getpid():  # a fork shares file offsets with its parent, so it reopens its files
            self._owner, self._open = os.getpid(), {}
        if path not in self._open:
            if len(self._open) >= _most_open:
                self._open.clear()
            self._open[path] = StoredPiece(path)
        return self._open[path]

    def write(self, stage: str, piece: int, content: PieceArrays) -> None:
        """Write a piece, complete or not at all, with a checksum."""
        path = self.path(stage, piece)
        write_atomically(path, sealing(lambda file: np.savez(file, **content)), run_again)  # type: ignore[arg-type]

    def has(self, stage: str, piece: int) -> bool:
        """Return whether a piece is stored undamaged; a damaged one is computed again, with a warning."""
        path = self.path(stage, piece)
        return is_whole(path, "mine", "it is computed again", lambda each: names_in_npz("mine", each))

    def drop(self, beginning: str) -> None:
        """Do nothing: pieces stay until the output is written, so that a killed run can resume."""


class StoredPiece(Mapping[str, Array]):
    """The arrays of a piece in a file that stays open; each is read when it is used."""

    def __init__(self, path: Path) -> None:
        self.path, self.archive = path, zipfile.ZipFile(path)
        self.names = {name.removesuffix(".npy"): name for name in self.archive.namelist()}

    def __getitem__(self, name: str) -> Array:
        return read_member("mine", self.path, self.archive, self.names[name])

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
