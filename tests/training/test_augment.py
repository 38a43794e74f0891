"""Views of images: the same for the same (seed, epoch, id, view), whatever the batch; their random parameters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.training.augmentation.augment import (
    CIFAR,
    GREY,
    PRESETS,
    TINY,
    Augment,
    preset_for,
)
from hardneg.training.data.images import load
from support.augmented import PIXEL, draw_of, random_images
from support.errors import raises


class TestViews:
    @pytest.mark.parametrize("augment", [CIFAR, replace(CIFAR, blur_probability=0.5, order="fixed")])
    def test_depend_on_the_id_and_not_on_the_batch(self, augment: Augment) -> None:
        images, ids = random_images(12), torch.randperm(1000)[:12]
        whole = torch.stack(augment.views(images, ids, epoch=3, seed=7))
        order = torch.randperm(12)
        assert torch.equal(torch.stack(augment.views(images[order], ids[order], 3, 7)), whole[:, order])
        parts = [torch.stack(augment.views(images[i : i + 5], ids[i : i + 5], 3, 7)) for i in (0, 5, 10)]
        assert torch.equal(torch.cat(parts, dim=1), whole)

    @pytest.mark.parametrize("channels_last", [False, True])
    def test_are_made_in_blocks_with_the_same_bits(self, channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        images, ids = random_images(13), torch.arange(13)
        augment = replace(CIFAR, blur_probability=0.5, channels_last=channels_last)
        whole = augment.views(images, ids, 3, 7)
        monkeypatch.setattr("hardneg.training.augmentation.augment._BLOCK_PIXELS", 4 * images[0, 0].numel())
        for one, other in zip(augment.views(images, ids, 3, 7), whole, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()

    def test_change_with_view_epoch_and_seed(self) -> None:
        images, ids = random_images(6), torch.arange(6)
        first, second = CIFAR.views(images, ids, 0, 0)
        others = [second, CIFAR.views(images, ids, 1, 0)[0], CIFAR.views(images, ids, 0, 1)[0]]
        for other in others:
            assert ((first - other).abs().mean((1, 2, 3)) > 0.01).all()

    def test_dtype_and_layout(self) -> None:
        images, ids = random_images(4), torch.arange(4)
        plain = CIFAR.views(images, ids, 0, 0)[0]
        half = replace(CIFAR, dtype=torch.bfloat16, channels_last=True).views(images, ids, 0, 0)[0]
        assert half.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(half, plain.bfloat16())

    def test_plain_is_the_view_without_randomness(self) -> None:
        still = replace(
            CIFAR, crop_scale=(1, 1), crop_ratio=(1, 1), flip_probability=0, jitter_probability=0, grey_probability=0
        )
        images = random_images(4)
        first, second = still.views(images, torch.arange(4), 0, 0)
        torch.testing.assert_close(first, still.plain(images), atol=5 * PIXEL, rtol=0)
        torch.testing.assert_close(second, still.plain(images), atol=5 * PIXEL, rtol=0)
        assert still.plain(images)[0, 0, 0, 0].item() == pytest.approx((images[0, 0, 0, 0] / 255 - 0.4914) / 0.2470)

    def test_grey_images_keep_one_channel(self) -> None:
        images = random_images(4, c=1)
        assert GREY.views(images, torch.arange(4), 0, 0)[0].shape == (4, 1, 32, 32)

    def test_compiles_without_a_break_and_once_for_all_epochs(self) -> None:
        images, ids = random_images(6), torch.arange(6)
        graphs: list[object] = []

        def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
            graphs.append(graph)
            return graph.forward

        views = CIFAR.compiled(backend=counting)
        for epoch, seed in [(0, 0), (1, 0), (2, 5)]:
            torch.testing.assert_close(views(images, ids, epoch, seed), CIFAR.views(images, ids, epoch, seed))
        assert len(graphs) == 2

    def test_wrong_inputs_are_reported(self) -> None:
        with raises(ArgumentError, who="Augment", what="images"):
            CIFAR.views(torch.rand(2, 3, 8, 8), torch.arange(2), 0, 0)
        with pytest.raises(ValueError, match=r"got .* ids=\(3,\)"):
            CIFAR.views(random_images(2), torch.arange(3), 0, 0)
        with raises(ArgumentError, who="Augment", got="mean=(0.4914, 0.4822, 0.4465)"):
            CIFAR.views(random_images(2, c=1), torch.arange(2), 0, 0)

    @pytest.mark.parametrize(
        "options",
        [
            {"crop_scale": (0.5, 0.2)}, {"crop_scale": (0.0, 1.0)}, {"crop_scale": (0.2, 1.5)},
            {"crop_ratio": (0.0, 1.0)}, {"flip_probability": 1.1}, {"jitter": (0.4, 0.4, 0.4, 0.6)},
            {"order": "shuffled"}, {"mean": (0.5,)}, {"mean": (0.5,), "std": (0.0,)}, {"dtype": torch.int64},
            {"crop_scale": 0.5}, {"crop_scale": (0.2, 0.5, 1.0)}, {"jitter": 0.4}, {"jitter": (0.4, 0.4)},
            {"mean": 0.5}, {"mean": ("a",), "std": (1.0,)}, {"rotate": -1.0}, {"shift": 2.0}, {"zoom": (1.2, 0.8)},
            {"blur_sigma": (0.0, 1.0)},
        ],
    )  # fmt: skip
    def test_wrong_options_are_reported(self, options: dict[str, object]) -> None:
        with pytest.raises(ValueError, match="Augment needs"):
            Augment(**options)  # type: ignore[arg-type]

    def test_presets_fit_the_data(self) -> None:
        data = load("digits", "test")
        assert preset_for(data.images) == "tiny"
        assert preset_for(random_images(1, 1, 28, 28)) == "grey"
        assert preset_for(random_images(1)) == "cifar"
        first, second = PRESETS["tiny"].views(data.images, data.ids, 0, 0)
        assert (first - second).abs().mean() > 0.1
        # A light augmentation: a view is closer to its own image than to one of another class.
        plain = TINY.plain(data.images).flatten(1)
        distance = torch.cdist(first.flatten(1), plain)
        assert data.labels is not None
        other = data.labels[:, None] != data.labels
        assert (distance.diagonal()[:, None] < distance)[other].float().mean() > 0.9


class TestParameters:
    def test_boxes_fit_and_have_the_area_and_requested_ratio(self) -> None:
        augment = Augment(crop_scale=(0.3, 0.9), crop_ratio=(0.5, 2.0))
        left, top, width, height = draw_of(augment, 20_000, (20, 30)).box
        assert (left >= 0).all()
        assert (top >= 0).all()
        assert (left + width <= 30 + 1e-4).all()
        assert (top + height <= 20 + 1e-4).all()
        area, ratio = width * height / 600, width / height
        assert area.min() > 0.3 - 1e-5
        assert area.max() < 0.9 + 1e-5
        assert ratio.min() > 0.5 - 1e-5
        assert ratio.max() < 2.0 + 1e-5

    def test_boxes_are_distributed_as_by_rejection(self) -> None:
        """Area and place against torchvision's procedure, without its rounding, in plain floats."""
        n = 50_000
        left, _, width, height = draw_of(Augment(), n).box
        area = torch.empty(4 * n).uniform_(0.2, 1.0)
        aspect = torch.empty(4 * n).uniform_(math.log(3 / 4), math.log(4 / 3)).exp()
        wide, high = (area * aspect).sqrt(), (area / aspect).sqrt()
        fits = (wide <= 1) & (high <= 1)
        assert distance_of_distributions(width * height / 1024, area[fits]) < 0.012
        assert distance_of_distributions(width / 32, wide[fits]) < 0.012
        assert distance_of_distributions(left / (32 - width), torch.rand(n)) < 0.012

    def test_factors_orders_and_chances(self) -> None:
        n = 30_000
        drawn = draw_of(replace(Augment(), blur_probability=0.3), n)
        changed = drawn.factors[0] != 1.0
        assert changed.float().mean() == pytest.approx(0.8, abs=0.01)
        assert ((drawn.factors[3] != 0.0) == changed).float().mean() > 0.999
        for factor, low, high in zip(drawn.factors, (0.6, 0.6, 0.6, -0.1), (1.4, 1.4, 1.4, 0.1), strict=True):
            values = (factor[changed] - low) / (high - low)
            assert distance_of_distributions(values, torch.rand(n)) < 0.015
        assert drawn.flip.float().mean() == pytest.approx(0.5, abs=0.015)
        assert drawn.grey.float().mean() == pytest.approx(0.2, abs=0.012)
        assert (drawn.sigma > 0).float().mean() == pytest.approx(0.3, abs=0.012)
        assert torch.equal(drawn.stage.sort(0).values, torch.arange(4)[:, None].expand(4, n))
        orders = (drawn.stage * torch.tensor([64, 16, 4, 1])[:, None]).sum(0).unique(return_counts=True)[1]
        assert len(orders) == 24
        assert ((orders - n / 24) ** 2 / (n / 24)).sum() < 23 + 4 * math.sqrt(46)

    def test_one_option_does_not_move_another(self) -> None:
        plain, other = (
            draw_of(Augment(), 50),
            draw_of(Augment(blur_probability=1.0, flip_probability=0.1, jitter=(0, 0, 0, 0)), 50),
        )
        assert torch.equal(plain.box, other.box)
        assert torch.equal(plain.stage, other.stage)
        assert torch.equal(plain.grey, other.grey)


def distance_of_distributions(first: Tensor, second: Tensor) -> float:
    """Kolmogorov and Smirnov's: the largest gap between the two empirical distributions."""
    points = torch.cat([first, second]).sort().values
    at = [torch.searchsorted(values.sort().values, points, right=True) / len(values) for values in (first, second)]
    return float((at[0] - at[1]).abs().max())
