"""Rules of the integration that a wrong result would not show: ids, learnt parameters, options without effect."""

from __future__ import annotations

import copy

import pytest
import torch

import hardneg as hn
from hardneg.core.errors import ArgumentError, HardnegWarning
from hardneg.integrations.sentence_transformers import CachedNegativesLoss, NegativesLoss, known_positives, with_ids
from support.errors import raises

datasets = pytest.importorskip("datasets", reason="needs the extra 'text'")


class Model(torch.nn.Module):
    """Vectors by the number of the text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(30, 4)

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sentence_embedding": self.table(features["input_ids"][:, 0])}


def features() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.arange(8)[:, None] + start} for start in (0, 10)]


def test_a_cached_loss_scales_the_gradient_of_a_learnt_temperature() -> None:
    found = []
    for kind in (NegativesLoss, CachedNegativesLoss):
        temperature = torch.nn.Parameter(torch.tensor(0.1))
        loss = kind(Model(), temperature=temperature)
        (0.25 * loss(features(), None)).backward()
        assert temperature.grad is not None
        found.append(temperature.grad)
    torch.testing.assert_close(*found)


def test_names_that_collide_and_labels_of_other_columns_are_refused() -> None:
    rows = {"anchor": ["a", "b"], "positive": ["c", "d"], "negative": [["e", "f"], ["g"]], "negative_1": ["h", "i"]}
    with pytest.raises(ArgumentError, match="negative_1"):
        with_ids(datasets.Dataset.from_dict(rows))
    rows["other"] = rows.pop("negative_1")
    labels = torch.tensor(with_ids(datasets.Dataset.from_dict(rows))["label"])
    with pytest.raises(ArgumentError):
        NegativesLoss(Model()).compute_loss_from_embeddings([torch.randn(2, 4) for _ in range(3)], labels)


def test_known_positives_need_ids() -> None:
    with pytest.raises(ArgumentError) as error:
        known_positives(datasets.Dataset.from_dict({"anchor": ["a"], "positive": ["b"]}))
    assert error.value.fix == "use with_ids(dataset)"


@pytest.mark.parametrize("options", [{"negatives": "Tilt(5.0)"}, {"tau_plus": 0.3}, {"positives": "group"}])
def test_options_that_an_objective_over_all_data_does_not_read_are_refused(options: dict[str, object]) -> None:
    with raises(ArgumentError, who="NegativesLoss", what="of negatives"):
        NegativesLoss(Model(), objective=hn.SogCLR(30, views="cross"), **options)


def test_the_text_of_an_anchor_is_no_negative_of_it() -> None:
    """Mutual pairs: each text is an anchor and a document."""
    texts = [str(i) for i in range(20)]
    pairs = datasets.Dataset.from_dict({"anchor": texts, "positive": texts[10:] + texts[:10]})
    torch.manual_seed(0)
    table = torch.nn.functional.normalize(torch.randn(20, 64), dim=-1)
    row = hn.audit(pairs, "Uniform()", model=lambda some: table[[int(one) for one in some]], frontier=False).rows[0]
    assert row.near_duplicates == 0.0


def test_data_sets_that_cannot_be_audited_are_refused() -> None:
    model = lambda texts: torch.eye(len(texts))  # noqa: E731
    empty = datasets.Dataset.from_dict({"anchor": [], "positive": []})
    missing = datasets.Dataset.from_dict({"anchor": ["a", None], "positive": ["b", "c"]})
    for wrong in (empty, missing, datasets.DatasetDict(train=missing)):
        with pytest.raises(ArgumentError):
            hn.audit(wrong, model=model)


def test_a_copy_reads_the_state_that_it_loads() -> None:
    queue, other = hn.Queue(32, 4), hn.Queue(32, 4)
    for _ in range(2):
        queue.push(torch.randn(2, 4))
    for _ in range(3):
        other.push(torch.randn(7, 4))
    copied = copy.deepcopy(queue)
    copied.load_state_dict(other.state_dict())
    assert len(copied) == 21


def test_sogclr_takes_rows_without_an_instance() -> None:
    z1, z2 = torch.nn.functional.normalize(torch.randn(2, 3, 4), dim=-1)
    assert hn.SogCLR(10)(z1, z2, ids=torch.tensor([0, 1, -1])).isfinite()


def test_a_queue_of_another_dimension_is_refused_or_warns() -> None:
    with pytest.raises(ArgumentError) as error, pytest.warns(HardnegWarning, match="no ids"):
        NegativesLoss(Model(), queue=hn.Queue(32, 3))(features(), None)
    assert error.value.fix == "use queue=hn.Queue(32, 4)"
    with pytest.warns(HardnegWarning, match=r"hn.Queue\(32, 4\)"):
        NegativesLoss(Model(), queue=hn.Queue(32, 5))(features(), None)
