"""The loss for sentence-transformers against its own losses, a plain loop, and its trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, HardnegWarning, forget_warnings
from hardneg.integrations.sentence_transformers import NegativesLoss
from support.errors import raises
from support.libraries import needs_option, part_of_sentence_transformers, tokens

losses = part_of_sentence_transformers("losses")


def columns(num: int, seed: int = 0, b: int = 9) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(b, 12, generator=random, dtype=torch.float64).requires_grad_() for _ in range(num)]


def value_and_gradient(loss: Any, num: int) -> tuple[Tensor, list[Tensor]]:
    given = columns(num)
    value = loss.compute_loss_from_embeddings(given, None)
    (2 * value).backward()
    return value.detach(), [each.grad for each in given]  # type: ignore[misc]


@pytest.mark.parametrize("num", [2, 3, 5])
@pytest.mark.parametrize("scale", [1.0, 20.0, 100.0])
def test_uniform_is_multiple_negatives_ranking(num: int, scale: float) -> None:
    theirs = losses.MultipleNegativesRankingLoss(torch.nn.Identity(), scale=scale)
    value, gradient = value_and_gradient(theirs, num)
    ours, own = value_and_gradient(NegativesLoss(torch.nn.Identity(), temperature=1 / scale), num)
    torch.testing.assert_close(ours, value)
    torch.testing.assert_close(own, gradient)


@needs_option(losses.MultipleNegativesRankingLoss, "hardness_mode")
@pytest.mark.parametrize(
    ("mode", "source"), [("hard_negatives", '"mined"'), ("in_batch_negatives", '"batch"'), ("all_negatives", "None")]
)
def test_additive_hardness_in_all_modes(mode: str, source: str) -> None:
    """Its strength multiplies the plain cosine: beta = strength x temperature."""
    theirs = losses.MultipleNegativesRankingLoss(torch.nn.Identity(), hardness_mode=mode, hardness_strength=5.0)
    text = f"Tilt({5.0 * 0.05}, detach=True, source={source})"
    ours = NegativesLoss(torch.nn.Identity(), text, num_negatives="mass")
    value, gradient = value_and_gradient(theirs, 4)
    own_value, own_gradient = value_and_gradient(ours, 4)
    torch.testing.assert_close(own_value, value)
    torch.testing.assert_close(own_gradient, gradient)


def test_explicit_negatives_are_told_from_the_batch() -> None:
    anchor, positive, *negatives = (torch.nn.functional.normalize(each, dim=-1) for each in columns(4))
    loss = NegativesLoss(torch.nn.Identity(), 'From("mined")', temperature=0.1)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(anchor)):
        logits = torch.stack([anchor[i] @ positive[i], *(anchor[i] @ each[i] for each in negatives)]) / 0.1
        total = total - torch.log_softmax(logits, 0)[0] / len(anchor)
    torch.testing.assert_close(loss.compute_loss_from_embeddings(columns(4)), total)
    with pytest.raises(ArgumentError) as caught:
        loss.compute_loss_from_embeddings(columns(2))
    assert caught.value.got == "two columns"


@pytest.mark.parametrize("directions", [("query_to_doc",), ("query_to_doc", "doc_to_query")])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("impl", ["dense", "streamed"])
def test_data_without_explicit_negatives_has_none_of_their_source(directions: Any, ids: bool, impl: str) -> None:
    labels = torch.arange(9)[:, None] + torch.tensor([0, 0, 9]) if ids else None
    values = []
    for text in ('Tilt(2.0, source="mined")', "Uniform()"):
        given = columns(2)
        loss = NegativesLoss(torch.nn.Identity(), text, directions=directions, impl=impl)
        value = loss.compute_loss_from_embeddings(given, labels)
        value.backward()
        values.append([value.detach(), *(each.grad for each in given)])
    torch.testing.assert_close(values[0], values[1])


def test_an_evaluation_of_pairs_with_explicit_negatives_only_warns() -> None:
    loss = NegativesLoss(torch.nn.Identity(), 'From("mined")').eval()
    forget_warnings()
    with torch.no_grad(), pytest.warns(HardnegWarning, match="no negative"):
        value = loss.compute_loss_from_embeddings(columns(2))
    assert float(value) == 0.0
    with pytest.raises(ArgumentError):
        NegativesLoss(torch.nn.Identity(), 'From("mind")').eval().compute_loss_from_embeddings(columns(2))


def test_a_cross_encoder_is_refused_with_the_losses_to_use() -> None:
    class CrossEncoder(torch.nn.Identity):
        """Known by its name, as that of sentence-transformers in all versions."""

    with pytest.raises(ArgumentError) as caught:
        NegativesLoss(CrossEncoder())
    assert "cross_encoder.losses" in (caught.value.fix or "")


@pytest.mark.parametrize("unknown", [3, -1])
def test_labels_take_out_rows_of_the_same_group(unknown: int) -> None:
    """Positives of the same group go; explicit negatives belong to no group, neither one's own nor those of others."""
    given, groups = columns(3), torch.tensor([0, 0, 1, 1, 2, 2, unknown, unknown, unknown])
    loss = NegativesLoss(torch.nn.Identity(), "OtherLabel()", temperature=0.1)
    anchor, positive, negative = (torch.nn.functional.normalize(each, dim=-1) for each in given)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(9):
        others = [positive[j] for j in range(9) if groups[j] != groups[i]]
        logits = torch.stack([anchor[i] @ each for each in (positive[i], *others, *negative)]) / 0.1
        total = total - torch.log_softmax(logits, 0)[0] / 9
    torch.testing.assert_close(loss.compute_loss_from_embeddings(given, groups), total)


def test_errors_and_the_config() -> None:
    for wrong, message in (
        ({"temperature": 0.0}, "above 0"),
        ({"similarity": "l2"}, "'cosine' or 'dot'"),
        ({"tau_plus": 1.0}, "tau_plus in"),
    ):
        with pytest.raises(ValueError, match=message):
            NegativesLoss(torch.nn.Identity(), **wrong)  # type: ignore[arg-type]
    with raises(ArgumentError, who="NegativesLoss", got="1 columns"):
        NegativesLoss(torch.nn.Identity()).compute_loss_from_embeddings(columns(1))
    told = NegativesLoss(torch.nn.Identity(), "Tilt(1.0)").get_config_dict()
    assert told["negatives"] == "Tilt(1.0)"
    dot = NegativesLoss(torch.nn.Identity(), similarity="dot", temperature=1.0)
    theirs = losses.MultipleNegativesRankingLoss(torch.nn.Identity(), scale=1.0, similarity_fct=lambda a, b: a @ b.T)
    torch.testing.assert_close(value_and_gradient(dot, 3), value_and_gradient(theirs, 3))


def test_schedules() -> None:
    loss = NegativesLoss(torch.nn.Identity(), "Tilt(linear(2.0, 0.0))")
    loss.set_progress(5, 10)
    fixed = NegativesLoss(torch.nn.Identity(), "Tilt(1.0)")
    torch.testing.assert_close(value_and_gradient(loss, 3), value_and_gradient(fixed, 3))


def test_the_trainer_trains(tmp_path: Path) -> None:
    """A static model learns which document belongs to which query, and the wrapper for several sizes works."""
    pytest.importorskip("accelerate", reason="the trainer needs accelerate")
    datasets = pytest.importorskip("datasets")
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model = SentenceTransformer(
        modules=[part_of_sentence_transformers("modules").StaticEmbedding(tokenizer, embedding_dim=16)], device="cpu"
    )
    rows = [{"anchor": f"w{i}", "positive": f"w{i + 20}", "negative_1": f"w{(i + 1) % 20 + 20}"} for i in range(20)]
    loss = NegativesLoss(model, 'Tilt(2.0, source="mined")')
    wrapped = losses.MatryoshkaLoss(model, loss, matryoshka_dims=[16, 8])
    features = [tokens(model, [row[name] for row in rows]) for name in rows[0]]
    before = float(wrapped(features, None).detach())
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=15,
        per_device_train_batch_size=10,
        learning_rate=0.05,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
    )
    data = datasets.Dataset.from_list(rows)
    SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=wrapped).train()
    assert float(wrapped(features, None).detach()) < 0.5 * before
