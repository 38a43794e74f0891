"""Image backbones of other libraries, by name.

torchvision:NAME   a torchvision classifier without its classification layer
timm:NAME          a timm model without its classification layer
hf:PATH            a Transformers vision model with its weights
file.py:function   your function(in_channels), which returns a module of [b, c, h, w] -> [b, d]

``build_encoder`` (encoders.py) calls ``library_backbone`` and adds the head. Weights of torchvision and timm are fresh.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, MissingExtra, optional
from hardneg.io.functions import load_function, names_a_file

WHO = "--encoder"
Backbone = tuple[nn.Module, int]
"""A module that returns features [b, d], and their width d."""


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
        size: Height and width of the images; a user's own backbone is called once with zeros of this size to find the
            width of its features.

    Returns:
        The module and the width of its features.

    Raises:
        ArgumentError: If the library has no such model, or a user's module does not return [b, d].
        MissingExtra: If the library is not installed.
    """
    if names_a_file(name):
        return _of_function(name, in_channels, size)
    kind, _, rest = name.partition(":")
    return _sources[kind](rest, in_channels)


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


def _library(module: str, name: str) -> Any:
    """Import a library of image models; one that was built for another version of torch raises RuntimeError."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        what = f"a {module} compatible with the installed torch"
        raise MissingExtra(f"{module}:{name}", what, fix=f"pip install {module}") from error


def _torchvision(name: str, in_channels: int) -> Backbone:
    library = _library("torchvision", name)
    try:
        backbone = library.models.get_model(name, weights=None)
    except ValueError as error:
        raise ArgumentError(WHO, "a model of torchvision", f"torchvision:{name} ({error})") from None
    feature_dim = _without_classifier(name, backbone)
    if in_channels != 3:
        _with_channels(backbone, in_channels)
    return backbone, feature_dim


def _timm(name: str, in_channels: int) -> Backbone:
    library = _library("timm", name)
    try:
        backbone = library.create_model(name, pretrained=False, in_chans=in_channels, num_classes=0)
    except RuntimeError as error:
        raise ArgumentError(WHO, "a model of timm", f"timm:{name} ({error})") from None
    return backbone, int(getattr(backbone, "head_hidden_size", None) or backbone.num_features)


def _hf(path: str, in_channels: int) -> Backbone:
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


def _without_classifier(name: str, backbone: nn.Module) -> int:
    """Replace the last linear layer, the classifier, by the identity; return the number of features before it."""
    layers = [(place, layer) for place, layer in backbone.named_modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise ArgumentError(WHO, "a classifier that ends with a linear layer", f"torchvision:{name}")
    place, last = layers[-1]
    backbone.set_submodule(place, nn.Identity())
    return last.in_features


def _with_channels(backbone: nn.Module, in_channels: int) -> None:
    """Replace the first convolution by one with ``in_channels`` input channels."""
    place, first = next((p, layer) for p, layer in backbone.named_modules() if isinstance(layer, nn.Conv2d))
    size, stride, padding = (first.kernel_size, first.stride, first.padding)
    other: Any = partial(nn.Conv2d, in_channels, first.out_channels, size, stride, padding)  # type: ignore[arg-type]
    backbone.set_submodule(place, other(bias=first.bias is not None))


_sources: dict[str, Callable[[str, int], Backbone]] = {"torchvision": _torchvision, "timm": _timm, "hf": _hf}
LIBRARY_ENCODERS = ("torchvision:resnet18", "timm:resnet18", "hf:PATH", "file.py:function")
