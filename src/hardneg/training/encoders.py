"""Encoders of small images: a backbone that computes features, and a head that projects them for the loss.

    build_encoder("tiny", in_channels=1)        a few convolutions without batch statistics: identical on any ranks
    build_encoder("resnet18", in_channels=3)    ResNet with CIFAR's stem: a 3 x 3 convolution and no pooling; resnet50
    build_encoder("resnet18-imagenet", 3)       with ImageNet's stem, for images above 64 pixels; resnet50-imagenet
    build_encoder("timm:resnet18", 3)           from torchvision, timm, Transformers or your file
    Encoder(any_module, feature_dim, head)      any module that returns [b, feature_dim]

The linear probe and kNN evaluate ``features``; the loss uses the projection (SimCLR, Chen et al. 2020). Neither is
normalised. For a module without a method ``features``, both use the module's output.

Read ``build_encoder`` and ``Encoder`` first; ``embed`` and ``Represent`` compute features in evaluation mode for
monitors, evaluations and refreshed indexes. The backbones are in backbones.py, encoders of texts in text_encoders.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import Tensor, distributed, nn

from hardneg.batching.refresh import device_of, eval_mode
from hardneg.core.errors import ArgumentError, UnknownName, argument_error
from hardneg.training.augmentation.pixels import Images
from hardneg.training.backbones import (
    BACKBONES,
    LIBRARY_ENCODERS,
    NORMS,
    feature_maps,
    is_library_encoder,
    library_backbone,
    library_encoder_errors,
)
from hardneg.training.backbones import Features as Features
from hardneg.training.normalisation import Normalise
from hardneg.training.options.base import HeadShape


class Encoder(nn.Module):
    """A backbone with a projection head: ``features`` is evaluated, and the loss compares the result of a call.

    Args:
        backbone: Module of inputs -> features [b, feature_dim].
        feature_dim: Width of the features, checked at every call.
        head: Module of features [b, feature_dim] -> projections [b, d]; None projects nothing.
        name: Name of the encoder for the record of a run.

    Example:
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
        # Set by ``load_encoder``: the encoder then accepts images in [0, 1] or uint8 and normalises them itself.
        self.normalise: Normalise | None = None

    def features(self, images: Images) -> Features:
        """Return the backbone's features [b, feature_dim], the representation that evaluations use.

        Raises:
            ArgumentError: If the backbone returns another shape.
        """
        images = images if self.normalise is None else self.normalise(images)
        features: Tensor = self.backbone(images)
        if features.ndim != 2 or features.shape[1] != self.feature_dim:
            got = tuple(features.shape)
            raise ArgumentError("Encoder", f"a backbone that returns [b, {self.feature_dim}]", f"features={got}")
        return features

    def maps(self, images: Images) -> Images:
        """Return the backbone's feature maps before pooling, [b, c, h, w]; raise ArgumentError if it has none."""
        return feature_maps(self.backbone, images if self.normalise is None else self.normalise(images))

    def forward(self, images: Images) -> Features:
        """Return the projections [b, d], which the loss compares."""
        projected: Tensor = self.head(self.features(images))
        return projected


class Predicted(nn.Module):
    """An encoder followed by a predictor (BYOL, MoCo v3, NNCLR); its ``features`` are those of the encoder.

    Args:
        encoder: The encoder with its projection.
        dim: Width of the projection and of the prediction.
        shape: Shape of the predictor.
    """

    encoder: nn.Module

    def __init__(self, encoder: nn.Module, dim: int, shape: HeadShape) -> None:
        super().__init__()
        self.encoder = encoder
        features = getattr(encoder, "feature_dim", dim)
        self.predictor = perceptron(dim, dim, shape, features, has_batch_statistics(encoder))

    def features(self, inputs: Any) -> Features:
        """Return the features of the encoder, [b, f], which are evaluated."""
        return features_of(self.encoder)(inputs)

    def forward(self, inputs: Any) -> Features:
        """Return the predictions, [b, dim]."""
        predicted: Tensor = self.predictor(self.encoder(inputs))
        return predicted


def build_encoder(
    name: str,
    in_channels: int,
    *,
    projection_dim: int = 128,
    norm: str = "auto",
    seed: int | None = None,
    size: int = 32,
    head: HeadShape | None = HeadShape(),
) -> Encoder:
    """Build an encoder by name, with fresh weights that depend only on ``seed``.

    Args:
        name: "tiny", "resnet18", "resnet50", either ResNet with "-imagenet", or a library's name such as "timm:NAME".
        in_channels: Channels of the images, 1 or 3.
        projection_dim: Width of the projections.
        norm: "batch" or "group"; "auto" is "group" for "tiny" and "batch" for ResNets.
        seed: Seed of the weights; None draws them from torch's generator.
        size: Height and width of the images; used to find the feature width of a user's own backbone.
        head: Shape of the projection head, by default two layers as in SimCLR; None: one linear layer.

    Returns:
        The encoder, in training mode, on the default device.

    Raises:
        UnknownName: If no encoder has this name.
        ArgumentError: If ``norm`` is unknown or cannot be chosen for this encoder.
    """
    check_encoder(name, norm)
    norm = ("group" if name == "tiny" else "batch") if norm == "auto" else norm
    with seeded(seed):
        if is_library_encoder(name):
            backbone, feature_dim = library_backbone(name, in_channels, size)
        else:
            backbone = BACKBONES[name](in_channels, NORMS[norm])
            feature_dim = backbone.feature_dim
        if head is None:
            return Encoder(backbone, feature_dim, nn.Linear(feature_dim, projection_dim), name)
        projection = perceptron(feature_dim, projection_dim, head, feature_dim, has_batch_statistics(backbone))
        return Encoder(backbone, feature_dim, projection, name)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw weights from ``seed`` inside the block and restore torch's generator afterwards; None changes nothing."""
    with nullcontext() if seed is None else torch.random.fork_rng([]):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def auto_encoder(size: int) -> str:
    """Return the encoder that "auto" stands for, given the side of the images in pixels.

    >>> auto_encoder(8), auto_encoder(32), auto_encoder(96)
    ('tiny', 'resnet18', 'resnet18-imagenet')
    """
    return "tiny" if size <= 28 else "resnet18" if size <= 64 else "resnet18-imagenet"


def check_encoder(name: str, norm: str = "auto") -> None:
    """Raise unless ``build_encoder`` accepts the names; builds nothing, so that the command line can check first."""
    if name not in BACKBONES and not is_library_encoder(name):
        raise UnknownName(name, [*BACKBONES, *LIBRARY_ENCODERS])
    if norm not in ("auto", *NORMS) or (norm != "auto" and is_library_encoder(name)):
        what = "a norm among auto, batch, group (only auto for models of other libraries)"
        raise argument_error("build_encoder", what, "norm", norm)


def has_batch_statistics(module: nn.Module) -> bool:
    """Return whether an image's embedding depends on the rest of its batch during training."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


ROWS, VALUES = 512, {"cpu": 512 * 3 * 32 * 32, "cuda": 512 * 3 * 64 * 64}
"""Rows of a forward pass in evaluation mode, and numbers in their inputs by device, at most: 10 images of 224 x 224
pixels on a CPU, which gains nothing from more, and 41 on a GPU."""


def rows_at_once(one: Any) -> int:
    """Return how many rows are encoded at once, so that evaluation needs no more memory than training.

    Args:
        one: The encoder's inputs of one row.

    Example:
        >>> rows_at_once(torch.zeros(1, 3, 32, 32)), rows_at_once(torch.zeros(1, 3, 224, 224))
        (512, 10)
    """
    if not isinstance(one, Tensor):
        return ROWS
    return max(1, min(ROWS, VALUES["cpu" if one.device.type == "cpu" else "cuda"] // max(1, one.numel())))


def embed(encoder: nn.Module, rows: Any, prepare: Callable[[Any], Any], *, batch_size: int | None = None) -> Features:
    """Compute the features of all rows in evaluation mode, batch by batch.

    Args:
        encoder: Module whose ``features`` (or output) represents inputs.
        rows: Anything that can be sliced and moved: a uint8 tensor of images, positions of items.
        prepare: Turns a slice of rows into the encoder's inputs: ``Augment.plain`` for uint8 images, ``Items.plain``
            for positions.
        batch_size: Rows per forward pass; by default ``rows_at_once``.

    Returns:
        Features [n, d] as float32, on the device of ``rows`` if they are a tensor, else on the encoder's.
    """
    device, represent = device_of(encoder), features_of(encoder)
    home, parts = getattr(rows, "device", None), []
    with torch.inference_mode(), eval_mode(encoder):
        batch_size = batch_size or rows_at_once(prepare(rows[:1].to(device)))
        for start in range(0, len(rows), batch_size):
            features = represent(prepare(rows[start : start + batch_size].to(device))).float()
            parts.append(features if home is None else features.to(home))
    # A copy made outside inference mode, so that a later computation of gradients may use it.
    return torch.cat(parts).clone()


def features_of(encoder: nn.Module) -> Callable[[Images], Features]:
    """Return the function by which an encoder is evaluated: its ``features``, else the module itself."""
    return getattr(encoder, "features", encoder)


def compares_projections(encoder: nn.Module) -> bool:
    """Return whether the loss compares projections of the features by which the encoder is evaluated."""
    kind = type(encoder)
    if getattr(kind, "features", kind.forward) is kind.forward:
        return False
    heads = [part.head for part in encoder.modules() if isinstance(part, Encoder)]
    return not heads or any(not isinstance(head, nn.Identity) for head in heads)


@dataclass(frozen=True, eq=False)
class Represent:
    """Features from a trained encoder, as monitors and evaluations receive them.

    Attributes:
        encoder: The encoder; switched to evaluation mode for each computation.
        epoch: Epoch whose views ``views`` returns.
        seed: Seed of these views.
        spread: Whether all ranks call the same methods at the same time; each then encodes its share of the rows, and
            all of them get the features of all rows, which are those that one process computes.
    """

    encoder: nn.Module
    epoch: int = 0
    seed: int = 0
    spread: bool = False

    def __call__(self, inputs: Any) -> Features:
        """Return the features of the encoder's inputs, [b, d]."""
        return embed(self.encoder, inputs, lambda batch: batch)

    def items(self, items: Any, rows: Annotated[Tensor, "m"] | None = None) -> Features:
        """Return the features of items of a data set, on the device of the items.

        Args:
            items: The items of a split.
            rows: Positions [m]; None for all items.
        """
        every = torch.arange(len(items), device=items.ids.device) if rows is None else rows
        size = rows_at_once(items.plain(every[:1]))

        def encode(index: Tensor) -> list[Features]:
            return [embed(self.encoder, index, items.plain, batch_size=size)]

        return self._in_parts(every, size, encode)[0]

    def views(self, items: Any, most: int = 2048) -> tuple[Features, Features]:
        """Return the features of two views of each item, as training would draw them.

        Args:
            items: The items of a split.
            most: Number of items, from the first on, that are used at most.

        Returns:
            Two tensors [min(n, most), d], with row i of both from the same item.
        """
        every = torch.arange(min(len(items), most), device=items.ids.device)

        def encode(index: Tensor) -> list[Features]:
            return [self(view) for view in items.views_evaluated(index, self.epoch, self.seed)]

        first, second = self._in_parts(every, max(1, rows_at_once(items.plain(every[:1])) // 2), encode)
        return first, second

    def _in_parts(self, rows: Tensor, size: int, encode: Callable[[Tensor], list[Features]]) -> list[Features]:
        """Encode rows in parts; with ``spread`` each rank encodes every n-th part, and sums fill in the others.

        The parts are the same for any number of ranks, so that the features have the same bits.
        """
        parts = torch.split(rows, size)
        if not (self.spread and distributed.is_available() and distributed.is_initialized()):
            return [torch.cat(side) for side in zip(*map(encode, parts), strict=True)]
        for buffer in self.encoder.buffers():  # batch statistics differ where ranks cannot share them
            distributed.broadcast(buffer, src=0)
        found = [one.new_zeros(len(rows), one.shape[1]) for one in encode(rows[:1])]
        for number in range(distributed.get_rank(), len(parts), distributed.get_world_size()):
            place = slice(number * size, number * size + len(parts[number]))
            for whole, part in zip(found, encode(parts[number]), strict=True):
                whole[place] = part
        for whole in found:
            distributed.all_reduce(whole)
        return found


def check_embeds(encoder: nn.Module, rows: Any, prepare: Callable[[Any], Any], noun: str = "image") -> None:
    """Raise unless ``embed`` would return one vector per row; tries two rows before anything is trained.

    Args:
        encoder: The encoder to try.
        rows: The rows of a data set, of which the first two are used.
        prepare: Turns rows into inputs, as for ``embed``.
        noun: Singular name of the rows for the error.

    Raises:
        ArgumentError: If the output is not a tensor [2, d], or a library's model rejects the images.
    """
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
            "an encoder that returns features [b, d]",
            f"{got} for {len(some)} {noun}s from {type(encoder).__name__}",
            "wrap it: hardneg.training.encoders.Encoder(module, feature_dim, head)",
        )


def perceptron(in_dim: int, out_dim: int, shape: HeadShape, features: int, by_batch: bool) -> nn.Sequential:
    """Build a projection head or a predictor: linear layers with normalisation and ReLU between them.

    Args:
        in_dim: Width of the input.
        out_dim: Width of the output.
        shape: Number, width and normalisation of the layers.
        features: Width of the encoder's features, from which the width of the hidden layers may be derived.
        by_batch: Whether the encoder has batch normalisation.

    Example:
        >>> [type(layer).__name__ for layer in perceptron(8, 4, HeadShape(), features=8, by_batch=True)]
        ['Linear', 'BatchNorm1d', 'ReLU', 'Linear']
    """
    norms: dict[str | None, Any] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
    norm = norms.get("batch" if shape.norm is None and by_batch else shape.norm)
    sizes = [in_dim, *[shape.width_for(features)] * (shape.layers - 1), out_dim]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes[:-1]):
        layers += [nn.Linear(before, after, bias=norm is None), *([] if norm is None else [norm(after)])]
        layers.append(nn.ReLU(inplace=True))
    layers.append(nn.Linear(sizes[-2], out_dim, bias=not shape.last_norm))
    if shape.last_norm and norm is nn.BatchNorm1d:  # the vectors have unit norm anyway
        layers.append(nn.BatchNorm1d(out_dim, affine=False))
    return nn.Sequential(*layers)
