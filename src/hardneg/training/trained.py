"""Trained encoders, read from a run or from an exported file, with the preprocessing of their images.

``load_encoder`` is the entry point from Python. ``read_trained`` finds the record of a run: in its directory, in a file
that ``hardneg export --format safetensors`` has written, or in a Hub folder. ``Preprocessing`` says how images are
prepared for an encoder; ``load_encoder`` applies it and exports (export.py) store it with the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from torch import nn

from hardneg.core.errors import ArgumentError, FileError, optional
from hardneg.io.functions import names_a_file
from hardneg.training.data.inputs import TwoTowers
from hardneg.training.data.kinds import kind_of
from hardneg.training.evaluation.texts import TextEncoder, as_text_encoder
from hardneg.training.loop.runs import Run
from hardneg.training.normalisation import Normalise, asks_for_statistics, with_values
from hardneg.training.options import RECIPES, TrainOptions
from hardneg.training.options.base import Weights
from hardneg.training.recipes import encoder_of_recipe
from hardneg.training.weights import COUNTER, NamedTensors, load_run, state_of_run

HUB_WEIGHTS = "model.safetensors"
"""File of the weights in a Hub folder."""

CHANNELS = {1: "grey", 3: "RGB"}
"""Order of the channels of images, by their number."""


class Preprocessing(NamedTuple):
    """How images are prepared for an encoder: values in [0, 1], then (x - mean) / std.

    Attributes:
        mean: Mean of each channel.
        std: Standard deviation of each channel.
        size: Height and width of the images of the run, to which the shorter side of other images is resized before the
            centre is cropped.
        channels: Order of the channels, "RGB" or "grey".
    """

    mean: list[float]
    std: list[float]
    size: list[int]
    channels: str

    @property
    def shape(self) -> list[int]:
        """Shape of an image, [c, h, w]."""
        return [len(self.mean), *self.size]


def load_encoder(
    run: str | Path,
    weights: Weights | Literal["initial"] = "last",
    *,
    run_code: bool = False,
    normalise: bool = True,
    encoder: nn.Module | None = None,
) -> nn.Module:
    """Load the trained encoder of a run, in evaluation mode on the CPU.

    ``encoder.features(inputs)`` returns the evaluated features. An encoder of texts also has ``encode(texts)`` for a
    list of strings. An encoder of images accepts uint8 or values in [0, 1] and normalises them as in training; its
    ``preprocessing`` has mean, std, size and order of the channels.

    Args:
        run: Run directory, or what ``hardneg export`` has written of one: a file of safetensors or a Hub folder.
        weights: "last", "best" for the checkpoint that the monitor chose, or "initial" for the encoder as it was before
            training. An exported file has only the weights that were exported.
        run_code: Allow running code that the run names: an encoder or data from a Python file, or a model folder that
            may contain code (``may_run_code``). Only for runs that you trust.
        normalise: Whether the encoder normalises images itself. With False it expects inputs as the views of training
            provide them; a run with its own views, whose mean and std are unknown, needs this.
        encoder: Module into which the weights are loaded, for a run of your own ``Method`` that builds its encoder
            itself; by default the encoder of ``--encoder`` is built again.

    Returns:
        The encoder.

    Raises:
        ArgumentError: If ``weights`` is unknown, the encoder would run code, or the normalisation is unknown.
        NoFile: If the run has no such checkpoint.
        FileError: If the checkpoint has the weights of another encoder, or the file was not written by an export.
    """
    if weights not in (known := (*get_args(Weights), "initial")):
        raise ArgumentError("load_encoder", f"weights to be one of {', '.join(known)}", repr(weights))
    trained = read_trained(run, "last" if weights == "initial" else weights)
    options = options_in(trained.config)
    named = [getattr(options, name) for name in ("encoder", "text_encoder") if hasattr(options, name)]
    if (code := [name for name in named if may_run_code(name)]) and not run_code:
        got = f"the encoder {code[0]}, which may run code when it is built"
        fix = "pass run_code=True if you trust it (--run-code)"
        raise ArgumentError("load_encoder", "an encoder that runs no code", got, fix)
    state = trained.state()
    prepared = preprocessing_in(trained.config, "load_encoder") if normalise else None
    if encoder is None:
        record = (trained.config.get("trained") or {}).get("data", {}).get("train", {})
        kind = kind_of(options.data, may_run=run_code)
        encoder = encoder_of_recipe(trained.config["recipe"], kind, record, options)
    if weights == "initial":
        state = _before_training(encoder, state)
    load_run(encoder, state, trained.path)
    if prepared is not None:
        of_images: Any = encoder.first if isinstance(encoder, TwoTowers) else encoder
        of_images.normalise, of_images.preprocessing = Normalise(prepared.mean, prepared.std), prepared
    return encoder.eval()


def _before_training(encoder: nn.Module, state: NamedTensors) -> NamedTensors:
    """Return the state of a fresh encoder; buffers that are not batch statistics, such as scales, are the run's."""
    fresh = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    statistics = ("running_mean", "running_var", COUNTER)
    fixed = [f"encoder.{name}" for name, _ in encoder.named_buffers() if not name.endswith(statistics)]
    return fresh | {name: state[name] for name in fixed if name in state}


@dataclass(frozen=True)
class Trained:
    """The record of a run and a way to read its weights.

    Attributes:
        path: Run directory or exported file.
        config: Recipe, options and what was trained, as in config.json.
        state: Reads the state of the method.
    """

    path: Path
    config: dict[str, Any]
    state: Callable[[], NamedTensors]


def read_trained(source: str | Path, weights: Weights = "last") -> Trained:
    """Find the record of a run, in its directory or in an exported file.

    Args:
        source: Run directory, file of safetensors, or Hub folder.
        weights: "last" or "best", for a run directory.

    Raises:
        FileError: If there is no run, or the file has no record of one.
    """
    path = Path(source)
    if (path / HUB_WEIGHTS).is_file():
        path = path / HUB_WEIGHTS
    if path.suffix != ".safetensors" or not path.is_file():
        run = Run(path)
        return Trained(path, run.whole_config(), lambda: state_of_run(run.checkpoints, weights))
    library = optional("safetensors", "load_encoder", extra="text")
    try:
        with library.safe_open(path, "pt") as file:
            found = {name: json.loads(file.metadata()[name]) for name in ("options", "trained")}
            config = {"recipe": file.metadata()["recipe"], **found}
    except Exception as error:  # not the format of safetensors, or metadata of another program
        fix = "export the run again: hardneg export RUN --format safetensors"
        raise FileError(
            "load_encoder", "a file of hardneg export", path, "which has no record of a run", fix
        ) from error
    of_file = optional("safetensors.torch", "load_encoder", extra="text").load_file
    return Trained(path, config, lambda: {f"encoder.{name}": value for name, value in of_file(path).items()})


def preprocessing_in(config: dict[str, Any], who: str) -> Preprocessing | None:
    """Return the preprocessing in the record of a run, or None if it was not trained on images.

    Args:
        config: The configuration of the run.
        who: Caller, for the error.

    Raises:
        ArgumentError: If the run was trained on images with unknown normalisation.
    """
    trained = config.get("trained") or {}
    if (shape := trained.get("data", {}).get("train", {}).get("shape")) is None:  # only images record a shape
        return None
    if scale := trained.get("normalisation"):
        return Preprocessing(scale["mean"], scale["std"], shape[1:], CHANNELS[shape[0]])
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
    options = options_in(read_trained(run, weights).config)
    if kind_of(options.data, may_run=False).has != "texts":
        raise ArgumentError("evaluate", "a run that was trained on texts", f"{options.data} in {run}")
    return as_text_encoder(encoder.encode)


def options_in(config: dict[str, Any]) -> TrainOptions:
    """Return the options of a run; those unknown to this version or of a user's own method are ignored.

    Args:
        config: The configuration of the run.
    """
    kind = RECIPES.get(config["recipe"], TrainOptions)
    known = {one.name for one in fields(kind)}
    options = kind(**{name: value for name, value in config["options"].items() if name in known})
    scale = (config.get("trained") or {}).get("normalisation")
    if scale and asks_for_statistics(options):
        options = with_values(options, **{name: tuple(values) for name, values in scale.items()})
    return options
