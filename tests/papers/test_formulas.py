"""ADNCE, RINCE, MoCHi, SynCo and iSogCLR against loops over Python floats, value and gradient.

Each formula is written as the loss of one anchor from plain similarities, with its derivatives by hand: nothing here is
shared with the library, and no automatic differentiation either. Sources: eq. 12 of Wu et al. 2023 with the authors'
``weight.detach()``; the authors' pseudo-code of Chuang et al. 2022; sec. 3 of Kalantidis et al. 2020; sec. 3 of
Giakoumoglou and Stathaki 2024; eq. 4 of Qiu et al. 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardneg import ContrastiveLoss, papers
from hardneg.core.errors import ArgumentError
from hardneg.core.generators import SynCo
from hardneg.losses.individual import IndividualTemperatures
from support.errors import raises

B, DIM = 7, 5


class OfAnchor(NamedTuple):
    """The loss of one anchor and its derivatives by its similarities, and by its temperature where that is learnt."""

    loss: float
    by_positive: float
    by_negatives: list[float]
    by_temperature: float = 0.0


Formula = Callable[[float, list[float]], OfAnchor]


def adnce(temperature: float, mu: float, sigma: float) -> Formula:
    def of(positive: float, negatives: list[float]) -> OfAnchor:
        density = [math.exp(-0.5 * ((s - mu) / sigma) ** 2) for s in negatives]
        weights = [w * len(density) / sum(density) for w in density]  # detached: constants in the derivatives below
        own = math.exp(positive / temperature)
        terms = [w * math.exp(s / temperature) for w, s in zip(weights, negatives, strict=True)]
        total = own + sum(terms)
        return OfAnchor(
            -math.log(own / total),
            (own / total - 1.0) / temperature,
            [term / total / temperature for term in terms],
        )

    return of


def rince(temperature: float, q: float, lam: float) -> Formula:
    def of(positive: float, negatives: list[float]) -> OfAnchor:
        own, terms = math.exp(positive / temperature), [math.exp(s / temperature) for s in negatives]
        total = own + sum(terms)
        slope = lam**q * total ** (q - 1.0)
        return OfAnchor(
            -(own**q) / q + (lam * total) ** q / q,
            (slope - own ** (q - 1.0)) * own / temperature,
            [slope * term / temperature for term in terms],
        )

    return of


def softmax(temperature: float) -> Formula:
    def of(positive: float, negatives: list[float]) -> OfAnchor:
        terms = [math.exp(s / temperature) for s in (positive, *negatives)]
        shares = [term / sum(terms) / temperature for term in terms]
        return OfAnchor(-math.log(terms[0] / sum(terms)), shares[0] - 1.0 / temperature, shares[1:])

    return of


def isogclr(temperature: float, rho: float) -> Formula:
    def of(positive: float, negatives: list[float]) -> OfAnchor:
        gaps = [(s - positive) / temperature for s in negatives]
        total = sum(math.exp(gap) for gap in gaps)
        shares = [math.exp(gap) / total for gap in gaps]
        robust = math.log(total / len(gaps)) + rho
        moved = sum(share * gap for share, gap in zip(shares, gaps, strict=True))
        return OfAnchor(temperature * robust, -1.0, shares, robust - moved)

    return of


@pytest.fixture
def z() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(4)
    noise = torch.randn(2, B, DIM, generator=random, dtype=torch.float64)
    first, second = normalize(noise[0], dim=-1), normalize(noise[0] + noise[1], dim=-1)
    return first.requires_grad_(), second.requires_grad_()


def expected_of_two_views(z1: Tensor, z2: Tensor, formulas: list[Formula]) -> tuple[float, Tensor, list[float]]:
    """Mean over 2b anchors, each against the 2b - 2 rows of other instances: value, gradient, sums by temperature."""
    rows = torch.cat([z1, z2]).tolist()
    value, gradient, by_temperature = 0.0, [[0.0] * DIM for _ in rows], [0.0] * B
    for i in range(2 * B):
        own = (i + B) % (2 * B)
        others = [j for j in range(2 * B) if j % B != i % B]
        found = formulas[i % B](dot(rows[i], rows[own]), [dot(rows[i], rows[j]) for j in others])
        value += found.loss / (2 * B)
        by_temperature[i % B] += found.by_temperature / (2 * B)
        for j, slope in zip([own, *others], [found.by_positive, *found.by_negatives], strict=True):
            for k in range(DIM):
                gradient[i][k] += slope * rows[j][k] / (2 * B)
                gradient[j][k] += slope * rows[i][k] / (2 * B)
    return value, torch.tensor(gradient, dtype=torch.float64), by_temperature


def dot(x: list[float], y: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def assert_same(loss: Tensor, z: tuple[Tensor, Tensor], value: float, gradient: Tensor) -> None:
    assert loss.item() == pytest.approx(value, rel=1e-12)
    found = torch.autograd.grad(loss, z, retain_graph=True)
    torch.testing.assert_close(torch.cat(found), gradient, rtol=1e-11, atol=1e-13)


OF_TWO_VIEWS = {
    "adnce": [(), (0.1, 0.4, 0.3), (0.2, -0.2, 0.05)],
    "rince": [(), (0.1, 0.1, 0.025), (0.07, 1.0, 0.5)],
}
DEFAULTS = {"adnce": (0.5, 0.7, 1.0), "rince": (0.5, 0.5, 0.01)}


@pytest.mark.parametrize("impl", ["dense", "streamed"])
@pytest.mark.parametrize(("name", "values"), [(name, each) for name, rows in OF_TWO_VIEWS.items() for each in rows])
def test_losses_of_two_views(name: str, values: tuple[float, ...], impl: str, z: tuple[Tensor, Tensor]) -> None:
    loss = getattr(papers, name)(*values)
    loss.impl = impl
    formula = {"adnce": adnce, "rince": rince}[name](*(values or DEFAULTS[name]))
    assert_same(loss(*z), z, *expected_of_two_views(*z, [formula] * B)[:2])


def test_the_options_of_adnce_detach_its_weights() -> None:
    """A recipe trains what the expression computes."""
    assert papers.registered()["adnce"].options()["negatives"] == "Gaussian(detach=True)"


def test_isogclr(z: tuple[Tensor, Tensor]) -> None:
    """Temperatures of their own, by id; those outside [0.05, 0.7] are used at the limit and get no gradient."""
    loss = papers.isogclr(num_instances=30, start=0.4, rho=0.2).double()
    temperatures = [0.06, 0.11, 0.2, 0.35, 0.5, 0.69, 0.9]
    ids = torch.tensor([3, 9, 1, 20, 29, 0, 14])
    with torch.no_grad():
        loss.temperatures[ids] = torch.tensor(temperatures, dtype=torch.float64)
    formulas = [isogclr(min(each, 0.7), rho=0.2) for each in temperatures]
    value, gradient, by_temperature = expected_of_two_views(*z, formulas)
    found = loss(*z, ids=ids)
    assert_same(found, z, value, gradient)
    wanted = torch.zeros(30, dtype=torch.float64)
    wanted[ids[:-1]] = torch.tensor(by_temperature[:-1], dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(found, loss.temperatures)[0], wanted, rtol=1e-11, atol=1e-13)


def test_isogclr_weighs_by_running_normalisers(z: tuple[Tensor, Tensor]) -> None:
    """Qiu et al. 2023, Alg. 1: u <- (1 - gamma) u + gamma g, p_j = e^(h_j / tau) / (n u), tau: log u + rho - p h."""
    loss, rho, gamma = papers.isogclr(num_instances=30, start=0.4, rho=0.2, gamma=0.3).double(), 0.2, 0.3
    ids, tau = torch.tensor([3, 9, 1, 20, 29, 0, 14]), [0.06, 0.11, 0.2, 0.35, 0.5, 0.69, 0.4]
    with torch.no_grad():
        loss.temperatures[ids] = torch.tensor(tau, dtype=torch.float64)
    before = normalize(torch.randn(2 * B, DIM, generator=torch.Generator().manual_seed(8), dtype=torch.float64), dim=-1)
    loss(*before.chunk(2), ids=ids)

    def of_anchor(views: Tensor, i: int) -> tuple[Tensor, float]:
        own = views[i] @ views[(i + B) % (2 * B)]
        h = torch.stack([views[i] @ views[j] - own for j in range(2 * B) if j % B != i % B])
        return h, sum(math.exp(each / tau[i % B]) for each in h.tolist()) / len(h)

    past = [(of_anchor(before, i)[1] + of_anchor(before, i + B)[1]) / 2.0 for i in range(B)]
    views, value = torch.cat(list(z)), torch.zeros((), dtype=torch.float64)
    real, by_temperature = 0.0, torch.zeros(30, dtype=torch.float64)
    for i in range(2 * B):
        h, g = of_anchor(views, i)
        u = (1.0 - gamma) * past[i % B] + gamma * g
        p = [math.exp(each / tau[i % B]) / (len(h) * u) for each in h.tolist()]
        value = value + torch.tensor(p, dtype=torch.float64) @ h / (2 * B)
        slope = math.log(u) + rho - sum(w * each / tau[i % B] for w, each in zip(p, h.tolist(), strict=True))
        by_temperature[ids[i % B]] += slope / (2 * B)
        real += tau[i % B] * (math.log(g) + rho) / (2 * B)
    gradients = torch.autograd.grad(loss(*z, ids=ids), [*z, loss.temperatures])
    for one, other in zip(gradients, [*torch.autograd.grad(value, z), by_temperature], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert loss.last["real_loss"].item() == pytest.approx(real, rel=1e-12)


def test_isogclr_of_the_batch_alone_is_its_objective(z: tuple[Tensor, Tensor]) -> None:
    """With gamma=1 each call has the gradient of the loss of the batch, also the second one; other objectives raise."""
    ids = torch.arange(B)
    running, plain = (papers.isogclr(30, start=0.3, gamma=gamma).double() for gamma in (0.999999999, 1.0))
    running(*(one.flip(0) for one in z), ids=ids)
    found, expected = (torch.autograd.grad(one(*z, ids=ids), [*z, one.temperatures]) for one in (running, plain))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    assert plain.normalisers is None
    with raises(ArgumentError, who="IndividualTemperatures", got="0.5"):
        IndividualTemperatures(ContrastiveLoss(), 30, gamma=0.5)


@pytest.mark.parametrize(
    ("loss", "number"),
    [(papers.mochi(0.1, num_hardest=6, num_mixed=4, num_with_anchor=3), 7), (papers.synco(0.1), 960)],
)
def test_synthetic_negatives(loss: ContrastiveLoss, number: int, z: tuple[Tensor, Tensor]) -> None:
    """A softmax over the positive, the queue and the synthetic negatives, which are constants, as are the keys."""
    queue = normalize(torch.randn(20, DIM, generator=torch.Generator().manual_seed(5), dtype=torch.float64), dim=-1)
    made = loss.pairing(*z, pool=queue).candidates[-1].vectors
    assert made.shape == (B, number, DIM)
    value, gradient = 0.0, torch.zeros(2 * B, DIM, dtype=torch.float64)
    for i, (q, k) in enumerate(zip(*(each.tolist() for each in z), strict=True)):
        candidates = queue.tolist() + made[i].tolist()
        found = softmax(0.1)(dot(q, k), [dot(q, candidate) for candidate in candidates])
        value += found.loss / B
        for slope, other in zip([found.by_positive, *found.by_negatives], [k, *candidates], strict=True):
            gradient[i] += slope * torch.tensor(other, dtype=torch.float64) / B
    found_loss = loss(*z, pool=queue)
    assert found_loss.item() == pytest.approx(value, rel=1e-12)
    of_queries, of_keys = torch.autograd.grad(found_loss, z, allow_unused=True)
    torch.testing.assert_close(of_queries, gradient[:B], rtol=1e-11, atol=1e-13)
    assert of_keys is None or not of_keys.any()


def test_mixtures_are_of_the_hardest_negatives(z: tuple[Tensor, Tensor]) -> None:
    """Sec. 3.2 and 3.3: a n_i + (1 - a) n_j, and b q + (1 - b) n_j with b < 0.5, of unit norm, n among the hardest."""
    queue = normalize(torch.randn(20, DIM, generator=torch.Generator().manual_seed(5), dtype=torch.float64), dim=-1)
    made = papers.mochi(0.1, num_hardest=6, num_mixed=4, num_with_anchor=3).pairing(*z, pool=queue).candidates[-1]
    for q, mixtures in zip(z[0].detach(), made.vectors, strict=True):
        hardest = queue[(queue @ q).argsort(descending=True)[:6]]
        for place, h in enumerate(mixtures):
            assert h.norm().item() == pytest.approx(1.0)
            second = hardest if place < 4 else q[None]
            assert any(mixed(h, n, other, most=1.0 if place < 4 else 0.5) for n in hardest for other in second)


def test_the_six_kinds_of_synco(z: tuple[Tensor, Tensor]) -> None:
    """Each synthetic negative is what the formula of its kind makes of one or two of the hardest ones."""
    queue = normalize(torch.randn(20, DIM, generator=torch.Generator().manual_seed(5), dtype=torch.float64), dim=-1)
    generate = SynCo(6, 4, 4, 4, 4, 4, 4, sigma=0.02, delta=0.3, eta=0.2)
    pairing = ContrastiveLoss(generate=generate, views="pool").pairing(*z, pool=queue)
    for q, made in zip(pairing.anchors.vectors.detach(), pairing.candidates[-1].vectors, strict=True):
        hardest = queue[(queue @ q).argsort(descending=True)[:6]]
        torch.testing.assert_close(made.norm(dim=1), torch.ones(24, dtype=torch.float64))
        between, beyond, both, noisy, perturbed, adversarial = made.split(4)
        assert all(any(mixed(h, n, q, most=0.5) for n in hardest) for h in between)
        # q + b (n - q) has the share 1 - b of q, from -0.5 to 0, and b of n.
        shares = [shares_of(h, n, q) for h in beyond for n in hardest]
        assert sum(left < 1e-9 and -0.5 - 1e-9 <= of_q <= 1e-9 for of_q, left in shares) == 4
        assert all(any(mixed(h, n, m, most=1.0) for n in hardest for m in hardest) for h in both)
        assert all(0.0 < min(float((h - n).norm()) for n in hardest) < 0.02 * 4 * DIM**0.5 for h in noisy)
        for kind, moved in ((perturbed, hardest + 0.3 * q), (adversarial, hardest + 0.2 * q.sign())):
            expected = normalize(moved, dim=-1)
            assert all(min(float((h - other).norm()) for other in expected) < 1e-12 for h in kind)


def shares_of(h: Tensor, n: Tensor, q: Tensor) -> tuple[float, float]:
    """The share of q in h up to its norm, and what of h is neither n nor q."""
    both = torch.stack([n, q], dim=1)
    shares = torch.linalg.lstsq(both, h[:, None]).solution[:, 0]
    return float(shares[1] / shares.sum()), torch.dist(both @ shares, h).item()


def mixed(h: Tensor, n: Tensor, other: Tensor, most: float) -> bool:
    """Whether h is, up to its norm, a mixture of both in which ``other`` has a share of at most ``most``."""
    shares = torch.linalg.lstsq(torch.stack([n, other], dim=1), h[:, None]).solution[:, 0]
    inside = bool((shares > -1e-9).all()) and float(shares[1]) <= most * float(shares.sum()) + 1e-9
    return inside and torch.dist(torch.stack([n, other], dim=1) @ shares, h).item() < 1e-9
