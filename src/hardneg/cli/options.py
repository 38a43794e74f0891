"""The options of the verbs whose rooms are too heavy for ``--help``, and where ``train`` writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from hardneg.core.options import argument, option, part
from hardneg.training.options.base import RUN, TrainOptions

FORMATS = ("torchvision", "timm", "sentence-transformers", "safetensors")
WEIGHTS = ("last", "best")
ALWAYS = ("data", "epochs", "batch_size")
"""Options of train that a comparison always has."""


@dataclass(frozen=True)
class RunOptions:
    """Where a run is, and whether to resume it."""

    out: str = option("runs", "Directory of the run.", RUN)
    resume: bool = option(False, "Resume the run in --out, if there is one.", RUN)
    allow_other_data: bool = option(False, "Go on although the data has changed since the start.", RUN)


@dataclass(frozen=True)
class CompareOptions:
    """The arms, what they share, and what decides."""

    arms: tuple[str, ...] = option((), "A paper or recipe, and after @ who shares the batch; repeat it.", None, "--arm")
    shared: TrainOptions = field(
        default_factory=TrainOptions, metadata=part(only=(*ALWAYS, "evaluate_with"), panel="Shared by all arms")
    )
    options: tuple[str, ...] = option(
        (), "Another option of train, as name=value, for arms that do not write it.", "Shared by all arms", "--option"
    )
    seeds: int = option(3, "Runs of each arm; the same seeds for all.", low=2)
    metric: str = option("auto", "What decides: auto (by the data), knn, 1nn, linear, retrieval ...")
    tune: tuple[str, ...] = option((), "Such as temperature=0.1,0.2,0.5: the same tries for every arm.", None, "--tune")
    out: str = option("runs/compare", "Directory of the comparison; an existing one is resumed.")
    jobs: int | None = option(None, "Most runs side by side; by default one for each core or two for each GPU.", low=1)
    allow_other_data: bool = option(False, "Go on in a folder that was begun with other data.")


@dataclass(frozen=True)
class EvaluateOptions:
    path: str = argument("A run directory, a file of saved embeddings (npz), or an encoder of texts such as st:PATH.")
    sts: str | None = option(None, "STS pairs: a table, or the folder of a task; Spearman's correlation.")
    beir: str | None = option(None, "A BEIR folder: nDCG@10, MRR@10, recall@10 and recall@100.")
    classification: str | None = option(None, "A table of texts and labels: logistic regression on the embeddings.")
    on: str | None = option(None, "Another labelled data set, for the encoder of a run: cifar100, folder:PATH ...")
    data_root: str | None = option(None, "Where that data set lies, if not in its usual place.")
    weights: str = option("last", "Of a run: those of the end, or those that its monitor found best.", among=WEIGHTS)
    split: str = option("test", "Of STS and BEIR.")
    run_code: bool = option(False, "Run code that the run names as its encoder: a Python file, a model folder.")
    json: bool = option(False, "Print one line of JSON.")


@dataclass(frozen=True)
class ExportOptions:
    run: str = argument("A run directory.")
    format: str = option("safetensors", "What is written.", None, "--format", among=FORMATS)
    out: str | None = option(None, "The file or folder; by default in the run directory.")
    weights: str = option("last", "Those of the end, or those that the monitor found best.", among=WEIGHTS)
    run_code: bool = option(False, "Run code that the run names as its encoder: a Python file, a model folder.")
    normalise: bool = option(
        True,
        "Write mean and std of the images with the weights; raises if they are not known.",
        None,
        "--normalise/--no-normalise",
    )


@dataclass(frozen=True)
class ReportOptions:
    paths: tuple[str, ...] = argument("Run directories and comparisons, one or several.")
    out: str | None = option(None, "The HTML file; by default report.html in the directory.", None, "--out", "-o")
    overwrite: bool = option(False, "Also over a file that is no page of hardneg.")


@dataclass(frozen=True)
class ExplainOptions:
    expression: str | None = argument("Negatives in the grammar; none lists all of them.", None)
    temperature: float = option(0.5, "Temperature of the scores.", low=1e-6)
