"""Classification of texts by logistic regression on their embeddings.

For SentEval's MR, CR, SUBJ, MPQA, SST-2, TREC and MRPC, or any table of texts and labels. ``hardneg evaluate`` calls
``read_classification`` and then ``evaluate_classification``. The probe and its folds are those of logistic.py: they run
on the device of the vectors, without scikit-learn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.io.tables import read_table
from hardneg.training.evaluation.logistic import folds_of, linear_predict
from hardneg.training.evaluation.texts import TextEncoder, Vectors, as_text_encoder

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

    A pair of texts with vectors u and v has the features |u - v| and u * v.

    Args:
        tasks: Tasks by name.
        encoder: A text encoder or any function of a list of texts.
        step: Called with 1 after each task, for progress bars.

    Returns:
        By task: accuracy, number of rows, classes and skipped rows; with folds, their number and standard deviation.

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
    about = {"num": len(y), "classes": len(classes), "skipped": task.skipped}
    if "test" in task.splits:
        test = torch.tensor([split == "test" for split in task.splits])
        train = torch.tensor([split in TRAIN for split in task.splits])
        return {"accuracy": _right(x, y, train, test), **about}
    fold = folds_of(y, FOLDS, seed=0)
    values = torch.tensor([_right(x, y, fold != one, fold == one) for one in range(FOLDS) if (fold == one).any()])
    return {"accuracy": float(values.mean()), "deviation": float(values.std()), "folds": len(values), **about}


def _check_splits(name: str, splits: Sequence[str]) -> None:
    known = (*TRAIN, "test", "all")
    if unknown := sorted(set(splits) - set(known)):
        raise ArgumentError(WHO, f"splits of {name} among {', '.join(known)}", repr(unknown[0]))
    if "test" in splits and not set(splits) & set(TRAIN):
        fix = f"add rows of the split {' or '.join(TRAIN)}"
        raise ArgumentError(WHO, f"rows of {name} to train on", "test rows only", fix)


def _right(x: Vectors, y: Tensor, train: Tensor, test: Tensor) -> float:
    predicted = linear_predict(x[train], y[train], x[test])
    return float((predicted == y[test]).double().mean())


def _features(name: str, texts: Sequence[tuple[str, ...]], encoder: TextEncoder) -> Vectors:
    sizes = {len(row) for row in texts}
    if len(sizes) > 1:
        raise ArgumentError(WHO, f"text2 in every row of {name} or in none", "some with and some without")
    vectors = encoder.texts([text for row in texts for text in row])
    if sizes == {1}:
        return vectors
    u, v = vectors[0::2], vectors[1::2]
    return torch.cat([(u - v).abs(), u * v], dim=1)
