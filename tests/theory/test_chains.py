"""The bounds of EMC2 (Yau et al. 2024) against the transition matrices of small chains and loops over its equations."""

import math

import pytest
import torch

import hardneg as hn
from hardneg.core.errors import ArgumentError
from hardneg.theory import EMC2Bounds, contraction, transition_matrix


def row(n, temperature, seed=0, c=1.0):
    generator = torch.Generator().manual_seed(seed)
    return c**2 * (2.0 * torch.rand(n, generator=generator, dtype=torch.float64) - 1.0) / temperature


def test_transitions_are_those_of_equation_28():
    scores, n = row(6, 0.5), 6
    found = transition_matrix(scores)
    for i in range(n):
        for j in range(n):
            accept = [min(1.0, math.exp(scores[k] - scores[i])) for k in range(n)]
            expected = accept[j] / n if i != j else 1 / n + sum(1 - accept[k] for k in range(n) if k != i) / n
            assert found[i, j].item() == pytest.approx(expected, abs=1e-14)
    law = torch.softmax(scores, 0)
    torch.testing.assert_close(law @ found, law)


@pytest.mark.parametrize("seed", range(5))
def test_the_contraction_is_the_second_eigenvalue_and_bounds_the_distance(seed):
    scores = row(8, 0.3, seed)
    matrix, law = transition_matrix(scores), torch.softmax(scores, 0)
    eigenvalues = torch.linalg.eigvals(matrix).real.sort(descending=True).values
    assert contraction(scores) == pytest.approx(eigenvalues[1].item(), abs=1e-9)
    power = torch.eye(8, dtype=torch.float64)
    for steps in range(1, 20):
        power = power @ matrix
        distance = (power - law).abs().sum(1).max() / 2
        assert distance <= contraction(scores, steps) + 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_lemma_3_2_bounds_the_joint_law_of_two_chains(seed):
    """Two chains, of which one advances by R steps in a training step: every state's probability, from every start."""
    n, steps, temperature = 3, 2, 0.7
    bounds = EMC2Bounds(2, n, temperature, batch_size=1, num_steps=steps)
    rows = [row(n, temperature, seed), row(n, temperature, seed + 10)]
    moves = [torch.linalg.matrix_power(transition_matrix(each), steps) for each in rows]
    eye = torch.eye(n, dtype=torch.float64)
    joint = 0.5 * torch.kron(moves[0], eye) + 0.5 * torch.kron(eye, moves[1])
    law = torch.kron(torch.softmax(rows[0], 0), torch.softmax(rows[1], 0))
    power = torch.eye(n * n, dtype=torch.float64)
    for t in range(1, 60):
        power = power @ joint
        assert (power - law).abs().max() <= bounds.mixing_rate**t
    assert bounds.mixing_rate == pytest.approx(1 - steps / (2 * 2 * n * math.exp(2 / temperature)))


@pytest.mark.parametrize("seed", range(5))
def test_lemma_3_4_bounds_the_change_of_the_transitions(seed):
    n, temperature, moved = 5, 0.5, 0.01
    for steps in (1, 3):
        bounds = EMC2Bounds(1, n, temperature, 1, steps)
        before = row(n, temperature, seed)
        change = moved * (2 * torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1)
        after = (before * temperature + change).clamp(-1, 1) / temperature
        ours, theirs = (torch.linalg.matrix_power(transition_matrix(each), steps) for each in (before, after))
        assert (ours - theirs).abs().max() <= bounds.kernel_lipschitz(1.0) * moved
    assert bounds.kernel_lipschitz(2.0) == pytest.approx(2**4 * 2.0 * math.exp(4.0) * 2.0)


def equation_58(m, m_neg, beta, batch, steps, lipschitz, smooth, sigma, rate, updates):
    """The right-hand side of eq. 58, from the constants of eq. 53 and 54, in the order of the paper."""
    rho = 1 - batch * steps / (2 * m * m_neg * math.exp(2 * beta))
    half = batch * steps / m / m_neg * math.exp(-2 * beta) / 2
    l0 = 2 * beta * sigma * rho / half
    l1 = 6 * 2 ** (steps + 1) * batch * math.exp(2 * beta) * beta**2 * sigma * lipschitz / half**2
    l1 += 2 * beta * smooth / half
    c_h = l1 * (1 + sigma) + l0 * (beta * smooth + 1)
    noise = 8 * beta**3 * smooth * sigma**2 + 2 * l1 * beta * sigma + 2 * beta * smooth * l0 * (1 + 2 * beta * sigma)
    return (4 * beta + 3 * l0 + noise * rate**2 * updates) / (rate * updates / 2), 1 / (2 * (2 * beta * smooth + c_h))


def test_theorem_3_7_is_equation_58_of_its_proof():
    numbers = {"similarity_lipschitz": 0.1, "gradient_lipschitz": 0.2, "deviation": 0.3}
    limit = equation_58(20, 19, 2.0, 4, 3, 0.1, 0.2, 0.3, 1.0, 1)[1]
    bounds = EMC2Bounds(20, 19, 0.5, 4, 3)
    expected = equation_58(20, 19, 2.0, 4, 3, 0.1, 0.2, 0.3, limit / 2, 1000)[0]
    assert bounds.gradient_norm(limit / 2, 1000, **numbers) == pytest.approx(expected, rel=1e-10)
    with pytest.raises(ArgumentError) as raised:
        bounds.gradient_norm(limit * 1.01, 1000, **numbers)
    assert raised.value.who == "EMC2Bounds"


def test_a_visited_softmax_is_reached_at_the_contraction():
    """The chain of the library itself: after many steps its visits are those of the stationary law."""
    scores = row(6, 0.5)
    law = torch.softmax(scores, 0)
    assert contraction(scores, 200) < 1e-6
    start = torch.zeros(6, dtype=torch.float64)
    start[0] = 1.0
    after = start @ torch.linalg.matrix_power(transition_matrix(scores), 200)
    torch.testing.assert_close(after, law, rtol=0.0, atol=1e-6)


def test_wrong_input():
    for wrong in (
        {"batch_size": 101},
        {"num_chains": 0},
        {"temperature": 0.0},
        {"num_steps": 10**9, "temperature": 10.0},
    ):
        with pytest.raises(ArgumentError):
            EMC2Bounds(
                **{
                    "num_chains": 100,
                    "num_candidates": 99,
                    "temperature": 1.0,
                    "batch_size": 9,
                    "num_steps": 9,
                    **wrong,
                }
            )
    cold = EMC2Bounds(100, 99, 0.001, 9, 9)
    assert cold.kernel_lipschitz(1.0) == math.inf
    with pytest.raises(ArgumentError):
        cold.gradient_norm(0.1, 10, similarity_lipschitz=1.0, gradient_lipschitz=1.0, deviation=1.0)
    with pytest.raises(ArgumentError):
        hn.theory.transition_matrix(torch.zeros(2, 2))
    with pytest.raises(ArgumentError):
        hn.theory.contraction([0.0])
