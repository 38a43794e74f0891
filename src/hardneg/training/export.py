"""Write the encoder of a run for other programs: weights under their names, whole programs, or a folder to publish.

torchvision            a state dict for torchvision's model without its classifier
timm                   a state dict for ``timm.create_model(name, num_classes=0)``
detectron2             a pickle for ``MODEL.WEIGHTS`` of Detectron2, from ResNets with the stem of ImageNet
sentence-transformers  a folder for ``SentenceTransformer(path)``, for encoders from st: or hf:
safetensors            the weights of backbone and head with the record of the run, for ``hn.load_encoder``
torch-export           a program of ``torch.export``, from images in [0, 1] to features
onnx                   the same for ONNX runtimes
hub                    a folder with a model card, for timm where it has the architecture, else for ``hn.load_encoder``

``export`` writes and ``how_to_load`` returns the lines of Python that read the output. Both look up ``FORMATS``. The
preprocessing of images is in the metadata of the file, or, for formats without any, in a JSON file beside it.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, optional
from hardneg.io.files import output_folder, read_json, write_atomically, write_json
from hardneg.training.backbones import ResNetBackbone, first_convolution, last_linear, timm_model, torchvision_model
from hardneg.training.data.inputs import TwoTowers
from hardneg.training.evaluation.measures import measure, measures_in
from hardneg.training.evaluation.texts import sentence_transformer
from hardneg.training.options.base import Weights
from hardneg.training.text_encoders import Pretrained
from hardneg.training.trained import (
    HUB_WEIGHTS,
    Preprocessing,
    load_encoder,
    options_in,
    preprocessing_in,
    read_trained,
)
from hardneg.training.weights import detectron2_names, resnet_names

PREPROCESSING = "preprocessing"
"""Name under which files hold the preprocessing of images."""


@dataclass(frozen=True)
class Export:
    """An export: where it is written, and the run that it comes from.

    Attributes:
        path: Export file or folder.
        config: Recipe, options and what was trained.
        prepared: Preprocessing of images; None for other data, or if it is left out.
        result: Content of result.json, empty for an unfinished run.
    """

    path: Path
    config: dict[str, Any]
    prepared: Preprocessing | None
    result: dict[str, Any]

    @property
    def encoder(self) -> str:
        """Name of the encoder, such as "resnet18" or "timm:vit_tiny_patch16_224"."""
        return str((self.config.get("trained") or {}).get("encoder", {}).get("name"))

    @property
    def shape(self) -> list[int]:
        """Shape [c, h, w] of the images of the run."""
        return [int(n) for n in self.config["trained"]["data"]["train"]["shape"]]

    def record(self) -> dict[str, str]:
        """Return the metadata of a file: the record of the run, without the user's paths to data."""
        options = dict(self.config["options"])
        kind, colon, path = str(options["data"]).partition(":")
        kept = {"data": f"{kind}{colon}{Path(path).name}", "data_root": None, "init": None, "evaluate_with": None}
        options |= {name: value for name, value in {**kept, "monitor": "knn"}.items() if name in options}
        trained = self.config.get("trained")
        about = {"recipe": self.config["recipe"], "options": json.dumps(options), "trained": json.dumps(trained)}
        return about | self.about()

    def about(self) -> dict[str, str]:
        """Return the preprocessing as metadata, empty without one."""
        return {} if self.prepared is None else {PREPROCESSING: json.dumps(self.prepared._asdict())}


def export(run: str | Path, format: str, out: str | Path | None = None, weights: Weights = "last", *,
           run_code: bool = False, normalise: bool = True) -> Path:  # fmt: skip
    """Write the encoder of a run in a library's format.

    Args:
        run: Run directory.
        format: A key of ``FORMATS``, such as "torchvision" or "onnx".
        out: Export file or folder; by default a fixed name in the run directory.
        weights: "last" or "best".
        run_code: Allow running code that the run names, see ``load_encoder``.
        normalise: Whether to raise if mean and std are unknown; False writes the weights without them, and programs
            that expect normalised images.

    Returns:
        The path of the output.

    Raises:
        ArgumentError: If the format is unknown or does not fit this encoder.
        MissingExtra: If the format needs a library that is not installed.
    """
    if format not in FORMATS:
        raise ArgumentError("export", f"a format among {', '.join(FORMATS)}", repr(format))
    path = Path(run) / FORMATS[format].file if out is None else Path(out)
    output = _output(run, path, normalise)
    FORMATS[format].write(load_encoder(run, weights, run_code=run_code, normalise=False), output)
    if output.prepared is not None and format in WITHOUT_METADATA:
        about = {"input": "(x - mean) / std of images x in [0, 1]", **output.prepared._asdict()}
        write_json(Path(f"{path}.json"), about)
    return path


def how_to_load(run: str | Path, format: str, path: Path, *, normalise: bool = True) -> str:
    """Return the lines of Python that read an export and prepare images for it.

    Args:
        run: Run directory.
        format: ExportFormat of the export.
        path: Path of the export.
        normalise: The argument with which ``export`` was called.
    """
    return "\n".join(FORMATS[format].lines(_output(run, path, normalise)))


def _output(run: str | Path, path: Path, normalise: bool) -> Export:
    config = read_trained(run).config
    result = Path(run) / "result.json"
    found = read_json(result, "delete it", who="export") if result.exists() else {}
    return Export(path, config, preprocessing_in(config, "export") if normalise else None, found)


# Weights under the names of libraries.


def _write_names(encoder: nn.Module, output: Export) -> None:
    """Write a state dict with the names of torchvision and timm."""
    state = _library_names(encoder, output)
    write_atomically(output.path, lambda file: torch.save(state, file))


def _library_names(encoder: nn.Module, output: Export) -> dict[str, Tensor]:
    backbone = getattr(encoder, "backbone", None)
    if isinstance(backbone, ResNetBackbone):
        return resnet_names(backbone)
    if isinstance(backbone, nn.Module) and output.encoder.partition(":")[0] in ("torchvision", "timm"):
        return dict(backbone.state_dict())
    what = "a ResNet, or an encoder of torchvision or timm"
    got = type(encoder).__name__ if backbone is None else output.encoder  # a pair of encoders may carry the name of one
    raise ArgumentError("export", what, got, "use --format safetensors, torch-export or onnx")


def _lines_of_torchvision(output: Export) -> list[str]:
    name = _model_name(output)
    channels, lines = output.shape[0], ["import torch", "import torchvision", ""]
    lines.append(f"model = torchvision.models.get_model({name!r}, weights=None)")
    if output.encoder.startswith("torchvision:"):
        model = torchvision_model(name)
        place, first = first_convolution(model)
        if channels != 3:
            lines.append(f"model.set_submodule({place!r}, {_conv(channels, first)})")
        return [*lines, f"model.set_submodule({last_linear(model)[0]!r}, torch.nn.Identity())", *_loaded(output)]
    return [*lines, *_stem(output, ours=channels != 3), "model.fc = torch.nn.Identity()", *_loaded(output)]


def _lines_of_timm(output: Export) -> list[str]:
    more = "".join(f", {name}={value!r}" for name, value in _timm_arguments(output).items())
    model = f"model = timm.create_model({_model_name(output)!r}, num_classes=0{more})"
    stem = [] if output.encoder.startswith("timm:") else _stem(output)
    return ["import timm", "import torch", "", model, *stem, *_loaded(output)]


def _timm_arguments(output: Export) -> dict[str, Any]:
    """Return the arguments of timm's constructor beside the name, such as ``img_size`` of vision transformers."""
    channels, *size = output.shape
    if output.encoder.startswith("timm:"):
        return timm_model(_model_name(output), channels, max(size))[1]
    return {} if channels == 3 else {"in_chans": channels}


def _model_name(output: Export) -> str:
    """Return the name of the architecture in torchvision and timm."""
    return re.sub(r"^\w+:|-imagenet$", "", output.encoder)


def _stem(output: Export, *, ours: bool = False) -> list[str]:
    """Return the lines that give a ResNet of another library the stem of ours, where it differs."""
    channels = output.shape[0]
    if output.encoder.endswith("-imagenet"):
        return [f"model.conv1 = torch.nn.Conv2d({channels}, 64, 7, 2, 3, bias=False)"] if ours else []
    stem = f"model.conv1 = torch.nn.Conv2d({channels}, 64, 3, 1, 1, bias=False)"
    return [stem, "model.maxpool = torch.nn.Identity()"]


def _conv(channels: int, like: nn.Conv2d) -> str:
    sizes = f"{like.out_channels}, {like.kernel_size}, {like.stride}, {like.padding}"
    return f"torch.nn.Conv2d({channels}, {sizes}, bias={like.bias is not None})"


def _loaded(output: Export) -> list[str]:
    return [f"model.load_state_dict(torch.load({str(output.path)!r}), strict=True)", *_scaled(output)]


def _scaled(output: Export) -> list[str]:
    """Return the lines that normalise images, with their size and order of channels."""
    if output.prepared is None:
        return []
    mean, std = ([round(value, 6) for value in values] for values in output.prepared[:2])
    inputs = "(images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]"
    return [f"mean, std = {mean}, {std}", f"inputs = {inputs}  # {_images(output)}"]


def _images(output: Export) -> str:
    """Describe the images that an encoder expects.

    >>> shape = {"trained": {"data": {"train": {"shape": [3, 96, 96]}}}}
    >>> _images(Export(Path("a.onnx"), shape, None, {}))
    '[n, 3, 96, 96], prepared as in training'
    """
    if output.prepared is None:
        return f"{_with_batch(output)}, prepared as in training"
    return f"{_with_batch(output)}, {output.prepared.channels}, in [0, 1]"


def _with_batch(output: Export) -> str:
    return f"[n, {', '.join(map(str, output.shape))}]"


def _write_detectron2(encoder: nn.Module, output: Export) -> None:
    """Write a pickle of arrays under the names of Detectron2, which reads it by its matching heuristics."""
    backbone = getattr(encoder, "backbone", None)
    name = _model_name(output)
    if not ((isinstance(backbone, ResNetBackbone) and backbone.imagenet) or re.search(r":resnet\d+$", output.encoder)):
        what = "a ResNet with the stem of ImageNet, the only backbone of this export"
        raise ArgumentError("export", what, output.encoder, "train with --encoder resnet50-imagenet")
    state = _library_names(encoder, output)
    arrays = {name: value.numpy() for name, value in detectron2_names(state).items() if value.ndim}
    content = {"model": arrays, "__author__": "hardneg", "matching_heuristics": True, "architecture": name}
    write_atomically(output.path, lambda file: pickle.dump(content, file))


def _lines_of_detectron2(output: Export) -> list[str]:
    depth = re.sub(r"\D", "", _model_name(output))
    lines = [f"cfg.MODEL.WEIGHTS = {str(output.path)!r}", f"cfg.MODEL.RESNETS.DEPTH = {depth}"]
    lines += ["cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False", 'cfg.INPUT.FORMAT = "RGB"']
    if output.prepared is not None:  # Detectron2 has pixels in [0, 255]
        mean, std = ([round(255.0 * value, 3) for value in values] for values in output.prepared[:2])
        lines += [f"cfg.MODEL.PIXEL_MEAN = {mean}", f"cfg.MODEL.PIXEL_STD = {std}"]
    return lines


# Files with metadata.


def _write_safetensors(encoder: nn.Module, output: Export) -> None:
    _save_tensors(output.path, dict(encoder.state_dict()), output.record())


def _save_tensors(path: Path, state: dict[str, Tensor], about: dict[str, str]) -> None:
    library = optional("safetensors.torch", "safetensors", extra="text")
    content = library.save(
        {name: value.contiguous() for name, value in state.items()}, metadata={**about, "format": "pt"}
    )
    write_atomically(path, lambda file: file.write(content))


def _lines_of_ours(output: Export) -> list[str]:
    lines = ["import hardneg", "", f"encoder = hardneg.load_encoder({str(output.path)!r})"]
    if output.prepared is not None:
        lines += [f"features = encoder.features(images)  # {_images(output)} or uint8; it normalises them itself"]
    return lines


class Program(nn.Module):
    """An encoder from images in [0, 1] to the evaluated features, as ``torch.export`` and ONNX store it.

    Args:
        encoder: Encoder of images.
        prepared: The preprocessing that the program applies; None for images prepared as in training.
    """

    def __init__(self, encoder: nn.Module, prepared: Preprocessing | None) -> None:
        super().__init__()
        self.encoder = encoder
        scale = ([0.0], [1.0]) if prepared is None else prepared[:2]
        for name, values in zip(("mean", "std"), scale, strict=True):
            self.register_buffer(name, torch.tensor(values)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """Return the features [b, d] of images [b, c, h, w]."""
        features: Tensor = self.encoder.features((images - self.mean) / self.std)  # type: ignore[operator]
        return features


def _program_of(encoder: nn.Module, output: Export) -> tuple[Program, Tensor, Any]:
    """Return the program, example images and the dynamic dimension of their number."""
    if isinstance(encoder, TwoTowers):  # image-text pairs
        encoder = encoder.first
    if "shape" not in (output.config.get("trained") or {}).get("data", {}).get("train", {}):
        raise ArgumentError("export", "an encoder of images", type(encoder).__name__, "use --format safetensors")
    dynamic = {0: torch.export.Dim("batch", min=1)}
    return Program(encoder, output.prepared).eval(), torch.zeros(2, *output.shape), dynamic


def _write_program(encoder: nn.Module, output: Export) -> None:
    program, example, dynamic = _program_of(encoder, output)
    content = BytesIO()
    with _quiet():
        found = torch.export.export(program, (example,), dynamic_shapes=(dynamic,))
        torch.export.save(found, content, extra_files=output.about())
    write_atomically(output.path, lambda file: file.write(content.getvalue()))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings of torch about its own internals and about libraries that the program does not use."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _lines_of_program(output: Export) -> list[str]:
    lines = ["import torch", "", f"model = torch.export.load({str(output.path)!r}).module()"]
    return [*lines, f"features = model(images)  # float32 {_images(output)}"]


def _write_onnx(encoder: nn.Module, output: Export) -> None:
    library = optional("onnx", "export --format onnx", extra="onnx")
    optional("onnxscript", "export --format onnx", extra="onnx")
    program, example, dynamic = _program_of(encoder, output)
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["features"]}
    with _quiet():
        found = torch.onnx.export(program, (example,), dynamic_shapes=(dynamic,), dynamo=True, verbose=False, **names)
    assert found is not None
    model = found.model_proto
    library.helper.set_model_props(model, output.about())
    write_atomically(output.path, lambda file: file.write(model.SerializeToString()))


def _lines_of_onnx(output: Export) -> list[str]:
    lines = ["import onnxruntime", "", f"session = onnxruntime.InferenceSession({str(output.path)!r})"]
    return [*lines, f'(features,) = session.run(None, {{"images": images}})  # float32 {_images(output)}']


# Folders.


def _write_sentence_transformer(encoder: nn.Module, output: Export) -> None:
    backbone = getattr(encoder, "backbone", None)
    if not isinstance(backbone, Pretrained):
        what, fix = (
            "an encoder of texts from st:PATH or hf:PATH",
            "use --format safetensors, and hn.load_encoder to read it",
        )
        raise ArgumentError("export", what, output.encoder, fix)
    model = backbone.model
    if backbone.kind == "hf":
        path = options_in(output.config).encoder.partition(":")[2]
        trained, model = model, sentence_transformer("hf", path, "cpu", backbone.pooling)
        model[0].auto_model.load_state_dict(trained.state_dict())
    model.save(str(output.path))


def _lines_of_sentence_transformer(output: Export) -> list[str]:
    model = f"model = SentenceTransformer({str(output.path)!r})"
    return ["from sentence_transformers import SentenceTransformer", "", model]


def _write_hub(encoder: nn.Module, output: Export) -> None:
    """Write weights, config.json and a model card into a folder."""
    folder = output_folder(output.path)
    folder.mkdir(parents=True, exist_ok=True)
    weights, library = folder / HUB_WEIGHTS, _hub_library(output)
    if library == "sentence-transformers":
        _write_sentence_transformer(encoder, output)
    elif library == "timm":
        _save_tensors(weights, _library_names(encoder, output), output.about())
        (folder / "config.json").write_text(json.dumps(_timm_config(output), indent=2))
    else:
        _write_safetensors(encoder, replace(output, path=weights))
        about = {name: json.loads(value) for name, value in output.record().items() if name != "recipe"}
        about = {"library_name": "hardneg", "recipe": output.config["recipe"], **about}
        (folder / "config.json").write_text(json.dumps(about, indent=2))
    (folder / "README.md").write_text(_card(output, library), encoding="utf-8")


def _hub_library(output: Export) -> str:
    """Return the library that reads a Hub folder of this run."""
    if output.encoder.partition(":")[0] in ("st", "hf") and "shape" not in output.config["trained"]["data"]["train"]:
        return "sentence-transformers"
    ours = re.fullmatch(r"resnet\d+-imagenet", output.encoder)
    return "timm" if (ours or output.encoder.startswith("timm:")) and output.prepared is not None else "hardneg"


def _timm_config(output: Export) -> dict[str, Any]:
    """Return config.json of a folder that ``timm.create_model("local-dir:PATH")`` reads."""
    prepared = output.prepared
    assert prepared is not None
    usual = {"num_classes": 0, "input_size": prepared.shape, "mean": prepared.mean, "std": prepared.std}
    more = {"interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "center"}
    model = {"architecture": _model_name(output), "num_classes": 0, "model_args": _timm_arguments(output)}
    return {**model, "pretrained_cfg": {**usual, **more}}


def _lines_of_hub(output: Export) -> list[str]:
    match _hub_library(output):
        case "sentence-transformers":
            return _lines_of_sentence_transformer(output)
        case "timm":
            model = f"model = timm.create_model('local-dir:{output.path}', pretrained=True)"
            return ["import timm", "import torch", "", model, *_scaled(output)]
    return _lines_of_ours(output)


def _card(output: Export, library: str) -> str:
    """Return the model card: use, preprocessing, training and evaluation."""
    options = json.loads(output.record()["options"])
    rows = {"recipe": output.config["recipe"], "encoder": output.encoder}
    rows |= {name: options[name] for name in ON_CARD if name in options}
    rows |= {"views": (output.config.get("trained") or {}).get("views"), "commit": output.config.get("commit")}
    prepared = {} if output.prepared is None else output.prepared._asdict()
    result, before = output.result, output.result.get("before_training", {})
    figures = {
        measure(name, result.get("k")): [f"{100 * one[name]:.2f}" if name in one else "" for one in (result, before)]
        for name in measures_in(result)
    }
    tags = "".join(f"\n- {tag}" for tag in ("contrastive-learning", "feature-extraction", "hardneg"))
    return "\n".join(
        [
            f"---\nlibrary_name: {library}\ntags:{tags}\n---\n",
            f"# {output.encoder}, trained by {output.config['recipe']} on {options['data']}\n",
            "\n".join(["```python", *_lines_of_hub(replace(output, path=Path("FOLDER"))), "```\n"]),
            *_section("Preprocessing of images", ("", ""), {name: (value,) for name, value in prepared.items()}),
            *_section("Evaluation, x 100", ("measure", "trained", "before training"), figures),
            *_section("Training", ("option", "value"), {name: (f"`{value}`",) for name, value in rows.items()}),
        ]
    )


def _section(title: str, heads: tuple[str, ...], rows: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the lines of a section with a table; none without rows."""
    table = [heads, ("---",) * len(heads), *((name, *values) for name, values in rows.items())]
    lines = [f"| {' | '.join(map(str, row))} |" for row in table]
    return [f"## {title}\n", *lines, ""] if rows else []


class ExportFormat(NamedTuple):
    """A format of ``hardneg export``.

    Attributes:
        file: Default name of the output in the run directory.
        write: Writes an encoder.
        lines: Returns the lines of Python that read the output.
    """

    file: str
    write: Callable[[nn.Module, Export], None]
    lines: Callable[[Export], list[str]]


FORMATS: dict[str, ExportFormat] = {
    "torchvision": ExportFormat("torchvision.pth", _write_names, _lines_of_torchvision),
    "timm": ExportFormat("timm.pth", _write_names, _lines_of_timm),
    "detectron2": ExportFormat("detectron2.pkl", _write_detectron2, _lines_of_detectron2),
    "sentence-transformers": ExportFormat(
        "sentence-transformers", _write_sentence_transformer, _lines_of_sentence_transformer
    ),
    "safetensors": ExportFormat("encoder.safetensors", _write_safetensors, _lines_of_ours),
    "torch-export": ExportFormat("encoder.pt2", _write_program, _lines_of_program),
    "onnx": ExportFormat("encoder.onnx", _write_onnx, _lines_of_onnx),
    "hub": ExportFormat("hub", _write_hub, _lines_of_hub),
}
ON_CARD = (
    "data", "negatives", "temperature", "tau_plus", "batches", "epochs", "batch_size", "optimizer",
    "learning_rate", "schedule", "seed",
)  # fmt: skip
"""Options on a model card."""

WITHOUT_METADATA = ("torchvision", "timm", "detectron2")
"""Formats whose files have no place for the preprocessing: it is written beside them."""
