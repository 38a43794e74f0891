"""Backbones of image encoders by name: our own, and those of other libraries.

tiny               a few convolutions without batch statistics
resnet18, resnet50 ResNets with CIFAR's stem, or with ImageNet's as resnet18-imagenet and resnet50-imagenet
torchvision:NAME   a torchvision classifier without its classification layer
timm:NAME          a timm model without its classification layer
hf:PATH            a Transformers vision model with its weights
file.py:function   your function(in_channels), which returns a module of [b, c, h, w] -> [b, d]

``build_encoder`` (encoders.py) looks a name up in ``BACKBONES`` or calls ``library_backbone``, and adds the head.
Weights of torchvision and timm are fresh.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.utils.checkpoint import checkpoint

from hardneg.core.errors import ArgumentError, MissingExtra, optional
from hardneg.io.functions import load_function, names_a_file
from hardneg.training.augmentation.pixels import Images

WHO = "--encoder"
Features = Annotated[Tensor, "b d"]
Norm = Callable[[int], nn.Module]
NORMS: dict[str, Norm] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(min(32, channels // 4), channels),
}
Backbone = tuple[nn.Module, int]
"""A module that returns features [b, d], and their width d."""

_KEPT_PIXELS, _BLOCK_PIXELS = 64 * 64, 4 * 224 * 224
"""``TinyBackbone``: largest image of which all maps are kept, and the pixels of a block of larger ones.

The largest map of a block has 26 MB. Beyond 32 MB, glibc takes new pages for every tensor, which takes as long as the
convolutions."""


def is_library_encoder(name: str) -> bool:
    """Return whether a name refers to a library's model or to a Python file.

    >>> is_library_encoder("timm:resnet18"), is_library_encoder("resnet18")
    (True, False)
    """
    return names_a_file(name) or (name.partition(":")[0] in _sources and bool(name.partition(":")[2]))


def library_backbone(name: str, in_channels: int, size: int = 32) -> Backbone:
    """Build a backbone by name.

    Args:
        name: One of the forms in the module's docstring.
        in_channels: Channels of the images.
        size: Height and width of the images, for models of timm that are built for one size. A user's own backbone is
            called once with zeros of this size to find the width of its features.

    Returns:
        The module and the width of its features.

    Raises:
        ArgumentError: If the library has no such model, or a user's module does not return [b, d].
        MissingExtra: If the library is not installed.
    """
    if names_a_file(name):
        return _of_function(name, in_channels, size)
    kind, _, rest = name.partition(":")
    return _sources[kind](rest, in_channels, size)


@contextmanager
def library_encoder_errors(names: Sequence[str], inputs: Any) -> Iterator[None]:
    """Turn errors that a library's model raises about images, such as a wrong image size, into one ``ArgumentError``.

    Args:
        names: Names of the encoders inside. Errors of a user's own function pass through with their traceback.
        inputs: The images, or the images with their texts.
    """
    try:
        yield
    except (AssertionError, ValueError, RuntimeError) as error:
        name = next((one for one in names if is_library_encoder(one) and not names_a_file(one)), None)
        images = getattr(inputs, "first", inputs)
        if name is None or not isinstance(images, Tensor) or isinstance(error, torch.OutOfMemoryError):
            raise
        height, width = images.shape[-2:]
        reason = " ".join(str(error).split()) or type(error).__name__
        fix = "use a model for images of this size, or resize the data: --data folder:PATH@224"
        what = f"a model for images of {height} x {width} pixels"
        raise ArgumentError(WHO, what, f"{name} ({reason})", fix) from error


def feature_maps(backbone: nn.Module, images: Images) -> Annotated[Tensor, "b c h w"]:
    """Return the last feature maps of a backbone, before they are pooled: 512 x 7 x 7 for ResNet-18 and 224 pixels.

    Args:
        backbone: One of ours, of torchvision or timm, or your own with a method ``maps`` or an adaptive pooling layer.
        images: Images as the backbone reads them.

    Raises:
        ArgumentError: If the backbone has no feature maps, as a vision transformer.
    """
    direct: Any = getattr(backbone, "maps", getattr(backbone, "forward_features", None))  # the second: timm
    found: Any = None
    if direct is not None:
        found = direct(images)
    elif pools := [part for part in backbone.modules() if isinstance(part, nn.AdaptiveAvgPool2d)]:
        seen: list[Tensor] = []
        hook = pools[-1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            backbone(images)
        finally:
            hook.remove()
        found = seen[-1] if seen else None
    if not isinstance(found, Tensor) or found.ndim != 4:
        what, fix = "a backbone with feature maps [b, c, h, w]", "use a convolutional encoder, such as resnet18"
        raise ArgumentError("evaluate", what, type(backbone).__name__, fix)
    return found


def _library(module: str, name: str) -> Any:
    """Import a library of image models; one that was built for another version of torch raises RuntimeError."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        what = f"a {module} compatible with the installed torch"
        raise MissingExtra(f"{module}:{name}", what, fix=f"pip install {module}") from error


def published_weights(name: str) -> dict[str, Tensor]:
    """Return the published weights of ``timm:NAME`` or ``torchvision:NAME``, which the library downloads.

    Raises:
        ArgumentError: If the library has no such model or weights.
        MissingExtra: If the library is not installed.
    """
    kind, _, model = name.partition(":")
    library = _library(kind, model)
    try:
        if kind == "timm":
            found = library.create_model(model, pretrained=True)
        else:
            found = library.models.get_model(model, weights="DEFAULT")
    except (RuntimeError, ValueError, OSError) as error:
        raise ArgumentError(
            "train", f"--init with a model of {kind} whose weights it has", f"{name} ({error})"
        ) from error
    return dict(found.state_dict())


def _torchvision(name: str, in_channels: int, size: int) -> Backbone:
    backbone = torchvision_model(name)
    place, last = last_linear(backbone)
    backbone.set_submodule(place, nn.Identity())
    if in_channels != 3:
        place, first = first_convolution(backbone)
        sizes = (first.kernel_size, first.stride, first.padding)
        other: Any = partial(nn.Conv2d, in_channels, first.out_channels, *sizes)  # type: ignore[arg-type]
        backbone.set_submodule(place, other(bias=first.bias is not None))
    return backbone, last.in_features


def torchvision_model(name: str) -> nn.Module:
    """Build a model of torchvision with new weights; raise ``ArgumentError`` if it has none of this name."""
    library = _library("torchvision", name)
    try:
        model: nn.Module = library.models.get_model(name, weights=None)
    except ValueError as error:
        raise ArgumentError(WHO, "a model of torchvision", f"torchvision:{name} ({error})") from None
    return model


def last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """Return the last linear layer of a model of torchvision, its classifier, with its name."""
    layers = [(place, layer) for place, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise ArgumentError(WHO, "a classifier that ends with a linear layer", type(model).__name__)
    return layers[-1]


def first_convolution(model: nn.Module) -> tuple[str, nn.Conv2d]:
    """Return the first convolution of a model with its name."""
    return next((place, layer) for place, layer in model.named_modules() if isinstance(layer, nn.Conv2d))


def _timm(name: str, in_channels: int, size: int) -> Backbone:
    backbone, _ = timm_model(name, in_channels, size)
    return backbone, int(getattr(backbone, "head_hidden_size", None) or backbone.num_features)


def timm_model(name: str, in_channels: int, size: int) -> tuple[Any, dict[str, Any]]:
    """Build a model of timm without a classifier and with new weights.

    Args:
        name: Name of the model.
        in_channels: Channels of the images.
        size: Height and width of the images, used by models that are built for one size.

    Returns:
        The model, and the arguments of ``timm.create_model`` beside the name that differ from the defaults.

    Raises:
        ArgumentError: If timm has no such model.
    """
    library = _library("timm", name)
    build = partial(library.create_model, name, pretrained=False, in_chans=in_channels, num_classes=0)
    channels = {} if in_channels == 3 else {"in_chans": in_channels}
    try:
        try:
            return build(img_size=size), {**channels, "img_size": size}
        except TypeError:  # such as ResNets, which accept any size
            return build(), channels
    except RuntimeError as error:
        raise ArgumentError(WHO, "a model of timm", f"timm:{name} ({error})") from None


def _hf(path: str, in_channels: int, size: int) -> Backbone:
    library = optional("transformers", f"hf:{path}", extra="text")
    if torch.get_default_device().type == "meta":  # only the shapes are needed
        model = library.AutoModel.from_config(library.AutoConfig.from_pretrained(path))
    else:
        model = library.AutoModel.from_pretrained(path)
    if getattr(model.config, "num_channels", in_channels) != in_channels:
        got = f"hf:{path} with {model.config.num_channels} channels"
        raise ArgumentError(WHO, f"a model for images of {in_channels} channels", got)
    sizes = getattr(model.config, "hidden_sizes", None)
    return Pooled(model), int(sizes[-1] if sizes else model.config.hidden_size)


class Pooled(nn.Module):
    """A Transformers vision model with one vector per image: the pooled output, or the mean over positions.

    Args:
        model: The Transformers model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Annotated[Tensor, "b c h w"]) -> Annotated[Tensor, "b d"]:
        """Return the features [b, d]."""
        found = self.model(pixel_values=images)
        pooled = getattr(found, "pooler_output", None)
        if pooled is None:
            places: Tensor = found.last_hidden_state
            pooled = places.mean(1) if places.ndim == 3 else places.mean((2, 3))
        return pooled.flatten(1)


def _of_function(name: str, in_channels: int, size: int) -> Backbone:
    backbone = load_function(name, WHO)(in_channels)
    if not isinstance(backbone, nn.Module):
        raise ArgumentError(WHO, f"{name} to return a module", type(backbone).__name__)
    first = next(backbone.parameters(), torch.zeros(()))
    training = backbone.training
    with torch.no_grad():
        found = backbone.eval()(torch.zeros(2, in_channels, size, size, device=first.device))
    backbone.train(training)
    if not isinstance(found, Tensor) or found.ndim != 2:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ArgumentError(WHO, f"a module from {name} that returns features [b, d]", str(got))
    return backbone, found.shape[1]


_sources: dict[str, Callable[[str, int, int], Backbone]] = {"torchvision": _torchvision, "timm": _timm, "hf": _hf}
LIBRARY_ENCODERS = ("torchvision:resnet18", "timm:resnet18", "hf:PATH", "file.py:function")


class TinyBackbone(nn.Module):
    """Three 3 x 3 convolutions, the last two of stride 2, then global average pooling; for images from 8 x 8 up.

    Training on images of more than 64 x 64 pixels keeps the maps of one block of rows at a time and computes the others
    again in the backward pass: at 224 pixels, 128 views would take 2.9 GB. No layer mixes rows, so that the result is
    the same up to rounding. With batch normalisation, rows are mixed, and all maps are kept.

    Args:
        in_channels: Channels of the images.
        norm: Makes the normalisation of a given number of channels.
    """

    feature_dim = 128

    def __init__(self, in_channels: int, norm: Norm) -> None:
        super().__init__()
        widths = [in_channels, 32, 64, self.feature_dim]
        layers: list[nn.Module] = []
        for i, stride in enumerate((1, 2, 2)):
            layers += [_conv(widths[i], widths[i + 1], 3, stride), norm(widths[i + 1]), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers)
        self.mixes_rows = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in layers)

    def maps(self, images: Images) -> Images:
        """Return the feature maps [b, 128, h / 4, w / 4]."""
        maps: Tensor = self.layers(images)
        return maps

    def forward(self, images: Images) -> Features:
        """Return the features [b, 128], the means of the maps."""
        pixels = images.shape[2] * images.shape[3]
        if not self.training or not torch.is_grad_enabled() or self.mixes_rows or pixels <= _KEPT_PIXELS:
            return self._means(images)
        blocks = images.split(max(1, _BLOCK_PIXELS // pixels))  # type: ignore[no-untyped-call]
        return torch.cat([checkpoint(self._means, one, use_reentrant=False) for one in blocks])

    def _means(self, images: Images) -> Features:
        return self.maps(images).mean((2, 3))


class ResNetBackbone(nn.Module):
    """ResNet (He et al. 2016): four stages of 64, 128, 256 and 512 channels, times the expansion of its blocks.

    Args:
        in_channels: Channels of the images.
        norm: Makes the normalisation of a given number of channels.
        blocks: Number of residual blocks in each stage.
        bottleneck: Whether a block is 1 x 1, 3 x 3, 1 x 1 with four times the channels, as in ResNet-50.
        imagenet: Whether to use ImageNet's stem, which reduces each side to a quarter, instead of CIFAR's 3 x 3
            convolution.
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

    def maps(self, images: Images) -> Images:
        """Return the feature maps [b, 512, h / 8, w / 8]: a quarter of each side with ImageNet's stem."""
        maps: Tensor = self.layers(self.stem(images))
        return maps

    def forward(self, images: Images) -> Features:
        """Return the features [b, 512], or [b, 2048] with bottlenecks: the means of the maps."""
        return self.maps(images).mean((2, 3))


class ResidualBlock(nn.Module):
    """x + f(x), where f is two 3 x 3 convolutions, or 1 x 1, 3 x 3 and 1 x 1 for a bottleneck.

    The stride is in the first 3 x 3 convolution, as in torchvision.

    Args:
        in_channels: Channels of the input maps.
        width: Channels of the inner convolutions.
        stride: 1, or 2 to halve the sides.
        bottleneck: Whether the output has four times ``width`` channels.
        norm: Makes the normalisation of a given number of channels.
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
        """Return relu(f(maps) + shortcut(maps)); the shortcut is a 1 x 1 convolution where the shapes differ."""
        return relu(self.residual(maps) + self.shortcut(maps))


BACKBONES: dict[str, Callable[[int, Norm], Any]] = {
    "tiny": TinyBackbone,
    "resnet18": partial(ResNetBackbone, blocks=(2, 2, 2, 2), bottleneck=False),
    "resnet50": partial(ResNetBackbone, blocks=(3, 4, 6, 3), bottleneck=True),
    "resnet18-imagenet": partial(ResNetBackbone, blocks=(2, 2, 2, 2), bottleneck=False, imagenet=True),
    "resnet50-imagenet": partial(ResNetBackbone, blocks=(3, 4, 6, 3), bottleneck=True, imagenet=True),
}
"""Our own backbones: functions of (channels of the images, normalisation layer)."""


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
