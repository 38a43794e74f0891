"""Negatives mined again during training: from the model as it is, with ids, their age in the logs, and resumed."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sentence_transformers_batches import static_model, trainer_of

import hardneg as hn
from hardneg.core.errors import ArgumentError, DataChanged, HardnegWarning
from hardneg.integrations.sentence_transformers import FreshNegatives, HardBatches, NegativesLoss
from support.errors import raises, warns
from support.tiny_bert import rows

pytest.importorskip("sentence_transformers", reason="needs the extra 'text'")
pytest.importorskip("accelerate", reason="the trainer needs accelerate")
datasets = pytest.importorskip("datasets")


def data() -> Any:
    return datasets.Dataset.from_dict({name: rows(40)[name] for name in ("anchor", "positive")})


def test_the_negatives_are_those_of_mine_with_the_model_as_it_is(tmp_path: Path) -> None:
    fresh, model = FreshNegatives(data(), "Rank(1, 9)", k=2, corpus=["w1 w2", "w3 w4 w5"]), static_model()
    loss = NegativesLoss(model, "Uniform()")
    hard = HardBatches(fresh.dataset["anchor"], every=3, loss=loss, planner="uniform()", fresh=fresh)
    expected: dict[int, Any] = {}

    def mined(args: Any, state: Any, control: Any, **more: Any) -> None:
        encode = lambda texts: model.encode(texts, convert_to_tensor=True, show_progress_bar=False)  # noqa: E731
        queries, documents = (
            torch.nn.functional.normalize(encode(t), dim=-1) for t in (fresh.queries, fresh.documents)
        )
        found = hn.mine(hn.Keys(queries), hn.Keys(documents), fresh.positives, "Rank(1, 9)", 2).rows
        expected[state.global_step] = (found, fresh.rows.clone(), fresh.mined_at)

    step_end = hard.on_step_end

    def after(args: Any, state: Any, control: Any, **more: Any) -> None:
        step_end(args, state, control, **more)
        mined(args, state, control)

    hard.on_step_end = after  # type: ignore[method-assign]
    trainer = trainer_of(tmp_path, loss, fresh.dataset, hard)
    trainer.train()
    assert [at for _, _, at in expected.values()] == [0, 0, 3, 3, 3, 6, 6, 6, 9, 9]
    for step in (3, 6, 9):
        found, used, _ = expected[step]
        assert torch.equal(found, used)
    assert not torch.equal(expected[3][1], expected[9][1]), "the model has moved"
    ages = [line["hardneg/age"] for line in trainer.state.log_history if "loss" in line]
    assert ages == [1.0, 0.0, 2.0, 1.0, 0.0]  # logs of steps 2, 4, 6, 8, 10; before the refresh of the same step


def test_rows_carry_their_negatives_and_ids() -> None:
    fresh = FreshNegatives(data(), k=3)
    assert fresh.rows.is_shared(), "loading processes see what is mined"
    for row in (fresh.dataset[5], fresh.dataset[7]):
        assert list(row) == ["anchor", "positive", "negative_1", "negative_2", "negative_3", "label"]
        texts = [row[name] for name in list(row)[:5]]
        assert row["label"][0] == row["label"][1]
        by_id = dict(zip(row["label"][1:], texts, strict=True))
        assert len(by_id) == len(set(texts)) == 5
        assert all(fresh.documents[one - len(fresh.queries)] == text for one, text in list(by_id.items())[1:])
    fresh.rows.copy_(torch.zeros_like(fresh.rows))
    assert fresh.dataset[9]["negative_2"] == fresh.documents[0]


def test_a_query_that_comes_out_short_keeps_what_it_had() -> None:
    fresh = FreshNegatives(data(), "Threshold(2.0)", k=2)
    before = fresh.rows.clone()
    fresh.refresh(lambda texts, column: torch.randn(len(texts), 4), 5)
    assert torch.equal(fresh.rows, before)
    assert fresh.age(12) == 7


def test_the_first_refresh_warns_and_later_ones_do_not_repeat_it() -> None:
    """Positives in another cluster than their anchors, with other figures at each refresh."""
    fresh, random = FreshNegatives(data(), k=2), torch.Generator().manual_seed(0)

    def encode(texts: list[str], column: str) -> torch.Tensor:
        cluster = (torch.arange(len(texts)) + 2 * (column == "positive")) % 4
        return torch.eye(4)[cluster] + 0.1 * torch.randn(len(texts), 4, generator=random)

    with warns("alignment"):
        fresh.refresh(encode, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HardnegWarning)
        fresh.refresh(encode, 2)


def test_a_resumed_run_has_the_same_negatives(tmp_path: Path) -> None:
    model = static_model()
    before = copy.deepcopy(model.state_dict())

    def train(resume: bool, given: bool = True) -> Any:
        model.load_state_dict(before)
        fresh = FreshNegatives(data(), k=2)
        if not given:
            del fresh.dataset.fresh  # as in a copy of the data set
        loss = NegativesLoss(model, "Uniform()")
        hard = HardBatches(
            fresh.dataset["anchor"], every=2, loss=loss, planner="strata()", segment=2, fresh=fresh if given else None
        )
        trainer_of(tmp_path, loss, fresh.dataset, hard).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-3") if resume else None
        )
        return {**copy.deepcopy(model.state_dict()), "rows": fresh.rows.clone()}

    first, again = train(False), train(True)
    assert all(torch.equal(again[name], value) for name, value in first.items())
    with pytest.raises(DataChanged, match="fresh negatives"):
        train(True, given=False)


def test_what_cannot_be_mined_is_refused() -> None:
    fresh = FreshNegatives(data())
    with raises(ArgumentError, who="HardBatches", got="fresh=None"):
        HardBatches(fresh.dataset["anchor"])(fresh.dataset, 8)
    for wrong in ({"negatives": "Tilt("}, {"draw": "best"}, {"k": 0.5}, {"temperature": 0}):
        with pytest.raises(ArgumentError, match=r"mine needs|The grammar needs"):
            FreshNegatives(data(), **wrong)
    with raises(ArgumentError, who="FreshNegatives", what="40 documents", got="k=40"):
        FreshNegatives(data(), k=40)
    with raises(ArgumentError, who="FreshNegatives", got="['x', 'y']"):
        FreshNegatives(datasets.Dataset.from_dict({"anchor": ["a"], "positive": [["x", "y"]]}))
    with raises(ArgumentError, who="FreshNegatives", what="and positives", got="list"):
        FreshNegatives(["text"])
