"""Views by a user's own transform of one image: distinct, repeatable, and evaluated as they are trained."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError
from hardneg.training.augmentation import from_transform
from hardneg.training.augmentation.views import as_augmentation, check_plain, described
from hardneg.training.data.images import load
from hardneg.training.loop.runs import Run
from support.errors import raises
from support.training_runs import few_digits, run, short


def noisy(image: Tensor) -> Tensor:
    return image + 0.1 * torch.randn_like(image)


def flipped(image: Tensor) -> Tensor:
    return image.flip(-1) if random.random() < 0.5 else image


def shifted(image: Tensor) -> Tensor:
    return image.roll(int(np.random.randint(8)), dims=-1)


class Normalize(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return (image - 0.3) / 0.25


class Compose:
    """Like torchvision's."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = transforms

    def __call__(self, image: Tensor) -> Tensor:
        for transform in self.transforms:
            image = transform(image)
        return image


def one_image(copies: int) -> tuple[Tensor, Tensor]:
    images = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return images.expand(copies, -1, -1, -1), torch.arange(copies)


def distinct(views: Tensor) -> int:
    return len({view.numpy().tobytes() for view in views})


def test_sixteen_copies_of_an_image_have_sixteen_distinct_views() -> None:
    images, ids = one_image(16)
    first, second = from_transform(Compose(noisy, flipped)).views(images, ids, epoch=0, seed=0)
    assert distinct(torch.cat([first, second])) == 32
    # torchvision's RandomCrop and its kind draw one number for all of what they are given.
    moved, _ = from_transform(lambda image: image * torch.rand(())).views(images, ids, 0, 0)
    assert distinct(moved) == 16


@pytest.mark.parametrize("transform", [noisy, flipped, shifted], ids=["torch", "random", "numpy"])
def test_a_view_depends_on_seed_epoch_id_and_view_alone(transform: Any) -> None:
    images, ids = one_image(16)
    views = from_transform(transform)
    together = views.views(images, ids, 3, 5)
    some = torch.tensor([11, 2, 7])
    for view in range(2):
        assert torch.equal(views.views(images[some], ids[some], 3, 5)[view], together[view][some])
    others = [views.views(images, ids, *key)[0] for key in ((4, 5), (3, 6))]
    for other in (*others, together[1]):
        assert not torch.equal(other, together[0])


def test_the_random_state_of_the_caller_is_kept() -> None:
    images, ids = one_image(4)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    def failing(image: Tensor) -> Tensor:
        random.random()
        np.random.rand()
        raise RuntimeError("mine")

    from_transform(Compose(noisy, flipped, shifted)).views(images, ids, 0, 0)
    with pytest.raises(RuntimeError, match="mine"):
        from_transform(failing).views(images, ids, 0, 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])


@pytest.mark.parametrize(
    ("transform", "got"),
    [
        (lambda image: image.mean(), "()"),
        (lambda image: "image", "str"),
        (lambda image: image[:, : 4 + int(torch.randint(3, ()))], "[("),
    ],
)
def test_a_transform_that_gives_no_images_is_refused(transform: Any, got: str) -> None:
    with pytest.raises(ArgumentError) as error:
        from_transform(transform).views(*one_image(32), 0, 0)
    assert error.value.who == "from_transform"
    assert error.value.got.startswith(got)


@pytest.mark.parametrize("compose", [Compose, lambda *steps: Compose(Compose(*steps[:1]), *steps[1:])])
def test_evaluation_sees_the_steps_that_are_not_random(compose: Any) -> None:
    data = load("digits", "test")
    augment = from_transform(compose(noisy, flipped, lambda image: image * 0.5, Normalize()))
    plain = augment.plain(data.images)
    torch.testing.assert_close(plain, (data.images / 255.0 * 0.5 - 0.3) / 0.25)
    check_plain(augment, data.images[:64], data.ids[:64], 0)


def test_modules_in_a_sequence_and_kornia() -> None:
    kornia = pytest.importorskip("kornia.augmentation", reason="needs kornia: pip install 'hardneg[vision]'")
    data = load("digits", "test")
    normalize = kornia.Normalize(torch.tensor([0.3]), torch.tensor([0.25]))
    augment = from_transform(nn.Sequential(kornia.RandomRotation(10.0), normalize))
    torch.testing.assert_close(augment.plain(data.images), (data.images / 255.0 - 0.3) / 0.25)
    check_plain(augment, data.images[:64], data.ids[:64], 0)


@pytest.mark.parametrize(
    "views",
    [
        from_transform(lambda image: Normalize()(noisy(image))),
        from_transform(lambda image: 255.0 * noisy(image)),
        from_transform(lambda image: noisy(image).repeat(1, 2, 2)),
        from_transform(lambda image: noisy(image).expand(3, -1, -1)),
        lambda images, ids, epoch, seed: (images / 127.5 - 1.0, images / 127.5 - 1.0),
    ],
    ids=["normalised", "of 255", "larger", "of three channels", "of batches"],
)
def test_a_run_stops_where_evaluation_would_see_other_images(views: Any, tmp_path: Path) -> None:
    data = few_digits(tmp_path / "digits.npz")
    with raises(ArgumentError, who="train", what="and size") as raised:
        run("simclr", tmp_path / "run", short(data), views=views)
    assert "plain" in (raised.value.fix or "")
    assert not Run(tmp_path / "run").has_results()


def test_who_says_what_evaluation_sees_is_taken_at_their_word(tmp_path: Path) -> None:
    def larger(images: Tensor) -> Tensor:
        return (images / 255.0).repeat(1, 1, 2, 2)

    data = few_digits(tmp_path / "digits.npz")
    views = from_transform(lambda image: noisy(image).repeat(1, 2, 2), larger)
    result = run("simclr", tmp_path / "run", short(data, epochs=1), views=views)
    assert result["knn"] > 0.5


def test_steps_that_need_the_random_ones_before_them_ask_for_plain() -> None:
    def needs_square(image: Tensor) -> Tensor:
        if image.shape[1] != 6:
            raise ValueError("not 6")
        return image

    def cropped(image: Tensor) -> Tensor:
        top = int(torch.randint(3, ()))
        return image[:, top : top + 6, :6]

    augment = from_transform(Compose(cropped, needs_square))
    with raises(ArgumentError, who="from_transform", got="needs_square"):
        augment.plain(load("digits", "test").images)


def test_strong_augmentations_are_on_the_scale_of_their_images() -> None:
    """No false alarm for what hides, dims or blurs."""
    data = load("digits", "test")

    def hidden(image: Tensor) -> Tensor:
        image[:, :, int(torch.randint(4, ())) :][:, :, :4] = 0.0
        return image

    for strong in (hidden, lambda image: image * (0.6 + 0.8 * torch.rand(())), noisy, shifted):
        check_plain(from_transform(strong), data.images[:64], data.ids[:64], 0)


def test_the_description_of_views_has_no_addresses() -> None:
    assert described(from_transform(noisy)) == "AnyViews(call=PerImage(transform=<function noisy>), shown=None)"
    assert "\n" not in described(from_transform(nn.Sequential(Normalize(), Normalize())))
    assert described(as_augmentation(lambda *what: what)).startswith("AnyViews(call=<function ")  # type: ignore[arg-type,return-value]


class OfItsOwn:
    """Draws from a generator of its own, as albumentations does from 1.4.19 on."""

    def __init__(self, kind: str, probability: float = 1.0) -> None:
        self.kind, self.probability = kind, probability
        self.set_random_seed(137)

    def set_random_seed(self, seed: int) -> None:
        self.draws = np.random.default_rng(seed) if self.kind == "numpy" else random.Random(seed)

    def __call__(self, image: Tensor) -> Tensor:
        return image * self.draws.random() if self.draws.random() < self.probability else image


@pytest.mark.parametrize("kind", ["numpy", "random"])
@pytest.mark.parametrize("probability", [1.0, 0.1])
def test_a_transform_with_a_generator_of_its_own_is_refused(kind: str, probability: float) -> None:
    images, ids = one_image(16)
    for transform in (OfItsOwn(kind, probability), Compose(noisy, OfItsOwn(kind, probability))):
        with pytest.raises(ArgumentError, match="set_random_seed"):
            from_transform(transform).views(images, ids, 0, 0)


@pytest.mark.parametrize("kind", ["numpy", "random"])
def test_a_transform_with_a_generator_of_its_own_is_seeded_by_what_is_given(kind: str) -> None:
    images, ids = one_image(16)
    transform = OfItsOwn(kind)
    views = from_transform(transform, seed=transform.set_random_seed)
    first, second = views.views(images, ids, 3, 5)
    assert distinct(torch.cat([first, second])) == 32
    assert torch.equal(views.views(images[4:6], ids[4:6], 3, 5)[1], second[4:6])
