"""The loss for open_clip against its ClipLoss: value and gradient, on one rank and on two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.integrations.open_clip import NegativesLoss
from support.libraries import library
from support.two_ranks import on_two_ranks

open_clip: Any = library("open_clip")


def features(rank: int = 0, rows: int = 7) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rank)
    image, text = (torch.randn(rows, 5, generator=random, dtype=torch.float64) for _ in range(2))
    return normalize(image, dim=1).requires_grad_(), normalize(image + text, dim=1).requires_grad_()


def value_and_gradient(loss: Any, rank: int = 0, **options: Any) -> tuple[Tensor, list[Tensor]]:
    image, text = features(rank)
    scale = torch.tensor(14.0, dtype=torch.float64, requires_grad=True)
    value = loss(image, text, scale, **options)
    (2 * value).backward()
    return value.detach(), [image.grad, text.grad, scale.grad]


def test_uniform_is_clip_loss() -> None:
    torch.testing.assert_close(value_and_gradient(NegativesLoss()), value_and_gradient(open_clip.ClipLoss()))


def test_a_bias_cancels_and_has_a_gradient() -> None:
    bias = torch.tensor(-3.0, dtype=torch.float64, requires_grad=True)
    theirs = value_and_gradient(open_clip.ClipLoss(), logit_bias=bias.detach())
    torch.testing.assert_close(value_and_gradient(NegativesLoss(), logit_bias=bias), theirs)
    assert bias.grad.item() == 0.0


def test_two_ranks_with_gather() -> None:
    """Per rank as local_loss with gather_with_grad; the mean over the ranks is the loss of the whole batch."""

    def work(rank: int) -> list[Any]:
        theirs = open_clip.ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=2)
        return [value_and_gradient(loss, rank) for loss in (NegativesLoss(), theirs, NegativesLoss(gather=False))]

    found = on_two_ranks(work)
    for ours, theirs, _ in found:
        torch.testing.assert_close(ours, theirs)
    whole = [torch.cat([features(rank)[side] for rank in range(2)]).detach() for side in range(2)]
    value = open_clip.ClipLoss()(*whole, torch.tensor(14.0, dtype=torch.float64))
    torch.testing.assert_close((found[0][0][0] + found[1][0][0]) / 2, value)
    alone = value_and_gradient(open_clip.ClipLoss(), 1)
    torch.testing.assert_close(found[1][2], alone)


def test_a_model_and_its_names() -> None:
    """The call of open_clip's training loop, with the outputs of one of its models."""
    config = {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 16, "layers": 1, "width": 64, "patch_size": 8},
        "text_cfg": {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1},
    }
    torch.manual_seed(0)
    model = open_clip.CLIP(**config, output_dict=True)
    out = model(torch.randn(5, 3, 16, 16), torch.randint(1, 50, (5, 8)))
    ours, theirs = (loss(**out, output_dict=True) for loss in (NegativesLoss(), open_clip.ClipLoss()))
    assert set(ours) == set(theirs) == {"contrastive_loss"}
    torch.testing.assert_close(ours, theirs)
    hard = NegativesLoss("Tilt(1.0)")(**out)
    hard.backward()
    assert hard.item() > theirs["contrastive_loss"].item()
    assert model.logit_scale.grad is not None


def test_equal_ids_are_no_negatives() -> None:
    image, text = features()
    ids = torch.tensor([0, 0, 1, 2, 3, 4, 5])
    total = torch.zeros((), dtype=torch.float64)
    for one, other in ((image, text), (text, image)):
        s = 14.0 * one @ other.T
        s = s.masked_fill((ids[:, None] == ids) & ~torch.eye(7, dtype=torch.bool), float("-inf"))
        total = total - s.log_softmax(1).diagonal().mean() / 2
    torch.testing.assert_close(NegativesLoss()(image, text, 14.0, ids=ids), total)


def test_schedules_reach_the_negatives() -> None:
    image, text = features()
    loss = NegativesLoss("Tilt(linear(1.0, 0.0))")
    loss.set_progress(1, 1)
    torch.testing.assert_close(loss(image, text, 14.0), NegativesLoss()(image, text, 14.0))
    assert isinstance(loss.loss, hn.ContrastiveLoss)
