"""Crops, warps and colours of images, against kornia and plain loops."""

from __future__ import annotations

import colorsys
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from hardneg.training.augmentation.augment import (
    CIFAR,
    OPERATIONS,
    TINY,
    Augment,
)
from hardneg.training.augmentation.pixels import Parameters, blur, grey_of, jitter, resample, shift_hue
from support.augmented import PIXEL, draw_of, random_images


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


def still(n: int, size: tuple[int, int] = (20, 32)) -> Parameters:
    """Parameters that change nothing."""
    whole = torch.tensor([0.0, 0.0, size[1], size[0]])[:, None].expand(4, n)
    no, zero = torch.zeros(n, dtype=torch.bool), torch.zeros(n)
    factors = torch.tensor([1.0, 1.0, 1.0, 0.0])[:, None].expand(4, n)
    stage = torch.arange(4)[:, None].expand(4, n)
    return Parameters(whole, no, zero, zero + 1.0, torch.zeros(2, n), factors, stage, no, zero)


def stacked(planes: list[Tensor]) -> Tensor:
    return torch.stack(planes, dim=1)
