"""HardBatches in Lightning's own trainer: killed and resumed as two ranks, refreshed, logged, refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hardneg as hn
from hardneg.batching import encode
from hardneg.core.errors import ArgumentError

lightning: Any = pytest.importorskip("lightning.pytorch", reason="the extra `lightning` is not installed")
from hardneg.integrations.lightning import HardBatches  # noqa: E402

SUPPORT = Path(__file__).parents[1] / "support" / "lightning_runs.py"


def run_jobs(library: str, folder: Path, *jobs: dict[str, Any]) -> dict[str, list[list[int]]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SUPPORT), library, str(folder), json.dumps(jobs)]
    done = subprocess.run(command, env=environment, timeout=240, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "codes.json").read_text())


def batches(folder: Path, rank: int) -> list[Any]:
    return [json.loads(line) for line in (folder / f"batches-{rank}.jsonl").read_text().splitlines()]


def same_weights(one: Path, other: Path) -> bool:
    first, second = (torch.load(folder / "weights.pt") for folder in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


def assert_resumed(folder: Path, name: str, killed: int, saved: int) -> None:
    """The batches and the weights are those of the run that was never killed."""
    for rank in range(2):
        expected = batches(folder / "whole", rank)
        assert len(expected) == 30
        assert batches(folder / name, rank) == expected[:killed] + expected[saved:]
    assert same_weights(folder / "whole", folder / name)


AGAIN = [[-9, -9], [0, 0]]
"""The exit codes of two ranks that were killed, and resumed."""


def test_two_ranks_killed_and_resumed(tmp_path: Path) -> None:
    """Ten batches an epoch, a graph every four: killed in mid-epoch, and after a checkpoint at the end of an epoch."""
    codes = run_jobs(
        "lightning.pytorch", tmp_path,
        {"name": "whole"},
        {"name": "middle", "kill_after": 18},
        {"name": "middle", "resume_from": 15},
        {"name": "end", "kill_after": 13},
        {"name": "end", "resume_from": 10},
        {"name": "lost", "kill_after": 18},
        {"name": "lost", "resume_from": 15, "callback": False},
    )  # fmt: skip
    assert (codes["whole"], codes["middle"], codes["end"], codes["lost"]) == ([[0, 0]], AGAIN, AGAIN, AGAIN)
    assert_resumed(tmp_path, "middle", 18, 15)
    assert_resumed(tmp_path, "end", 13, 10)
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    for rank in range(2):
        assert batches(lost, rank)[18:] != batches(whole, rank)[15:], "without the callback the batches are others"
    assert not same_weights(whole, lost)
    both = [[ids for _, ids in batches(whole, rank)[10:20]] for rank in range(2)]
    assert sorted(i for ranks in both for ids in ranks for i in ids) == list(range(120)), "each instance once an epoch"


def test_the_older_name_of_the_library_with_workers(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason="the extra `lightning` is not installed")
    codes = run_jobs(
        "pytorch_lightning", tmp_path,
        {"name": "whole", "workers": 2},
        {"name": "middle", "workers": 2, "kill_after": 18},
        {"name": "middle", "workers": 2, "resume_from": 15},
    )  # fmt: skip
    assert codes == {"whole": [[0, 0]], "middle": AGAIN}
    assert_resumed(tmp_path, "middle", 18, 15)


def test_what_cannot_be_resumed_or_spread_is_refused(tmp_path: Path) -> None:
    codes = run_jobs(
        "lightning.pytorch", tmp_path,
        {"name": "without plan", "ranks": 1, "callback": False, "limit": 0.5},
        {"name": "without plan", "ranks": 1, "resume_from": 5},
        {"name": "replaced", "use_distributed_sampler": True},
    )  # fmt: skip
    assert (codes["without plan"], codes["replaced"]) == ([[0], [1]], [[1, 1]])
    error = (tmp_path / "without plan" / "error-0.txt").read_text()
    assert "HardBatches needs a checkpoint that contains its plan" in error
    assert "use_distributed_sampler=False" in (tmp_path / "replaced" / "error-0.txt").read_text()


class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.criterion = hn.ContrastiveLoss("Tilt(linear(1.0, 0.0))", temperature=0.3)
        self.random: list[float] = []
        self.betas: list[float] = []
        self.hardness: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, x = batch
        self.random.append(float(torch.rand(())))
        views = self(x), self(x)
        found = self.criterion.diagnose(*views, ids=ids).summary()
        self.betas.append(0.3 / found["effective_temperature"] - 1)
        self.hardness.append(found["hardness"])
        return self.criterion(*views, ids=ids)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


DATA = TensorDataset(torch.arange(40), torch.randn(40, 5, generator=torch.Generator().manual_seed(0)))


def fit(model: Model, hard: HardBatches, **options: Any) -> Any:
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[hard], **{"max_epochs": 2, "log_every_n_steps": 1} | options,
    )  # fmt: skip
    trainer.fit(model, DataLoader(DATA, batch_sampler=hard.sampler))
    return trainer


def uniform(batch_size: int) -> Any:
    return hn.ProximityBatchSampler(40, batch_size, warmup_epochs=2)


def vectors_of(model: Model) -> Callable[[], Tensor]:
    loader = DataLoader(DATA, batch_size=40, shuffle=False)
    return lambda: encode(model, loader, inputs=lambda batch: batch[1], progress=False)


def test_schedules_advance_and_diagnostics_are_logged() -> None:
    model = Model()
    trainer = fit(model, HardBatches(uniform(8)))
    torch.testing.assert_close(torch.tensor(model.betas), torch.linspace(1, 0.1, 10), rtol=1e-4, atol=1e-4)
    metrics = trainer.callback_metrics
    assert {"hardneg/hardness", "hardneg/effective_temperature", "hardneg/clamped", "hardneg/empty"} <= set(metrics)
    assert "hardneg/false_negatives" not in metrics, "there are no labels"
    assert float(metrics["hardneg/hardness"]) == pytest.approx(model.hardness[-1])


def test_progress_counts_optimizer_steps() -> None:
    model = Model()
    fit(model, HardBatches(uniform(10)), accumulate_grad_batches=2, max_epochs=1)
    torch.testing.assert_close(torch.tensor(model.betas), torch.tensor([1.0, 1.0, 0.5, 0.5]), rtol=1e-4, atol=1e-4)


def test_a_refresh_leaves_the_random_numbers_and_the_mode() -> None:
    plain, refreshed = Model(), Model()
    fit(plain, HardBatches(uniform(8)))
    calls: list[bool] = []

    def vectors() -> Tensor:
        calls.append(refreshed.training)
        torch.rand(3)
        return vectors_of(refreshed)()

    hard = HardBatches(hn.ProximityBatchSampler(40, 8, segment=2), vectors, every=4, num_neighbours=5)
    fit(refreshed, hard)
    assert refreshed.random == plain.random
    assert len(calls) == 1 + 10 // 4
    assert refreshed.training
    assert hard.sampler.plan.segments[-1].graph == hn.batching.ProximityGraph(**hard.state_dict()["data"]).digest


def test_the_first_refresh_comes_after_the_warm_up() -> None:
    model, seen = Model(), []

    class Look(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append([segment.graph != "" for segment in hard.sampler.plan.segments])

    def vectors() -> Tensor:
        calls.append(trainer.current_epoch)
        return vectors_of(model)()

    sampler, calls = hn.ProximityBatchSampler(40, 8, warmup_epochs=1), []
    hard = HardBatches(sampler, vectors, every=3, num_neighbours=5)
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[hard, Look()], max_epochs=2, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(model, DataLoader(DATA, batch_sampler=sampler))
    assert seen == [[False], [True]]
    assert calls == [1, 1, 1], "at the start, and after batches 6 and 9"


def test_a_checkpoint_loads_without_pickle(tmp_path: Path) -> None:
    model = Model()
    hard = HardBatches(hn.ProximityBatchSampler(40, 8), vectors_of(model), num_neighbours=5)
    trainer = fit(model, hard)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["callbacks"][hard.state_key]
    assert (saved["epoch"], saved["position"]) == (2, 0)
    other = HardBatches(hn.ProximityBatchSampler(40, 8))
    other.load_state_dict(saved)
    assert other.sampler.epoch == 2
    assert other.sampler.data.digest == hard.sampler.data.digest
    other.sampler.set_epoch(2)
    hard.sampler.set_epoch(2)
    assert list(other.sampler) == list(hard.sampler)


def test_another_sampler_is_refused() -> None:
    with pytest.raises(ArgumentError, match="planned sampler"):
        HardBatches(torch.utils.data.BatchSampler(range(4), 2, False))
