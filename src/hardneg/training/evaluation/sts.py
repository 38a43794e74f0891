"""Semantic textual similarity: the rank correlation of cosines with people's scores (STS12-16, STS-B, SICK-R).

A task has subsets, and two ways to make one figure of them are in use: "all" is Spearman's correlation over all pairs
of the task together (SimCSE and most papers), "mean" the mean of the correlations of its subsets (SentEval's "mean").
They differ by points, so both are named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import cosine_similarity

from hardneg.core.errors import ArgumentError, FileError, NoFile, optional
from hardneg.io.files import without_nan
from hardneg.io.tables import open_text, read_table, suffix_of, table_suffixes
from hardneg.training.evaluation.texts import TextEncoder, of_function

WHO = "evaluate"
NAMES = {
    "score": ("score", "similarity_score", "relatedness_score", "label"),
    "first": ("sentence1", "sentence_A", "text1"),
    "second": ("sentence2", "sentence_B", "text2"),
    "task": ("task",),
    "subset": ("subset",),
    "split": ("split", "SemEval_set"),
}
SPLITS = {"trial": "dev", "validation": "dev"}
ENTAILMENT = {"CONTRADICTION", "ENTAILMENT", "NEUTRAL"}  # labels of SICK's pairs, which are no subsets
OF_STSB = 7  # genre, file, year, number, score, sentence1, sentence2 in a line, and perhaps sources


class Pair(NamedTuple):
    """Two sentences and how similar people found them."""

    task: str
    subset: str
    score: float
    first: str
    second: str


@dataclass(frozen=True)
class Correlation:
    """Of one task, each between -1 and 1; NaN where scores or cosines are all the same."""

    all: float
    mean: float
    pairs: int
    subsets: dict[str, float]


def evaluate_sts(pairs: Sequence[Pair], encoder: TextEncoder | Any) -> dict[str, Correlation]:
    """Spearman's correlation of every task; ``encoder`` may be any function of a list of texts.

    >>> import torch
    >>> pairs = [Pair("toy", "a", s, "x", t) for s, t in [(5, "x"), (3, "xy"), (0, "y")]]
    >>> letters = lambda texts: torch.tensor([[t.count("x"), t.count("y")] for t in texts]).float()
    >>> evaluate_sts(pairs, letters)["toy"].all
    1.0
    """
    vectors = of_function(encoder).texts([text for pair in pairs for text in (pair.first, pair.second)])
    cosines = cosine_similarity(vectors[0::2].double(), vectors[1::2].double())
    places: dict[str, dict[str, list[int]]] = {}
    for place, pair in enumerate(pairs):
        places.setdefault(pair.task, {}).setdefault(pair.subset, []).append(place)
    scores = [pair.score for pair in pairs]
    return {task: _correlation(scores, cosines, subsets) for task, subsets in places.items()}


def sts_figures(found: dict[str, Correlation]) -> dict[str, Any]:
    """As JSON holds it: every task with both figures and its subsets, and the means over the tasks."""
    means = {how: sum(getattr(one, how) for one in found.values()) / len(found) for how in ("all", "mean")}
    figures: dict[str, Any] = without_nan({"tasks": {task: asdict(one) for task, one in found.items()}, **means})
    return figures


def spearman(first: Sequence[float] | Tensor, second: Sequence[float] | Tensor) -> float:
    """The correlation of ranks, ties having their mean rank; NaN where one side is constant."""
    if len(set(map(float, first))) < 2 or len(set(map(float, second))) < 2:
        return math.nan
    stats = optional("scipy.stats", "Spearman's correlation", extra="eval")
    return float(stats.spearmanr(list(map(float, first)), list(map(float, second))).statistic)


def read_sts(path: str | Path, split: str = "test") -> list[Pair]:
    """The scored pairs of a split, in any of the formats that STS sets come in.

    A table with the columns score, sentence1 and sentence2, and perhaps task, subset and split; SICK.txt; sts-test.csv
    of STS-B, which has no first line; or a folder with ``STS.input.NAME.txt`` and ``STS.gs.NAME.txt``, or with such
    folders, one for each task. Only a column of splits and the names of STS-B say that pairs are of another split than
    "test".
    """
    path = Path(path)
    if not path.exists():
        raise NoFile(WHO, "an STS file or folder that exists", path)
    pairs = list(_of_folder(path, split) if path.is_dir() else _of_file(path, split))
    if not pairs:
        fix = f"give a table with a column split that has {split!r}, or another split"
        raise ArgumentError(WHO, f"scored pairs of the split {split!r}", f"none in {path}", fix)
    return pairs


def _of_folder(path: Path, split: str) -> Iterator[Pair]:
    inputs = sorted(path.glob("STS.input.*.txt"))
    for sentences in inputs if split == "test" else []:
        name = sentences.name.removeprefix("STS.input.").removesuffix(".txt")
        scores = _lines(path / f"STS.gs.{name}.txt")
        pairs = _lines(sentences)
        if len(pairs) != len(scores):
            got = f"which has {len(scores)} for {len(pairs)} lines in {sentences.name}"
            raise FileError(WHO, "a line for each pair of sentences", path / f"STS.gs.{name}.txt", got)
        for line, score in zip(pairs, scores, strict=True):
            if score.strip():  # pairs without a score are not part of the task
                yield _pair(path.name, name, score, line.split("\t"), sentences)
    if not inputs:
        for name in (f"sts-{split}.csv", "SICK.txt"):
            if (path / name).exists():
                yield from _of_file(path / name, split)
        for folder in sorted(one for one in path.iterdir() if one.is_dir()):
            yield from _of_folder(folder, split)


def _of_file(path: Path, split: str) -> Iterator[Pair]:
    if path.name.startswith("sts-") and path.suffix == ".csv":
        own = path.stem.removeprefix("sts-")
        yield from _of_stsb(path) if split == (own if own in ("train", "dev") else "test") else ()
        return
    table = read_table(path, WHO) if suffix_of(path) in table_suffixes or path.is_dir() else _tabbed(path)
    column = {name: next((table[one] for one in known if one in table), None) for name, known in NAMES.items()}
    for name in ("score", "first", "second"):
        if column[name] is None:
            raise ArgumentError(WHO, f"a column of {NAMES[name]} in {path}", f"columns {sorted(table)}")
    tasks, subsets, splits = (column[name] for name in ("task", "subset", "split"))
    for row, (score, *texts) in enumerate(zip(*(column[one] for one in ("score", "first", "second")), strict=True)):  # type: ignore[arg-type]
        here = "test" if splits is None else str(splits[row]).lower()
        if SPLITS.get(here, here) == split:
            task = path.name.split(".")[0] if tasks is None else str(tasks[row])
            yield _pair(task, "" if subsets is None else str(subsets[row]), score, texts, path)


def _of_stsb(path: Path) -> Iterator[Pair]:
    for line in _lines(path):
        fields = line.split("\t")
        if len(fields) < OF_STSB:
            got = f"which has {len(fields)} in {line[:60]!r}"
            raise FileError(WHO, f"{OF_STSB} fields in each line", path, got)
        yield _pair("STSB", fields[0], fields[4], fields[5:7], path)


def _pair(task: str, subset: str, score: Any, texts: Sequence[Any], path: Path) -> Pair:
    try:
        number = float(score)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or len(texts) < 2 or not all(isinstance(text, str) for text in texts[:2]):
        raise FileError(WHO, "a score and two sentences in each row", path, f"which has {score!r} and {texts!r}")
    return Pair(task, "" if subset in ENTAILMENT else subset, number, texts[0], texts[1])


def _tabbed(path: Path) -> dict[str, list[Any]]:
    """A table whose first line names the columns; empty lines are left out."""
    header, *rows = [line.split("\t") for line in _lines(path) if line.strip()] or [[]]
    for row in rows:
        if len(row) != len(header):
            got = f"which has {len(row)} in {'; '.join(row)[:60]!r}"
            raise FileError(WHO, f"{len(header)} fields in each line, as in the first", path, got)
    return {name: [row[place] for row in rows] for place, name in enumerate(header)}


def _lines(path: Path) -> list[str]:
    if not path.exists():
        raise NoFile(WHO, "the scores of every file of sentences", path)
    with open_text(path, WHO) as file:
        return [line.rstrip("\r\n") for line in file]


def _correlation(scores: Sequence[float], cosines: Tensor, subsets: dict[str, list[int]]) -> Correlation:
    def of(places: list[int]) -> float:
        return spearman([scores[place] for place in places], cosines[places])

    each = {name: of(places) for name, places in subsets.items()}
    together = [place for places in subsets.values() for place in places]
    return Correlation(of(together), sum(each.values()) / len(each), len(together), each)
