"""hn.audit(train, model=model): a training set of sentence-transformers is audited as its tensors are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hardneg as hn
from hardneg.core.errors import ArgumentError
from support.errors import raises


class Data:
    """What is asked of a datasets.Dataset."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns, self.column_names = columns, list(columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.columns["anchor"])


def vectors(texts: list[str]) -> Tensor:
    """A direction of its own for each text, the same at each call."""
    return torch.stack([torch.randn(8, generator=torch.Generator().manual_seed(sum(map(ord, text)))) for text in texts])


def test_a_data_set_is_audited_as_its_tensors() -> None:
    data = Data(
        anchor=["q0", "q1", "q1", "q2"],
        positive=["a", "b", "c", "d"],
        negative=[["d", "b"], ["a"], ["e"], ["d", ""]],  # of q2 its own positive
        label=[0, 0, 0, 0],
    )
    found = hn.audit(data, ["Uniform()"], model=vectors, frontier=False)
    plain = hn.audit(
        hn.Keys(vectors(["q0", "q1", "q2"])), ["Uniform()"], frontier=False,
        corpus=hn.Keys(vectors(["a", "d", "b", "c", "e"]), torch.arange(5)), positives=[[0], [2, 3], [1]],
        mined=torch.tensor([[1, 2], [0, 4], [1, -1]]),
    )  # fmt: skip
    assert found.rows == plain.rows
    assert found.mined == plain.mined
    assert found.mined is not None
    assert found.mined.equal_to_positive == 1


def test_labels_of_pairs_and_lists_say_what_is_a_negative() -> None:
    plain = hn.audit(Data(anchor=["q0", "q1"], positive=["a", "b"], negative=["c", "a"]), "Uniform()", model=vectors)
    pairs = Data(anchor=["q0", "q1", "q0", "q1"], positive=["a", "b", "c", "a"], label=[1, 1, 0, 0])
    documents = {"anchor": ["q0", "q1"], "positive": [["a", "c"], ["b", "a"]]}
    gaps = Data(anchor=[*pairs["anchor"], "q1"], positive=[*pairs["positive"], None], label=[*pairs["label"], 0])
    padded = Data(anchor=["q0", "q1"], positive=[["a", "c", None], ["b", "a", None]], labels=[[1, 0, None]] * 2)
    lists = (Data(**documents, labels=[[1, 0], [1, 0]]), Data(**documents, scores=[[0.5, 0.9], [0.8, 0.1]]))
    for data in (pairs, *lists, gaps, padded):
        found = hn.audit(data, "Uniform()", model=vectors)
        assert found.row("mined").similarity == pytest.approx(plain.row("mined").similarity)
        assert found.positive_similarity == pytest.approx(plain.positive_similarity)
    with raises(ArgumentError, who="audit", got="label=None"):
        hn.audit(Data(anchor=["q0"] * 3, positive=["a", "b", "c"], label=[1, 0, None]), model=vectors)
    ids = hn.audit(Data(anchor=["q0", "q1"], positive=["a", "b"], label=[[0, 0, 2], [1, 1, 3]]), model=vectors)
    assert ids.mined is None


@pytest.mark.parametrize("name", ["score", "scores", "label"])
def test_scored_pairs_as_in_sts_are_no_training_set(name: str) -> None:
    pairs = {"anchor": ["q0", "q0"], "positive": ["a", "b"]}
    with pytest.raises(
        ArgumentError, match=rf"a {name} of each pair, as in STS, .*; give a label of 1 \(positive\) or 0"
    ):
        hn.audit(Data(**pairs, **{name: [0.9, 0.1]}), model=vectors)
    same = [
        hn.audit(Data(**pairs, label=marks), model=vectors).row("mined").similarity for marks in ([1, 0], [1.0, 0.0])
    ]
    assert same[0] == same[1]


def test_a_data_set_of_the_library_with_its_model() -> None:
    datasets: Any = pytest.importorskip("datasets", reason="needs the extra 'text'")
    data = datasets.Dataset.from_dict({"anchor": ["x", "y"], "positive": ["u", "v"]})
    found = hn.audit(data, ["Uniform()"], model=vectors, frontier=False)
    assert found.mined is None
    assert len(found.rows) == 1


def test_errors() -> None:
    with raises(ArgumentError, who="audit", got="model=None"):
        hn.audit(Data(anchor=["x"], positive=["y"]))
    with raises(ArgumentError, who="audit", got="columns ['anchor']"):
        hn.audit(Data(anchor=["x"], label=[1]), model=vectors)
    with raises(ArgumentError, who="audit", got="model=3"):
        hn.audit(Data(anchor=["x"], positive=["y"]), model=3)
    with raises(ArgumentError, who="The encoder", got="shape () of object"):
        hn.audit(Data(anchor=["x"], positive=["y"]), model=lambda texts: None)
    with raises(ArgumentError, who="audit", got="similarity=0.5", fix="remove_columns('similarity')"):
        hn.audit(Data(anchor=["x"], positive=["y"], similarity=[0.5]), model=vectors)
