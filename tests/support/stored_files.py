"""One small sample of everything that hardneg stores, made once, and the commands that read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from hardneg.comparing.comparing import compare
from hardneg.comparing.request import Comparison
from hardneg.mining.job import run as mine_files
from hardneg.mining.options import MineOptions
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES
from hardneg.training.recipes import run_recipe
from support.comparisons import here
from support.mining_jobs import encode, make_rows, write_lines

ARMS = ("simclr()", "hcl(beta=1)")
SMALL = {"batch_size": 16, "dim": 8, "log_every": 2, "device": "cpu", "encoder": "tiny"}


def small_images(path: Path, num_images: int = 48) -> str:
    random = np.random.default_rng(0)
    labels = np.arange(num_images) % 3
    images = random.integers(0, 128, (num_images, 8, 8), dtype=np.uint8) + (40 * labels[:, None, None]).astype(np.uint8)
    np.savez(path, images=images, labels=labels, test_images=images[:24], test_labels=labels[:24])
    return f"npz:{path}"


def flags(**options: Any) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def make_stored(folder: Path) -> Path:
    """run/ and begun/ (a run that is finished, one that is not), compare/, and mined/ with its manifest and cache."""
    data = small_images(folder / "data.npz")
    options = {"data": data, "epochs": 2, **SMALL}
    run_recipe("simclr", RECIPES["simclr"](**options), folder / "run", quiet=True)
    _begin(folder / "begun", options)
    with mock.patch("hardneg.comparing.runs.in_a_process", here):
        common = {"data": data, "epochs": 1, **SMALL}
        compare(Comparison(ARMS, 3, common), folder / "compare", jobs=1, show=lambda line: None)
    mined = folder / "mined"
    mined.mkdir()
    queries, corpus = make_rows()
    np.save(mined / "q.npy", encode([row["query"] for row in queries]))
    np.save(mined / "d.npy", encode([row["text"] for row in corpus]))
    tables = {"queries": write_lines(mined / "q.jsonl", queries), "corpus": write_lines(mined / "d.jsonl", corpus)}
    vectors = {"query_embeddings": str(mined / "q.npy"), "corpus_embeddings": str(mined / "d.npy")}
    how = {"negatives": "Rank(1, 40)", "k": 4, **tables}
    mine_files(MineOptions(out=str(mined / "mined.jsonl"), **how, **vectors))
    mine_files(MineOptions(out=str(mined / "coded.jsonl"), encoder="support.mining_jobs:encode", cache_key="1", **how))
    (folder / "precious").mkdir()
    (folder / "precious" / "file").write_text("precious")
    return folder


class Stopped(Exception):
    """In the place of a kill, between two epochs."""


def _begin(out: Path, options: dict[str, Any]) -> None:
    save = Run.save

    def stop(run: Run, state: dict[str, Any]) -> None:
        save(run, state)
        raise Stopped

    with mock.patch.object(Run, "save", stop):
        try:
            run_recipe("simclr", RECIPES["simclr"](**options), out, quiet=True)
        except Stopped:
            return
    raise AssertionError("the run was not stopped")


Command = Callable[[Path], list[str]]


def commands(data: str) -> dict[str, tuple[Command, str, tuple[str, ...]]]:
    """By name: the arguments for a copy of the files, the folder that they may write to, and the files they read."""
    of_run = ("config.json", "result.json", "metrics.jsonl", "embeddings.npz", "warnings.json", "memory.json")
    run = tuple(f"run/{name}" for name in of_run)
    begun = tuple(f"begun/{name}" for name in ("config.json", "metrics.jsonl", "checkpoint.pt", ".lock"))
    comparison = ("compare/comparison.json", "compare/comparison.json", "compare/request.json")
    below = tuple(f"compare/runs/*/{name}" for name in of_run[:4])
    training, budget = flags(data=data, epochs=2, **SMALL), flags(data=data, epochs=1, batch_size=16, seeds=3, jobs=1)
    others = [
        part for name in ("dim", "log_every", "device", "encoder") for part in ("--option", f"{name}={SMALL[name]}")
    ]
    arms = [part for arm in ARMS for part in ("--arm", arm)]
    mined = ("mined/mined.jsonl.manifest.json",) * 3 + ("mined/mined.jsonl",)
    coded = ("mined/coded.jsonl.manifest.json",) * 4 + ("mined/coded.jsonl",)
    return {
        "report run": (lambda at: ["report", f"{at}/run", "--out", f"{at}/out/page.html"], "out", run),
        "report comparison": (
            lambda at: ["report", f"{at}/compare", "--out", f"{at}/out/page.html"], "out", comparison + below),
        "report both": (
            lambda at: ["report", f"{at}/run", f"{at}/compare", "--out", f"{at}/out/p.html"],
            "out", run[:3] + comparison,
        ),
        "evaluate": (lambda at: ["evaluate", f"{at}/run"], "out", ("run/embeddings.npz", "run/result.json")),
        "audit run": (lambda at: ["audit", f"{at}/run", "--out", f"{at}/out"], "out", ("run/embeddings.npz", *run)),
        "audit mined": (lambda at: ["audit", f"{at}/mined/mined.jsonl", "--out", f"{at}/out"], "out", mined),
        "audit coded": (lambda at: ["audit", f"{at}/mined/coded.jsonl", "--out", f"{at}/out"], "out", coded),
        "train": (lambda at: ["train", "simclr", "--resume", "--out", f"{at}/begun", *training], "begun", begun),
        "train again": (lambda at: ["train", "simclr", "--resume", "--out", f"{at}/run", *training], "run", run),
        "compare": (
            lambda at: ["compare", *arms, "--out", f"{at}/compare", *budget, *others], "compare", comparison + below),
    }  # fmt: skip
