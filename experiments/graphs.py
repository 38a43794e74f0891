"""Do hard negatives help on graphs? GraphCL and InfoGraph on TU data beside the figures of three papers.

    HARDNEG_DATA=data python experiments/graphs.py                      all sets, 5 seeds; resumes what was stopped
    HARDNEG_DATA=data python experiments/graphs.py --sets MUTAG PTC_MR --seeds 2

Every encoder is GIN, 3 layers of 32, and is evaluated by a support vector machine with 10-fold cross-validation, C
being chosen from five values inside of the nine training folds. Arms without labels train on all graphs, as the papers
do. Arms with labels train once for each fold, on the nine others, and are tested on that fold: nothing sees the labels
that it is tested on. Three rows are controls: GIN as it begins, GraphCL at the temperature that the tilt amounts to,
and SCL.

Batches are of 128 graphs, or half of a smaller set, so that an epoch has two steps at least; the last, incomplete batch
of an epoch is dropped. PTC_MR is the PTC of HCL's Table 3 (14.29 nodes on average).
Writes one folder for each run, and the table as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hardneg.io.provenance import environment
from hardneg.training.data.graphs import GraphData
from hardneg.training.evaluation.svm import svm_correct
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES
from hardneg.training.recipes import run_recipe

ROOT = Path(__file__).resolve().parent.parent
FOLDS = 10
Job = tuple[str, str, str, int]


@dataclass(frozen=True)
class Study:
    """A method, its sets, and its arms: recipe and options; ``{m}`` and ``{k}`` depend on the set."""

    sets: tuple[str, ...]
    common: dict[str, Any]
    arms: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)


PROXIMITY = "proximity(num_candidates={m}, num_neighbours={k}, restart=linear(0.2, 0.05), refresh=25)"
POOLED = {"num_negatives": "candidates", "reduction": "pairs", "dim": 96}
STUDIES = {
    "GraphCL": Study(
        ("MUTAG", "PTC_MR", "ENZYMES", "PROTEINS", "IMDB-BINARY", "IMDB-MULTI"),
        {"epochs": 20, "temperature": 0.2, "learning_rate": 0.01},
        {
            "plain": ("graphcl", {}),
            "HCL": ("graphcl", {"negatives": "Tilt(1.0)"}),
            "temperature 0.1": ("graphcl", {"temperature": 0.1}),
            "ProSampler": ("graphcl", {"batches": PROXIMITY}),
            "SCL, labels": ("supervised", {"negatives": "OtherLabel()", **POOLED}),
            "H-SCL, labels": ("supervised", {"negatives": "OtherLabel() * Tilt(1.0)", **POOLED}),
        },
    ),
    "InfoGraph": Study(
        ("MUTAG", "PROTEINS"),
        {"epochs": 20, "learning_rate": 0.01},
        {
            "plain": ("infograph", {}),
            "HCL": ("infograph", {"negatives": "ClippedTilt(1.0)"}),
            "ProSampler": ("infograph", {"batches": PROXIMITY}),
            "SCL, labels": ("infograph", {"negatives": "OtherLabel()"}),
            "H-SCL, labels": ("infograph", {"negatives": "OtherLabel() * ClippedTilt(1.0)"}),
        },
    ),
}
SIZES = {"MUTAG": 188, "PTC_MR": 344, "ENZYMES": 600, "PROTEINS": 1113, "IMDB-BINARY": 1000, "IMDB-MULTI": 1500}

TABLE_II = ("MUTAG", "ENZYMES", "PTC_MR", "IMDB-BINARY", "IMDB-MULTI")
TABLE_3 = ("IMDB-BINARY", "IMDB-MULTI")
PAPERS = {
    "H-SCL Table II, InfoGraph": dict(zip(TABLE_II, (86.8, 50.4, 55.3, 72.2, 49.6), strict=True)),
    "H-SCL Table II, HCL": dict(zip(TABLE_II, (87.2, 50.4, 57.3, 72.8, 49.6), strict=True)),
    "H-SCL Table II, SCL": dict(zip(TABLE_II, (86.9, 50.4, 55.8, 72.4, 49.9), strict=True)),
    "H-SCL Table II, H-SCL": dict(zip(TABLE_II, (87.2, 50.7, 57.7, 73.0, 50.1), strict=True)),
    "ProSampler Table 3, GraphCL": dict(zip(TABLE_3, (70.90, 48.48), strict=True)),
    "ProSampler Table 3, ProSampler": dict(zip(TABLE_3, (71.90, 48.93), strict=True)),
    "ProSampler Table 3, HCL": dict(zip(TABLE_3, (71.24, 48.54), strict=True)),
}
HCL_FIGURE_3 = (
    "HCL Fig. 3 is a plot; its text gives the gain over InfoGraph: ENZYMES 3.2, PTC 1 to 2, MUTAG and IMDB-B at least "
    "0.5, PROTEINS and IMDB-M as well as InfoGraph."
)


def batch_size_of(name: str) -> int:
    return min(128, SIZES[name] // 2)


def jobs(sets: list[str], seeds: int) -> Iterator[Job]:
    """(method, set, arm, seed): the small sets first, and all arms without labels, which train once, before others."""
    for labels in (False, True):
        for name in sorted(sets, key=lambda one: SIZES[one]):
            for seed in range(seeds):
                for method, study in STUDIES.items():
                    arms = [arm for arm in study.arms if ("labels" in arm) == labels and name in study.sets]
                    yield from ((method, name, arm, seed) for arm in arms)


def options_of(method: str, name: str, arm: str, seed: int, fold: int | None) -> tuple[str, Any]:
    study = STUDIES[method]
    recipe, own = study.arms[arm]
    size = SIZES[name]
    m, k = min(300, size // 2), min(100, size // 6)
    chosen = {key: value.format(m=m, k=k) if key == "batches" else value for key, value in own.items()}
    data = f"graphs:{name}" if fold is None else f"graphs:{name}@{fold}/{FOLDS}"
    batch_size = batch_size_of(name) if fold is None else min(batch_size_of(name), size * (FOLDS - 1) // FOLDS // 2)
    more = {"data": data, "batch_size": batch_size, "seed": seed, "save_every": 5, "device": "cpu"}
    return recipe, RECIPES[recipe](**{**study.common, **chosen, **more})


def trained(out: Path, method: str, name: str, arm: str, seed: int, until: float) -> float | None:
    """The accuracy of one seed: of one run, or of all graphs over the runs of the folds; None if one is not begun."""
    place = out / method / name / arm.replace(", ", "-").replace(" ", "-") / str(seed)
    folds = list(range(FOLDS)) if "labels" in arm else [None]
    right = 0.0
    for fold in folds:
        there = place if fold is None else place / str(fold)
        result = Run(there).result() if there.exists() else None
        if result is None and time.time() > until:
            return None
        if result is None:
            recipe, options = options_of(method, name, arm, seed, fold)
            result = run_recipe(recipe, options, there, resume=there.exists(), quiet=True)
        right += result["svm"] * result["num_test"]
    return right / SIZES[name]


def untrained(out: Path, name: str, seed: int) -> float:
    """The accuracy of GIN with its first weights; kept in a file, since it has no run."""
    path = out / "untrained" / name / f"{seed}.json"
    if not path.exists():
        _, options = options_of("GraphCL", name, "plain", seed, None)
        data = GraphData.splits(options).train
        encoder = data.encoder(options).eval()
        with torch.no_grad():
            features = encoder.features(data.plain(torch.arange(len(data))))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(float(svm_correct(features, data.labels).double().mean())))
    return float(json.loads(path.read_text()))


def figures(found: dict[str, dict[str, dict[int, float]]]) -> dict[str, Any]:
    """Means and deviations over the seeds in percent, by set and arm."""
    return {name: {arm: _of_seeds(list(of.values())) for arm, of in arms.items()} for name, arms in found.items()}


def _of_seeds(values: list[float]) -> dict[str, Any]:
    deviation = round(100 * stdev(values), 2) if len(values) > 1 else None
    return {"mean": round(100 * mean(values), 2), "deviation": deviation, "seeds": [round(v, 4) for v in values]}


def show(result: dict[str, Any]) -> None:
    names = list(result["accuracy"])
    table = Table("", *names, title="10-fold SVM accuracy, %: mean and deviation over the seeds", title_justify="left")
    for arm in dict.fromkeys(arm for arms in result["accuracy"].values() for arm in arms):
        cells = [result["accuracy"][name].get(arm) for name in names]
        table.add_row(arm, *("" if cell is None else _shown(cell) for cell in cells))
    table.add_section()
    for row, values in PAPERS.items():
        table.add_row(row, *(f"{values[name]:.2f}" if name in values else "" for name in names))
    Console(width=150).print(table)
    print(HCL_FIGURE_3)


def _shown(cell: dict[str, Any]) -> str:
    deviation = "" if cell["deviation"] is None else f" ± {cell['deviation']:.2f}"
    return f"{cell['mean']:.2f}{deviation} ({len(cell['seeds'])})"


def measured(job: Job, out: Path, until: float) -> dict[str, float] | None:
    """The accuracies of a job, and of the encoder that it began with; None if it is not begun after the last minute."""
    torch.set_num_threads(1)
    method, name, arm, seed = job
    value = trained(out, method, name, arm, seed, until)
    return None if value is None else {"untrained": untrained(out, name, seed), f"{method}, {arm}": value}


def collected(todo: list[Job], options: argparse.Namespace) -> Iterator[tuple[Job, dict[str, float] | None]]:
    until = time.time() + 60 * options.minutes
    if options.jobs == 1:
        yield from ((job, measured(job, options.out, until)) for job in todo)
        return
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        waiting = [pool.submit(measured, job, options.out, until) for job in todo]
        yield from ((job, one.result()) for job, one in zip(todo, waiting, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs/graphs")
    parser.add_argument("--sets", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, of one thread each")
    parser.add_argument("--minutes", type=float, default=60.0, help="begins no run after so many minutes")
    options = parser.parse_args()
    begun, left, todo = time.monotonic(), 0, list(jobs(options.sets, options.seeds))
    found: dict[str, dict[str, dict[int, float]]] = {name: {} for _, name, _, _ in todo}
    path = options.out / "graphs.json"
    for (method, name, arm, seed), values in collected(todo, options):
        if values is None:
            left += 1
            continue
        for row, value in values.items():
            found[name].setdefault(row, {})[seed] = value
        value = values[f"{method}, {arm}"]
        print(f"{time.monotonic() - begun:7.0f} s  {method} {name} {arm}, seed {seed}: {100 * value:.2f}", flush=True)
        result = {"environment": environment(), "accuracy": figures(found), "papers": PAPERS, "hcl": HCL_FIGURE_3}
        path.write_text(json.dumps(result, indent=2) + "\n")
    if path.exists():
        show(json.loads(path.read_text()))
    if left:
        print(f"{left} of {len(todo)} were not begun; the same command goes on with them.")


if __name__ == "__main__":
    main()
