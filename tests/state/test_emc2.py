"""EMC2's law with batches much smaller than the data set: the softmax over all, not over the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.core.errors import ArgumentError
from hardneg.core.types import Keys
from hardneg.losses.global_softmax import EMC2
from hardneg.state.chain import Chain
from hardneg.state.pools import Bank
from support.errors import raises
from support.grids import grid
from support.vectors import make_unit_vectors

ITEMS, TEMPERATURE = 480, 0.1


@dataclass
class Frozen:
    """Two views of 480 items around 24 centres; anchors and columns of some of them."""

    views: str
    z1: Tensor
    z2: Tensor

    @classmethod
    def make(cls, views: str, seed: int) -> Frozen:
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(24, 16, generator=generator, dtype=torch.float64).repeat_interleave(ITEMS // 24, 0)
        noise = torch.randn(2, ITEMS, 16, generator=generator, dtype=torch.float64)
        return cls(views, *normalize(normalize(centres, dim=-1) + 0.3 * noise, dim=-1))

    def encode(self, ids: Tensor, views: Tensor) -> Tensor:
        return torch.stack([self.z1, self.z2])[views, ids]

    def softmax(self, ids: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Of the anchors of ``ids`` over the columns of others: probabilities, and the mean similarity under them."""
        two = self.views == "two"
        anchors = torch.cat([self.z1[ids], self.z2[ids]]) if two else self.z1[ids]
        candidates = torch.cat([self.z1[columns], self.z2[columns]]) if two else self.z2[columns]
        similarity = anchors @ candidates.T
        own = ids.repeat(2 if two else 1)[:, None] == columns.repeat(2 if two else 1)
        law = torch.softmax((similarity / TEMPERATURE).masked_fill(own, -torch.inf), dim=1)
        return law, (law * similarity).sum(1).mean()


def begin_at_the_global_law(chain: Chain, frozen: Frozen, seed: int) -> None:
    law, _ = frozen.softmax(torch.arange(ITEMS), torch.arange(ITEMS))
    column = torch.multinomial(law, 1, generator=torch.Generator().manual_seed(seed)).squeeze(1)
    slots = torch.cat([chain.slots(torch.arange(ITEMS), view) for view in range(chain.num_views)])
    chain.state[slots], chain.view[slots] = column % ITEMS, (column // ITEMS).to(chain.view)


def way_to_the_global_softmax(loss: EMC2, frozen: Frozen, batch: int, steps: int, seed: int, **options: Any) -> float:
    """0: visits are as similar as the softmax over the batch would make them, 1: as the softmax over all."""
    everyone, found = torch.arange(ITEMS), torch.zeros(3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randperm(ITEMS, generator=generator)[:batch]
        value = loss(frozen.z1[ids], frozen.z2[ids], ids=ids, **options)
        assert loss.last["outside"] == 0.0
        visited = value * TEMPERATURE + (frozen.z1[ids] * frozen.z2[ids]).sum(1).mean()
        found += torch.stack([visited, frozen.softmax(ids, ids)[1], frozen.softmax(ids, everyone)[1]])
    visited, of_batch, of_all = found.tolist()
    return (visited - of_batch) / (of_all - of_batch)


@grid("views, sizes, seed", ["two", "cross"], [(96, 150), (24, 300)], [0, 1])
def test_in_batch_proposals_keep_the_global_softmax(views: str, sizes: tuple[int, int], seed: int) -> None:
    batch, steps = sizes
    frozen = Frozen.make(views, seed)
    loss = EMC2(ITEMS, TEMPERATURE, views=views, seed=seed)
    begin_at_the_global_law(loss.chain, frozen, seed)
    way = way_to_the_global_softmax(loss, frozen, batch, steps, seed, encode=frozen.encode)
    assert way == pytest.approx(1.0, abs=0.1)


def test_the_global_softmax_is_reached_from_nothing() -> None:
    frozen = Frozen.make("cross", 0)
    loss = EMC2(ITEMS, TEMPERATURE, views="cross")
    way_to_the_global_softmax(loss, frozen, 96, 60, 5, encode=frozen.encode)
    way = way_to_the_global_softmax(loss, frozen, 96, 240, 0, encode=frozen.encode)
    assert way == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("views", ["two", "cross"])
def test_a_bank_keeps_it_too(views: str) -> None:
    frozen = Frozen.make(views, 0)
    loss = EMC2(ITEMS, TEMPERATURE, views=views, remember=Bank(ITEMS, 16, dtype=torch.float64))
    for ids in torch.arange(ITEMS).split(96):  # the bank knows all
        loss(frozen.z1[ids], frozen.z2[ids], ids=ids)
    begin_at_the_global_law(loss.chain, frozen, 0)
    assert way_to_the_global_softmax(loss, frozen, 96, 150, 0) == pytest.approx(1.0, abs=0.1)


def test_without_an_embedding_the_state_is_proposable_by_its_stored_scores() -> None:
    """End states: their mean similarity is that of the softmax over all, though the chains hold scores only."""
    frozen = Frozen.make("two", 0)
    loss, everyone = EMC2(ITEMS, TEMPERATURE), torch.arange(ITEMS)
    generator = torch.Generator().manual_seed(0)
    ends = []
    for step in range(160):
        ids = torch.randperm(ITEMS, generator=generator)[:96]
        loss(frozen.z1[ids], frozen.z2[ids], ids=ids)
        if step >= 60:
            slots = torch.cat([loss.chain.slots(ids, view) for view in (0, 1)])
            own = loss.chain.log_score[slots].gather(1, loss.chain.views_of(slots)[:, None])
            ends.append(own.mean() * TEMPERATURE)
    of_all, of_batch = frozen.softmax(everyone, everyone)[1], frozen.softmax(ids, ids)[1]
    way = (torch.stack(ends).mean() - of_batch) / (of_all - of_batch)
    assert way.item() == pytest.approx(1.0, abs=0.1)
    assert loss.last["outside"] > 0.1


@pytest.mark.parametrize("views", ["two", "cross"])
def test_algorithm_1_proposes_from_the_whole_data_set(views: str) -> None:
    frozen = Frozen.make(views, 1)
    encoded: list[Tensor] = []

    def encode(ids: Tensor, which: Tensor) -> Tensor:
        encoded.append(ids)
        return frozen.encode(ids, which)

    loss = EMC2(ITEMS, TEMPERATURE, views=views, proposals="data set")
    begin_at_the_global_law(loss.chain, frozen, 0)
    way = way_to_the_global_softmax(loss, frozen, 24, 200, 0, encode=encode)
    assert way == pytest.approx(1.0, abs=0.1)
    assert len(torch.cat(encoded).unique()) == ITEMS


def test_algorithm_1_from_a_bank_or_not_at_all() -> None:
    z1, z2, ids = make_unit_vectors(8, 4, seed=1), make_unit_vectors(8, 4, seed=2), torch.arange(8)
    loss = EMC2(20, proposals="data set", remember=Bank(20, 4))
    loss.remember.push(_keys(20))  # type: ignore[union-attr]
    loss.remember_first.push(_keys(20))  # type: ignore[union-attr]
    for _ in range(20):
        assert torch.isfinite(loss(z1, z2, ids=ids))
        states = loss.chain.state.view(20, 2)[:8]
        assert (states != ids[:, None]).all()
    assert (states >= 8).any()  # not only from the batch
    with raises(ArgumentError, who="EMC2", what="proposals='data", got="none", fix="remember=Bank"):
        EMC2(20, proposals="data set")(z1, z2, ids=ids)
    with raises(ArgumentError, who="EMC2", what="'data set'", got="proposals='all'"):
        EMC2(20, proposals="all")


def _keys(size: int) -> Keys:
    return Keys(make_unit_vectors(size, 4, seed=3), torch.arange(size))


def test_ids_may_be_a_list() -> None:
    z1, z2 = make_unit_vectors(4, 8), make_unit_vectors(4, 8)
    as_list, as_tensor = (EMC2(10, 0.1)(z1, z2, ids=ids) for ids in ([3, 1, 4, 2], torch.tensor([3, 1, 4, 2])))
    assert torch.equal(as_list, as_tensor)
