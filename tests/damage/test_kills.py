"""Kills at random moments, and two processes on one output: the same bytes after the rerun.

One kill of each kind by default; HARDNEG_KILLS=30 gives that many in all. Kills of mining are in tests/mining.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from hardneg.auditing.files import audit_files
from hardneg.auditing.options import AuditOptions, Settings
from hardneg.batching.graph import ProximityGraph
from hardneg.batching.plan import Plan
from hardneg.comparing.comparing import compare
from hardneg.comparing.request import Comparison
from hardneg.core.errors import InUse
from hardneg.io.embeddings import load_embeddings
from hardneg.io.files import write_atomically
from hardneg.reporting import write_report
from hardneg.training.options import RECIPES
from hardneg.training.recipes import run_recipe
from support.comparisons import here
from support.forks import CONTEXT
from support.stored_files import ARMS, SMALL, small_images
from support.training_runs import everything
from support.vectors import save_embeddings

pytest.importorskip("accelerate", reason="training needs the extra train")
IN_USE = 7
OPTIONS = {**SMALL, "epochs": 4, "save_every": 1}


def do_train(out: Path, data: str) -> None:
    run_recipe("simclr", RECIPES["simclr"](data=data, **OPTIONS), out / "run", resume=True, quiet=True)


def do_compare(out: Path, data: str) -> None:
    with mock.patch("hardneg.comparing.runs.in_a_process", here):
        compare(Comparison(ARMS, 2, {"data": data, **SMALL, "epochs": 1}), out / "compare", jobs=1, show=_silent)
    write_report(out / "compare")


def _silent(line: str) -> None:
    pass


def do_audit(out: Path, data: str) -> None:
    """Of vectors beside the output, as the command writes it."""
    folder = Path(data.removeprefix("npz:")).parent
    found = audit_files(AuditOptions(str(folder / "vectors.npz"), settings=Settings(num_anchors=64)))
    found.write_json(out / "audit.json")
    found.write_html(out / "audit.html")


ROWS = 50_000


@cache
def graph_of(number: int) -> ProximityGraph:
    random = torch.Generator().manual_seed(number)
    neighbours, similarities = (
        torch.randint(0, ROWS, (ROWS, 8), generator=random),
        torch.rand(ROWS, 8, generator=random),
    )
    return ProximityGraph(neighbours, similarities)


@cache
def plan_of(number: int) -> Plan:
    order = np.random.default_rng(number).permutation(10 * ROWS)
    return Plan.from_batches(list(order.reshape(-1, 100)), len(order), 100)


@cache
def split_of(number: int) -> tuple[torch.Tensor, ...]:
    features, labels = graph_of(number).similarities, torch.arange(ROWS) % 3
    return features, labels, features, labels


def save_split(path: Path, number: int) -> None:
    write_atomically(path, lambda file: save_embeddings(file, *split_of(number)))


SAVES: dict[str, Callable[[Path, int], object]] = {
    "graph": lambda path, number: graph_of(number).save(path),
    "plan": lambda path, number: plan_of(number).save(path),
    "embeddings": save_split,
}


def do_saves(name: str, out: Path) -> None:
    """Two files in turn, and a third one at the end."""
    for number in (0, 1) * 15 + (2,):
        SAVES[name](out / f"{name}.npz", number)


def content(out: Path) -> dict[str, Any]:
    """All that a rerun must bring back to the last bit; times differ."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.name == "result.json":
            found |= {f"{name} {key}": str(value) for key, value in everything(path.parent).items() if key != "state"}
            found |= {
                f"{name} state": {key: value.tobytes() for key, value in everything(path.parent)["state"].items()}
            }
        elif path.name == "comparison.json":
            found[name] = [row["values"] for row in json.loads(path.read_text())["rows"]]
        elif path.suffix in (".npz", ".html", ".json", ".jsonl") and _is_exact(path):
            found[name] = path.read_bytes().replace(str(out).encode(), b"@")
    return found


def _is_exact(path: Path) -> bool:
    """Not those with times, memory, or the checksums of paths; nor what a killed process left of its own."""
    return path.name not in ("config.json", "memory.json", "report.html", "audit.json") and ".partial" not in path.name


WORK: dict[str, Callable[[Path, str], None]] = {
    "train": do_train,
    "compare": do_compare,
    "audit": do_audit,
    **{name: lambda out, data, name=name: do_saves(name, out) for name in SAVES},
}
EACH = max(1, round(int(os.environ.get("HARDNEG_KILLS", len(WORK))) / len(WORK)))


def child(name: str, out: Path, data: str, begun: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.argv = ["hardneg", name]
    for number in range(3):  # what is saved is made before: a kill is to meet a save
        {"graph": graph_of, "plan": plan_of, "embeddings": split_of}.get(name, str)(number)
    begun.set()
    try:
        WORK[name](out, data)
    except InUse:
        sys.exit(IN_USE)


def start(name: str, out: Path, data: str) -> Any:
    begun = CONTEXT.Event()
    process = CONTEXT.Process(target=child, args=(name, out, data, begun))
    process.start()
    assert begun.wait(120)
    return process


def whole(name: str, out: Path, data: str) -> float:
    """Works to the end; the seconds that it took."""
    process, since = start(name, out, data), time.monotonic()
    process.join(240)
    assert process.exitcode == 0
    return time.monotonic() - since


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("kills")
    vectors = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)
    labels = np.arange(300) % 5
    np.savez(folder / "vectors.npz", embeddings=vectors, labels=labels)
    return small_images(folder / "data.npz")


References = dict[str, tuple[dict[str, Any], float]]


@pytest.fixture(scope="module")
def references() -> References:
    return {}


def reference(name: str, data: str, folder: Path, references: References) -> tuple[dict[str, Any], float]:
    if name not in references:
        out = folder / "reference"
        out.mkdir()
        seconds = whole(name, out, data)
        references[name] = content(out), seconds
        shutil.rmtree(out)
    assert references[name][0]
    return references[name]


@pytest.mark.parametrize("number", range(EACH))
@pytest.mark.parametrize("name", WORK)
def test_a_kill_at_any_moment_changes_nothing(
    name: str, number: int, data: str, tmp_path: Path, references: References
) -> None:
    expected, seconds = reference(name, data, tmp_path, references)
    out = tmp_path / "out"
    out.mkdir()
    process = start(name, out, data)
    time.sleep(Random(f"{name} {number}").uniform(0.0, seconds))
    process.kill()
    process.join()
    if name in SAVES:
        assert_whole(name, out)
    whole(name, out, data)
    assert content(out) == expected


def assert_whole(name: str, out: Path) -> None:
    """What a kill during a save leaves is the old or the new file, or none before the first."""
    path = out / f"{name}.npz"
    if not path.exists():
        return
    if name == "graph":
        assert any(ProximityGraph.load(path).neighbours.equal(graph_of(number).neighbours) for number in range(3))
    elif name == "plan":
        assert any(np.array_equal(Plan.load(path).order, plan_of(number).order) for number in range(3))
    else:
        assert any(load_embeddings(path)[0].equal(split_of(number)[0]) for number in range(3))


@pytest.mark.parametrize("name", WORK)
def test_two_processes_on_one_output_change_nothing(
    name: str, data: str, tmp_path: Path, references: References
) -> None:
    expected, _ = reference(name, data, tmp_path, references)
    out = tmp_path / "out"
    out.mkdir()
    processes = [start(name, out, data) for _ in range(2)]
    for process in processes:
        process.join(240)
    codes = sorted(process.exitcode for process in processes)
    assert codes in ([0, 0], [0, IN_USE]), codes
    assert content(out) == expected
