"""On a GPU: graphs built beside training, runs that resume in half precision, batch statistics of two ranks.

Two ranks share one GPU here, over gloo, since NCCL insists on a GPU for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.batching.graph import build_graph
from hardneg.batching.planners import Proximity
from hardneg.batching.refresh import Refresh
from hardneg.batching.sampler import PlannedBatchSampler
from hardneg.training.loop.runs import Run
from hardneg.training.loop.train import Loop
from support.training_ranks import run_job
from support.training_runs import STEPS, assert_same, everything, few_digits, run, short

pytest.importorskip("accelerate", reason="training needs the extra train")
pytestmark = pytest.mark.gpu

N, DIM = 20_000, 64


def unit_vectors_there(seed: int) -> torch.Tensor:
    vectors = torch.randn(N, DIM, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(vectors, dim=1).cuda()


def test_graph_of_vectors_that_training_overwrites_meanwhile() -> None:
    """The graph is of the vectors at the moment of the refresh, however busy the GPU is before and after."""
    kept, buffer = unit_vectors_there(0), unit_vectors_there(0)
    sampler = PlannedBatchSampler(Proximity(num_neighbours=10, num_candidates=100), N, 256, seed=0)
    refresh = Refresh(sampler, 1, lambda: buffer, num_neighbours=10, num_candidates=100, seed=3)
    expected = build_graph(kept, 10, 100, torch.Generator("cuda").manual_seed(3 * 2**31 + 5))
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        for _ in range(30):
            busy = torch.nn.functional.normalize(busy @ busy)
        buffer.copy_(kept)
        refresh.now(5)
        buffer.fill_(float("nan"))
        litter = [torch.full((N, DIM), float("nan"), device="cuda") for _ in range(20)]  # in memory that was let go
        graph = sampler.data
        assert torch.equal(graph.neighbours, expected.neighbours)
        assert torch.allclose(graph.similarities, expected.similarities, atol=1e-6)
        del litter


def test_graph_of_a_gpu_is_made_in_a_thread_and_waited_for() -> None:
    sampler = PlannedBatchSampler(Proximity(num_neighbours=10, num_candidates=100), N, 256, seed=0)
    refresh = Refresh(sampler, 1, lambda: unit_vectors_there(1), num_neighbours=10, num_candidates=100)
    made = refresh._aside(lambda: build_graph(unit_vectors_there(1), 10, 100), torch.device("cuda"))
    assert isinstance(made, Future)
    refresh.now()
    assert len([index for batch in sampler for index in batch]) == N


def test_graphs_after_the_first_take_no_more_memory() -> None:
    """Each in a stream of its own would allocate from the device again, which stops training for that time."""
    sampler = PlannedBatchSampler(Proximity(num_neighbours=10, num_candidates=100), N, 256, seed=0)
    refresh = Refresh(sampler, 1, lambda: unit_vectors_there(1), num_neighbours=10, num_candidates=100)
    held = []
    for step in range(4):
        refresh.now(step)
        assert len(sampler.data) == N  # waits for it
        held.append(torch.cuda.memory_reserved())
    assert held[1:] == [held[1]] * 3


class Stopped(Exception):
    """Training is killed here."""


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_resumed_run_is_exact_where_kernels_are(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    batches = "proximity(num_candidates=100, num_neighbours=8, refresh=4, warmup=1)"
    data = few_digits(tmp_path / "digits.npz")
    options = short(data, epochs=4, device="cuda", precision=precision, batches=batches, save_every=1)
    step = Loop._one_step

    def stopped(self: Loop, *rest: Any) -> None:
        step(self, *rest)
        if self.step == 2 * STEPS + 3:
            raise Stopped

    torch.use_deterministic_algorithms(True)
    try:
        run("simclr", tmp_path / "whole", options)
        with monkeypatch.context() as patch:
            patch.setattr(Loop, "_one_step", stopped)
            with pytest.raises(Stopped):
                run("simclr", tmp_path / "killed", options)
        saved = Run(tmp_path / "killed").load()
        run("simclr", tmp_path / "killed", options, resume=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert saved is not None
    assert saved["step"] == 2 * STEPS
    assert bool(saved["scaler"]) == (precision == "fp16")
    assert_same(everything(tmp_path / "whole"), everything(tmp_path / "killed"))


RANK = """
import sys, torch
torch.cuda.set_device(0)
torch.distributed.init_process_group("gloo")
from support.training_ranks import main
main()
"""


def test_two_ranks_share_their_batch_statistics(tmp_path: Path) -> None:
    """A ResNet with batch normalisation on two ranks trains as on one, since the statistics are of the whole batch."""
    options = short(few_digits(tmp_path / "digits.npz", 96), epochs=1, encoder="resnet18", device="cuda")
    job = {"name": "synchronised", "recipe": "simclr", "options": options | {"learning_rate": 1e-5}}
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    where["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-c", RANK, str(tmp_path / "jobs.json"), str(tmp_path / "two")]
    ranks = [
        subprocess.Popen(command, env=os.environ | where | {"RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    run_job(job, tmp_path / "one")
    one, two = (Run(tmp_path / name / "synchronised").metrics() for name in ("one", "two"))
    losses = [[record["loss"] for record in records] for records in (one, two)]
    assert len(losses[0]) == 3
    assert np.allclose(*losses, rtol=2e-4), losses
