"""Benchmarks of text encoders: STS and retrieval at the end of a run, and classification by logistic regression.

The data kinds of texts (data/texts.py) call ``benchmark_of`` and ``read_benchmark`` before training, so that a bad path
fails early, and ``benchmark_figures`` at the end. Every figure comes with one number per item whose mean it is, from
which comparisons of runs compute their intervals; SciPy ranks the cosines, but its ``spearmanr`` gives only the mean.

``hardneg evaluate`` calls ``read_classification`` and ``evaluate_classification``, for SentEval's MR, CR, SUBJ, MPQA,
SST-2, TREC and MRPC, or any table of texts and labels. The probe and its folds are those of logistic.py: they run on
the device of the vectors, without scikit-learn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from hardneg.core.errors import ArgumentError, FileError, NoFile, NotFinite, optional
from hardneg.io.embeddings import pack_numbers
from hardneg.io.tables import read_table
from hardneg.training.evaluation.logistic import folds_of, linear_predict
from hardneg.training.evaluation.measures import register_measure
from hardneg.training.evaluation.retrieval import RetrievalSet, evaluate_retrieval, read_beir
from hardneg.training.evaluation.sts import Pair, read_sts
from hardneg.training.evaluation.texts import TextEncoder, Vectors, as_text_encoder

register_measure(
    "sts",
    "Spearman on STS",
    "the rank correlation between cosines and human similarity scores of sentence pairs, averaged over the tasks",
    unit="x 100",
)
register_measure("ndcg@10", "nDCG@10", "how high relevant documents rank among the ten nearest of each query")

NAMES = {"sts": "sts", "beir": "ndcg@10"}
EncodeDocuments = Callable[[Sequence[str]], Annotated[Tensor, "n d"]]


class Benchmark(NamedTuple):
    """A benchmark to evaluate with.

    Attributes:
        name: Name of its measure, "sts" or "ndcg@10".
        path: File or folder of the benchmark.
    """

    name: str
    path: Path


def benchmark_of(text: str | None) -> Benchmark | None:
    """Parse ``--evaluate-with`` without reading the benchmark; None for None.

    Raises:
        ArgumentError: If the text is neither sts:PATH nor beir:PATH.
        NoFile: If PATH does not exist.
    """
    if text is None:
        return None
    kind, _, path = text.partition(":")
    if kind not in NAMES or not path:
        raise ArgumentError("train", "sts:PATH or beir:PATH", repr(text))
    if not Path(path).exists():
        raise NoFile("train", "a benchmark that exists", Path(path))
    return Benchmark(NAMES[kind], Path(path))


def read_benchmark(benchmark: Benchmark, evaluate_on: str) -> RetrievalSet | list[Pair]:
    """Read the test split of a benchmark, or its dev split for ``evaluate_on="validation"``, which is used for tuning.

    Args:
        benchmark: The benchmark to read.
        evaluate_on: "test" or "validation".

    Raises:
        ArgumentError: If a BEIR folder has no judgements for the split.
        FileError: If all scores of an STS task are equal, so that they have no ranks.
    """
    split = "dev" if evaluate_on == "validation" else "test"
    if benchmark.name != "ndcg@10":
        return _checked(read_sts(benchmark.path, split), benchmark.path)
    judged = f"qrels/{split}.tsv"
    if not any((benchmark.path / f"{judged}{suffix}").exists() for suffix in ("", ".gz")):
        fix = f"add {judged}, or omit --evaluate-with while tuning on the validation split"
        raise ArgumentError("train", f"a BEIR folder with {judged}", str(benchmark.path), fix)
    return read_beir(benchmark.path, split)


def _checked(pairs: list[Pair], path: Path) -> list[Pair]:
    """Return the pairs; raise if all scores of a task are equal, so that they have no ranks."""
    scores: dict[str, set[float]] = {}
    for pair in pairs:
        scores.setdefault(pair.task, set()).add(pair.score)
    for task, found in scores.items():
        if len(found) < 2:
            raise FileError("evaluate", f"different scores in task {task}", path, f"where all are {found.pop():g}")
    return pairs


def benchmark_figures(benchmark: Benchmark, encode: EncodeDocuments, evaluate_on: str = "test") -> dict[str, Any]:
    """Evaluate a text encoder on a benchmark.

    Args:
        benchmark: The benchmark to read.
        encode: Function of a list of texts that returns vectors [n, d].
        evaluate_on: "test" or "validation".

    Returns:
        The figures by name, with ``num_items`` and, where a figure is a mean over items, packed ``scores``, one per
        item.
    """
    data = read_benchmark(benchmark, evaluate_on)
    if isinstance(data, RetrievalSet):
        found = evaluate_retrieval(data, lambda texts: encode(texts).cpu())
        return found | {"num_items": {"ndcg@10": found.pop("num_queries")}}
    return sts_benchmark_figures(data, encode)


def sts_benchmark_figures(pairs: Sequence[Pair], encode: EncodeDocuments) -> dict[str, Any]:
    """Compute the mean over tasks of Spearman's correlation, and each pair's contribution.

    Args:
        pairs: Scored pairs of sentences.
        encode: Function of a list of texts that returns vectors [n, d].

    Returns:
        ``sts`` (the mean), ``sts_tasks`` (the correlation of each task), ``num_items``, and packed ``scores`` whose
        mean is ``sts``.
    """
    vectors = encode([text for pair in pairs for text in (pair.first, pair.second)])
    cosines = cosine_similarity(vectors[0::2].double(), vectors[1::2].double()).cpu().numpy()
    gold = np.array([pair.score for pair in pairs])
    tasks = list(dict.fromkeys(pair.task for pair in pairs))
    parts, of_tasks = np.empty(len(pairs)), {}
    for task in tasks:
        rows = np.array([pair.task == task for pair in pairs])
        own = spearman_parts(cosines[rows], gold[rows])
        of_tasks[task] = float(own.mean())
        # Weighted so that the mean over all pairs is the mean over the tasks.
        parts[rows] = own * len(pairs) / (len(tasks) * rows.sum())
    found = {"sts": float(parts.mean()), "sts_tasks": of_tasks, "num_items": {"sts": len(pairs)}}
    return found | {"scores": {"sts": pack_numbers(parts)}}


def spearman_parts(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.float64]:
    """Split Spearman's correlation into one number per pair.

    Their mean is the correlation, and their variance over n is its sampling variance. With z and w the standardised
    ranks, rho = mean(z w), and a pair moves it by z w - rho (z^2 + w^2) / 2 (the influence function of a correlation),
    whose mean is 0.

    >>> float(spearman_parts(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])).mean())
    0.5
    """
    rank = optional("scipy.stats", "Spearman's correlation", extra="eval").rankdata
    z, w = (rank(side) - (len(side) + 1) / 2.0 for side in (first, second))
    scales = [float(np.sqrt((side**2).mean())) for side in (z, w)]
    if min(scales) == 0.0:
        raise NotFinite("Spearman's correlation", "cosines and scores that differ", "all the same")
    z, w = z / scales[0], w / scales[1]
    rho = float((z * w).mean())
    parts: NDArray[np.float64] = rho + z * w - rho * (z**2 + w**2) / 2.0
    return parts


WHO = "evaluate"
FOLDS = 10
TRAIN = ("train", "dev", "validation")


@dataclass(frozen=True)
class TextTask:
    """Texts, or pairs of texts, with labels and splits.

    Attributes:
        texts: One or two texts per row.
        labels: The class of each row.
        splits: The split of each row: "test" is tested on, "train", "dev" and "validation" are fitted to, "all" takes
            part in cross-validation.
        skipped: Number of rows that were skipped because their text is empty.
    """

    texts: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    splits: tuple[str, ...]
    skipped: int = 0


def read_classification(path: str | Path) -> dict[str, TextTask]:
    """Read classification tasks from a table with the columns text and label, and optionally task, split and text2.

    Rows with an empty text are skipped and counted. Without a column "split", every row is used in cross-validation.

    Args:
        path: A table (Parquet, JSONL, CSV, TSV).

    Returns:
        Tasks by name; without a column "task" there is one, named after the file.

    Raises:
        ArgumentError: If the columns text and label are missing.
    """
    table = read_table(path, WHO)
    if not {"text", "label"} <= table.keys():
        raise ArgumentError(WHO, f"columns text and label in {path}", f"columns {sorted(table)}")
    number = len(table["text"])
    usual = {"task": Path(path).name.split(".")[0], "split": "all", "text2": ""}
    columns = [table.get(name) or [usual[name]] * number for name in ("task", "split", "text2")]
    rows: dict[str, list[tuple[tuple[str, ...], str, str]]] = {}
    skipped: Counter[str] = Counter()
    for text, label, task, split, second in zip(table["text"], table["label"], *columns, strict=True):
        if not str(text or "").strip():
            skipped[str(task)] += 1
            continue
        texts = (str(text), str(second)) if second else (str(text),)
        rows.setdefault(str(task), []).append((texts, str(label), str(split)))
    return {task: _task(each, skipped[task]) for task, each in rows.items()}


def _task(rows: list[tuple[tuple[str, ...], str, str]], skipped: int) -> TextTask:
    texts, labels, splits = zip(*rows, strict=True)
    return TextTask(texts, labels, splits, skipped)


def evaluate_classification(
    tasks: dict[str, TextTask], encoder: TextEncoder | Any, step: Callable[[int], None] = lambda done: None
) -> dict[str, dict[str, Any]]:
    """Compute the accuracy of every task: on its test split, or the mean over 10 folds.

    A pair of texts with vectors u and v has the features |u - v| and u * v. Tasks of pairs with two classes, such as
    MSRP, also have the F1 of the class that sorts last ("1", "paraphrase", "true"), as in SentEval.

    Args:
        tasks: Tasks by name.
        encoder: A text encoder or any function of a list of texts.
        step: Called with 1 after each task, for progress bars.

    Returns:
        By task: accuracy, number of rows, classes and skipped rows; with folds, their number and standard deviation;
        for pairs of two classes, f1.

    Raises:
        ArgumentError: If a task has fewer than two classes, unknown splits, or no rows to train on.
    """
    found = {}
    for name, task in tasks.items():
        found[name] = _accuracy(name, task, as_text_encoder(encoder))
        step(1)
    return found


def _accuracy(name: str, task: TextTask, encoder: TextEncoder) -> dict[str, Any]:
    """Evaluate one task."""
    x = _features(name, task.texts, encoder)
    classes = {label: number for number, label in enumerate(sorted(set(task.labels)))}
    if len(classes) < 2:
        raise ArgumentError(WHO, f"at least two classes in {name}", f"only the label {task.labels[0]!r}")
    _check_splits(name, task.splits)
    y = torch.tensor([classes[label] for label in task.labels])
    about: dict[str, Any] = {"num": len(y), "classes": len(classes), "skipped": task.skipped}
    if "test" in task.splits:
        test = torch.tensor([split == "test" for split in task.splits])
        train = torch.tensor([split in TRAIN for split in task.splits])
        parts = [_scores(x, y, train, test)]
    else:
        fold = folds_of(y, FOLDS, seed=0)
        parts = [_scores(x, y, fold != one, fold == one) for one in range(FOLDS) if (fold == one).any()]
        about |= {"deviation": float(torch.tensor([right for right, _ in parts]).std()), "folds": len(parts)}
    accuracy, f1 = (sum(values) / len(parts) for values in zip(*parts, strict=True))
    paired = len(task.texts[0]) == 2 and len(classes) == 2
    return {"accuracy": accuracy, **({"f1": f1} if paired else {}), **about}


def _check_splits(name: str, splits: Sequence[str]) -> None:
    known = (*TRAIN, "test", "all")
    if unknown := sorted(set(splits) - set(known)):
        raise ArgumentError(WHO, f"splits of {name} among {', '.join(known)}", repr(unknown[0]))
    if "test" in splits and not set(splits) & set(TRAIN):
        fix = f"add rows of the split {' or '.join(TRAIN)}"
        raise ArgumentError(WHO, f"rows of {name} to train on", "test rows only", fix)


def _scores(x: Vectors, y: Tensor, train: Tensor, test: Tensor) -> tuple[float, float]:
    """Fit the probe to the rows of ``train`` and return accuracy and F1 of class 1 on those of ``test``."""
    found = linear_predict(x[train], y[train], x[test])
    predicted, wanted = found == 1, y[test] == 1
    both = int((predicted & wanted).sum())
    return float((found == y[test]).double().mean()), 2.0 * both / max(int(predicted.sum() + wanted.sum()), 1)


def _features(name: str, texts: Sequence[tuple[str, ...]], encoder: TextEncoder) -> Vectors:
    sizes = {len(row) for row in texts}
    if len(sizes) > 1:
        raise ArgumentError(WHO, f"text2 in every row of {name} or in none", "some with and some without")
    vectors = encoder.texts([text for row in texts for text in row])
    if sizes == {1}:
        return vectors
    u, v = vectors[0::2], vectors[1::2]
    return torch.cat([(u - v).abs(), u * v], dim=1)
