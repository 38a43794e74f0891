"""One epoch's plan of every planner: how hard its batches are against how false (ProSampler, Fig. 4).

    python experiments/plan_frontier.py            # scikit-learn's digits, and CIFAR-10 where HARDNEG_DATA has it

Vectors are centred pixels (after PCA for CIFAR-10) of unit norm: no training, so the figures compare planners and say
nothing about a trained encoder. Writes runs/plan_frontier/<data>.json and <data>.png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.batching.planners import (
    Communities,
    CuthillMcKee,
    NearestNeighbours,
    Planner,
    Proximity,
    SingleSource,
    Strata,
    UniformPlanner,
)
from hardneg.core.errors import NoFile
from hardneg.training.data.images import load as load_images
from hardneg.training.data.named import default_root

ROOT = Path(__file__).resolve().parent.parent


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    pixels = torch.from_numpy(pixels).float()
    return normalize(pixels - pixels.mean(0), dim=1), torch.from_numpy(labels)


def cifar10(root: Path) -> tuple[Tensor, Tensor]:
    """The training images, as 64 principal components."""
    data = load_images("cifar10", "train", root)
    assert data.labels is not None
    pixels = data.images.permute(0, 2, 3, 1).flatten(1).float() / 255
    pixels -= pixels.mean(0)
    axes = torch.linalg.eigh(pixels.T @ pixels).eigenvectors[:, -64:]
    return normalize(pixels @ axes, dim=1), data.labels


def planners(labels: Tensor, num_candidates: int) -> Iterator[tuple[str, Planner]]:
    """Every planner, ProSampler at several restarts; single-source batches by the label are the other end."""
    yield "uniform", UniformPlanner()
    for restart in (0.05, 0.1, 0.2, 0.5, 0.7):
        yield f"ProSampler, restart {restart}", Proximity(restart, num_candidates=num_candidates)
    yield "ProSampler, by similarity", Proximity(0.1, steps="similarity", num_candidates=num_candidates)
    for kind in ("random", "depth_first", "breadth_first"):
        yield kind.replace("_", " "), Proximity(kind=kind, num_candidates=num_candidates)
    for restart in (0.1, 0.5):
        yield f"kNN graph, restart {restart}", Proximity(restart, num_candidates=None)
    yield "k-means strata", Strata()
    yield "communities", Communities()
    yield "communities, ranks 30 to 130 (B3)", Communities(skip=30, num_neighbours=130)
    yield "Cuthill-McKee order (GCBS)", CuthillMcKee()
    yield "kNN", NearestNeighbours()
    yield "single source (label)", SingleSource(labels)


def measure(vectors: Tensor, labels: Tensor, batch_size: int, num_candidates: int, seeds: int) -> list[dict[str, Any]]:
    """Each planner with coverage "once", and the walks and kNN also "free", as in the paper."""
    rows = []
    named = list(planners(labels, num_candidates))
    free = [(name, planner) for name, planner in named if isinstance(planner, (Proximity, NearestNeighbours))]
    settings = [(name, planner, "once") for name, planner in named]
    settings += [(f"{name}, free", planner, "free") for name, planner in free]
    for name, planner, coverage in settings:
        generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
        try:
            plans = [planner.plan(vectors, batch_size, generator, coverage=coverage) for generator in generators]
        except ImportError as missing:
            print(f"{name}: left out. {missing}")
            continue
        found = [plan.describe(vectors, labels) for plan in plans]
        row: dict[str, Any] = {"planner": name, "visited": coverage}
        for key in ("similarity", "false_negatives", "coverage", "filled"):
            values = [getattr(description, key) for description in found]
            row[key], row[f"{key}_std"] = float(np.mean(values)), float(np.std(values))
        rows.append(row)
    return rows


def check_order(rows: list[dict[str, Any]]) -> None:
    """Uniform, ProSampler and kNN come in that order of hardness."""
    by_name = {row["planner"]: row for row in rows}
    chain = [by_name[name] for name in ("uniform", "ProSampler, restart 0.1", "kNN")]
    for key in ("similarity", "false_negatives"):
        values = [row[key] for row in chain]
        if not values[0] < values[1] < values[2]:
            raise SystemExit(f"uniform, ProSampler, kNN are not in this order of {key}: {values}")


def show(data: str, rows: list[dict[str, Any]]) -> None:
    table = Table("planner", "similarity", "false negatives", "coverage", "filled", title=data)
    for row in sorted(rows, key=lambda row: row["similarity"]):
        shares = (f"{row[key]:.1%}" for key in ("false_negatives", "coverage", "filled"))
        table.add_row(row["planner"], f"{row['similarity']:.3f}", *shares)
    Console(width=100).print(table)


def plot(data: str, rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 6))
    shown = [row for row in rows if not row["planner"].startswith("single source")]  # far above: 100 % by design
    for number, row in enumerate(sorted(shown, key=lambda row: row["similarity"]), 1):
        family = "tab:red" if "ProSampler" in row["planner"] else "tab:blue"
        hollow = {"markerfacecolor": "none"} if row["visited"] == "free" else {}
        place = row["similarity"], 100 * row["false_negatives"]
        axes.plot(*place, "o", color=family, label=f"{number}  {row['planner']}", **hollow)
        offset = (-4, 6) if number % 2 else (-4, -13)
        axes.annotate(str(number), place, fontsize=8, textcoords="offset points", xytext=offset)
    axes.legend(fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.set(
        xlabel="similarity within a batch",
        ylabel="false negatives (same label), %",
        title=f"One epoch on {data} (hollow: free)",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs/plan_frontier")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    root = default_root()
    settings: list[tuple[str, Any, int, int]] = [("digits", digits, 64, 500)]
    try:
        vectors = cifar10(root)
        settings.append(("cifar10", lambda: vectors, 256, 1000))
    except NoFile as error:
        print(error)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    for data, load, batch_size, num_candidates in settings:
        vectors, labels = load()
        rows = measure(vectors, labels, batch_size, num_candidates, options.seeds if data == "digits" else 1)
        show(data, rows)
        result = {"commit": commit, "data": data, "batch_size": batch_size, "num_candidates": num_candidates}
        (options.out / f"{data}.json").write_text(json.dumps({**result, "rows": rows}, indent=2) + "\n")
        plot(data, rows, options.out / f"{data}.png")
        check_order(rows)


if __name__ == "__main__":
    main()
