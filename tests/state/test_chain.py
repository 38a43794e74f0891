"""EMC2's chains: their stationary law, their memory, their gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg import papers
from hardneg.core.types import Keys
from hardneg.losses.global_softmax import EMC2
from hardneg.state.chain import Chain
from hardneg.state.metropolis import metropolis_hastings
from hardneg.state.pools import Bank
from support.vectors import make_unit_vectors

TEMPERATURE, NUM_CANDIDATES, NUM_CHAINS, NUM_SWEEPS, BURN_IN_SWEEPS = 0.07, 50, 25_000, 7, 3


def views(b: int, d: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    first = make_unit_vectors(b, d, seed=seed)
    return first, normalize(0.8 * first + 0.6 * make_unit_vectors(b, d, seed=seed + 100), dim=-1)


def frozen_scores() -> Tensor:
    """One anchor against 50 candidates with 64 features, scored at temperature 0.07."""
    return make_unit_vectors(1, 64, seed=1) @ make_unit_vectors(NUM_CANDIDATES, 64, seed=2).T / TEMPERATURE


def proposals_of(kind: str, generator: torch.Generator) -> Tensor:
    """As many proposals as there are candidates, for every chain."""
    shape = (NUM_CHAINS, NUM_CANDIDATES)
    if kind == "with replacement":
        return torch.randint(NUM_CANDIDATES, shape, generator=generator)
    if kind == "fixed sweep":
        return torch.arange(NUM_CANDIDATES).expand(shape)
    return torch.rand(shape, generator=generator).argsort(1)


def total_variation(kind: str) -> float:
    """Between 100,000 end states, four of each of 25,000 chains, and the exact softmax."""
    generator = torch.Generator().manual_seed(0)
    scores = frozen_scores()
    column = torch.zeros(NUM_CHAINS, dtype=torch.long)
    counts = torch.zeros(NUM_CANDIDATES, dtype=torch.float64)
    for sweep in range(NUM_SWEEPS):
        uniforms = torch.rand(NUM_CHAINS, NUM_CANDIDATES, generator=generator, dtype=torch.float64)
        proposals = proposals_of(kind, generator)
        column = metropolis_hastings(scores.expand(NUM_CHAINS, -1), column, proposals, uniforms.log()).end
        if sweep >= BURN_IN_SWEEPS:
            counts += column.bincount(minlength=NUM_CANDIDATES)
    assert counts.sum() == 100_000
    return 0.5 * (counts / counts.sum() - torch.softmax(scores[0], 0)).abs().sum().item()


def test_uniform_proposals_with_replacement_keep_the_softmax() -> None:
    assert total_variation("with replacement") < 0.02


@pytest.mark.parametrize("kind", ["fixed sweep", "shuffled sweep"])
def test_sweeps_over_the_candidates_do_not(kind: str) -> None:
    assert total_variation(kind) > 0.02


def test_chain_over_batches_keeps_the_softmax() -> None:
    """The module itself, drawing from seed and step: end states of many rows over several calls, exact mode."""
    size, rows = 12, 4000
    pool = Keys(make_unit_vectors(size, 4, seed=3), torch.arange(size))
    anchor = make_unit_vectors(1, 4, seed=4)
    chain = Chain(num_instances=size + rows)
    ids = torch.arange(size, size + rows)  # many anchors with the same vector
    scores = hn.score(Keys(anchor.expand(rows, -1), ids), anchor.expand(rows, -1), pool, 0.3)
    for _ in range(6):
        chain.walk(scores, chain.slots(ids), num_steps=20)
    found = chain.state[ids].bincount(minlength=size) / rows
    exact = torch.softmax(scores.candidates[0], 0)
    assert 0.5 * (found - exact).abs().sum().item() < 0.03


def exact_gradient(z1: Tensor, z2: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """Of the mean over the batch's 2b anchors of -a + log sum e^s over the whole data set, by z1 of the batch."""
    anchors = z1[rows].clone().requires_grad_()
    first, second = z1.clone(), z2
    ids = torch.arange(len(z1))
    pool = Keys(torch.cat([first, second]), torch.cat([ids, ids]))
    both = Keys(torch.cat([anchors, z2[rows]]), torch.cat([rows, rows]))
    scores = hn.score(both, torch.cat([z2[rows], anchors]), pool, temperature)
    log_w = hn.Uniform().log_weights(scores)
    hn.info_nce(scores, log_w, positives_in_denominator="none").mean().backward()
    assert anchors.grad is not None
    return anchors.grad


def test_estimated_gradient_is_the_exact_one_within_four_standard_errors() -> None:
    """Exact mode: candidates are the whole data set. Independent runs, so that standard errors are plain ones."""
    z1, z2 = views(20)
    rows, ids = torch.arange(6), torch.arange(20)
    pool = Keys(torch.cat([z1, z2]), torch.cat([ids, ids]))
    gradients = []
    for seed in range(200):
        loss = EMC2(20, 0.2, burn_in=0.5, num_steps=120, seed=seed)
        for _ in range(2):
            anchors = z1[rows].clone().requires_grad_()
            value = loss(anchors, z2[rows], ids=rows, pool=pool)
        value.backward()
        gradients.append(anchors.grad)
    found = torch.stack(gradients)
    error = found.std(0) / len(found) ** 0.5
    exact = exact_gradient(z1, z2, rows, 0.2)
    assert ((found.mean(0) - exact).abs() / error).max() < 4.0
    # The test can fail: with the softmax of a temperature twice as high it would.
    wrong = exact_gradient(z1, z2, rows, 0.4) * 2.0
    assert ((found.mean(0) - wrong).abs() / error).max() > 20.0


def test_surrogate_is_the_mean_over_the_visits() -> None:
    """Given draws by hand: two steps of burn-in, then what the chain visited, counted."""
    z1, z2 = views(3)
    scores = hn.two_views(z1, z2, 0.1, ids=torch.tensor([4, 5, 6]))
    chain = Chain(10, burn_in=0.5, num_views=2)
    slots = torch.cat([chain.slots(torch.tensor([4, 5, 6]), view) for view in (0, 1)])
    proposals = torch.tensor([[1, 2, 4, 5], [0, 2, 3, 5], [0, 1, 3, 4], [1, 2, 4, 5], [0, 2, 3, 5], [0, 1, 3, 4]])
    always = torch.full(proposals.shape, -1e3, dtype=torch.float64)
    walk = chain.walk(scores, slots, draws=(proposals, always))
    visits = walk.log_visits.exp()
    for row in range(6):
        expected = torch.zeros(6, dtype=torch.float64)
        expected[proposals[row, 2:]] = 1.0
        assert torch.equal(visits[row], expected)
    assert walk.log_norm.exp().tolist() == pytest.approx([2.0] * 6)
    assert walk.acceptance.tolist() == [1.0] * 6
    assert chain.states_of(slots).tolist() == [6, 6, 5, 6, 6, 5]
    assert chain.views_of(slots).tolist() == [1] * 6


def test_state_in_the_batch_is_rescored_and_outside_keeps_its_stale_score() -> None:
    chain = Chain(10)
    ids, vectors = torch.tensor([0, 1, 2]), make_unit_vectors(3, 4)
    pool = Keys(vectors, torch.tensor([7, 8, 9]))
    first = hn.score(Keys(vectors, ids), vectors, pool, 0.5)
    slots = chain.slots(ids)
    always = torch.full((3, 1), -1e3, dtype=torch.float64)
    chain.walk(first, slots, draws=(torch.tensor([[0], [1], [2]]), always))
    assert chain.states_of(slots).tolist() == [7, 8, 9]
    stale = chain.log_score[slots, 0].clone()
    # Other parameters, and only item 7 among the candidates.
    second = hn.score(Keys(vectors.flip(0), ids), vectors, Keys(vectors[:1] * 0.5, torch.tensor([7])), 0.5)
    never = torch.zeros(3, 1, dtype=torch.float64)
    walk = chain.walk(second, slots, draws=(torch.full((3, 1), -1), never))
    assert chain.log_score[slots[0], 0].item() == pytest.approx(second.candidates[0, 0].item())
    assert torch.equal(chain.log_score[slots[1:], 0], stale[1:])
    assert walk.outside.tolist() == [0.0, 1.0, 1.0]
    assert chain.states_of(slots).tolist() == [7, 8, 9]
    again = chain.walk(second, slots, draws=(torch.full((3, 1), -1), never))
    assert again.age.tolist() == [1.0, 2.0, 2.0]


def run_small_batches(loss: EMC2, z1: Tensor, z2: Tensor, steps: int, **options: object) -> list[float]:
    outside = []
    for step in range(steps):
        ids = torch.randperm(len(z1), generator=torch.Generator().manual_seed(step))[:4]
        loss(z1[ids], z2[ids], ids=ids, **options)
        outside.append(loss.last["outside"].item())
    return outside


def test_states_outside_the_batch_are_counted_reported_or_kept_by_a_bank_or_a_callback() -> None:
    z1, z2 = views(40)
    both = torch.stack([z1, z2])
    alone = run_small_batches(EMC2(40, 0.1), z1, z2, 60)
    with_bank = run_small_batches(EMC2(40, 0.1, remember=Bank(40, 6)), z1, z2, 60)
    encoded: list[Tensor] = []

    def encode(ids: Tensor, which: Tensor) -> Tensor:
        encoded.append(ids)
        return both[which, ids]

    with_callback = run_small_batches(EMC2(40, 0.1), z1, z2, 60, encode=encode)
    assert sum(alone[30:]) / 30 > 0.1
    with hn.core.scoring.checks():
        run_small_batches(EMC2(40, 0.1, remember=Bank(40, 6)), z1, z2, 10)
        run_small_batches(EMC2(40, 0.1), z1, z2, 10, encode=encode)
    assert max(with_bank) == max(with_callback) == 0.0
    assert len(encoded) > 10


def test_callback_gives_a_gradient_to_the_state_and_the_bank_to_the_anchor_only() -> None:
    z1, z2 = views(6)
    rows = torch.tensor([0, 1])
    far = 50.0 * (z1[0] + z1[1])  # far more likely than anything in the batch: the chains stay there
    table = torch.cat([z2[:5], far[None]]).requires_grad_()
    bank = Bank(6, 6, normalize=False)
    bank.push(Keys(table, torch.arange(6)))
    for loss, options in (
        (EMC2(6, 0.1, views="cross"), {"encode": lambda ids, views: table[ids]}),
        (EMC2(6, 0.1, views="cross", remember=bank), {}),
    ):
        loss.chain.state.fill_(5)
        anchors, table.grad = z1[rows].clone().requires_grad_(), None
        loss(anchors, z2[rows], ids=rows, **options).backward()
        assert loss.last["outside"] == 0.0
        torch.testing.assert_close(anchors.grad, (far - z2[rows]) / 0.1 / 2)
        if options:
            expected = torch.zeros_like(table)
            expected[5] = (z1[0] + z1[1]) / 0.1 / 2
            torch.testing.assert_close(table.grad, expected)


def test_all_visits_outside_still_pull_the_positive() -> None:
    z1, z2 = views(6)
    rows = torch.tensor([0, 1])
    loss = EMC2(6, 0.1, burn_in=0.0, num_steps=2)
    loss.chain.state.fill_(5)
    loss.chain.log_score.fill_(1e6)  # nothing in the batch is accepted
    anchors = z1[rows].clone().requires_grad_()
    value = loss(anchors, z2[rows], ids=rows)
    value.backward()
    assert loss.last["outside"] == 1.0
    torch.testing.assert_close(value, -(anchors * z2[rows]).sum(1).mean() / 0.1)
    torch.testing.assert_close(anchors.grad, -z2[rows] / 0.1 / 2)


def test_own_id_is_never_proposed_nor_visited() -> None:
    z1, z2 = views(5)
    ids = torch.tensor([0, 1, 1, 2, 3])  # an instance twice in the batch
    loss = EMC2(4, 0.1)
    for _ in range(20):
        loss(z1, z2, ids=ids)
        states = loss.chain.state.view(4, 2)
        assert (states != torch.arange(4)[:, None]).all()


def test_two_encoders() -> None:
    z1, z2 = views(8)
    loss = EMC2(8, 0.1, views="cross")
    assert torch.isfinite(loss(z1, z2, ids=torch.arange(8)))
    assert len(loss.chain.state) == 8
    assert loss.last["acceptance"] > 0


def test_short_last_batch_and_single_item() -> None:
    z1, z2 = views(8)
    loss = papers.emc2(8)
    loss(z1, z2, ids=torch.arange(8))
    assert torch.isfinite(loss(z1[:3], z2[:3], ids=torch.tensor([5, 6, 7])))
    value = loss(z1[:1], z2[:1], ids=torch.tensor([2]))
    assert torch.isfinite(value)
    assert loss.last["outside"] == 1.0  # nobody in the batch to move to


def test_twins_in_a_batch_walk_by_themselves_and_the_last_is_stored() -> None:
    scores = hn.score(
        Keys(torch.ones(2, 2), torch.tensor([0, 0])), torch.ones(2, 2), Keys(torch.eye(2), torch.tensor([1, 2])), 1.0
    )
    chain = Chain(3)
    always = torch.full((2, 1), -1e3, dtype=torch.float64)
    chain.walk(scores, chain.slots(torch.tensor([0, 0])), draws=(torch.tensor([[0], [1]]), always))
    assert chain.state.tolist() == [2, -1, -1]


def test_low_temperature_needs_no_exponential() -> None:
    """Their scores e^(s / temperature) overflow float32 below temperature 0.0113."""
    z1, z2 = (z.float() for z in views(8))
    loss = papers.emc2(8, temperature=0.005)
    for _ in range(5):
        assert torch.isfinite(loss(z1, z2, ids=torch.arange(8)))
    assert torch.isfinite(loss.chain.log_score).all()  # of both views of each state


def test_a_broken_batch_does_not_stick() -> None:
    z1, z2 = views(6)
    loss = papers.emc2(6)
    assert loss(z1 * float("nan"), z2, ids=torch.arange(6)).isnan()
    for _ in range(3):
        loss(z1, z2, ids=torch.arange(6))
    assert torch.isfinite(loss.chain.log_score).all()


def test_eval_mode_remembers_nothing() -> None:
    z1, z2 = views(6)
    loss = EMC2(6, remember=Bank(6, 6)).eval()
    loss(z1, z2, ids=torch.arange(6))
    assert (loss.chain.state == -1).all()
    assert int(loss.chain.step) == 0
    assert loss.remember is not None
    assert len(loss.remember) == 0
