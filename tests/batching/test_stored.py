"""Graphs and plans on disk: whole or not at all, and damage is found."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hardneg.batching.graph import ProximityGraph
from hardneg.batching.plan import Plan
from hardneg.batching.planners import UniformPlanner
from hardneg.core.errors import Damaged
from support.errors import raises


def a_graph(n: int = 40, k: int = 5) -> ProximityGraph:
    generator = torch.Generator().manual_seed(0)
    return ProximityGraph(torch.randint(n, (n, k), generator=generator), torch.rand(n, k, generator=generator), "made")


def a_plan() -> Plan:
    return UniformPlanner().plan(200, 16, torch.Generator().manual_seed(0))


KINDS: list[tuple[Callable[[], Any], Callable[[Any], str]]] = [
    (a_graph, lambda graph: graph.digest + graph.name),
    (a_plan, lambda plan: plan.digest() + repr(plan.segments)),
]

SAVE_FOR_EVER = """
import sys, torch
from hardneg.batching.graph import ProximityGraph
n, k = 60_000, 50
neighbours = torch.arange(n * k).view(n, k) % n
print("ready", flush=True)
while True:
    for name in ("old", "new"):
        ProximityGraph(neighbours, torch.ones(n, k), name).save(sys.argv[1])
"""


def test_a_kill_during_a_save_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "graph.npz"
    a_graph().save(path)
    rng = random.Random(0)
    for _ in range(3):
        saving = subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(path)], stdout=subprocess.PIPE)
        assert saving.stdout is not None
        saving.stdout.readline()
        time.sleep(0.1 + 0.3 * rng.random())
        os.kill(saving.pid, signal.SIGKILL)
        saving.wait()
        saving.stdout.close()
        assert ProximityGraph.load(path).name in ("made", "old", "new")


@pytest.mark.parametrize(("make", "shown"), KINDS, ids=["graph", "plan"])
def test_a_flipped_bit_is_refused_by_name(make: Callable[[], Any], shown: Callable[[Any], str], tmp_path: Path) -> None:
    made, path = make(), tmp_path / "kept.npz"
    made.save(path)
    whole, rng = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(60):
        place = rng.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :])
        try:
            found = type(made).load(path)  # a bit of the seal's own name
        except Damaged:
            refused += 1
        else:
            assert shown(found) == shown(made)
    assert refused > 50
    for length in (0, 10, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:length])
        with raises(Damaged, path="kept.npz", got="the checksum at its end is missing"):
            type(made).load(path)
    with pytest.raises(FileNotFoundError):
        type(made).load(tmp_path / "absent.npz")


def test_files_whose_checksum_was_lost_are_damaged(tmp_path: Path) -> None:
    a_graph().save(tmp_path / "graph.npz")
    a_plan().save(tmp_path / "plan.npz")
    for load, name in ((ProximityGraph.load, "graph.npz"), (Plan.load, "plan.npz")):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-81])
        with pytest.raises(Damaged) as refused:
            load(path)
        assert refused.value.path == path
