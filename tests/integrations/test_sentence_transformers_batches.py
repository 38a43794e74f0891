"""HardBatches and LossCallback in the trainer: which data set is planned, from when on, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hardneg as hn
from hardneg.core.errors import ArgumentError, Damaged, DataChanged, HardnegWarning
from hardneg.integrations.sentence_transformers import HardBatches, LossCallback, NegativesLoss, with_ids
from hardneg.integrations.sentence_transformers.callback import own_state
from hardneg.io.files import write_atomically
from hardneg.io.sealed import sealing
from support.errors import raises
from support.libraries import part_of_sentence_transformers
from support.tiny_bert import rows, tiny_bert

losses = part_of_sentence_transformers("losses")
pytest.importorskip("accelerate", reason="the trainer needs accelerate")
datasets = pytest.importorskip("datasets")


def static_model() -> Any:
    from sentence_transformers import SentenceTransformer
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return SentenceTransformer(
        modules=[part_of_sentence_transformers("modules").StaticEmbedding(tokenizer, embedding_dim=8)], device="cpu"
    )


def trainer_of(folder: Path, loss: Any, train: Any, callback: Any, **options: Any) -> Any:
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    evaluated = options.pop("eval_dataset", None)
    args = SentenceTransformerTrainingArguments(
        str(folder), num_train_epochs=2, per_device_train_batch_size=8, save_strategy="steps", save_steps=3,
        logging_steps=2, report_to="none", disable_tqdm=True, use_cpu=True, learning_rate=0.05,
        **({"batch_sampler": callback} if isinstance(callback, HardBatches) else {}), **options,
    )  # fmt: skip
    return SentenceTransformerTrainer(loss.model, args, train, evaluated, loss=loss, callbacks=[callback])


def data(number: int = 40, seed: int = 0) -> Any:
    return with_ids(datasets.Dataset.from_dict(rows(number, seed)))


def test_warm_up_then_hard_batches_and_evaluation_on_the_training_set(tmp_path: Path) -> None:
    train, loss = data(), NegativesLoss(static_model(), "Tilt(linear(1.0, 0.0))")
    hard = HardBatches(train["anchor"], every=3, loss=loss, warmup=1, planner="proximity(num_neighbours=5)")
    seen: dict[int, Any] = {}
    hard.on_epoch_end = lambda args, state, control, **_: seen.update(  # type: ignore[attr-defined]
        {round(state.epoch): hard.sets[""].sampler.plan}  # type: ignore[union-attr]
    )
    trainer = trainer_of(tmp_path, loss, train, hard, eval_dataset=train, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert [part.planner for part in seen[1].segments] == ["Uniform()"] * len(seen[1].segments)
    assert all(part.planner.startswith("Proximity") and part.graph for part in seen[2].segments)
    for plan in seen.values():
        assert sorted(plan.order.tolist()) == list(range(40))
    logs = [line for line in trainer.state.log_history if "loss" in line]
    temperatures = [line["hardneg/effective_temperature"] for line in logs]
    assert temperatures == sorted(temperatures), "the tilt goes to 0"
    assert temperatures[0] == pytest.approx(0.05 / (1 + 1.0 - 0.1), rel=1e-3)  # step 1 of 10


def test_a_planner_of_vectors_is_resumed_and_other_texts_are_refused(tmp_path: Path) -> None:
    train, model = data(), static_model()
    before = copy.deepcopy(model.state_dict())

    def run(resume: bool, texts: Any) -> Any:
        model.load_state_dict(before)
        loss = NegativesLoss(model, queue=hn.Queue(16, 8))
        hard = HardBatches(texts, every=2, loss=loss, planner="strata()", segment=2)
        trainer_of(tmp_path, loss, train, hard).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-6") if resume else None
        )
        return {**copy.deepcopy(model.state_dict()), **own_state(loss)}

    first = run(False, train["anchor"])
    again = run(True, train["anchor"])
    assert "queue.vectors" in first
    assert not any(name.startswith("model") for name in first if "embedding" not in name)
    assert all(torch.equal(again[name], value) for name, value in first.items() if isinstance(value, torch.Tensor))
    with raises(DataChanged, who="HardBatches", fix="interrupted run"):
        run(True, train["positive"])


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    train = data()
    loss = NegativesLoss(static_model())
    with raises(ArgumentError, who="HardBatches", got="none for ['texts']"):
        trainer_of(tmp_path, loss, train, HardBatches(data(40, 5)["anchor"], loss=loss)).train()
    streamed = datasets.Dataset.from_dict(rows(40)).to_iterable_dataset()
    with raises(ArgumentError, who="HardBatches", got="none for ['texts']", fix="IterableDataset"):
        trainer_of(tmp_path, loss, streamed, HardBatches(train["anchor"], loss=loss), max_steps=2).train()
    with raises(ArgumentError, who="HardBatches", what="known length", got="IterableDataset"):
        HardBatches(train["anchor"])(streamed, 8)
    with raises(ArgumentError, who="HardBatches", got="every=0"):
        HardBatches(train["anchor"], every=0)
    for wrong in ({"warmup": 0.5}, {"planner": 3}):
        with pytest.raises(ArgumentError, match=f"got {next(iter(wrong))}="):
            HardBatches(train["anchor"], **wrong)
    with raises(ArgumentError, who="NegativesLoss", what="Queue(4096, dim)", got="queue=4096"):
        NegativesLoss(loss.model, queue=4096)  # type: ignore[arg-type]

    class Sharded:
        world_size, fsdp, deepspeed = 1, [1], None

    hard = HardBatches(train["anchor"])
    hard(train, 8)
    with raises(ArgumentError, who="HardBatches", got="FSDP or DeepSpeed"):
        hard.on_train_begin(Sharded(), None, None)


def test_batches_without_the_callback_warn(tmp_path: Path) -> None:
    """The first epoch would have uniform batches, and it may be the only one."""
    train, loss = data(), NegativesLoss(static_model())
    with warnings.catch_warnings():
        warnings.simplefilter("error", HardnegWarning)
        trainer_of(tmp_path, loss, train, HardBatches(train["anchor"], loss=loss)).evaluate(train)
    hard = HardBatches(train["anchor"], loss=loss)
    trainer = trainer_of(tmp_path, loss, train, LossCallback(loss), max_steps=2, batch_sampler=hard)
    with pytest.warns(HardnegWarning, match=r"Pass callbacks=\[hard\]"):
        trainer.train()
    trainer.add_callback(hard)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HardnegWarning)
        trainer.train()


def test_an_encoder_may_give_arrays(tmp_path: Path) -> None:
    train, loss = data(), NegativesLoss(static_model())
    encoded: list[Any] = []
    hard = HardBatches(
        train["anchor"], every=4, loss=loss, encode=lambda texts: encoded.append(1) or loss.model.encode(texts)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", HardnegWarning)
        trainer_of(tmp_path, loss, train, hard, max_steps=2).train()
    assert encoded
    assert all(part.graph for part in hard.sets[""].sampler.plan.segments)  # type: ignore[union-attr]


def test_an_iterable_data_set_trains_without_ids(tmp_path: Path) -> None:
    loss = NegativesLoss(tiny_bert(tmp_path), "Tilt(1.0)")  # the trainer cannot split the tokens of StaticEmbedding
    streamed = datasets.Dataset.from_dict(rows(40)).to_iterable_dataset()
    trainer = trainer_of(tmp_path, loss, streamed, LossCallback(loss), max_steps=4)
    trainer.train()
    assert "hardneg/hardness" in trainer.state.log_history[0]


def test_the_callback_alone_keeps_the_state_of_a_wrapped_loss(tmp_path: Path) -> None:
    model, train = static_model(), data()
    inner = NegativesLoss(model, "Tilt(linear(1.0, 0.0))", queue=hn.Queue(24, 8))
    wrapped = losses.MatryoshkaLoss(model, inner, [8, 4])
    trainer_of(tmp_path, wrapped, train, LossCallback(wrapped)).train()
    saved = torch.load(tmp_path / "checkpoint-10" / "hardneg" / "loss-0.pt", weights_only=True)[""]
    assert torch.equal(saved["loss.queue.vectors"], inner.queue.vectors)  # type: ignore[union-attr]
    assert int(saved["loss.queue.step"]) == 10, "one push a step, whatever the number of sizes"
    assert not any("embedding" in name for name in saved)
    other = NegativesLoss(model, "Tilt(linear(1.0, 0.0))")
    with raises(DataChanged, who="MatryoshkaLoss", what="same loss"):
        trainer_of(tmp_path, other, train, LossCallback(losses.MatryoshkaLoss(model, other, [8, 4]))).train(
            resume_from_checkpoint=True
        )


def saved_state(folder: Path, capacity: int = 24) -> tuple[LossCallback, Any]:
    """A callback whose loss has a queue of this capacity, with its state in the folder, and the trainer's arguments."""
    callback = LossCallback(NegativesLoss(static_model(), "Tilt(1.0)", queue=hn.Queue(capacity, 8)))
    args = SimpleNamespace(process_index=0, world_size=1)
    callback.save(folder, args)
    return callback, args


def test_a_damaged_state_of_a_loss_is_refused_by_name(tmp_path: Path) -> None:
    callback, args = saved_state(tmp_path)
    path = tmp_path / "loss-0.pt"
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:-81], whole[:-1], b"", bytes(len(whole))):
        path.write_bytes(content)
        with pytest.raises(Damaged) as refused:
            callback.load(tmp_path, args)
        assert refused.value.path == path
    write_atomically(path, sealing(lambda file: file.write(b"no archive")))
    with pytest.raises(Damaged):
        callback.load(tmp_path, args)


def test_a_queue_of_another_capacity_is_not_resumed(tmp_path: Path) -> None:
    _, args = saved_state(tmp_path / "one")
    other, _ = saved_state(tmp_path / "two", capacity=32)
    with pytest.raises(DataChanged, match=r"queue\.vectors.*interrupted run"):
        other.load(tmp_path / "one", args)


def test_a_checkpoint_of_another_run_in_the_output_folder_is_not_used(tmp_path: Path) -> None:
    """The trainer resumes from one folder, and the output folder has a checkpoint of the same step."""
    loss = hn.ContrastiveLoss("Tilt(linear(1.0, 0.0))")
    states = {}
    for name, value in (("one", 0.5), ("two", float("nan"))):
        args = SimpleNamespace(output_dir=tmp_path / name, process_index=0, world_size=1)
        logs = [{"loss": value, "step": 2}]
        states[name] = SimpleNamespace(global_step=3, max_steps=9, log_history=logs)
        LossCallback(loss).on_save(args, states[name], None)
        kept = tmp_path / name / "checkpoint-3" / "trainer_state.json"
        kept.write_text(json.dumps(vars(states[name])))
    with raises(DataChanged, who="LossCallback", got="other logs", fix="resume_from_checkpoint"):
        LossCallback(loss).on_train_begin(args, states["one"], None)
    LossCallback(loss).on_train_begin(args, SimpleNamespace(**json.loads(kept.read_text())), None)
    args.resume_from_checkpoint = str(tmp_path / "one" / "checkpoint-3")
    LossCallback(loss).on_train_begin(args, states["one"], None)


@pytest.mark.parametrize(("callback", "changed"), [(HardBatches, "positive"), (LossCallback, "label")])
def test_a_resume_with_other_training_data_is_refused(callback: Any, changed: str, tmp_path: Path) -> None:
    model, whole = static_model(), data()

    def run(train: Any, resume: bool) -> Any:
        loss = NegativesLoss(model)
        hard = HardBatches(train["anchor"], loss=loss) if callback is HardBatches else LossCallback(loss)
        trainer_of(tmp_path, loss, train, hard).train(resume_from_checkpoint=resume)

    run(whole, False)
    run(whole, True)
    other = whole.map(lambda row: {changed: f"{row[changed]} w1" if changed != "label" else [1, 1, 2, 3]})
    with pytest.raises(DataChanged) as caught:
        run(other, True)
    assert caught.value.got == f"other values in {changed}"


def test_sparse_vectors_are_planned_from(tmp_path: Path) -> None:
    """As a SparseEncoder gives them."""
    train, loss = data(), NegativesLoss(static_model())
    hard = HardBatches(train["anchor"], loss=loss, encode=lambda texts: torch.eye(len(texts)).to_sparse())
    trainer_of(tmp_path, loss, train, hard, max_steps=2).train()
    assert all(part.graph for part in hard.sets[""].sampler.plan.segments)  # type: ignore[union-attr]


def test_a_sparse_encoder_trains_on_hard_batches(tmp_path: Path) -> None:
    sparse = pytest.importorskip("sentence_transformers.sparse_encoder", reason="needs sentence-transformers 5")
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding
    from transformers import BertTokenizer

    tiny_bert(tmp_path)
    words = BertTokenizer.from_pretrained(tmp_path / "bert-0-0.1-16")
    train = data()
    loss = NegativesLoss(sparse.SparseEncoder(modules=[SparseStaticEmbedding(words)], device="cpu"), temperature=1.0)
    hard = HardBatches(train["anchor"], every=3, loss=loss)
    args = sparse.SparseEncoderTrainingArguments(
        str(tmp_path / "run"), num_train_epochs=1, per_device_train_batch_size=8, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True, batch_sampler=hard,
    )  # fmt: skip
    sparse.SparseEncoderTrainer(loss.model, args, train, loss=loss, callbacks=[hard]).train()
    assert all(part.graph for part in hard.sets[""].sampler.plan.segments)  # type: ignore[union-attr]


def test_pairs_are_evaluated_while_explicit_negatives_are_trained_on(tmp_path: Path) -> None:
    train, loss = data(), NegativesLoss(static_model(), 'Tilt(2.0, source="mined")')
    pairs = with_ids(datasets.Dataset.from_dict({name: rows(16, 1)[name] for name in ("anchor", "positive")}))
    trainer = trainer_of(tmp_path, loss, train, LossCallback(loss), eval_dataset=pairs, eval_strategy="epoch")
    trainer.train()
    assert sum("eval_loss" in line for line in trainer.state.log_history) == 2


def test_a_copy_and_a_pickle_hold_no_texts() -> None:
    hard = HardBatches(["w1"] * 1000, every=7)
    assert copy.deepcopy(hard) is hard
    assert pickle.loads(pickle.dumps(hard)) == "HardBatches(Proximity(), every=7, warmup=0)"


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (None, None),
        ("all: ", "all: "),
        ({"anchor": "q: ", "positive": "d: "}, "q: "),
        ({"one": "one: "}, "one: "),
        ({"one": {"anchor": "q: "}}, "q: "),
        ({"two": {"anchor": "q: "}}, None),
        ({"one": {"positive": "d: "}}, None),
    ],
)
def test_texts_are_embedded_with_the_prompt_of_their_column(prompts: Any, expected: str | None) -> None:
    train = data()
    hard = HardBatches({"one": train["anchor"]})
    hard(train, 8)
    assert hard.sets["one"].prompt(prompts) == expected
