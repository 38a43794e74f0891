"""A paper is defined once: what a recipe trains is what the expression computes."""

import inspect

import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn
from hardneg import papers
from hardneg.core.schedules import linear
from hardneg.training.options import RECIPES

Z1, Z2, QUEUE = (
    normalize(torch.randn(n, 6, generator=torch.Generator().manual_seed(n), dtype=torch.float64), dim=-1)
    for n in (8, 8, 30)
)
Z2 = normalize(Z2 + 0.3 * torch.ones(6, dtype=torch.float64), dim=-1)
LABELS = torch.arange(8) % 3


@pytest.mark.parametrize("name", papers.registered())
def test_options_give_the_same_loss(name):
    paper = papers.registered()[name]
    options = paper.options()
    recipe_only = {key: options.pop(key) for key in dict(paper.more)}
    assert recipe_only == paper.more
    moco = "cross" if recipe_only.get("version") == "v3" else "pool"
    views = {"simclr": "two", "supervised": "two", "graphcl": "cross", "moco": moco}[paper.recipe]
    positives = "label" if paper.recipe == "supervised" else "view"
    loss = hn.ContrastiveLoss(options.pop("negatives", "Uniform()"), views=views, positives=positives, **options)
    pool = {"pool": QUEUE} if views == "pool" else {}
    labels = {"labels": LABELS} if positives == "label" else {}
    expected = papers.registered()[name].make()(Z1, Z2, **pool, **labels)
    scale = 2 * 0.2 if name == "moco_v3" else 1.0
    torch.testing.assert_close(scale * loss(Z1, Z2, **pool, **labels), expected)
    default = inspect.signature(paper.make).parameters["temperature"].default
    assert options["temperature"] == (RECIPES[paper.recipe]().temperature if default is None else default)


def test_arguments_and_schedules_are_in_the_options():
    assert papers.registered()["hcl"].options(0.2, beta=linear(1.0, 0.0)) == {
        "temperature": 0.2,
        "tau_plus": 0.1,
        "negatives": "Tilt(linear(1.0, 0.0))",
    }
    assert papers.registered()["moco_v3"].options()["version"] == "v3"
    assert papers.registered()["rince"].options(q=0.1)["objective"] == "rince(q=0.1)"
    assert papers.registered()["mochi"].options(num_hardest=8)["generate"] == "mochi(num_hardest=8)"
    assert papers.registered()["synco"].options(num_hardest=8)["generate"] == "synco(num_hardest=8)"


def test_isogclr_learns_a_temperature_for_each_instance():
    loss = papers.isogclr(num_instances=20, start=0.4, rho=0.3)
    ids = torch.arange(8) + 5
    value = loss(Z1, Z2, ids=ids)
    z = torch.cat([Z1, Z2])
    total = 0.0
    for i in range(16):
        negatives = torch.stack([z[i] @ z[j] for j in range(16) if j % 8 != i % 8])
        tau = loss.temperatures[5 + i % 8].double()
        total = total + tau * ((negatives - z[i] @ z[(i + 8) % 16]) / tau).exp().mean().log() + 0.3 * tau
    torch.testing.assert_close(value, total / 16)
    mine, theirs = (torch.autograd.grad(each, loss.temperatures)[0] for each in (value, total / 16))
    torch.testing.assert_close(mine, theirs)
    assert (mine[:5] == 0).all()
    assert (mine[5:13] != 0).all()
