"""Runs of the plain HF Trainer with HardBatches, for tests that kill them, in forks: ``python hf_run.py JOBS``.

JOBS: a list of [folder, kill after step, whether to resume, whether the plan is lost] as JSON. Prints the exit codes.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel, Trainer, TrainerCallback, TrainingArguments

import hardneg as hn
from hardneg.batching.planners import Proximity
from hardneg.integrations.sentence_transformers import HardBatches  # type: ignore[attr-defined]
from support.forks import in_forks


def tokens(texts: list[str]) -> Tensor:
    return torch.tensor([[int(word) for word in text.split()] for text in texts])


def train(folder: Path, kill_at: int, resume: bool, lost: bool = False) -> None:
    if lost:
        (folder / "checkpoint-16" / "hardneg" / "record.json").unlink()
    words = torch.randint(2, 40, (64, 6), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [" ".join(map(str, row)) for row in words]
    data = Dataset.from_dict({"text": texts, "id": list(range(64))})
    torch.manual_seed(0)
    config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=40, **config), add_pooling_layer=False)
    criterion = hn.ContrastiveLoss("Tilt(linear(1.0, 0.0))", temperature=0.1)

    def encode(some: list[str]) -> Tensor:
        return model(input_ids=tokens(some)).last_hidden_state[:, 0]

    hard = HardBatches(texts, every=5, loss=criterion, encode=encode, planner=Proximity(num_neighbours=6), segment=3)

    class Contrastive(Trainer):
        def get_train_dataloader(self) -> Any:
            sampler = hard(self.train_dataset, self.args.train_batch_size, seed=self.args.seed)
            loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Tensor:
            ids = inputs.pop("ids")
            with open(folder / "log.jsonl", "a") as file:
                file.write(json.dumps(ids.tolist()) + "\n")
            first, second = (model(**inputs).last_hidden_state[:, 0] for _ in range(2))  # two dropout masks
            return criterion(first, second, ids=ids)

    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    args = TrainingArguments(
        str(folder), num_train_epochs=2, per_device_train_batch_size=8, learning_rate=1e-3, save_steps=3,
        logging_steps=2, report_to="none", disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
    )  # fmt: skip
    collate = lambda rows: {  # noqa: E731
        "input_ids": tokens([row["text"] for row in rows]),
        "ids": torch.tensor([row["id"] for row in rows]),
    }
    trainer = Contrastive(model, args, collate, train_dataset=data, callbacks=[hard, Kill()])
    trainer.train(resume_from_checkpoint=resume or None)
    torch.save(model.state_dict(), folder / "weights.pt")


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # once, and not in each fork
    torch.set_num_threads(1)
    jobs = [(Path(folder), *rest) for folder, *rest in json.loads(sys.argv[1])]
    print(json.dumps(in_forks(partial(train, *job) for job in jobs)))
