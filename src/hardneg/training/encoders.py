"""Encoders of small images: a backbone that gives features, and a head that projects them for the loss.

    build_encoder("tiny", in_channels=1)        a few convolutions without batch statistics: the same over any ranks
    build_encoder("resnet18", in_channels=3)    ResNet with CIFAR's stem: a 3 x 3 convolution and no pooling; resnet50
    build_encoder("resnet18-imagenet", 3)       with ImageNet's stem, for images above 64 pixels; resnet50-imagenet
    build_encoder("timm:resnet18", 3)           of torchvision, timm, Transformers or a file of yours: outside.py
    Encoder(any_module, feature_dim, head)      any module that gives [b, feature_dim]

The probe and kNN read ``features``, the loss reads the projection (SimCLR, Chen et al. 2020). Neither is normalised.
Of a module without ``features`` both read what it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from hardneg.batching.refresh import device_of, eval_mode
from hardneg.core.errors import ArgumentError, UnknownName, argument_error
from hardneg.training.augmentation.pixels import Images
from hardneg.training.library_encoders import OUTSIDE, is_library_encoder, library_backbone, library_encoder_errors
from hardneg.training.normalisation import Normalise

Features = Annotated[Tensor, "b d"]
Norm = Callable[[int], nn.Module]

NORMS: dict[str, Norm] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(min(32, channels // 4), channels),
}


class Encoder(nn.Module):
    """A backbone and a head: ``features`` represents, the call projects.

    >>> encoder = build_encoder("tiny", in_channels=1, seed=0)
    >>> encoder(torch.rand(2, 1, 8, 8)).shape, encoder.features(torch.rand(2, 1, 8, 8)).shape
    (torch.Size([2, 128]), torch.Size([2, 128]))
    """

    def __init__(
        self, backbone: nn.Module, feature_dim: int, head: nn.Module | None = None, name: str | None = None
    ) -> None:
        super().__init__()
        self.name = name  # for the record of a run
        self.backbone = backbone
        self.feature_dim = feature_dim
        self.head = nn.Identity() if head is None else head
        self.normalise: Normalise | None = None  # of an encoder that takes images in [0, 1], as ``load_encoder`` gives

    def features(self, images: Images) -> Features:
        images = images if self.normalise is None else self.normalise(images)
        features: Tensor = self.backbone(images)
        if features.ndim != 2 or features.shape[1] != self.feature_dim:
            got = tuple(features.shape)
            raise ArgumentError("Encoder", f"a backbone that gives [b, {self.feature_dim}]", f"features={got}")
        return features

    def forward(self, images: Images) -> Features:
        projected: Tensor = self.head(self.features(images))
        return projected


def build_encoder(
    name: str,
    in_channels: int,
    *,
    projection_dim: int = 128,
    norm: str = "auto",
    seed: int | None = None,
    size: int = 32,
) -> Encoder:
    """An encoder by its name, with freshly drawn weights: the same for the same ``seed``.

    The head has two layers, with batch normalisation between (SimCLR's) where the backbone has batch statistics.
    ``norm``: "batch" or "group"; "auto" is "group" for tiny and "batch" for ResNets. ``size``: of the images, for
    backbones whose features must be counted.
    """
    check_encoder(name, norm)
    norm = ("group" if name == "tiny" else "batch") if norm == "auto" else norm
    with seeded(seed):
        if is_library_encoder(name):
            backbone, feature_dim = library_backbone(name, in_channels, size)
        else:
            backbone = _BACKBONES[name](in_channels, NORMS[norm])
            feature_dim = backbone.feature_dim
        head = _mlp(feature_dim, projection_dim, norm=has_batch_statistics(backbone))
        return Encoder(backbone, feature_dim, head, name)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Inside, weights are drawn by the seed, and torch's generator is set back afterwards; None: as it is."""
    with nullcontext() if seed is None else torch.random.fork_rng([]):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def auto_encoder(size: int) -> str:
    """What "auto" is for images of so many pixels a side."""
    return "tiny" if size <= 28 else "resnet18" if size <= 64 else "resnet18-imagenet"


def check_encoder(name: str, norm: str = "auto") -> None:
    """Raises unless ``build_encoder`` knows the names; builds nothing, for the command line."""
    if name not in _BACKBONES and not is_library_encoder(name):
        raise UnknownName(name, [*_BACKBONES, *OUTSIDE])
    if norm not in ("auto", *NORMS) or (norm != "auto" and is_library_encoder(name)):
        raise argument_error("build_encoder", "a norm among auto, batch, group (auto for others' models)", "norm", norm)


def has_batch_statistics(module: nn.Module) -> bool:
    """Whether an image's embedding depends on the others of its batch while training."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


def embed(encoder: nn.Module, rows: Any, prepare: Callable[[Any], Any], *, batch_size: int = 512) -> Features:
    """Features of all rows in evaluation mode, batch by batch, as float32 where the rows are, if they are a tensor.

    ``prepare`` makes of rows what the encoder takes: ``Augment.plain`` of uint8 images, ``Items.plain`` of positions.
    """
    device, represent = device_of(encoder), features_of(encoder)
    home, parts = getattr(rows, "device", None), []
    with torch.inference_mode(), eval_mode(encoder):
        for start in range(0, len(rows), batch_size):
            features = represent(prepare(rows[start : start + batch_size].to(device))).float()
            parts.append(features if home is None else features.to(home))
    # A copy outside inference mode, which a later computation of gradients may use.
    return torch.cat(parts).clone()


def features_of(encoder: nn.Module) -> Callable[[Images], Features]:
    """What an encoder is evaluated by: its ``features``, or what a module without them gives."""
    return getattr(encoder, "features", encoder)


@dataclass(frozen=True, eq=False)
class Represent:
    """The features of a trained encoder; ``epoch`` and ``seed`` say which views."""

    encoder: nn.Module
    epoch: int = 0
    seed: int = 0

    def __call__(self, inputs: Any) -> Features:
        """Of anything that the encoder takes."""
        return embed(self.encoder, inputs, lambda batch: batch)

    def items(self, items: Any) -> Features:
        """Of all items of a data set, on the device where they are."""
        return embed(self.encoder, torch.arange(len(items), device=items.ids.device), items.plain)

    def views(self, items: Any, most: int = 2048) -> tuple[Features, Features]:
        """Of two views of each item, as training would see them; of the first ``most`` items where there are more."""
        pairs = []
        for index in torch.arange(min(len(items), most), device=items.ids.device).split(256):  # type: ignore[no-untyped-call]
            pairs.append([self(view) for view in items.views_evaluated(index, self.epoch, self.seed)])
        first, second = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return first, second


def check_embeds(encoder: nn.Module, rows: Any, prepare: Callable[[Any], Any], noun: str = "image") -> None:
    """Raises unless ``embed`` would get a vector for each row; tries two of them, before anything is trained."""
    some = rows[:2]
    names = [str(part.name) for part in encoder.modules() if isinstance(part, Encoder)]
    with torch.no_grad(), eval_mode(encoder):
        inputs = prepare(some.to(device_of(encoder)))
        with library_encoder_errors(names, inputs):
            found = features_of(encoder)(inputs)
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(some):
        got = f"{tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ArgumentError(
            "train",
            "an encoder that gives features [b, d]",
            f"{got} for {len(some)} {noun}s from {type(encoder).__name__}",
            "wrap it: hardneg.training.encoders.Encoder(module, feature_dim, head)",
        )


class TinyBackbone(nn.Module):
    """Three 3 x 3 convolutions, the last two of stride 2, and the mean over places; for images of 8 x 8 and more."""

    feature_dim = 128

    def __init__(self, in_channels: int, norm: Norm) -> None:
        super().__init__()
        widths = [in_channels, 32, 64, self.feature_dim]
        layers: list[nn.Module] = []
        for i, stride in enumerate((1, 2, 2)):
            layers += [_conv(widths[i], widths[i + 1], 3, stride), norm(widths[i + 1]), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Images) -> Features:
        maps: Tensor = self.layers(images)
        return maps.mean((2, 3))


class ResNetBackbone(nn.Module):
    """ResNet (He et al. 2016): four stages of 64, 128, 256 and 512 channels, times the expansion.

    With CIFAR's stem of a 3 x 3 convolution; or with that of ImageNet, which leaves a quarter of the pixels a side.
    """

    def __init__(
        self, in_channels: int, norm: Norm, blocks: tuple[int, ...], bottleneck: bool, imagenet: bool = False
    ) -> None:
        super().__init__()
        first = _conv(in_channels, 64, 7, 2) if imagenet else _conv(in_channels, 64, 3)
        self.blocks, self.imagenet = blocks, imagenet
        self.stem = nn.Sequential(first, norm(64), nn.ReLU(inplace=True))
        if imagenet:
            self.stem.append(nn.MaxPool2d(3, 2, 1))
        layers: list[nn.Module] = []
        width = 64
        for stage, num_blocks in enumerate(blocks):
            for i in range(num_blocks):
                block = ResidualBlock(width, 64 * 2**stage, 2 if stage > 0 and i == 0 else 1, bottleneck, norm)
                layers.append(block)
                width = block.out_channels
        self.layers = nn.Sequential(*layers)
        self.feature_dim = width

    def forward(self, images: Images) -> Features:
        maps: Tensor = self.layers(self.stem(images))
        return maps.mean((2, 3))


class ResidualBlock(nn.Module):
    """x + f(x), f being two 3 x 3 convolutions, or 1 x 1, 3 x 3 and 1 x 1 for a bottleneck; the stride is on the first
    3 x 3.
    """

    def __init__(self, in_channels: int, width: int, stride: int, bottleneck: bool, norm: Norm) -> None:
        super().__init__()
        self.out_channels = 4 * width if bottleneck else width
        if bottleneck:
            shapes = [(in_channels, width, 1, 1), (width, width, 3, stride), (width, self.out_channels, 1, 1)]
        else:
            shapes = [(in_channels, width, 3, stride), (width, width, 3, 1)]
        layers: list[nn.Module] = []
        for shape in shapes:
            layers += [_conv(*shape), norm(shape[1]), nn.ReLU(inplace=True)]
        self.residual = nn.Sequential(*layers[:-1])
        same = stride == 1 and in_channels == self.out_channels
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(_conv(in_channels, self.out_channels, 1, stride), norm(self.out_channels))
        )

    def forward(self, maps: Images) -> Images:
        return relu(self.residual(maps) + self.shortcut(maps))


_BACKBONES: dict[str, Callable[[int, Norm], Any]] = {
    "tiny": TinyBackbone,
    "resnet18": partial(ResNetBackbone, blocks=(2, 2, 2, 2), bottleneck=False),
    "resnet50": partial(ResNetBackbone, blocks=(3, 4, 6, 3), bottleneck=True),
    "resnet18-imagenet": partial(ResNetBackbone, blocks=(2, 2, 2, 2), bottleneck=False, imagenet=True),
    "resnet50-imagenet": partial(ResNetBackbone, blocks=(3, 4, 6, 3), bottleneck=True, imagenet=True),
}


def _mlp(in_dim: int, out_dim: int, *, norm: bool) -> nn.Module:
    """As wide inside as the features: 512-512(BN)-128 for ResNet-18."""
    hidden = [nn.Linear(in_dim, in_dim, bias=not norm), *([nn.BatchNorm1d(in_dim)] if norm else [])]
    return nn.Sequential(*hidden, nn.ReLU(inplace=True), nn.Linear(in_dim, out_dim))


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
