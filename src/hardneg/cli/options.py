"""The options of the verbs whose rooms are too heavy for ``--help``, and where ``train`` writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from hardneg.core.options import argument, option, part
from hardneg.training.options import RUN, TrainOptions


@dataclass(frozen=True)
class RunOptions:
    """Where a run is, and whether it goes on."""

    out: str = option("runs", "Directory of the run.", RUN)
    resume: bool = option(False, "Resume the run in --out, if there is one.", RUN)
    allow_other_data: bool = option(False, "Go on although the images or labels have changed since the start.", RUN)


@dataclass(frozen=True)
class CompareOptions:
    """The arms, what they share, and what decides."""

    arms: tuple[str, ...] = option((), "A paper or recipe, and after @ who shares the batch; repeat it.", None, "--arm")
    shared: TrainOptions = field(
        default_factory=TrainOptions, metadata=part(only=("data", "epochs", "batch_size"), panel="Shared by all arms")
    )
    options: tuple[str, ...] = option(
        (), "Another option of train, as name=value, for arms that do not write it.", "Shared by all arms", "--option"
    )
    seeds: int = option(3, "Runs of each arm; the same seeds for all.", low=2)
    metric: str = option("knn", "What decides.", among=("knn", "1nn", "linear"))
    tune: str | None = option(None, "Such as temperature=0.1,0.2,0.5: the same tries for every arm.")
    out: str = option("runs/compare", "Directory of the comparison; an existing one is resumed.")
    jobs: int | None = option(None, "Most runs side by side; by default one for each core or two for each GPU.", low=1)
    allow_other_data: bool = option(False, "Go on in a folder that was begun with other data.")


@dataclass(frozen=True)
class EvaluateOptions:
    path: str = argument("A run directory, or a file of saved embeddings (npz).")


@dataclass(frozen=True)
class ReportOptions:
    paths: tuple[str, ...] = argument("Run directories and comparisons, one or several.")
    out: str | None = option(None, "The HTML file; by default report.html in the directory.", None, "--out", "-o")
    overwrite: bool = option(False, "Also over a file that is no page of hardneg.")


@dataclass(frozen=True)
class ExplainOptions:
    expression: str | None = argument("Negatives in the grammar; none lists all of them.", None)
    temperature: float = option(0.5, "Temperature of the scores.", low=1e-6)
