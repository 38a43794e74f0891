"""Quick-thoughts on consecutive sentences: classification of texts before and after.

    HARDNEG_DATA=data python experiments/quick_thoughts.py --jobs 12

Needs $HARDNEG_DATA/sentences and $HARDNEG_DATA/textcls. The encoders are two of hashed subwords, of width 128 each; the
figure is the accuracy of a logistic regression on the features of both: on the test split of SST-2, TREC and MRPC, over
10 folds of MR, CR, SUBJ and MPQA. Two rows are controls: the encoders as they begin, and the same training on the
sentences in random order, whose neighbours say nothing. HCL is a tilt of 1 (Robinson et al. 2021, Section 5.3, without
the correction tau_plus). Values were chosen before any run and are not tuned.
One process for each arm and seed; a stopped study resumes, and its file is written after each of them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from sentences import DATA, RESULTS, ROOT, articles, of_seeds, write_lines, write_result

from hardneg.training.data.inputs import TwoTowers
from hardneg.training.evaluation.benchmarks import evaluate_classification, read_classification
from hardneg.training.options import QuickThoughtsOptions
from hardneg.training.recipes import run_recipe
from hardneg.training.text_encoders import text_encoder
from hardneg.training.trained import load_encoder

ARMS: dict[str, dict[str, Any] | None] = {
    "untrained": None,
    "quick-thoughts": {},
    "quick-thoughts, HCL": {"negatives": "Tilt(1.0)"},
    "quick-thoughts, sentences in random order": {},
}
WIDTH = 128


def shuffled(documents: Iterator[list[str]]) -> Iterator[list[str]]:
    """The sentences of all documents in random order, as documents of the same lengths."""
    kept = list(documents)
    every = [sentence for document in kept for sentence in document]
    random.Random(0).shuffle(every)
    for document in kept:
        yield [every.pop() for _ in document]


def measured(arm: str, seed: int, lines: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The accuracies of one arm and seed; kept in a file."""
    path = out / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"
    kept = path.with_suffix(".json")
    if not kept.exists():
        torch.set_num_threads(1)
        own, trained = ARMS[arm], {}
        if own is None:
            encoder: Any = TwoTowers(*(text_encoder(dim=WIDTH, seed=one) for one in (seed, seed + 2**30)))
        else:
            wanted = {"data": f"text:{lines}", "dim": WIDTH, "epochs": options.epochs, "seed": seed, **own}
            result = run_recipe(
                "quick-thoughts", QuickThoughtsOptions(**wanted), path, resume=path.exists(), quiet=True
            )
            trained = {"seconds": result["seconds"], "final": result["final"], "retrieval": result["retrieval"]}
            encoder = load_encoder(path)
        tasks = read_classification(DATA / "textcls" / "textcls.tsv.gz")
        chosen = {name: task for name, task in tasks.items() if not options.tasks or name in options.tasks}
        found = evaluate_classification(chosen, encoder.encode)
        kept.write_text(json.dumps({"accuracy": {name: one["accuracy"] for name, one in found.items()}, **trained}))
    return dict(json.loads(kept.read_text()))


def table(found: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    """By arm: each task and their mean, over the seeds that have ended."""
    rows: dict[str, Any] = {}
    for arm in ARMS:
        seeds = [found[key] for key in sorted(found) if key[0] == arm]
        if seeds:
            tasks = {name: of_seeds([one["accuracy"][name] for one in seeds]) for name in seeds[0]["accuracy"]}
            means = of_seeds([mean(one["accuracy"].values()) for one in seeds])
            rows[arm] = {"mean": means, "tasks": tasks, "final": [one.get("final") for one in seeds]}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentences", type=int, default=65_536)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="*", help="some of the tasks; by default all")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side, of one thread each")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/quick_thoughts", help="for the runs")
    parser.add_argument("--result", type=Path, default=RESULTS / "quick_thoughts.json")
    options = parser.parse_args()
    ordered = write_lines(options.out / f"sentences_{options.sentences}.txt", articles(options.sentences))
    mixed = write_lines(options.out / f"shuffled_{options.sentences}.txt", shuffled(articles(options.sentences)))
    about = {"sentences": options.sentences, "epochs": options.epochs, "width": WIDTH}
    found: dict[tuple[str, int], dict[str, Any]] = {}
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        waiting = {
            pool.submit(measured, arm, seed, mixed if "random" in arm else ordered, options.out, options): (arm, seed)
            for seed in range(options.seeds)
            for arm in ARMS
        }
        for one in as_completed(waiting):
            found[waiting[one]] = one.result()
            accuracy = one.result()["accuracy"]
            print(*waiting[one], {name: round(100 * value, 2) for name, value in accuracy.items()}, flush=True)
            write_result(options.result, {**about, "accuracy": table(found)})


if __name__ == "__main__":
    main()
