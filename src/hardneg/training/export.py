"""The encoder of a run for use elsewhere: in Python, on other data, or in files for other libraries.

torchvision            a state dict for torchvision's ResNet with ``fc = Identity()``
timm                   a state dict for ``timm.create_model(name, num_classes=0)``
sentence-transformers  a folder for ``SentenceTransformer(path)``, for encoders from st: or hf:
safetensors            the weights of backbone and head under our names, with the options of the run

``load_encoder`` is the entry point from Python. ``hardneg export`` calls ``export`` and prints ``how_to_load``;
``hardneg evaluate --on`` calls ``transfer``. ``FORMATS`` maps each format to its writer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, FileError, NoFile, argument_error, optional
from hardneg.io.files import write_atomically, write_json
from hardneg.io.functions import names_a_file
from hardneg.training.backbones import ResNetBackbone
from hardneg.training.data.inputs import TwoTowers
from hardneg.training.data.items import Items, Splits
from hardneg.training.data.kinds import kind_of
from hardneg.training.encoders import Represent
from hardneg.training.evaluation.texts import TextEncoder, as_text_encoder, sentence_transformer
from hardneg.training.loop.checkpoints import read_state
from hardneg.training.loop.runs import Run
from hardneg.training.normalisation import Normalise, Scale
from hardneg.training.options import RECIPES, CMCOptions, InfoGraphOptions, QuickThoughtsOptions, TrainOptions
from hardneg.training.options.base import Weights
from hardneg.training.text_encoders import Pretrained

PREFIXES = ("encoder.", "encoder.encoder.")
"""Prefixes of the encoder's weights in the state of a method; in MoCo v3 a predictor wraps the encoder."""


def load_encoder(
    run: str | Path, weights: Weights = "last", *, run_code: bool = False, normalise: bool = True
) -> nn.Module:
    """Load the trained encoder of a run, in evaluation mode on the CPU.

    ``encoder.features(inputs)`` returns the evaluated features. An encoder of texts also has ``encode(texts)`` for a
    list of strings. An encoder of images accepts uint8 or values in [0, 1] and normalises them as in training.

    Args:
        run: Run directory.
        weights: "last", or "best" for the checkpoint that the monitor chose.
        run_code: Allow running code that the run names: an encoder or data from a Python file, or a model folder that
            may contain code (``may_run_code``). Only for runs that you trust.
        normalise: Whether the encoder normalises images itself. With False it expects inputs as the views of training
            provide them; a run with its own views, whose mean and std are unknown, needs this.

    Returns:
        The encoder.

    Raises:
        ArgumentError: If ``weights`` is unknown, the encoder would run code, or the normalisation is unknown.
        NoFile: If the run has no such checkpoint.
        FileError: If the checkpoint has the weights of another encoder.
    """
    if weights not in get_args(Weights):
        raise ArgumentError("load_encoder", f"weights to be one of {', '.join(get_args(Weights))}", repr(weights))
    disk = Run(Path(run))
    config = disk.whole_config()
    options = options_of(disk)
    named = [getattr(options, name) for name in ("encoder", "text_encoder") if hasattr(options, name)]
    if (code := [name for name in named if may_run_code(name)]) and not run_code:
        got = f"the encoder {code[0]}, which may run code when it is built"
        fix = "pass run_code=True if you trust it (--run-code)"
        raise ArgumentError("load_encoder", "an encoder that runs no code", got, fix)
    state = _state(disk, weights)
    record = (config.get("trained") or {}).get("data", {}).get("train", {})
    scale = scale_in(config, "load_encoder") if normalise else None
    encoder = _rebuilt(kind_of(options.data, may_run=run_code), record, options)
    _load(encoder, state, disk.path)
    if scale is not None:
        of_images: Any = encoder.first if isinstance(encoder, TwoTowers) else encoder
        of_images.normalise = Normalise(**scale)
    return encoder.eval()


def scale_in(config: dict[str, Any], who: str) -> Scale | None:
    """Return the mean and std in the record of a run, or None if it was not trained on images.

    Args:
        config: The configuration of the run.
        who: Caller, for the error.

    Raises:
        ArgumentError: If the run was trained on images with unknown normalisation.
    """
    trained = config.get("trained") or {}
    if scale := trained.get("normalisation"):
        return dict(scale)
    if "shape" not in trained.get("data", {}).get("train", {}):  # only images record a shape
        return None
    got = f"one with the views {str(trained.get('views'))[:80]}, whose mean and std are unknown"
    fix = "pass normalise=False (--no-normalise) and prepare the images as in training"
    raise ArgumentError(who, "a run with a known normalisation of images", got, fix)


def may_run_code(encoder: str) -> bool:
    """Return whether building this encoder may run code stored next to it.

    A Python file is executed. A folder of transformers or sentence-transformers may refer to its own modules;
    sentence-transformers asks before running them from version 6 on.

    >>> may_run_code("mine.py:build"), may_run_code("hf:model"), may_run_code("resnet18")
    (True, True, False)
    """
    kind = encoder.partition(":")[0]
    if kind != "st":
        return kind == "hf" or names_a_file(encoder)
    library = optional("sentence_transformers", encoder, extra="text")
    return int(str(library.__version__).partition(".")[0]) < 6


def text_encoder_of(run: str | Path, weights: Weights = "last", *, run_code: bool = False) -> TextEncoder:
    """Return the encoder of a run on texts, or on images with texts, as evaluations use it.

    Args:
        run: Run directory.
        weights: "last" or "best".
        run_code: Allow running code that the run names, see ``load_encoder``.

    Raises:
        ArgumentError: If the run was trained on data without texts.
    """
    encoder: Any = load_encoder(run, weights, run_code=run_code)
    options = options_of(Run(Path(run)))
    if kind_of(options.data, may_run=False).has != "texts":
        raise ArgumentError("evaluate", "a run that was trained on texts", f"{options.data} in {run}")
    return as_text_encoder(encoder.encode)


def options_of(run: Run) -> TrainOptions:
    """Return the options of a run; options unknown to this version are ignored."""
    config = run.whole_config()
    if config["recipe"] not in RECIPES:
        raise FileError("load_encoder", "a run of a known recipe", run.path, f"of recipe {config['recipe']!r}")
    kind = RECIPES[config["recipe"]]
    known = {one.name for one in fields(kind)}
    return kind(**{name: value for name, value in config["options"].items() if name in known})


def export(run: str | Path, format: str, out: str | Path | None = None, weights: Weights = "last", *,
           run_code: bool = False, normalise: bool = True) -> Path:  # fmt: skip
    """Write the encoder of a run in a library's format.

    Image encoders expect (x - mean) / std for x in [0, 1]. Mean and std are in the metadata of safetensors; for the
    other formats they are in a JSON file named after the output with ``.json`` appended.

    Args:
        run: Run directory.
        format: "torchvision", "timm", "sentence-transformers" or "safetensors".
        out: Output file or folder; by default a fixed name in the run directory.
        weights: "last" or "best".
        run_code: Allow running code that the run names, see ``load_encoder``.
        normalise: Whether to raise if mean and std are unknown; False writes the weights without them.

    Returns:
        The path of the output.

    Raises:
        ArgumentError: If the format is unknown or does not fit this encoder.
    """
    if format not in FORMATS:
        raise ArgumentError("export", f"a format among {', '.join(FORMATS)}", repr(format))
    name, write = FORMATS[format]
    scale = scale_in(Run(Path(run)).whole_config(), "export") if normalise else None
    encoder = load_encoder(run, weights, run_code=run_code, normalise=False)
    path = Path(run) / name if out is None else Path(out)
    write(encoder, path, Run(Path(run)))
    if scale is not None and format != "safetensors":  # which holds them as metadata
        write_json(Path(f"{path}.json"), {"input": "(x - mean) / std of images x in [0, 1]", **scale})
    return path


def how_to_load(run: str | Path, format: str, path: Path) -> str:
    """Return the lines of Python that read an export.

    Args:
        run: Run directory.
        format: Format of the export.
        path: Path of the export.
    """
    if format == "sentence-transformers":
        return f"model = SentenceTransformer({str(path)!r})"
    scale = (Run(Path(run)).whole_config().get("trained") or {}).get("normalisation")
    if format == "safetensors":
        return "\n".join([f"weights = safetensors.torch.load_file({str(path)!r})", *_scaled(scale)])
    encoder = load_encoder(run, normalise=False)
    name = re.sub(r"^\w+:|-imagenet$", "", str(getattr(encoder, "name", "resnet18")))
    made = f"timm.create_model({name!r}, num_classes=0)" if format == "timm" else f"torchvision.models.{name}()"
    lines = [f"model = {made}"]
    backbone = getattr(encoder, "backbone", None)
    if isinstance(backbone, ResNetBackbone) and not backbone.imagenet:
        channels = backbone.stem[0].in_channels
        lines += [f"model.conv1 = torch.nn.Conv2d({channels}, 64, 3, 1, 1, bias=False)"]
        lines += ["model.maxpool = torch.nn.Identity()"]
    lines += ["model.fc = torch.nn.Identity()"] * (format == "torchvision")
    return "\n".join([*lines, f"model.load_state_dict(torch.load({str(path)!r}), strict=True)", *_scaled(scale)])


def _scaled(scale: Scale | None) -> list[str]:
    """Return the lines of Python that normalise the inputs of an exported image encoder."""
    if not scale:
        return []
    mean, std = ([round(value, 6) for value in scale[name]] for name in ("mean", "std"))
    inputs = "(images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]"
    return [f"mean, std = {mean}, {std}", f"inputs = {inputs}  # of images in [0, 1]"]


def resnet_names(backbone: ResNetBackbone) -> dict[str, Tensor]:
    """Return the weights of our ResNet under the names shared by torchvision and timm.

    Raises:
        ArgumentError: If the ResNet has group normalisation, which neither library has.
    """
    if any(isinstance(part, nn.GroupNorm) for part in backbone.modules()):
        raise ArgumentError("export", "a ResNet with batch normalisation", "one with group normalisation")
    starts = [sum(backbone.blocks[:stage]) for stage in range(len(backbone.blocks))]
    return {_renamed(name, starts): value for name, value in backbone.state_dict().items()}


def _renamed(name: str, starts: list[int]) -> str:
    """Translate a parameter name of ``ResNetBackbone`` to torchvision's.

    >>> _renamed("layers.3.residual.4.weight", [0, 2, 4, 6]), _renamed("layers.2.shortcut.0.weight", [0, 2, 4, 6])
    ('layer2.1.bn2.weight', 'layer2.0.downsample.0.weight')
    """
    if stem := re.fullmatch(r"stem\.([01])\.(\w+)", name):
        return f"{('conv1', 'bn1')[int(stem[1])]}.{stem[2]}"
    block, part, place, rest = re.fullmatch(r"layers\.(\d+)\.(\w+)\.(\d+)\.(\w+)", name).groups()  # type: ignore[union-attr]
    stage = max(i for i, start in enumerate(starts) if start <= int(block))
    where = f"layer{stage + 1}.{int(block) - starts[stage]}"
    if part == "shortcut":
        return f"{where}.downsample.{place}.{rest}"
    number, kind = divmod(int(place), 3)  # convolution, norm, ReLU
    return f"{where}.{('conv', 'bn')[kind]}{number + 1}.{rest}"


def _write_resnet(encoder: nn.Module, path: Path, run: Run) -> None:
    backbone = getattr(encoder, "backbone", None)
    name = str(getattr(encoder, "name", ""))
    if isinstance(backbone, ResNetBackbone):
        state = resnet_names(backbone)
    elif isinstance(backbone, nn.Module) and name.partition(":")[0] in ("torchvision", "timm"):
        state = dict(backbone.state_dict())
    else:
        what = "a ResNet, or an encoder of torchvision or timm"
        got = type(encoder).__name__ if backbone is None else name  # a pair of encoders may carry the name of one
        raise ArgumentError("export", what, got, "use --format safetensors")
    write_atomically(path, lambda file: torch.save(state, file))


def _write_safetensors(encoder: nn.Module, path: Path, run: Run) -> None:
    library = optional("safetensors.torch", "safetensors", extra="text")
    config = run.whole_config()
    about = {"recipe": config["recipe"], "options": json.dumps(config["options"]), "format": "pt"}
    if scale := (config.get("trained") or {}).get("normalisation"):
        about["normalisation"] = json.dumps(scale)
    content = library.save({name: value.contiguous() for name, value in encoder.state_dict().items()}, metadata=about)
    write_atomically(path, lambda file: file.write(content))


def _write_sentence_transformer(encoder: nn.Module, path: Path, run: Run) -> None:
    backbone = getattr(encoder, "backbone", None)
    if not isinstance(backbone, Pretrained):
        name = str(getattr(encoder, "name", type(encoder).__name__))
        what = "an encoder of texts from st:PATH or hf:PATH"
        raise ArgumentError("export", what, name, "use --format safetensors, and hn.load_encoder to read it")
    model = backbone.model
    if backbone.kind == "hf":
        trained, model = model, sentence_transformer("hf", options_of(run).encoder.partition(":")[2], "cpu")
        model[0].auto_model.load_state_dict(trained.state_dict())
    model.save(str(path))


Write = Callable[[nn.Module, Path, Run], None]
FORMATS: dict[str, tuple[str, Write]] = {  # default file name and writer
    "torchvision": ("torchvision.pth", _write_resnet),
    "timm": ("timm.pth", _write_resnet),
    "sentence-transformers": ("sentence-transformers", _write_sentence_transformer),
    "safetensors": ("encoder.safetensors", _write_safetensors),
}


def _state(run: Run, weights: str) -> dict[str, Any]:
    path = run.checkpoints.best if weights == "best" else run.checkpoint_path
    if not path.exists():
        fix = "train with --monitor-every 1" if weights == "best" else "train first"
        raise NoFile("load_encoder", f"the {weights} checkpoint of a run", path, "which does not exist", fix)
    found = read_state(path, parts={"method"})
    average = {name: value for name, value in found.get("average", {}).items() if name.startswith("module.")}
    return {**found["method"], **{f"encoder.{name.removeprefix('module.')}": value for name, value in average.items()}}


def _rebuilt(kind: type[Items], record: dict[str, Any], options: TrainOptions) -> nn.Module:
    """Build the encoder as its recipe trains it: some recipes have two encoders or add modules."""
    if isinstance(options, CMCOptions):
        from hardneg.training.recipes.cmc import Aspects

        return Aspects.built(record["shape"], options)
    encoder = kind.rebuilt(record, options)
    if isinstance(options, InfoGraphOptions):
        from hardneg.training.recipes.infograph import LocalAndGlobal

        return LocalAndGlobal(encoder, options.dim, options.seed)
    if isinstance(options, QuickThoughtsOptions) and options.encoders == "two":
        return TwoTowers(encoder, kind.rebuilt(record, options))
    return encoder


def _load(encoder: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    names = set(encoder.state_dict())
    for prefix in PREFIXES:
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        if names <= own.keys():
            encoder.load_state_dict({name: own[name] for name in names})
            return
    raise FileError(
        "load_encoder", "a checkpoint with the weights of this encoder", path, "whose weights have other names"
    )


def transfer(
    run: str | Path, data: str, data_root: str | None = None, weights: Weights = "last", *, run_code: bool = False
) -> dict[str, Any]:
    """Compute the final figures of a run on other data.

    The train split of ``data`` fits the probes; its test split is evaluated.

    Args:
        run: Run directory.
        data: Name of the data, as for ``--data``.
        data_root: Folder of named data sets.
        weights: "last" or "best".
        run_code: Allow running code that the run names, see ``load_encoder``.

    Returns:
        The figures by name, with the name of the data.

    Raises:
        ArgumentError: If the data is of another kind than the run's, or its items have other channels or features.
    """
    disk = Run(Path(run))
    options = options_of(disk)
    kind = kind_of(data)
    if kind is not kind_of(options.data, may_run=False):
        got = f"{data} for a run on {options.data}"
        raise argument_error("evaluate", "--on with data of the kind that the run was trained on", "on", got)
    options = replace(
        options, data=data, data_root=data_root, evaluate_on="test", evaluate_with=None, compile=False
    )  # without the run's benchmark, which does not concern this data
    # Loaded first, so that code is refused before data is read. Not normalising: the views of the data do.
    encoder = load_encoder(run, weights, run_code=run_code, normalise=False)
    device = "cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    splits = Splits(*(part and part.prepared(options).to(device) for part in kind.splits(options)))
    splits.train.check_like((disk.config().get("trained") or {}).get("data", {}).get("train", {}))
    represent = Represent(encoder.to(device), options.epochs, options.seed)
    figures: dict[str, Any] = splits.test.evaluate(splits, represent, options).figures
    return {"data": data, **figures}
