"""hn.mine of a Dataset beside sentence-transformers' mine_hard_negatives: the same rows, time and memory.

    python benchmarks/mine_dataset.py                # 20,000 pairs, a static model of random vectors, 5 negatives each

Both get the same Dataset of texts, the same small model and the same options, and give a Dataset: n-tuples with scores.
Each runs in a fresh process, in turn, several rounds; a small call first loads what is needed and is not counted. Time
is the processor's; memory is the peak of the call above what the process held. The negatives must be equal; scores may
differ by rounding, and so may the order of negatives whose similarities differ by less.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from dense_loss import cpu_name, peak, reset_peak
from rich.console import Console

import hardneg as hn
from hardneg.io.provenance import environment

ROOT = Path(__file__).resolve().parent.parent
OURS, PEER, FAISS = "hn.mine", "mine_hard_negatives", "mine_hard_negatives, FAISS"
OPTIONS: dict[str, Any] = {
    "relative_margin": 0.05,
    "range_max": 100,
    "num_negatives": 5,
    "output_format": "n-tuple",
    "output_scores": True,
}
WORDS = 5000


def make_model() -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=64)], device="cpu")


def make_pairs(number: int) -> Any:
    from datasets import Dataset

    random = np.random.default_rng(0)
    anchors = [" ".join(f"w{i}" for i in row) for row in random.integers(0, WORDS, (number, 6))]
    more = [" ".join(f"w{i}" for i in row) for row in random.integers(0, WORDS, (number, 4))]
    return Dataset.from_dict({"anchor": anchors, "positive": [f"{a} {b}" for a, b in zip(anchors, more, strict=True)]})


def mined(name: str, pairs: Any, model: Any) -> Any:
    with contextlib.redirect_stderr(io.StringIO()):
        if name == OURS:
            return hn.mine(pairs, model=model, verbose=False, **OPTIONS)
        from sentence_transformers.util import mine_hard_negatives

        return mine_hard_negatives(pairs, model, verbose=False, use_faiss=name == FAISS, **OPTIONS)


def measured(name: str, number: int) -> dict[str, float]:
    torch.set_num_threads(1)
    model, pairs = make_model(), make_pairs(number)
    mined(name, make_pairs(200), model)
    before = reset_peak()
    clock, cpu = time.perf_counter(), time.process_time()
    rows = mined(name, pairs, model)
    figures = {"seconds": time.process_time() - cpu, "clock": time.perf_counter() - clock}
    return figures | {"mib": (peak() - before) / 2**20, "rows": len(rows)}


def compared(number: int) -> dict[str, Any]:
    """Whether the rows are the same."""
    torch.set_num_threads(1)
    model, pairs = make_model(), make_pairs(number)
    ours, theirs = mined(OURS, pairs, model), mined(PEER, pairs, model)
    texts = [name for name in theirs.column_names if name != "scores"]
    shared = {row["anchor"]: row for row in ours}
    found = [[[each[name] for name in texts] for each in (shared[row["anchor"]], row)] for row in theirs]
    return {
        "columns_equal": ours.column_names == theirs.column_names,
        "rows": [len(ours), len(theirs)],
        "rows_equal": sum(mine == other for mine, other in found),
        "rows_equal_in_any_order": sum(set(mine) == set(other) for mine, other in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "mine_dataset.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sys.stdout.write(json.dumps(measured(options.one, options.number)))
        return
    console, found = Console(), {"compared": compared(options.number), "contenders": {}}
    console.print(found["compared"])
    rounds: dict[str, list[dict[str, float]]] = {OURS: [], PEER: [], FAISS: []}
    for _ in range(options.rounds):
        for name, results in rounds.items():
            command = [sys.executable, __file__, "--one", name, "--number", str(options.number)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    for name, results in rounds.items():
        figures = {key: median(each[key] for each in results) for key in results[0]}
        found["contenders"][name] = figures
        console.print(f"{name}: {figures['seconds']:.2f} s, {figures['mib']:.0f} MiB, {figures['rows']:.0f} rows")
    found |= {"number": options.number, "options": OPTIONS, "cpu": cpu_name(), **environment()}
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
