"""Training runs of the trainer of sentence-transformers, for tests that kill them: ``python st_run.py JOBS.json``.

Each writes a line per batch of the loss to log.jsonl, and the final weights to weights.pt. They run in forks of this
process, one after the other, and their exit codes are printed.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from support.forks import in_forks, on_forked_ranks

torch.set_num_threads(1)


def train(job: dict[str, Any]) -> None:
    from datasets import Dataset, DatasetDict
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from transformers import TrainerCallback

    import hardneg as hn
    from hardneg.integrations.sentence_transformers import CachedNegativesLoss, HardBatches, NegativesLoss, with_ids
    from support.tiny_bert import rows

    folder = Path(job["folder"])
    if "copy_of" in job:
        shutil.copytree(job["copy_of"], folder)
    if job.get("without_plan"):
        shutil.rmtree(folder / f"checkpoint-{job['save']}" / "hardneg")

    class Model(SentenceTransformer):  # type: ignore[misc]
        def save_pretrained(self, *arguments: Any, **options: Any) -> None:
            """Without the model card, which takes half of the time of a run."""
            super().save_pretrained(*arguments, **{**options, "create_model_card": False})

    model = Model(job["model"], device="cpu")
    if job.get("two"):
        both = {"one": Dataset.from_dict(rows(40, 0)), "two": Dataset.from_dict(rows(24, 7, negatives=1))}
        train = with_ids(DatasetDict(both))
        texts: Any = {name: list(part["anchor"]) for name, part in train.items()}
        prompts = {name: {"anchor": f"w{i} : "} for i, name in enumerate(train)}
    else:
        train = with_ids(Dataset.from_dict(rows(64, 0)))
        texts, prompts = train["anchor"], None
    held_out = with_ids(Dataset.from_dict(rows(12, 30)))
    evaluated = DatasetDict(one=held_out) if job.get("two") else held_out
    kind = CachedNegativesLoss if job.get("cached") else NegativesLoss
    options: dict[str, Any] = {"mini_batch_size": 4} if job.get("cached") else {}

    class Logged(kind):  # type: ignore[misc, valid-type]
        def compute_loss_from_embeddings(self, embeddings: Any, labels: Any = None, guide: Any = None) -> Any:
            if torch.is_grad_enabled():
                rank = int(os.environ.get("RANK", "0"))
                with open(folder / f"log-{rank}.jsonl", "a") as file:
                    file.write(json.dumps(labels[:, 1].tolist()) + "\n")
            return super().compute_loss_from_embeddings(embeddings, labels, guide)

    loss = Logged(
        model, "Tilt(linear(1.0, 0.0))", temperature=0.05, queue=hn.Queue(40, 16),
        gather_across_devices=job.get("ranks", 1) > 1, **options,
    )  # fmt: skip
    hard = HardBatches(texts, every=5, loss=loss, planner=hn.batching.planners.Proximity(num_neighbours=6), segment=3)

    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == job.get("kill_at"):
                os.kill(os.getpid(), signal.SIGKILL)

    args = SentenceTransformerTrainingArguments(
        output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=job.get("batch", 8),
        gradient_accumulation_steps=job.get("accumulation", 1), learning_rate=1e-3, batch_sampler=hard, prompts=prompts,
        dataloader_num_workers=job.get("workers", 0), save_strategy="steps", save_steps=job["save"],
        eval_strategy="steps", eval_steps=3, logging_steps=2, report_to="none", disable_tqdm=True, use_cpu=True,
        accelerator_config={"split_batches": True} if job.get("ranks", 1) > 1 else None, seed=5,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model=model, args=args, train_dataset=train, eval_dataset=evaluated, loss=loss, callbacks=[hard, Kill()],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=True if job.get("resume") else None)
    if int(os.environ.get("RANK", "0")) == 0:
        state = {name: value for name, value in loss.state_dict().items() if name.startswith("queue.")}
        torch.save({**model.state_dict(), **state}, folder / "weights.pt")
        (folder / "history.json").write_text(json.dumps(trainer.state.log_history))


def on_ranks(job: dict[str, Any]) -> None:
    on_forked_ranks(partial(train, job), job["ranks"])


IMPORTED = (
    "datasets", "sentence_transformers", "transformers.models.bert.modeling_bert", "torch._dynamo",
    "hardneg.integrations.sentence_transformers",
)  # fmt: skip
"""Before the forks, each of which would import them."""


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps(in_forks(partial(on_ranks if "ranks" in job else train, job) for job in jobs)))
