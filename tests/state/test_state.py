"""Everything that remembers: the cache, clusters, the momentum encoder; resuming bit for bit; memory."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import hardneg as hn
from hardneg import papers
from hardneg.core.schedules import cosine
from hardneg.core.types import Keys
from hardneg.losses.bank import CMC, InstanceDiscrimination
from hardneg.losses.global_softmax import EMC2, SogCLR
from hardneg.state.cache import Cache, cache_loss, retrieve
from hardneg.state.clusters import Clusters
from hardneg.state.momentum import MomentumEncoder
from hardneg.state.pools import Bank, Queue
from support.vectors import make_unit_vectors

SIZE, DIM = 24, 6


def batch(step: int, b: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randperm(SIZE, generator=generator)[:b]
    noise = torch.randn(2, b, DIM, generator=generator)
    return normalize(noise[0], dim=-1), normalize(0.5 * noise[0] + noise[1], dim=-1), ids


class WithQueue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(15, DIM)
        self.queue.push(batch(99)[0])

    def forward(self, z1: Tensor, z2: Tensor, ids: Tensor) -> Tensor:
        loss = papers.moco()(z1, z2, pool=self.queue, ids=ids)
        self.queue.push(Keys(z2, ids))
        return loss


class WithBank(nn.Module):
    """A bank's draws, and clusters refreshed from it on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.bank, self.clusters = Bank(SIZE, DIM, momentum=0.5), Clusters(SIZE, num_runs=2)
        self.bank.push(Keys(make_unit_vectors(SIZE, DIM, dtype=torch.float32), torch.arange(SIZE)))

    def forward(self, z1: Tensor, z2: Tensor, ids: Tensor) -> Tensor:
        self.clusters.refresh(self.bank, num_clusters=4)
        close = papers.local_aggregation(num_background=10)(z1, ids, self.bank, self.clusters)
        scores = hn.score(Keys(z1, ids), z2, self.bank.draw(ids, 5, replace=False), 0.1)
        loss = hn.info_nce(scores, hn.Uniform().log_weights(scores)).mean()
        self.bank.push(Keys(z2, ids))
        return loss + close


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(12, DIM)
        self.register_buffer("table", make_unit_vectors(SIZE, DIM, dtype=torch.float32))
        self.cache.push(Keys(self.table[:12], torch.arange(12)))

    def forward(self, z1: Tensor, z2: Tensor, ids: Tensor) -> Tensor:
        encode: Callable[[Tensor], Tensor] = lambda items: self.table[items]  # noqa: E731
        loss = papers.negative_cache(0.1, num_draws=2)(z1, z2, self.cache, encode, ids)
        self.cache.push(Keys(z2, ids))
        self.cache.refresh(encode, share=0.2)
        return loss


class WithMomentumEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
        self.slow = MomentumEncoder(self.encoder, momentum=cosine(0.9, 1.0), total=20)

    def forward(self, z1: Tensor, z2: Tensor, ids: Tensor) -> Tensor:
        loss = papers.moco_v3()(normalize(self.encoder(z1), dim=-1), normalize(self.slow(z2), dim=-1))
        self.encoder.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in self.encoder.parameters():
                parameter -= 0.1 * parameter.grad
        self.slow.update_parameters(self.encoder)
        return loss.detach()


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "queue": WithQueue,
    "bank and clusters": WithBank,
    "cache": WithCache,
    "momentum encoder": WithMomentumEncoder,
    "sogclr": lambda: SogCLR(SIZE),
    "sogclr bimodal": lambda: SogCLR(SIZE, views="cross"),
    "emc2": lambda: EMC2(SIZE),
    "emc2 with bank": lambda: EMC2(SIZE, remember=Bank(SIZE, DIM)),
    "emc2 two encoders": lambda: EMC2(SIZE, views="cross"),
    "instance discrimination": lambda: OneView(InstanceDiscrimination(SIZE, DIM, num_draws=5)),
    "cmc": lambda: CMC(SIZE, DIM, num_draws=5),
}


class OneView(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, z1: Tensor, z2: Tensor, ids: Tensor) -> Tensor:
        return self.loss(z1, ids)


@pytest.mark.parametrize("name", STATEFUL)
def test_resuming_gives_the_same_losses_bit_for_bit(name: str) -> None:
    """Five steps, a checkpoint through a file, five more; a fresh module with that checkpoint gives the same five.

    The sixth batch is a short one.
    """
    torch.manual_seed(0)
    module = STATEFUL[name]()
    for step in range(5):
        module(*batch(step))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    later = [(batch(step) if step != 6 else batch(step, b=3)) for step in range(5, 10)]
    expected = [module(*each) for each in later]
    torch.manual_seed(1)
    resumed = STATEFUL[name]()
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    found = [resumed(*each) for each in later]
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert len({value.item() for value in expected}) > 1
    for key, value in module.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    # The state matters: a module that starts over gives other losses.
    torch.manual_seed(1)
    fresh = STATEFUL[name]()
    assert not torch.equal(torch.stack([fresh(*each) for each in later]), torch.stack(expected))


@pytest.mark.parametrize("name", STATEFUL)
def test_state_dicts_hold_tensors_only_so_that_safetensors_stores_them(name: str, tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    torch.manual_seed(0)
    module = STATEFUL[name]()
    module(*batch(0))
    state = module.state_dict()
    assert all(isinstance(value, Tensor) for value in state.values())
    files.save_file(state, tmp_path / "state.safetensors")
    resumed = STATEFUL[name]()
    resumed.load_state_dict(files.load_file(tmp_path / "state.safetensors"))
    assert torch.equal(resumed(*batch(1)), module(*batch(1)))


@pytest.mark.parametrize("name", STATEFUL)
def test_all_state_is_in_the_state_dict(name: str) -> None:
    """Nothing that changes with steps hides outside: a deep copy that only gets the state behaves the same."""
    torch.manual_seed(0)
    module = STATEFUL[name]()
    before = copy.deepcopy(module)
    for step in range(4):
        module(*batch(step))
    before.load_state_dict(module.state_dict())
    assert torch.equal(module(*batch(11)), before(*batch(11)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", STATEFUL)
def test_a_gpu_gives_the_same_run(name: str) -> None:
    """The same draws and, up to rounding, the same losses and state as on the CPU."""
    torch.manual_seed(0)
    here = STATEFUL[name]()
    there = copy.deepcopy(here).cuda()
    for step in range(6):
        expected, found = here(*batch(step)), there(*(value.cuda() for value in batch(step)))
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)
    for key, value in here.state_dict().items():
        torch.testing.assert_close(there.state_dict()[key].cpu(), value, rtol=1e-3, atol=1e-4)


def test_double_precision_state_resumes_exactly() -> None:
    queue = Queue(4, 3)
    queue.push(make_unit_vectors(3, 3))
    other = Queue(4, 3)
    other.load_state_dict(queue.state_dict())
    assert torch.equal(other.keys().vectors, queue.keys().vectors)


@pytest.mark.parametrize("make", [lambda n, d: papers.sogclr(n), lambda n, d: papers.emc2(n)])
def test_memory_is_of_the_order_of_the_instances(make: Callable[[int, int], nn.Module]) -> None:
    """A few numbers per instance, whatever the dimension; a bank is O(num_instances x dim) and has to be given."""
    num_instances, dim = 1000, 64
    loss = make(num_instances, dim)
    z1, z2 = (make_unit_vectors(8, dim, seed=seed, dtype=torch.float32) for seed in (0, 1))
    loss(z1, z2, ids=torch.arange(8))
    numbers = sum(buffer.numel() for buffer in loss.buffers())
    assert numbers <= 10 * num_instances + 8
    assert not any(value.numel() > 4 * num_instances for value in loss.buffers())
    with_bank = EMC2(num_instances, remember=Bank(num_instances, dim))
    assert sum(buffer.numel() for buffer in with_bank.buffers()) > num_instances * dim


# The cache


def test_cache_replaces_the_oldest_and_refreshes_what_it_holds() -> None:
    cache = Cache(4, 1)
    for items in ([0, 1], [2, 3], [0], [7, 8]):
        cache.push(Keys(torch.tensor(items, dtype=torch.float32)[:, None], torch.tensor(items)))
    held = cache.keys()
    # Item 1 was the oldest, then 2 and 3 of the same step: the first of these goes.
    assert sorted(held.ids.tolist()) == [0, 3, 7, 8]
    assert held.vectors[:, 0].tolist() == held.ids.float().tolist()
    assert dict(zip(held.ids.tolist(), cache.age().tolist(), strict=True)) == {0: 1, 3: 2, 7: 0, 8: 0}


def test_cache_refresh_spends_its_budget_on_the_oldest() -> None:
    cache = Cache(10, 1)
    for item in range(10):
        cache.push(Keys(torch.zeros(1, 1), torch.tensor([item])))
    encoded: list[int] = []

    def encode(ids: Tensor) -> Tensor:
        encoded.extend(ids.tolist())
        return torch.ones(len(ids), 1)

    cache.refresh(encode, share=0.3)
    assert sorted(encoded) == [0, 1, 2]
    assert cache.keys().vectors.sum() == 3
    cache.refresh(encode, share=0.0)
    assert len(encoded) == 3


def test_cache_push_of_more_than_it_holds_keeps_the_last() -> None:
    cache = Cache(3, 1)
    cache.push(Keys(torch.arange(8.0)[:, None], torch.arange(8)))
    assert sorted(cache.keys().ids.tolist()) == [5, 6, 7]


def test_empty_cache_costs_nothing() -> None:
    z = make_unit_vectors(3, 4).requires_grad_()
    step = cache_loss(Keys(z), z.detach(), Cache(5, 4), lambda ids: torch.ones(len(ids), 4), 0.1)
    step.losses.sum().backward()
    assert step.losses.abs().sum() == step.real.abs().sum() == 0


def test_gumbel_retrieval_draws_from_the_softmax_and_top_takes_the_best() -> None:
    scores = hn.score(make_unit_vectors(1, 4), make_unit_vectors(1, 4), make_unit_vectors(6, 4, seed=2), 0.5)
    drawn = retrieve(scores, 20_000, torch.Generator().manual_seed(0))
    share = drawn[0].bincount(minlength=6) / 20_000
    torch.testing.assert_close(share.double(), torch.softmax(scores.candidates[0], 0), atol=0.02, rtol=0)
    best = retrieve(scores, 2, torch.Generator(), how="top")
    assert best[0].tolist() == scores.candidates[0].topk(2).indices.tolist()


def test_cache_gradient_is_unbiased_when_nothing_is_stale() -> None:
    """Averaged over draws, the surrogate's gradient is that of -log p+ against the whole cache."""
    vectors = make_unit_vectors(8, 4, seed=2)
    cache = Cache(8, 4)
    cache.push(Keys(vectors, torch.arange(8)))
    z, positive = make_unit_vectors(1, 4), make_unit_vectors(1, 4, seed=1)
    exact = z.clone().requires_grad_()
    scores = hn.score(exact, positive, vectors, 0.5)
    hn.info_nce(scores, hn.Uniform().log_weights(scores)).sum().backward()
    rows = 20_000
    anchors = z.expand(rows, -1).clone().requires_grad_()
    step = cache_loss(Keys(anchors), positive.expand(rows, -1), cache, lambda ids: vectors[ids], 0.5)
    step.losses.sum().backward()
    error = anchors.grad.std(0) / rows**0.5
    assert ((anchors.grad.mean(0) - exact.grad[0]).abs() / error).max() < 4.0


def test_cached_own_item_is_never_its_negative() -> None:
    vectors = make_unit_vectors(4, 4)
    cache = Cache(4, 4)
    cache.push(Keys(vectors, torch.arange(4)))
    for _ in range(20):
        step = cache_loss(Keys(vectors, torch.arange(4)), vectors, cache, lambda ids: vectors[ids], 0.05)
        drawn = cache.keys().ids[step.drawn[:, 0]]
        assert (drawn != torch.arange(4)).all()


# Clusters


def test_clusters_find_groups_and_feed_the_distributions() -> None:
    centres = 4.0 * torch.eye(3)
    vectors = normalize(centres.repeat_interleave(5, 0) + 0.3 * make_unit_vectors(15, 3, dtype=torch.float32), dim=-1)
    clusters = Clusters(20, num_runs=3)
    ids = torch.arange(15) + 5
    clusters.refresh(Keys(vectors, ids), num_clusters=3)
    group = torch.arange(15) // 5
    keys = clusters.tag(Keys(vectors, ids))
    scores = hn.score(keys, vectors, keys, 0.5)
    same = group[:, None] == group
    cave = hn.SameCluster().log_weights(scores) != hn.NEVER
    assert torch.equal(cave, same & ~torch.eye(15, dtype=torch.bool))
    assert torch.equal(hn.OtherCluster().log_weights(scores) != hn.NEVER, ~same)


def test_before_the_first_refresh_everyone_is_alone() -> None:
    clusters = Clusters(6)
    keys = clusters.tag(Keys(make_unit_vectors(6, 3), torch.arange(6)))
    scores = hn.score(keys, keys.vectors, keys, 0.5)
    assert (hn.SameCluster().log_weights(scores) == hn.NEVER).all()
    with pytest.raises(ValueError, match="known ids"):
        clusters.of(torch.tensor([0, -1]))


def test_ring_with_cluster_members_as_positives() -> None:
    """Ring + C_i: members of the anchor's cluster in the pool join its numerator."""
    bank = Bank(6, 4)
    bank.push(Keys(make_unit_vectors(6, 4, seed=1), torch.arange(6)))
    clusters = Clusters(6)
    clusters.assignments[:, 0] = torch.tensor([0, 0, 0, 1, 1, 1])
    q, k = make_unit_vectors(2, 1, 4, seed=2)
    found = papers.ring_neighbours(0.5, inner=0.2, outer=1.0)(
        q, k, clusters.tag(bank.keys()), ids=torch.tensor([1]), clusters=clusters
    )
    s = (q @ bank.vectors.T / 0.5).exp()[0]
    positive = (q @ k.T / 0.5).exp()[0, 0]
    others = torch.tensor([0, 2, 3, 4, 5])
    ring = others[s[others].argsort(descending=True)[1:]]  # one of five valid candidates is closer than the ring
    expected = (positive + s[ring].sum()).log() - (positive + s[torch.tensor([0, 2])].sum()).log()
    assert found.item() == pytest.approx(expected.item())


# The momentum encoder


def test_momentum_encoder_is_mocos_update_and_keeps_its_own_statistics() -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    slow = MomentumEncoder(encoder, momentum=0.9)
    by_hand = [parameter.detach().clone() for parameter in encoder.parameters()]
    for step in range(3):
        slow(torch.randn(8, 3) + 5.0)  # its own statistics move
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter += 0.1 * (step + 1)
        slow.update_parameters(encoder)
        by_hand = [0.9 * old + 0.1 * new.detach() for old, new in zip(by_hand, encoder.parameters(), strict=True)]
    for found, expected in zip(slow.module.parameters(), by_hand, strict=True):
        torch.testing.assert_close(found, expected)
        assert not found.requires_grad
    assert slow.module[1].num_batches_tracked == 3
    assert encoder[1].num_batches_tracked == 0


def test_an_update_of_the_momentum_encoder_neither_copies_statistics_nor_waits_for_the_gpu() -> None:
    encoder = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    slow = MomentumEncoder(encoder, momentum=cosine(0.5, 1.0), total=4)
    versions = [buffer._version for buffer in slow.module.buffers()]
    slow.n_averaged = slow.n_averaged.to("meta")  # which has no value
    before = slow.module[0].weight.clone()
    with torch.no_grad():
        encoder[0].weight.add_(1.0)
    slow.update_parameters(encoder)
    torch.testing.assert_close(slow.module[0].weight, before + 0.5)
    assert [buffer._version for buffer in slow.module.buffers()] == versions


def test_momentum_of_moco_v3_is_a_cosine_to_one() -> None:
    slow = MomentumEncoder(nn.Linear(2, 2), momentum=cosine(0.99, 1.0), total=100)
    for step in (0, 25, 100):
        expected = 1.0 - 0.5 * (1.0 + torch.cos(torch.tensor(torch.pi * step / 100))).item() * 0.01
        assert slow.momentum_at(step) == pytest.approx(expected, abs=1e-7)
