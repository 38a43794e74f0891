"""Two ranks with different numbers of rows hold the same state and give the gradient of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardneg import papers
from hardneg.core.distributed import gather
from hardneg.core.errors import ArgumentError
from hardneg.core.types import Keys
from hardneg.losses.bank import CMC
from hardneg.losses.global_softmax import EMC2
from hardneg.state.pools import Bank, Queue
from support.two_ranks import on_two_ranks
from support.vectors import make_unit_vectors

SPLIT = [slice(0, 5), slice(5, 8)]  # 5 rows on the first rank, 3 on the second
STEPS = 4


class Moco(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(11, 4)
        self.queue.push(make_unit_vectors(6, 4, seed=77, dtype=torch.float32))

    def forward(self, z1: Tensor, z2: Tensor, ids: Tensor) -> Tensor:
        loss = papers.moco(0.2)(z1, z2, pool=self.queue, ids=ids)
        self.queue.push(Keys(z2, ids))
        return loss


LOSSES: dict[str, Callable[[], nn.Module]] = {
    "sogclr": lambda: papers.sogclr(20, 0.2),
    "emc2": lambda: papers.emc2(20, 0.2),
    "emc2 with bank": lambda: EMC2(20, 0.2, remember=Bank(20, 4)),
    "cmc": lambda: CMC(20, 4, num_draws=6),
    "moco": Moco,
}


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 8, 3, generator=generator), torch.randperm(20, generator=generator)[:8]


def train(make: Callable[[], nn.Module], rows: slice) -> tuple[nn.Module, nn.Module, list[Tensor]]:
    """A few steps on these rows; the gradients as DistributedDataParallel would leave them, averaged over ranks."""
    torch.manual_seed(0)
    encoder, loss_of, gradients = nn.Linear(3, 4), make(), []
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for step in range(STEPS):
        views, ids = data(step)
        own = [Keys(normalize(encoder(view[rows]), dim=-1), ids[rows]) for view in views]
        first, second = (gather(keys) for keys in own)
        encoder.zero_grad()
        loss_of(first.vectors, second.vectors, ids=first.ids).backward()
        for parameter in encoder.parameters():
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in encoder.parameters()]))
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter -= 0.1 * parameter.grad
    return encoder, loss_of, gradients


def train_on_rank(rank: int) -> dict[str, object]:
    results: dict[str, object] = {}
    for name, make in LOSSES.items():
        _, loss_of, gradients = train(make, SPLIT[rank])
        results[name] = (loss_of.state_dict(), gradients)
    results["gathered"] = gather_everything(rank)
    return results


def gather_everything(rank: int) -> dict[str, Tensor]:
    """Local loss on own anchors against all keys, and tags of all kinds; rank 1 has no row in the last gather."""
    rows = torch.arange(4) + 10 * rank
    keys = gather(Keys(rows[:, None].float(), rows, labels=rows % 3, clusters=rows[:, None] % 2, source="batch"))
    nothing = gather(Keys(torch.ones(2 if rank == 0 else 0, 1), torch.arange(2 if rank == 0 else 0)))
    mine = normalize(make_unit_vectors(3, 4, seed=rank), dim=-1).requires_grad_()
    everyone = gather(Keys(mine)).vectors
    ((rank + 1.0) * (everyone * torch.arange(1.0, 7.0)[:, None])).sum().backward()
    assert keys.source == "batch"
    return {
        "vectors": keys.vectors,
        "ids": keys.ids,
        "labels": keys.labels,
        "clusters": keys.clusters,
        "nothing": nothing.ids,
        "gradient": mine.grad,
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, object]]:
    return on_two_ranks(train_on_rank)


@pytest.mark.parametrize("name", LOSSES)
def test_same_state_on_both_ranks_and_the_gradient_of_one_process(
    two_ranks: list[dict[str, tuple[dict[str, Tensor], list[Tensor]]]], name: str
) -> None:
    (state0, gradients0), (state1, gradients1) = (results[name] for results in two_ranks)
    for key in state0:
        assert torch.equal(state0[key], state1[key]), key
    assert all(torch.equal(a, b) for a, b in zip(gradients0, gradients1, strict=True))
    _, alone, gradients = train(LOSSES[name], slice(0, 8))
    for found, expected in zip(gradients0, gradients, strict=True):
        assert expected.abs().max() > 0 or name == "cmc"  # nobody is in CMC's banks at the first step
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert gradients[-1].abs().max() > 1e-3
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(state0[key], value, rtol=1e-4, atol=1e-6)


def test_gather_keeps_order_tags_and_adds_gradients(two_ranks: list[dict[str, dict[str, Tensor]]]) -> None:
    expected = torch.cat([torch.arange(4), torch.arange(4) + 10])
    for rank, results in enumerate(two_ranks):
        got = results["gathered"]
        assert torch.equal(got["ids"], expected)
        assert torch.equal(got["vectors"][:, 0], expected.float())
        assert torch.equal(got["labels"], expected % 3)
        assert torch.equal(got["clusters"], expected[:, None] % 2)
        assert got["nothing"].tolist() == [0, 1]
        weights = torch.arange(1.0, 7.0)[3 * rank : 3 * rank + 3, None].double()
        assert torch.allclose(got["gradient"], 3.0 * weights.expand(3, 4))  # both ranks' losses, 1x and 2x


def test_one_process_gathers_itself() -> None:
    keys = Keys(torch.eye(3), torch.arange(3))
    assert gather(keys) is keys


def gather_unlike(rank: int) -> list[str]:
    """What each rank is told of vectors, and of ids, whose precision is not the same everywhere."""
    vectors, ids = torch.randn(3, 4), torch.arange(3)
    unlike = [
        Keys(vectors.to(torch.bfloat16 if rank else torch.float32)),
        Keys(vectors, ids=ids.to(torch.int32 if rank else torch.int64)),
    ]
    told = []
    for keys in unlike:
        with pytest.raises(ArgumentError) as raised:
            gather(keys)
        told.append(f"{raised.value.what}: {raised.value.got}")
    return told


def test_ranks_of_different_precision_raise_on_all_of_them() -> None:
    expected = ["vectors on every rank: float32, bfloat16", "ids on every rank: int64, int32"]
    for told in on_two_ranks(gather_unlike):
        assert [text.removeprefix("the same dtype of ") for text in told] == expected
