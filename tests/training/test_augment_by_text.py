"""Augmentations by text, by kornia, or any callable."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hardneg as hn
from hardneg.core.errors import ArgumentError, MissingExtra
from hardneg.io.embeddings import load_embeddings
from hardneg.training.augmentation import from_transform
from hardneg.training.augmentation.augment import (
    CIFAR,
    GREY,
    PRESETS,
    TINY,
    Augment,
)
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
from hardneg.training.evaluation.protocols import transfer
from hardneg.training.loop.runs import Run
from support.augmented import PIXEL, random_images
from support.errors import raises
from support.training_runs import few_digits, run, short


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
            ("strong", r"'strong' is not known. .*Known: auto, cifar, grey, tiny, imagenet, kornia\.$"),
            ("cifr()", r"'cifr\(\)' is not known. Did you mean cifar\?"),
            ("cifar(blur=0.5)", "'blur' is not known. .*Known in cifar: crop_scale, .* blur_sigma, mean, std"),
            ("cifar(0.5)", r"options such as .*\(options are written as name=value\)"),
            ("cifar(blur_probability=2)", r"needs blur_probability in \[0.0, 1.0\], got blur_probability=2"),
            ("cifar(crop_scale=0.5)", "needs crop_scale to be a tuple of 2 numbers, got crop_scale=0.5"),
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
        with raises(ArgumentError, who="kornia_transform", what='order="random"', got="order='fixed'"):
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
        with raises(MissingExtra, who="train", what="kornia", fix="'hardneg[vision]'"):
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
        with raises(ArgumentError, who="train", got="views='cifar'"):
            as_augmentation("cifar")  # type: ignore[arg-type]


def test_statistics_of_the_training_images(tmp_path: Path) -> None:
    """mean="data" is replaced by numbers before training, which the run records and loading applies."""
    data = few_digits(tmp_path / "digits.npz", 64)
    run("simclr", tmp_path / "run", short(data, epochs=1, augment="tiny(mean='data')"))
    pixels = load(data, "train").images.double() / 255
    scale = Run(tmp_path / "run").config()["trained"]["normalisation"]
    assert scale["mean"] == pytest.approx([float(pixels.mean())], abs=1e-6)
    assert scale["std"] == pytest.approx([float(pixels.std(correction=0))], abs=1e-6)
    expected = load_embeddings(tmp_path / "run" / "embeddings.npz")[2]
    encoder: Any = hn.load_encoder(tmp_path / "run")
    with torch.no_grad():
        torch.testing.assert_close(encoder.features(load(data, "test").images), expected, rtol=0, atol=1e-6)
    result = Run(tmp_path / "run").result()
    assert result is not None
    assert transfer(tmp_path / "run", data, baseline=False)["linear"] == result["linear"]


def test_the_preset_of_imagenet_has_the_values_of_simclr() -> None:
    images = torch.zeros(2, 3, 96, 96, dtype=torch.uint8)
    augment: Any = augment_for_text("imagenet", images)
    assert (augment.crop_scale, augment.blur_probability, augment.jitter) == ((0.08, 1.0), 0.5, (0.8, 0.8, 0.8, 0.2))
    plain = augment.plain(images)
    torch.testing.assert_close(plain[0, :, 0, 0], -torch.tensor([0.485 / 0.229, 0.456 / 0.224, 0.406 / 0.225]))
