"""The exact loss over a data set against loops, and bias and variance against all batches of a tiny data set."""

import itertools

import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn
from hardneg import papers
from hardneg.core.errors import ArgumentError, HardnegWarning, forget_warnings


def unit_views(n, d, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(normalize(torch.randn(n, d, generator=generator, dtype=dtype), dim=-1) for _ in range(2))


def loop_loss(z1, z2, temperature, views, ids, positive):
    """Eq. 1 of Yau et al. 2024 over the whole data set, with the positive in the denominator or not."""
    n = len(z1)
    sides = [(z1, z2), (z2, z1)] if views == "two" else [(z1, z2)]
    losses = []
    for own, other in sides:
        for i in range(n):
            a = (own[i] @ other[i]) / temperature
            others = [j for j in range(n) if ids[j] != ids[i]]
            pool = [other, own] if views == "two" else [other]
            terms = [((own[i] @ view[j]) / temperature).exp() for view in pool for j in others]
            terms += [a.exp()] if positive == "own" else []
            losses.append(torch.stack(terms).sum().log() - a if others else a * 0.0)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("positive", ["own", "none"])
@pytest.mark.parametrize("views", ["two", "cross"])
@pytest.mark.parametrize("repeated", [False, True])
def test_the_global_loss_is_that_of_a_loop(views, positive, repeated):
    z1, z2 = (z.requires_grad_() for z in unit_views(11, 5))
    ids = torch.arange(11) // (2 if repeated else 1)
    options = {"positives_in_denominator": positive}
    ours = hn.global_loss(z1, z2, 0.3, views, ids if repeated else None, **options)
    expected = loop_loss(z1, z2, 0.3, views, ids.tolist(), positive)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0.0)
    grads = [torch.autograd.grad(loss, [z1, z2]) for loss in (ours, expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-14)


def test_the_global_loss_holds_no_matrix(monkeypatch):
    """No operation allocates half of the 6,000 x 6,000 scores."""
    z1, z2 = unit_views(3000, 8, dtype=torch.float32)
    largest = 0
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        hn.global_loss(z1.requires_grad_(), z2, 0.2).backward()
    for event in profile.function_events:
        largest = max(largest, event.self_cpu_memory_usage)
    assert largest < 6000 * 6000 * 4 / 2
    assert z1.grad.isfinite().all()


def all_batches(loss, z1, z2, size):
    """Gradients by the embeddings of every batch of this size."""
    table = torch.stack([z1, z2]).requires_grad_()
    found = []
    for items in itertools.combinations(range(len(z1)), size):
        ids = torch.tensor(items)
        first, second = normalize(table[:, ids], dim=-1)
        found.append(torch.autograd.grad(loss(first, second, ids=ids), table)[0])
    return torch.stack(found)


@pytest.mark.parametrize("views", ["two", "cross"])
def test_errors_tend_to_those_of_all_batches(views):
    z1, z2 = unit_views(6, 4)
    loss = hn.ContrastiveLoss(temperature=0.3, views=views)
    table = torch.stack([z1, z2]).requires_grad_()
    unit = normalize(table, dim=-1)
    exact = torch.autograd.grad(loop_loss(*unit, 0.3, views, range(6), "own"), table)[0]
    gradients = all_batches(loss, z1, z2, 3)
    mean, norm = gradients.mean(0), exact.norm()
    found = hn.gradient_error(loss, z1, z2, batch_size=3, temperature=0.3, views=views, num_batches=4000)
    assert found.bias == pytest.approx(((mean - exact).norm() / norm).item(), abs=0.02)
    variance = (gradients - mean).square().sum((1, 2, 3)).mean() / norm**2
    assert found.variance == pytest.approx(variance.item(), rel=0.05)
    cosine = (mean * exact).sum() / mean.norm() / norm
    assert found.cosine == pytest.approx(cosine.item(), abs=0.01)
    single = torch.nn.functional.cosine_similarity(gradients.flatten(1), exact.flatten()[None]).mean()
    assert found.batch_cosine == pytest.approx(single.item(), abs=0.02)
    assert (found.batch_size, found.num_batches) == (3, 4000)


def test_the_whole_data_set_has_no_error():
    z1, z2 = unit_views(12, 4)
    found = hn.gradient_error(papers.simclr(0.2), z1, z2, batch_size=12, temperature=0.2, num_batches=3)
    assert found.bias < 1e-6
    assert found.variance < 1e-12
    assert found.cosine == pytest.approx(1.0)


def test_emc2_is_closer_than_simclr_and_needs_its_states():
    z1, z2 = unit_views(32, 4)
    z2 = normalize(z1 + 0.3 * z2, dim=-1)
    options = {"batch_size": 4, "temperature": 0.2, "num_batches": 1000}
    simclr = hn.gradient_error(papers.simclr(0.2), z1, z2, **options)
    algorithm_1 = hn.gradient_error(hn.EMC2(32, 0.2, proposals="data set"), z1, z2, encode=True, warm_up=100, **options)
    forgetful = hn.gradient_error(hn.EMC2(32, 0.2), z1, z2, warm_up=100, **options)
    assert algorithm_1.cosine > max(0.98, forgetful.cosine)
    assert algorithm_1.bias < 0.5 * simclr.bias
    assert algorithm_1.variance > simclr.variance


def test_a_pool_is_filled_and_used():
    z1, z2 = unit_views(40, 4)
    queue = hn.Queue(20, 4)
    found = hn.gradient_error(
        papers.moco(0.2), z1, z2, batch_size=5, temperature=0.2, views="cross", pool=queue, num_batches=300
    )
    assert len(queue.keys()) == 20
    assert 0.2 < found.cosine <= 1.0


def test_a_function_without_ids_is_called_without_them():
    z1, z2 = unit_views(10, 4)
    found = hn.gradient_error(papers.simcse(0.2), z1, z2, batch_size=10, temperature=0.2, views="cross", num_batches=2)
    assert found.cosine == pytest.approx(1.0)


def test_wrong_input():
    z1, z2 = unit_views(6, 4)
    for change in ({"batch_size": 7}, {"batch_size": 1}, {"num_batches": 1}, {"views": "three"}):
        with pytest.raises(ArgumentError):
            hn.gradient_error(papers.simclr(), z1, z2, **{"batch_size": 3, "temperature": 0.5, **change})
    with pytest.raises(ArgumentError):
        hn.gradient_error("simclr", z1, z2, batch_size=3, temperature=0.5)
    with pytest.raises(ArgumentError):
        hn.global_loss(z1, z2[:3], 0.5)
    with pytest.raises(ArgumentError):
        hn.global_loss(z1, z2, 0.0)


def test_one_item_has_no_loss():
    z1, z2 = unit_views(1, 4)
    for views in ("two", "cross"):
        with pytest.warns(HardnegWarning):
            assert hn.global_loss(z1, z2, 0.5, views).item() == 0.0
        forget_warnings()
