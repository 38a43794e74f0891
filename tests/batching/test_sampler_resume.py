"""Killed in mid-epoch (SIGKILL), a resumed run sees exactly the batches that the uninterrupted one would have."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

from hardneg.batching.graph import ProximityGraph, build_graph
from hardneg.batching.planners import Plan
from hardneg.batching.sampler import ProximityBatchSampler
from support.grids import grid

N, BATCH, EPOCHS, KILL_AFTER = 120, 8, 2, 24  # 15 batches an epoch: killed after the ninth of the second


def graph_of(version: int) -> ProximityGraph:
    """The graph of the weights at some time; a later one cannot give it again."""
    vectors = normalize(torch.randn(N, 6, generator=torch.Generator().manual_seed(version)), dim=1)
    return build_graph(vectors, 6, 30, torch.Generator().manual_seed(version))


def sampler_in(folder: Path) -> ProximityBatchSampler:
    return ProximityBatchSampler(N, BATCH, restart=0.2, seed=1, segment=4, plan_file=folder / "plan.npz")


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(N))


class Log:
    """What a run trains on, one line per step, and where it is; both survive a SIGKILL."""

    def __init__(self, folder: Path, kill_after: int | None) -> None:
        self.folder, self.kill_after = folder, kill_after

    def batches(self) -> list[list[int]]:
        return [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]

    def write(self, batch: Tensor) -> None:
        with open(self.folder / "log.jsonl", "a") as file:
            file.write(json.dumps(batch.tolist()) + "\n")

    def checkpoint(self, sampler: ProximityBatchSampler, state: dict[str, Any]) -> None:
        """What a trainer saves: its own state and the graph in use. The plan saves itself."""
        assert sampler.graph is not None
        sampler.graph.save(self.folder / "graph.npz")
        torch.save(state, self.folder / "state.pt")
        if state["step"] == self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)


def train_plain(folder: Path, workers: int, kill_after: int | None, resume: bool) -> None:
    sampler, log, step = sampler_in(folder), Log(folder, kill_after), 0
    sampler.graph = graph_of(0)
    if resume:
        state = torch.load(folder / "state.pt")
        sampler.graph, step = ProximityGraph.load(folder / "graph.npz"), state["step"]
        sampler.resume(folder / "plan.npz", position=state["position"])
    loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=workers)
    for epoch in range(step // len(sampler), EPOCHS):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            log.write(batch)
            step += 1
            if step % 7 == 0:  # new weights, a new graph
                sampler.graph = graph_of(step)
            log.checkpoint(sampler, {"step": step, "position": step - epoch * len(sampler)})


def train_stateful(folder: Path, workers: int, kill_after: int | None, resume: bool) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler, log, step = sampler_in(folder), Log(folder, kill_after), 0
    loader = StatefulDataLoader(dataset(), batch_sampler=sampler, num_workers=workers)
    sampler.graph = graph_of(0)
    if resume:
        state = torch.load(folder / "state.pt")
        sampler.graph, step = ProximityGraph.load(folder / "graph.npz"), state["step"]
        sampler.plan = Plan.load(folder / "plan.npz")
        loader.load_state_dict(state["loader"])
    for epoch in range(step // len(sampler), EPOCHS):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            log.write(batch)
            step += 1
            if step % 7 == 0:
                sampler.graph = graph_of(step)
            log.checkpoint(sampler, {"step": step, "loader": loader.state_dict()})


def run_killed(train: Callable[..., None], *arguments: Any) -> None:
    process = multiprocessing.get_context("fork").Process(target=train, args=arguments)
    process.start()
    process.join()  # with a timeout it would wait for the orphaned workers of a loader, too: five seconds
    assert process.exitcode == -signal.SIGKILL


@grid("train, workers", [train_plain, train_stateful], [0, 2], strength=1)
def test_killed_and_resumed(train: Callable[..., None], workers: int, tmp_path: Path) -> None:
    if train is train_stateful:
        pytest.importorskip("torchdata", reason="the extra `resume` is not installed")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    train(whole, workers, None, False)
    run_killed(train, broken, workers, KILL_AFTER, False)
    before = Log(broken, None).batches()
    assert len(before) == KILL_AFTER
    train(broken, workers, None, True)
    expected, seen = Log(whole, None).batches(), Log(broken, None).batches()
    assert len(expected) == 30
    assert seen == expected
    for epoch in (seen[:15], seen[15:]):
        assert sorted(i for batch in epoch for i in batch) == list(range(N))
    graphs = {segment.graph for segment in Plan.load(broken / "plan.npz").segments}
    assert len(graphs) > 1, "the second epoch was planned from several graphs"


def test_resuming_needs_the_plan(tmp_path: Path) -> None:
    """The test above can fail: from the graph at the crash alone, the epoch's batches would be others."""
    run_killed(train_plain, tmp_path, 0, KILL_AFTER, False)
    saved = Plan.load(tmp_path / "plan.npz")
    sampler = sampler_in(tmp_path)
    sampler.graph = ProximityGraph.load(tmp_path / "graph.npz")
    sampler.set_epoch(1)
    assert list(sampler)[:8] != [batch.tolist() for batch in saved][:8]
    assert len({segment.graph for segment in saved.segments}) == 2


# Trainers -------------------------------------------------------------------------------------------------------------


class Ids(torch.utils.data.Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, int]:
        return {"ids": i}


def train_hf(folder: Path, kill_after: int | None, resume: bool) -> None:
    """The plan travels with the checkpoint."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    sampler, log = sampler_in(folder), Log(folder, kill_after)
    sampler.graph = graph_of(7 if resume else 0)  # the one in use; that of the first four batches is gone
    checkpoint = folder / "out" / "checkpoint-18"
    if resume:
        sampler.plan = Plan.load(checkpoint / "plan.npz")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            log.write(ids)
            return {"loss": (self.w * ids.double().mean()).sum()}

    class PlanTravels(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            sampler.plan.save(Path(args.output_dir) / f"checkpoint-{state.global_step}" / "plan.npz")

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 16:
                sampler.graph = graph_of(7)
            if state.global_step == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

    class WithSampler(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(DataLoader(self.train_dataset, batch_sampler=sampler))

    args = TrainingArguments(
        str(folder / "out"), num_train_epochs=2, save_steps=6, report_to=[], use_cpu=True, disable_tqdm=True,
        logging_strategy="no",
    )  # fmt: skip
    trainer = WithSampler(Model(), args, train_dataset=Ids(), callbacks=[PlanTravels()])
    trainer.train(resume_from_checkpoint=str(checkpoint) if resume else None)


def test_hf_trainer_killed_and_resumed(tmp_path: Path) -> None:
    for module in ("transformers", "accelerate", "torch._dynamo"):  # once, and not in the fork
        pytest.importorskip(module, reason="the extra `train` is not installed")
    reference = sampler_in(tmp_path)
    reference.graph = graph_of(0)
    expected: list[list[int]] = []
    for epoch in range(2):
        reference.set_epoch(epoch)
        for batch in reference:
            expected.append(batch)
            if len(expected) == 16:
                reference.graph = graph_of(7)
    run_killed(train_hf, tmp_path, 21, False)
    assert Log(tmp_path, None).batches() == expected[:21]
    (tmp_path / "log.jsonl").unlink()
    train_hf(tmp_path, None, True)
    assert Log(tmp_path, None).batches() == expected[18:]
    assert sorted(i for batch in expected[15:] for i in batch) == list(range(N))


def test_lightning_reaches_set_epoch(tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("lightning", reason="the extra `lightning` is not installed")
    seen: list[list[int]] = []

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, _: int) -> Tensor:
            seen.append(batch[0].tolist())
            return (self.w * batch[0].float().mean()).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    sampler, reference = sampler_in(tmp_path), sampler_in(tmp_path)
    sampler.graph = reference.graph = graph_of(0)
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(dataset(), batch_sampler=sampler))
    assert sampler.epoch == 2
    expected: list[list[int]] = []
    for epoch in range(3):
        reference.set_epoch(epoch)
        expected.extend(reference)
    assert seen == expected


def test_accelerate_splits_one_global_batch(tmp_path: Path) -> None:
    data_loader: Any = pytest.importorskip("accelerate.data_loader", reason="the extra `train` is not installed")
    sampler = sampler_in(tmp_path)
    sampler.graph = graph_of(0)
    whole = list(sampler)
    sampler.set_epoch(0)
    shards: Iterator[Any] = zip(
        *(data_loader.BatchSamplerShard(sampler, 2, rank, split_batches=True) for rank in range(2)), strict=True
    )
    assert [left + right for left, right in shards] == whole
