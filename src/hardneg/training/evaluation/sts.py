"""Semantic textual similarity: rank correlation of cosines with human scores (STS12-16, STS-B, SICK-R).

A task has subsets, and two ways to aggregate them are in use: "all" is Spearman's correlation over all pairs of the
task (SimCSE and most papers), "mean" is the mean of the correlations of its subsets (SentEval's "mean"). They differ by
points, so both are reported.

Read ``read_sts``, ``evaluate_sts`` and ``sts_figures``, which ``hardneg evaluate`` calls in this order; the rest reads
file formats.
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
from hardneg.training.evaluation.texts import TextEncoder, as_text_encoder

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
ENTAILMENT = {"CONTRADICTION", "ENTAILMENT", "NEUTRAL"}  # entailment labels of SICK's pairs are not subsets
STSB_FIELDS = 7  # genre, file, year, number, score, sentence1, sentence2, optionally followed by sources


class Pair(NamedTuple):
    """Two sentences and how similar human annotators rated them.

    Attributes:
        task: Name of the task.
        subset: Name of the subset of the task, or "".
        score: Human similarity score, on any scale.
        first: The first sentence.
        second: The second sentence.
    """

    task: str
    subset: str
    score: float
    first: str
    second: str


@dataclass(frozen=True)
class Correlation:
    """Spearman's correlations of one task, in [-1, 1]; NaN where all scores or all cosines are equal.

    Attributes:
        all: Over all pairs of the task.
        mean: Mean over its subsets.
        pairs: Number of pairs.
        subsets: By subset.
    """

    all: float
    mean: float
    pairs: int
    subsets: dict[str, float]


def evaluate_sts(pairs: Sequence[Pair], encoder: TextEncoder | Any) -> dict[str, Correlation]:
    """Compute Spearman's correlation for every task.

    Args:
        pairs: Scored pairs of sentences.
        encoder: A text encoder or any function of a list of texts.

    Returns:
        Correlations by task.

    Example:
        >>> import torch
        >>> pairs = [Pair("toy", "a", s, "x", t) for s, t in [(5, "x"), (3, "xy"), (0, "y")]]
        >>> letters = lambda texts: torch.tensor([[t.count("x"), t.count("y")] for t in texts]).float()
        >>> evaluate_sts(pairs, letters)["toy"].all
        1.0
    """
    vectors = as_text_encoder(encoder).texts([text for pair in pairs for text in (pair.first, pair.second)])
    cosines = cosine_similarity(vectors[0::2].double(), vectors[1::2].double())
    places: dict[str, dict[str, list[int]]] = {}
    for place, pair in enumerate(pairs):
        places.setdefault(pair.task, {}).setdefault(pair.subset, []).append(place)
    scores = [pair.score for pair in pairs]
    return {task: _correlation(scores, cosines, subsets) for task, subsets in places.items()}


def sts_figures(found: dict[str, Correlation]) -> dict[str, Any]:
    """Convert correlations for JSON: both figures and the subsets of every task, and the means over tasks."""
    means = {how: sum(getattr(one, how) for one in found.values()) / len(found) for how in ("all", "mean")}
    figures: dict[str, Any] = without_nan({"tasks": {task: asdict(one) for task, one in found.items()}, **means})
    return figures


def spearman(first: Sequence[float] | Tensor, second: Sequence[float] | Tensor) -> float:
    """Return the rank correlation, with mean ranks for ties; NaN where one side is constant.

    Args:
        first: Values [n].
        second: Values [n].
    """
    if len(set(map(float, first))) < 2 or len(set(map(float, second))) < 2:
        return math.nan
    stats = optional("scipy.stats", "Spearman's correlation", extra="eval")
    return float(stats.spearmanr(list(map(float, first)), list(map(float, second))).statistic)


def read_sts(path: str | Path, split: str = "test") -> list[Pair]:
    """Read the scored pairs of a split, in any format in which STS sets are published.

    Accepted are a table with the columns score, sentence1 and sentence2, and optionally task, subset and split;
    SICK.txt; sts-test.csv of STS-B, which has no header; a folder with ``STS.input.NAME.txt`` and ``STS.gs.NAME.txt``;
    or a folder of such folders, one for each task. Pairs belong to the split "test" unless a column of splits or
    STS-B's file name differs.

    Args:
        path: File or folder.
        split: Split to read.

    Raises:
        NoFile: If the path does not exist.
        FileError: If a row has no score or fewer than two sentences.
        ArgumentError: If there are no pairs of the split.
    """
    path = Path(path)
    if not path.exists():
        raise NoFile(WHO, "an STS file or folder that exists", path)
    pairs = list(_of_folder(path, split) if path.is_dir() else _of_file(path, split))
    if not pairs:
        fix = f"use a table whose column split contains {split!r}, or choose another split"
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
        if len(fields) < STSB_FIELDS:
            got = f"which has {len(fields)} in {line[:60]!r}"
            raise FileError(WHO, f"{STSB_FIELDS} fields in each line", path, got)
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
    """Read a tab-separated table whose first line names the columns; empty lines are skipped."""
    header, *rows = [line.split("\t") for line in _lines(path) if line.strip()] or [[]]
    for row in rows:
        if len(row) != len(header):
            got = f"which has {len(row)} in {'; '.join(row)[:60]!r}"
            raise FileError(WHO, f"{len(header)} fields in each line, as in the first", path, got)
    return {name: [row[place] for row in rows] for place, name in enumerate(header)}


def _lines(path: Path) -> list[str]:
    if not path.exists():
        raise NoFile(WHO, "a file of scores for every file of sentences", path)
    with open_text(path, WHO) as file:
        return [line.rstrip("\r\n") for line in file]


def _correlation(scores: Sequence[float], cosines: Tensor, subsets: dict[str, list[int]]) -> Correlation:
    def of(places: list[int]) -> float:
        return spearman([scores[place] for place in places], cosines[places])

    each = {name: of(places) for name, places in subsets.items()}
    together = [place for places in subsets.values() for place in places]
    return Correlation(of(together), sum(each.values()) / len(each), len(together), each)
