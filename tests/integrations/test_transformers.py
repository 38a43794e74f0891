"""HardBatches for sentence-transformers in a plain HF Trainer: killed and resumed, equal to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from support.libraries import library

for name in ("transformers", "accelerate", "datasets", "hardneg.integrations.sentence_transformers.batches"):
    library(name)
TESTS = Path(__file__).parents[1]


def run(*jobs: tuple[Path, int, bool, bool]) -> list[int]:
    """The exit codes of jobs one after the other: a folder, the step of a kill, to resume, and if the plan is lost."""
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    given = json.dumps([(str(folder), *rest) for folder, *rest in jobs])
    command = [sys.executable, str(TESTS / "support" / "hf_run.py"), given]
    done = subprocess.run(command, env=environment, timeout=240, check=True, stdout=subprocess.PIPE, text=True)
    codes: list[int] = json.loads(done.stdout.splitlines()[-1])
    return codes


def batches(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_killed_and_resumed(tmp_path: Path) -> None:
    """Eight batches an epoch, a checkpoint every three steps, a refresh every five, dropout, a schedule."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    jobs = [(whole, 0, False, False), (broken, 11, False, False), (broken, 0, True, False), (broken, 0, True, True)]
    assert run(*jobs) == [0, -signal.SIGKILL, 0, 1], "without the plan it does not resume"
    expected = batches(whole)
    assert len(expected) == 16
    assert batches(broken) == expected[:11] + expected[9:]
    assert sorted(i for batch in expected[8:] for i in batch) == list(range(64))
    first, second = (torch.load(folder / "weights.pt") for folder in (whole, broken))
    assert all(torch.equal(first[name], second[name]) for name in first)
