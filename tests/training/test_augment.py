"""Augmentation: the generator against its published vectors, each operation against an independent one, and views that
depend on nothing but (seed, epoch, id, view)."""

from __future__ import annotations

import colorsys
import math
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from hardneg.core.errors import ArgumentError
from hardneg.core.keyed import philox, uniforms
from hardneg.training.augmentation import from_transform
from hardneg.training.augmentation.augment import (
    CIFAR,
    GREY,
    OPERATIONS,
    PRESETS,
    TINY,
    Augment,
    preset_for,
)
from hardneg.training.augmentation.pixels import Parameters, blur, grey_of, jitter, resample, shift_hue
from hardneg.training.augmentation.views import (
    NAMES,
    AnyViews,
    Augmentation,
    as_augmentation,
    augment_for_text,
    check_augment,
    kornia_transform,
)
from hardneg.training.data.images import load

PIXEL = 1e-5  # tolerance on the scale of [0, 1]: a four-hundredth of a grey level
WORD = 0xFFFFFFFF


def random_images(b: int, c: int = 3, h: int = 32, w: int = 32) -> Tensor:
    return torch.randint(0, 256, (b, c, h, w), dtype=torch.uint8)


def draw_of(augment: Augment, n: int, size: tuple[int, int] = (32, 32), seed: int = 0) -> Parameters:
    return augment.draw(torch.arange(n), torch.zeros(n, dtype=torch.int64), 0, seed, size)


class TestPhilox:
    @pytest.mark.parametrize(
        ("counter", "key", "expected"),
        [
            ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
            ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
            (
                [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
                [0xA4093822, 0x299F31D0],
                [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
            ),
        ],
    )
    def test_known_answers_of_random123(self, counter: list[int], key: list[int], expected: list[int]) -> None:
        assert philox(torch.tensor(counter)[:, None], torch.tensor(key))[:, 0].tolist() == expected

    def test_agrees_with_plain_integers(self) -> None:
        counters = torch.randint(0, WORD, (4, 50))
        key = torch.randint(0, WORD, (2,))
        drawn = philox(counters, key)
        for i in range(50):
            assert drawn[:, i].tolist() == plain_philox(counters[:, i].tolist(), key.tolist())

    def test_uniforms_are_uniform_in_every_slot(self) -> None:
        n, bins = 20_000, 50
        u = uniforms(32, torch.arange(n), torch.zeros(n, dtype=torch.int64), 0, 0)
        assert ((u >= 0) & (u < 1)).all()
        counts = torch.stack([torch.histc(row, bins, 0, 1) for row in u])
        chi_squared = ((counts - n / bins) ** 2 / (n / bins)).sum(1)
        # 49 degrees of freedom: above 95 once in 10,000; 32 slots at once stay below it but for 1 in 300.
        assert chi_squared.max() < 95
        assert chi_squared.mean() == pytest.approx(49, abs=4 * math.sqrt(2 * 49 / 32))

    @pytest.mark.parametrize("what", ["slot", "id", "view", "epoch", "seed"])
    def test_neighbours_are_independent(self, what: str) -> None:
        """Pairs that differ by one in one part of the counter fill the unit square evenly."""
        n, bins = 40_000, 16
        ids, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
        first, second = {
            "slot": uniforms(2, ids, zero, 0, 0),
            "id": torch.stack([uniforms(1, ids, zero, 0, 0)[0], uniforms(1, ids + 1, zero, 0, 0)[0]]),
            "view": torch.stack([uniforms(1, ids, zero, 0, 0)[0], uniforms(1, ids, zero + 1, 0, 0)[0]]),
            "epoch": torch.stack([uniforms(1, ids, zero, 0, 0)[0], uniforms(1, ids, zero, 1, 0)[0]]),
            "seed": torch.stack([uniforms(1, ids, zero, 0, 0)[0], uniforms(1, ids, zero, 0, 1)[0]]),
        }[what]
        cell = (first * bins).long() * bins + (second * bins).long()
        expected = n / bins**2
        chi_squared = ((cell.bincount(minlength=bins**2) - expected) ** 2 / expected).sum()
        assert abs(chi_squared - 255) < 4 * math.sqrt(2 * 255)
        assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 4 / math.sqrt(n)

    def test_no_part_of_the_key_is_ignored(self) -> None:
        zero = torch.zeros(1, dtype=torch.int64)
        cases = [
            (0, 0, 0, 0),
            (1 << 40, 0, 0, 0),
            (-1, 0, 0, 0),
            (0, 1, 0, 0),
            (0, 0, 1, 0),
            (0, 0, 0, 1),
            (0, 0, 0, 1 << 40),
        ]
        drawn = [uniforms(8, zero + i, zero + v, epoch, seed) for i, v, epoch, seed in cases]
        assert len({tuple(u.flatten().tolist()) for u in drawn}) == len(cases)

    def test_more_slots_do_not_move_the_first(self) -> None:
        ids, view = torch.arange(5), torch.ones(5, dtype=torch.int64)
        assert torch.equal(uniforms(6, ids, view, 2, 3), uniforms(32, ids, view, 2, 3)[:6])


class TestViews:
    @pytest.mark.parametrize("augment", [CIFAR, replace(CIFAR, blur_probability=0.5, order="fixed")])
    def test_depend_on_the_id_and_not_on_the_batch(self, augment: Augment) -> None:
        images, ids = random_images(12), torch.randperm(1000)[:12]
        whole = torch.stack(augment.views(images, ids, epoch=3, seed=7))
        order = torch.randperm(12)
        assert torch.equal(torch.stack(augment.views(images[order], ids[order], 3, 7)), whole[:, order])
        parts = [torch.stack(augment.views(images[i : i + 5], ids[i : i + 5], 3, 7)) for i in (0, 5, 10)]
        assert torch.equal(torch.cat(parts, dim=1), whole)

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
        with pytest.raises(ValueError, match="needs uint8 images"):
            CIFAR.views(torch.rand(2, 3, 8, 8), torch.arange(2), 0, 0)
        with pytest.raises(ValueError, match=r"one id each, got .* ids=\(3,\)"):
            CIFAR.views(random_images(2), torch.arange(3), 0, 0)
        with pytest.raises(ValueError, match="a mean for each of 1 channels"):
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


class TestResample:
    def test_whole_boxes_are_cropped_and_resized(self) -> None:
        pixels = torch.rand(3, 3, 20, 32)
        boxes = [(0, 0, 32, 20), (3, 5, 10, 12), (20, 0, 12, 4)]
        drawn = still(3)._replace(box=torch.tensor(boxes, dtype=torch.float32).T)
        for i, (left, top, width, height) in enumerate(boxes):
            crop = pixels[i : i + 1, :, top : top + height, left : left + width]
            expected = interpolate(crop, size=(20, 32), mode="bilinear", align_corners=False)[0]
            torch.testing.assert_close(stacked(resample(pixels, drawn, warped=False))[i], expected, atol=PIXEL, rtol=0)

    def test_flip_is_a_mirror(self) -> None:
        pixels = torch.rand(2, 1, 9, 12)
        drawn = still(2, (9, 12))._replace(flip=torch.tensor([True, False]))
        expected = torch.stack([pixels[0].flip(2), pixels[1]])
        torch.testing.assert_close(stacked(resample(pixels, drawn, warped=False)), expected, atol=PIXEL, rtol=0)

    def test_warp_turns_zooms_and_shifts(self) -> None:
        pixels = torch.rand(4, 1, 8, 8)
        drawn = still(4, (8, 8))._replace(
            angle=torch.tensor([math.pi / 2, 0, 0, 0]),
            zoom=torch.tensor([1.0, 1, 2, 1]),
            shift=torch.tensor([[0.0, 3, 0, 0], [0, -2, 0, 0]]),
        )
        turned = stacked(resample(pixels, drawn, warped=True))[:, 0]
        shifted = torch.zeros(8, 8)
        shifted[:6, 3:] = pixels[1, 0, 2:, :5]
        larger = interpolate(pixels[2:3], scale_factor=2, mode="bilinear")[0, 0, 4:12, 4:12]
        expected = torch.stack([pixels[0, 0].rot90(-1), shifted, larger, pixels[3, 0]])
        torch.testing.assert_close(turned, expected, atol=PIXEL, rtol=0)

    def test_warp_agrees_with_kornia(self) -> None:
        kornia = pytest.importorskip("kornia", reason="needs kornia: pip install 'hardneg[vision]'")
        pixels, n = torch.rand(16, 1, 8, 8), 16
        drawn = draw_of(TINY, n, (8, 8))
        # kornia turns against the clock and measures centres of pixels.
        matrix = kornia.geometry.get_rotation_matrix2d(
            torch.full((n, 2), 3.5), -torch.rad2deg(drawn.angle), drawn.zoom[:, None].expand(n, 2)
        )
        matrix[:, :, 2] += drawn.shift.T
        expected = kornia.geometry.warp_affine(pixels, matrix, (8, 8), align_corners=True)
        torch.testing.assert_close(stacked(resample(pixels, drawn, warped=True)), expected, atol=PIXEL, rtol=0)


class TestColours:
    def test_hue_agrees_with_the_standard_library(self) -> None:
        pixels = torch.cat([torch.rand(1, 3, 4, 16), torch.randint(0, 2, (1, 3, 4, 16)).float()])
        turned = stacked(shift_hue(list(pixels.unbind(1)), torch.tensor([0.3, -0.45])))
        for b, turns in enumerate([0.3, -0.45]):
            for y in range(4):
                for x in range(16):
                    h, s, v = colorsys.rgb_to_hsv(*pixels[b, :, y, x].tolist())
                    expected = torch.tensor(colorsys.hsv_to_rgb((h + turns) % 1.0, s, v))
                    torch.testing.assert_close(turned[b, :, y, x], expected, atol=PIXEL, rtol=0)

    @pytest.mark.parametrize("order", ["random", "fixed"])
    def test_jitter_agrees_with_kornia_in_any_order(self, order: str) -> None:
        enhance = pytest.importorskip("kornia.enhance", reason="needs kornia: pip install 'hardneg[vision]'")
        operations = {
            "brightness": enhance.adjust_brightness_accumulative,
            "contrast": enhance.adjust_contrast_with_mean_subtraction,
            "saturation": enhance.adjust_saturation_with_gray_subtraction,
            "hue": lambda image, turns: enhance.adjust_hue(image, turns * 2 * math.pi),
        }
        pixels = torch.rand(64, 3, 16, 16)
        drawn = draw_of(Augment(jitter=(0.8, 0.8, 0.8, 0.2), order=order), 64)
        ours = stacked(jitter(list(pixels.unbind(1)), drawn.factors, drawn.stage, random_order=order == "random"))
        for i in range(64):
            image = pixels[i : i + 1]
            for step in range(4):
                which = int(drawn.stage[:, i].tolist().index(step))
                image = operations[OPERATIONS[which]](image, drawn.factors[which, i : i + 1])
            torch.testing.assert_close(ours[i : i + 1], image, atol=2 * PIXEL, rtol=0)

    def test_no_jitter_changes_nothing(self) -> None:
        planes = [torch.rand(5, 8, 8) for _ in range(3)]
        drawn = draw_of(Augment(jitter_probability=0.0), 5)
        for before, after in zip(planes, jitter(planes, drawn.factors, drawn.stage), strict=True):
            torch.testing.assert_close(after, before, atol=PIXEL, rtol=0)

    def test_grey_agrees_with_kornia(self) -> None:
        kornia = pytest.importorskip("kornia", reason="needs kornia: pip install 'hardneg[vision]'")
        pixels = torch.rand(3, 3, 8, 8)
        expected = kornia.color.rgb_to_grayscale(pixels)
        torch.testing.assert_close(grey_of(list(pixels.unbind(1)))[:, None], expected, atol=PIXEL, rtol=0)

    @pytest.mark.parametrize("size", [8, 32, 64])
    def test_blur_agrees_with_kornia(self, size: int) -> None:
        filters = pytest.importorskip("kornia.filters", reason="needs kornia: pip install 'hardneg[vision]'")
        pixels = torch.rand(4, 2, size, size)
        sigma = torch.tensor([0.1, 0.7, 2.0, 0.0])
        ours = stacked(blur(list(pixels.unbind(1)), sigma))
        kernel = 2 * max(1, size // 20) + 1
        for i in range(3):
            expected = filters.gaussian_blur2d(pixels[i : i + 1], kernel, sigma[i].expand(1, 2))
            torch.testing.assert_close(ours[i : i + 1], expected, atol=PIXEL, rtol=0)
        assert torch.equal(ours[3], pixels[3])

    def test_the_whole_of_simclr_in_its_order(self) -> None:
        """apply() is crop, jitter, grey, blur, normalisation of the same parameters, one by one."""
        augment = replace(CIFAR, blur_probability=0.5, grey_probability=0.5)
        images, drawn = random_images(8), draw_of(augment, 8)
        planes = jitter(resample(images / 255.0, drawn, warped=False), drawn.factors, drawn.stage)
        grey = grey_of(planes)
        planes = [torch.where(drawn.grey[:, None, None], grey, plane) for plane in planes]
        expected = stacked(blur(planes, drawn.sigma))
        for i, (mean, std) in enumerate(zip(CIFAR.mean, CIFAR.std, strict=True)):
            expected[:, i] = (expected[:, i] - mean) / std
        torch.testing.assert_close(augment.apply(images, drawn), expected, atol=5 * PIXEL, rtol=0)
        chosen = drawn.grey & (drawn.sigma == 0)
        coloured = expected * torch.tensor(CIFAR.std)[:, None, None] + torch.tensor(CIFAR.mean)[:, None, None]
        assert chosen.any()
        assert (coloured[chosen, 0] - coloured[chosen, 2]).abs().max() < 1e-5


class TestOtherTransforms:
    def test_any_transform_is_repeatable_and_leaves_the_generator_alone(self) -> None:
        views = from_transform(lambda x: x + torch.rand_like(x))
        images, ids = random_images(3), torch.arange(3)
        before = torch.get_rng_state()
        first, second = views(images, ids, 0, 0)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(views(images, ids, 0, 0)[1], second)
        for one, other in pairwise([first, second, views(images, ids, 1, 0)[0], views(images, ids, 0, 1)[0]]):
            assert not torch.equal(one, other)

    def test_kornia_gives_views_of_the_same_kind(self) -> None:
        pytest.importorskip("kornia", reason="needs kornia: pip install 'hardneg[vision]'")
        augment = replace(CIFAR, blur_probability=0.5)
        images, ids = random_images(64), torch.arange(64)
        theirs = from_transform(kornia_transform(augment, (32, 32)))(images, ids, 0, 0)[0]
        ours = augment.views(images, ids, 0, 0)[0]
        assert theirs.shape == ours.shape
        assert theirs.mean().item() == pytest.approx(ours.mean().item(), abs=0.15)
        assert theirs.std().item() == pytest.approx(ours.std().item(), rel=0.1)


class TestByText:
    @pytest.mark.parametrize(
        ("text", "channels", "expected"),
        [
            ("auto", 3, CIFAR),
            ("auto", 1, GREY),
            ("cifar", 3, CIFAR),
            ("tiny", 1, TINY),
            ("cifar()", 3, CIFAR),
            ("cifar(blur_probability=0.5)", 3, replace(CIFAR, blur_probability=0.5)),
            ("auto(flip_probability=0, order='fixed')", 1, replace(GREY, flip_probability=0, order="fixed")),
            ("auto(crop_scale=(0.08, 1))", 3, replace(CIFAR, crop_scale=(0.08, 1))),
            ("tiny(mean=(0.1,), std=(0.2,))", 1, replace(TINY, mean=(0.1,), std=(0.2,))),
            ("tiny(mean=(0, 0, 0), std=(1, 1, 1))", 3, replace(TINY, mean=(0, 0, 0), std=(1, 1, 1))),
        ],
    )
    def test_presets_and_what_differs_from_them(self, text: str, channels: int, expected: Augment) -> None:
        assert augment_for_text(text, random_images(1, channels)) == expected
        check_augment(text)
        last = augment_for_text(text, random_images(1, channels), channels_last=True)
        assert last == replace(expected, channels_last=True)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("strong", r"'strong' is not known. .*Known: auto, cifar, grey, tiny, kornia\.$"),
            ("cifr()", r"'cifr\(\)' is not known. Did you mean cifar\?"),
            ("cifar(blur=0.5)", "'blur' is not known. .*Known in cifar: crop_scale, .* blur_sigma, mean, std"),
            ("cifar(0.5)", r"options such as .*\(options are written as name=value\)"),
            ("cifar(blur_probability=2)", r"needs blur_probability in \[0.0, 1.0\], got blur_probability=2"),
            ("cifar(crop_scale=0.5)", "needs crop_scale as 2 numbers in brackets, got crop_scale=0.5"),
            ("cifar(crop_scale=(a, b))", "malformed node"),
            ("cifar(order='(x')", 'needs an order "random" or "fixed"'),
            ("cifar(order={[]: 1})", "unhashable"),
            ("cifar(", "was never closed"),
            ("cifar() * grey()", "options are written as name=value"),
            ("0.5", "'0.5' is not known"),
            ("", "'' is not known"),
        ],
    )
    def test_what_nobody_knows_is_named(self, text: str, reason: str) -> None:
        for read in (check_augment, lambda text: augment_for_text(text, random_images(1))):
            with pytest.raises(ArgumentError, match=reason):
                read(text)

    @pytest.mark.parametrize(
        ("text", "channels", "message"),
        [
            ("grey", 3, "images of 3 channels, got augment='grey', which is for 1; use auto or cifar"),
            ("tiny(rotate=5)", 3, r"got augment='tiny\(rotate=5\)', which is for 1"),
            ("cifar", 1, "images of 1 channel, got augment='cifar', which is for 3; use auto or grey or tiny"),
            ("auto(mean=(0, 0, 0), std=(1, 1, 1))", 1, "which is for 3"),
        ],
    )
    def test_channels_that_do_not_fit_are_reported_before_training(
        self, text: str, channels: int, message: str
    ) -> None:
        check_augment(text)
        check_augment(text, 4 - channels)
        for check in (
            lambda: check_augment(text, channels),
            lambda: augment_for_text(text, random_images(1, channels)),
        ):
            with pytest.raises(ValueError, match="needs an --augment for .*" + message):
                check()

    @pytest.mark.parametrize("channels", [1, 3])
    def test_every_name_that_fits_is_an_augmentation(self, channels: int) -> None:
        pytest.importorskip("kornia", reason="needs kornia: pip install 'hardneg[vision]'")
        images, ids = random_images(6, channels), torch.arange(6)
        for name in NAMES:
            if len(PRESETS[name].mean if name in PRESETS else [0] * channels) != channels:
                continue
            found = augment_for_text(name, images)
            assert isinstance(found, Augmentation)
            for view in found.views(images, ids, 0, 0):
                assert view.shape == images.shape
            # Views and the images of evaluation are on one scale.
            assert found.plain(images).mean().item() == pytest.approx(view.mean().item(), abs=0.5)
            assert found.plain(images).amax() > 1.5, "normalised"

    def test_kornia_takes_the_same_values(self) -> None:
        pytest.importorskip("kornia", reason="needs kornia: pip install 'hardneg[vision]'")
        images, ids = random_images(8), torch.arange(8)
        values = "crop_scale=(1, 1), crop_ratio=(1, 1), jitter_probability=0, blur_probability=1, blur_sigma=(0.8, 0.8)"
        for flip, grey in [(0, 0), (1, 0), (0, 1)]:
            # Nothing is left to chance, so that the two agree to the pixel.
            text = f"({values}, flip_probability={flip}, grey_probability={grey})"
            ours, theirs = (
                augment_for_text(name + text, images).views(images, ids, 0, 0) for name in ("cifar", "kornia")
            )
            torch.testing.assert_close(theirs, ours, atol=20 * PIXEL, rtol=0)
        with pytest.raises(ValueError, match=r"the order \"random\", which is kornia's"):
            augment_for_text("kornia(order='fixed')", images)

    def test_kornia_turns_zooms_and_shifts_tiny_images(self) -> None:
        pytest.importorskip("kornia", reason="needs kornia: pip install 'hardneg[vision]'")
        data = load("digits", "test")
        theirs = augment_for_text("kornia", data.images)
        first, second = theirs.views(data.images, data.ids, 0, 0)
        assert torch.equal(theirs.views(data.images, data.ids, 0, 0)[0], first)
        plain = TINY.plain(data.images)
        assert torch.equal(theirs.plain(data.images), plain)
        ours = TINY.views(data.images, data.ids, 0, 0)
        # As far from each other and from the image as our views are.
        for a, b in [((first, second), ours), ((first, plain), (ours[0], plain))]:
            assert (a[0] - a[1]).abs().mean().item() == pytest.approx((b[0] - b[1]).abs().mean().item(), rel=0.1)

    def test_kornia_that_is_missing_names_the_extra_before_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "kornia", None)
        with pytest.raises(ImportError, match=r"train needs kornia; pip install 'hardneg\[vision\]'"):
            check_augment("kornia()")


class TestAnyCallable:
    def test_is_an_augmentation(self) -> None:
        def shifted(images: Tensor, ids: Tensor, epoch: int, seed: int) -> tuple[Tensor, Tensor]:
            x = images / 255.0 + ids[:, None, None, None]
            return x + epoch, x + seed

        images, ids = random_images(3), torch.arange(3)
        found = as_augmentation(shifted)
        first, second = found.compiled()(images, ids, 10, 20)
        assert torch.equal(first, images / 255.0 + ids[:, None, None, None] + 10)
        assert torch.equal(second, found.views(images, ids, 10, 20)[1])
        assert torch.equal(found.plain(images), images / 255.0)
        assert as_augmentation(CIFAR) is CIFAR
        assert as_augmentation(found) is found

    def test_with_its_own_plain_images(self) -> None:
        class Mine:
            def __call__(self, images: Tensor, ids: Tensor, epoch: int, seed: int) -> tuple[Tensor, Tensor]:
                return self.plain(images), self.plain(images)

            def plain(self, images: Tensor) -> Tensor:
                return images / 127.5 - 1.0

        images = random_images(3)
        assert torch.equal(as_augmentation(Mine()).plain(images), images / 127.5 - 1.0)
        assert torch.equal(from_transform(lambda x: x, Mine().plain).plain(images), images / 127.5 - 1.0)

    @pytest.mark.parametrize(
        ("made", "message"),
        [
            (lambda x: (x / 255.0,), r"two views \[3, c, h, w\] from a callable, got \[\(3, 3, 32, 32\)\]"),
            (lambda x: (x / 255.0, x[:2] / 255.0), r"two views \[3, c, h, w\].*\(2, 3, 32, 32\)"),
            (lambda x: (x, x), r"views as floats, got \['torch.uint8', 'torch.uint8'\]"),
        ],
    )
    def test_that_gives_something_else_is_reported(self, made: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            AnyViews(lambda images, ids, epoch, seed: made(images)).views(random_images(3), torch.arange(3), 0, 0)

    def test_what_is_no_callable_is_reported(self) -> None:
        with pytest.raises(ValueError, match=r"train needs views\(images, ids, epoch, seed\) -> .*got views='cifar'"):
            as_augmentation("cifar")  # type: ignore[arg-type]


def still(n: int, size: tuple[int, int] = (20, 32)) -> Parameters:
    """Parameters that change nothing."""
    whole = torch.tensor([0.0, 0.0, size[1], size[0]])[:, None].expand(4, n)
    no, zero = torch.zeros(n, dtype=torch.bool), torch.zeros(n)
    factors = torch.tensor([1.0, 1.0, 1.0, 0.0])[:, None].expand(4, n)
    stage = torch.arange(4)[:, None].expand(4, n)
    return Parameters(whole, no, zero, zero + 1.0, torch.zeros(2, n), factors, stage, no, zero)


def stacked(planes: list[Tensor]) -> Tensor:
    return torch.stack(planes, dim=1)


def distance_of_distributions(first: Tensor, second: Tensor) -> float:
    """Kolmogorov and Smirnov's: the largest gap between the two empirical distributions."""
    points = torch.cat([first, second]).sort().values
    at = [torch.searchsorted(values.sort().values, points, right=True) / len(values) for values in (first, second)]
    return float((at[0] - at[1]).abs().max())


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32) ^ b ^ k, y & WORD, (x >> 32) ^ d ^ m, x & WORD
        k, m = (k + 0x9E3779B9) & WORD, (m + 0xBB67AE85) & WORD
    return [a, b, c, d]
