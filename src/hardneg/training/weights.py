"""Weights of encoders by name: those of runs, and published ones of torchvision, timm and other code.

``initialised`` implements ``--init``: it loads a run or a file into a fresh encoder before training. ``load_run`` loads
the trained weights of a run, for ``load_encoder``. ``resnet_names`` gives the weights of our ResNets the names that
torchvision and timm share, and ``detectron2_names`` those of Detectron2; exports use both.

A file may hold more than the backbone (a head, a momentum encoder, an optimiser), under any prefix, as in
``module.encoder_q.conv1.weight``: the prefix under which all names of the backbone are found is removed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, FileError, NoFile, optional
from hardneg.training.backbones import ResNetBackbone, published_weights
from hardneg.training.loop.checkpoints import Checkpoints, read_state
from hardneg.training.options import TrainOptions

PREFIXES = ("encoder.", "encoder.encoder.")
"""Prefixes of the encoder's weights in the state of a method; in MoCo v3 a predictor wraps the encoder."""
NESTED = ("state_dict", "model", "model_state_dict", "method")
"""Keys under which files hold the weights, beside an optimiser and other state."""
COUNTER = "num_batches_tracked"
"""Buffer of batch normalisation that old files lack."""

NamedTensors = Mapping[str, Tensor]


def initialised(encoder: nn.Module, options: TrainOptions) -> nn.Module:
    """Return a fresh encoder with the weights of ``--init``: all of them if they fit, otherwise those of its backbone.

    Args:
        encoder: The fresh encoder; its ``init`` then says what was loaded.
        options: Options of the run; ``init`` is a run directory, a torch or safetensors file, or ``timm:NAME`` or
            ``torchvision:NAME`` for the published weights of these libraries, which they download.

    Raises:
        ArgumentError: If the weights are those of another architecture.
        NoFile: If there is no such file or run.
        FileError: If the file cannot be read.
    """
    source = options.init
    if source is None or torch.get_default_device().type == "meta":  # only the shapes are needed
        return encoder
    state = _read(source)
    if (found := _found(encoder.state_dict(), state)) is not None:
        encoder.load_state_dict(found)
        encoder.init = f"all weights of the encoder, from {source}"  # type: ignore[assignment]
        return encoder
    backbone = getattr(encoder, "backbone", encoder)
    own = dict(backbone.state_dict())
    if (found := _found(own, state)) is None and isinstance(backbone, ResNetBackbone):
        places = {_renamed(name, _starts(backbone)): name for name in own}
        renamed = _found({there: own[name] for there, name in places.items()}, state)
        found = renamed and {places[name]: value for name, value in renamed.items()}
    if found is None:
        name = getattr(encoder, "name", None) or type(encoder).__name__
        raise ArgumentError("train", f"--init with the weights of {name}", f"{source}, {_difference(backbone, state)}")
    backbone.load_state_dict(found)
    encoder.init = f"the backbone, from {source}; the head is new"  # type: ignore[assignment]
    return encoder


def check_source(source: str) -> None:
    """Raise unless ``--init`` names a library's model, or a file or run that exists; reads nothing."""
    if source.partition(":")[0] not in ("timm", "torchvision") and not Path(source).exists():
        raise NoFile("train", "--init with a run directory or a file of weights", Path(source))


def _read(source: str) -> NamedTensors:
    """Read all tensors of a run, a file or a library, by name."""
    check_source(source)
    path = Path(source)
    if not path.exists():
        return published_weights(source)
    if path.is_dir():
        return state_of_run(Checkpoints(path), "last")
    if path.suffix == ".safetensors":
        loaded: NamedTensors = optional("safetensors.torch", "--init", extra="text").load_file(path)
        return loaded
    if path.name.startswith("checkpoint."):
        return with_average(read_state(path, parts={"method"}))
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can make torch raise almost any exception
        fix = "save a state dict with torch.save, or use safetensors"
        raise FileError("train", "a file of weights", path, f"which torch cannot read ({error})", fix) from error
    while isinstance(found, dict) and (
        inner := next((name for name in NESTED if isinstance(found.get(name), dict)), "")
    ):
        found = found[inner]
    if not isinstance(found, dict) or not any(isinstance(value, Tensor) for value in found.values()):
        raise FileError("train", "a file of weights", path, f"which holds {type(found).__name__} without tensors")
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}


def _found(wanted: NamedTensors, state: NamedTensors) -> dict[str, Tensor] | None:
    """Return the tensors of these names and shapes, under the first prefix that has all of them, or None."""
    needed = [name for name in wanted if not name.endswith(COUNTER)]
    first = needed[0]
    for prefix in (name.removesuffix(first) for name in state if name == first or name.endswith(f".{first}")):
        if all(prefix + name in state and state[prefix + name].shape == wanted[name].shape for name in needed):
            return {name: state.get(prefix + name, value) for name, value in wanted.items()}
    return None


def _difference(backbone: nn.Module, state: NamedTensors) -> str:
    """Describe why weights do not fit: the first tensor of another shape, or the first that is missing."""
    own = dict(backbone.state_dict())
    if isinstance(backbone, ResNetBackbone):
        own = {_renamed(name, _starts(backbone)): value for name, value in own.items()} | own
    for name, value in own.items():
        for there, other in state.items():
            if (there == name or there.endswith(f".{name}")) and other.shape != value.shape:
                return f"whose {there} is {list(other.shape)} instead of {list(value.shape)}"
    missing = next((name for name in own if not any(there.endswith(name) for there in state)), next(iter(own)))
    return f"whose {len(state)} tensors include no {missing}"


# Runs.


def state_of_run(checkpoints: Checkpoints, weights: str) -> NamedTensors:
    """Return the state of the method of a run, with averaged weights in place of the trained ones if there are any.

    Args:
        checkpoints: Checkpoints of the run.
        weights: "last" or "best".

    Raises:
        NoFile: If there is no such checkpoint.
    """
    path = checkpoints.best if weights == "best" else checkpoints.newest
    if not path.exists():
        fix = "train with --monitor-every 1" if weights == "best" else "train first"
        raise NoFile("load_encoder", f"the {weights} checkpoint of a run", path, "which does not exist", fix)
    return with_average(read_state(path, parts={"method"}))


def with_average(checkpoint: dict[str, Any]) -> NamedTensors:
    """Return the state of the method in a checkpoint, its encoder replaced by the averaged one of ``--ema``."""
    inside = "module."
    average = {name: value for name, value in checkpoint.get("average", {}).items() if name.startswith(inside)}
    return {
        **checkpoint["method"],
        **{f"encoder.{name.removeprefix(inside)}": value for name, value in average.items()},
    }


def load_run(encoder: nn.Module, state: NamedTensors, path: Path) -> None:
    """Load the weights of a run into its rebuilt encoder; raise ``FileError`` if names are missing.

    Args:
        encoder: The rebuilt encoder.
        state: State of the method of the run.
        path: The run directory, for the error.
    """
    names = set(encoder.state_dict())
    for prefix in PREFIXES:
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        if names <= own.keys():
            encoder.load_state_dict({name: own[name] for name in names})
            return
    what = "a checkpoint with the weights of this encoder"
    fix = "pass encoder=, the module that your Method trains"
    raise FileError("load_encoder", what, path, "whose weights have other names", fix)


# Names of other libraries.


def resnet_names(backbone: ResNetBackbone) -> dict[str, Tensor]:
    """Return the weights of our ResNet under the names shared by torchvision and timm.

    Raises:
        ArgumentError: If the ResNet has group normalisation, which neither library has.
    """
    if any(isinstance(part, nn.GroupNorm) for part in backbone.modules()):
        raise ArgumentError("export", "a ResNet with batch normalisation", "one with group normalisation")
    return {_renamed(name, _starts(backbone)): value for name, value in backbone.state_dict().items()}


def detectron2_names(weights: NamedTensors) -> dict[str, Tensor]:
    """Translate the names of torchvision's ResNet to those of Detectron2, as MoCo's conversion does.

    >>> list(detectron2_names({"bn1.bias": torch.zeros(1), "layer1.0.downsample.1.weight": torch.zeros(1)}))
    ['stem.conv1.norm.bias', 'res2.0.shortcut.norm.weight']
    """
    found = {}
    for name, value in weights.items():
        name = name if name.startswith("layer") else f"stem.{name}"
        name = re.sub(r"^layer(\d)", lambda stage: f"res{int(stage[1]) + 1}", name)
        name = re.sub(r"bn(\d)", r"conv\1.norm", name)
        found[name.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")] = value
    return found


def _starts(backbone: ResNetBackbone) -> list[int]:
    return [sum(backbone.blocks[:stage]) for stage in range(len(backbone.blocks))]


def _renamed(name: str, starts: list[int]) -> str:
    """Translate a parameter name of ``ResNetBackbone`` to torchvision's.

    >>> _renamed("layers.3.residual.4.weight", [0, 2, 4, 6]), _renamed("layers.2.shortcut.0.weight", [0, 2, 4, 6])
    ('layer2.1.bn2.weight', 'layer2.0.downsample.0.weight')
    """
    if stem := re.fullmatch(r"stem\.([01])\.(\w+)", name):
        return f"{('conv1', 'bn1')[int(stem[1])]}.{stem[2]}"
    match = cast(re.Match[str], re.fullmatch(r"layers\.(\d+)\.(\w+)\.(\d+)\.(\w+)", name))
    block, part, place, rest = match.groups()
    stage = max(i for i, start in enumerate(starts) if start <= int(block))
    where = f"layer{stage + 1}.{int(block) - starts[stage]}"
    if part == "shortcut":
        return f"{where}.downsample.{place}.{rest}"
    number, kind = divmod(int(place), 3)  # convolution, norm, ReLU
    return f"{where}.{('conv', 'bn')[kind]}{number + 1}.{rest}"
