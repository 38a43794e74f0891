"""Options of the verbs evaluate, export, report, explain and compare, and the run directory of ``train``.

They live here, and not in the packages that do the work, so that ``--help`` imports neither torch nor those packages.
Every field becomes a flag and a name in YAML files (``flags.py``); its first two arguments are the default and the help
text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from hardneg.core.options import argument, option, part
from hardneg.training.options.base import RUN, TrainOptions, Weights

# Choices of --format, and options of train that every comparison sets for all arms, given or not.
FORMATS = (
    "torchvision", "timm", "detectron2", "sentence-transformers", "safetensors", "torch-export", "onnx", "hub",
)  # fmt: skip
ALWAYS = ("data", "epochs", "batch_size")


@dataclass(frozen=True)
class RunOptions:
    """Run directory of ``hardneg train`` and how to treat an existing run in it."""

    out: str = option("runs", "Run directory.", RUN)
    resume: bool = option(
        False, "Continue the run in --out if there is one; --no-resume raises instead.", RUN, "--resume/--no-resume"
    )
    allow_other_data: bool = option(False, "Continue even if the data has changed since the run started.", RUN)


@dataclass(frozen=True)
class CompareOptions:
    """Arms of ``hardneg compare``, the options they share, and the metric that decides."""

    arms: tuple[str, ...] = option(
        (), "Paper or recipe to compare; after @, how batches are chosen. Repeatable.", None, "--arm"
    )
    shared: TrainOptions = field(
        default_factory=TrainOptions, metadata=part(only=(*ALWAYS, "evaluate_with"), panel="Shared by all arms")
    )
    options: tuple[str, ...] = option(
        (),
        "Any other option of train as name=value, for arms that do not set it. Repeatable.",
        "Shared by all arms",
        "--option",
    )
    seeds: int = option(3, "Runs per arm; every arm uses the same seeds.", low=2)
    metric: str = option("auto", "Metric that decides: auto (depends on the data), knn, 1nn, linear, retrieval ...")
    tune: tuple[str, ...] = option(
        (),
        "Values to try for every arm on a validation split: an option, an argument of a paper or a field of the "
        "negatives, such as temperature=0.1,0.2,0.5 or beta=0.5,1. Repeatable: all combinations are tried.",
        None,
        "--tune",
    )
    tries: int | None = option(
        None,
        "Number of configurations tried per arm; default: the largest number of combinations of any arm. Arms with "
        "more combinations are sampled; arms with fewer also try random values between the given ones.",
        low=1,
    )
    tune_seeds: int = option(1, "Seeds per configuration of --tune; the values with the best mean are chosen.", low=1)
    out: str = option("runs/compare", "Directory of the comparison.")
    resume: bool = option(
        True,
        "Continue the comparison in --out if there is one; --no-resume raises instead.",
        None,
        "--resume/--no-resume",
    )
    jobs: int | None = option(None, "Maximum number of parallel runs; by default one per core, or two per GPU.", low=1)
    allow_other_data: bool = option(False, "Continue even if the data has changed since the comparison started.")


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of ``hardneg evaluate``: the model or embeddings, and the benchmarks to measure."""

    path: str = argument("Run directory, file of saved embeddings (.npz), or text encoder such as st:PATH.")
    sts: str | None = option(None, "STS pairs: a table or the folder of a task. Reports Spearman's correlation.")
    beir: str | None = option(None, "BEIR folder. Reports nDCG@10, MRR@10, recall@10 and recall@100.")
    classification: str | None = option(
        None, "Table of texts and labels. Reports the accuracy of logistic regression on embeddings."
    )
    on: tuple[str, ...] = option(
        (),
        "Another labelled data set on which to evaluate the encoder of a run: cifar100, folder:PATH ... Repeatable: "
        "one table shows all of them.",
        None,
        "--on",
    )
    protocol: tuple[str, ...] = option(
        (),
        "Further protocol on the data of --on, or of the run: probe (a linear classifier by SGD on random crops), "
        "maps (the same on the feature maps before pooling, as in Ring) or finetune (encoder and classifier). "
        "Repeatable.",
        None,
        "--protocol",
    )
    labels: tuple[str, ...] = option(
        (), "Share of the labels to fit with, such as 0.01 for 1 %. Repeatable: one column each.", None, "--labels"
    )
    statistics: str = option(
        "run",
        "Mean and std that normalise the images of --on: those of the run, or of the data set itself (data).",
        among=("run", "data"),
    )
    data_root: str | None = option(None, "Folder of the data sets of --on, if not the default folder.")
    weights: Weights = option(
        "last",
        "Weights of a run to use: from the last epoch, or the best according to the monitor.",
        among=get_args(Weights),
    )
    split: str = option("test", "Split of the STS or BEIR data to evaluate.")
    run_code: bool = option(
        False, "Allow running the code that the run uses as its encoder: a Python file or a model folder."
    )


@dataclass(frozen=True)
class ExportOptions:
    """Options of ``hardneg export``: the run, the target format, and which weights to write."""

    run: str = argument("Run directory.")
    format: str = option(
        "safetensors",
        "Format to write: names of torchvision, timm or detectron2; a program from images to features (torch-export, "
        "onnx); a folder with a model card (hub); or safetensors, which hn.load_encoder reads.",
        None,
        "--format",
        among=FORMATS,
    )
    out: str | None = option(None, "File or folder to write; by default inside the run directory.")
    weights: Weights = option(
        "last", "Weights to write: from the last epoch, or the best according to the monitor.", among=get_args(Weights)
    )
    run_code: bool = option(
        False, "Allow running the code that the run uses as its encoder: a Python file or a model folder."
    )
    normalise: bool = option(
        True,
        "Save mean, std, size and channels of the images with the weights; an error if they are unknown.",
        None,
        "--normalise/--no-normalise",
    )


@dataclass(frozen=True)
class ReportOptions:
    """Options of ``hardneg report``: what to show, and where to write the page."""

    paths: tuple[str, ...] = argument("One or more run directories or comparisons.")
    out: str | None = option(None, "HTML file to write; by default report.html in the (first) directory.")
    overwrite: bool = option(False, "Replace the file even if hardneg did not write it.")


@dataclass(frozen=True)
class AdviseOptions:
    """Options of ``hardneg advise``: the data."""

    data: str = argument("Data to train on, as for train --data: digits, folder:PATH, pairs:FILE ...")
    data_root: str | None = option(None, "Folder that holds the data set, if not the default one.")


@dataclass(frozen=True)
class ExplainOptions:
    """Options of ``hardneg explain``: an expression of the grammar and the temperature of the loss."""

    expression: str | None = argument("Expression of the grammar; without one, all distributions are listed.", None)
    temperature: float = option(0.5, "Temperature of the loss.", low=1e-6)
