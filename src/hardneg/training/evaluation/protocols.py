"""Protocols of papers on the encoder of a finished run: transfer, few labels, a probe by SGD, and fine-tuning.

    transfer("runs/a", "cifar100")                                  kNN and the linear probe on other data
    transfer("runs/a", "cifar10", share=0.01)                       with 1 % of the labels
    transfer("runs/a", "cifar10", protocols=("probe", "finetune"))  by SGD with augmentation, as in the papers

``hardneg evaluate --on`` calls ``transfer`` once for each data set and share of labels and shows the results as columns
of one table. Every result has the same figures of the encoder before training, under ``before_training``.
``classified`` trains a classifier on an encoder: with a frozen encoder it is the probe, else it fine-tunes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hardneg.core.errors import ArgumentError, FileError, argument_error, check_count, check_range
from hardneg.io.embeddings import Labels, pack_bits
from hardneg.training.data.items import Items, Splits, stratified
from hardneg.training.data.kinds import kind_of
from hardneg.training.encoders import Represent, features_of, rows_at_once
from hardneg.training.evaluation.logistic import feature_scale
from hardneg.training.evaluation.measures import BEFORE, register_measure
from hardneg.training.loop.data_record import digest_of_weights
from hardneg.training.loop.records import before_training
from hardneg.training.normalisation import with_statistics, with_values
from hardneg.training.options import TrainOptions
from hardneg.training.options.base import Weights
from hardneg.training.trained import load_encoder, options_in, read_trained

WHO = "evaluate"
Name = Literal["probe", "maps", "finetune"]
"""Protocols beside kNN and the linear probe of the features."""

Statistics = Literal["run", "data"]
"""Mean and std that normalise other images: those of the run, or those of the other training images."""

CROPS = {"jitter_probability": 0.0, "grey_probability": 0.0, "blur_probability": 0.0}
"""Augmentation of images when a classifier is trained: the crops and flips of the run, without its colours."""

register_measure("probe", "linear probe, SGD", "a linear classifier is trained by SGD on features of random crops")
register_measure("maps", "probe of feature maps, SGD", "a linear classifier is trained by SGD on maps before pooling")
register_measure("finetune", "fine-tuned", "encoder and classifier are trained by SGD on random crops")


@dataclass(frozen=True)
class ClassifierTraining:
    """How a classifier is trained: SGD with Nesterov momentum of 0.9.

    Attributes:
        epochs: Number of passes over the labelled items.
        batch_size: Items per batch.
        learning_rate: Learning rate for 256 items per batch; the rate is proportional to the batch size.
        weight_decay: Weight decay.
        seed: Seed of batches and crops.
        decay: Whether the learning rate falls to 0 along a cosine.
    """

    epochs: int = 100
    batch_size: int = 256
    learning_rate: float = 0.1
    weight_decay: float = 0.0
    seed: int = 0
    decay: bool = True

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            check_count(WHO, name, getattr(self, name))
        check_range(WHO, "learning_rate", self.learning_rate, 0.0, 1e4)


USUAL: dict[Name, ClassifierTraining] = {
    "probe": ClassifierTraining(),
    "maps": ClassifierTraining(learning_rate=0.01, decay=False),  # as in Ring, Section 5
    "finetune": ClassifierTraining(epochs=30, learning_rate=0.05),
}
"""How classifiers are trained by default."""


def transfer(
    run: str | Path,
    data: str,
    data_root: str | None = None,
    weights: Weights = "last",
    *,
    run_code: bool = False,
    protocols: Sequence[Name] = (),
    share: float = 1.0,
    statistics: Statistics = "run",
    schedule: ClassifierTraining | None = None,
    baseline: bool = True,
) -> dict[str, Any]:
    """Compute the final figures of a run on other data, or on its own.

    The train split of ``data`` fits probes and classifiers; its test split is evaluated.

    Args:
        run: Run directory, or an exported run that ``load_encoder`` reads.
        data: Name of the data, as for ``--data``.
        data_root: Folder of named data sets.
        weights: "last" or "best".
        run_code: Allow running code that the run names, see ``load_encoder``.
        protocols: Further protocols: "probe", "maps" (a probe of the feature maps before pooling, as in Ring) and
            "finetune".
        share: Share of the labelled training items to use, stratified by class: 0.01 for 1 % of the labels.
        statistics: Mean and std of images: those of the run, or those of the training images of ``data``.
        schedule: How classifiers are trained; by default as in ``USUAL``.
        baseline: Whether to compute the same figures for the encoder before training.

    Returns:
        The figures by name, with the name of the data.

    Raises:
        ArgumentError: If the data is of another kind than the run's, its items have other channels or features, or a
            protocol needs labels that it lacks.
    """
    trained = read_trained(run, weights)
    options = options_in(trained.config)
    kind = kind_of(data)
    if kind is not kind_of(options.data, may_run=False):
        got = f"{data} for a run on {options.data}"
        raise argument_error(WHO, "--on with data of the kind that the run was trained on", "on", got)
    options = replace(
        options, data=data, data_root=data_root, evaluate_on="test", evaluate_with=None, compile=False
    )  # without the run's benchmark, which does not concern this data
    # Loaded first, so that code is refused before data is read. Not normalising: the views of the data do.
    encoder = load_encoder(run, weights, run_code=run_code, normalise=False)
    read = _with_share(kind.splits(options), share)
    read.train.check_like((trained.config.get("trained") or {}).get("data", {}).get("train", {}))
    if statistics == "data" and read.train.has == "pixels":
        options = with_statistics(options, read.train)
    found = _figures(encoder, read, options, protocols, schedule)
    first = initial_encoder(run, run_code=run_code) if baseline else None
    if first is not None:
        found[BEFORE] = before_training(_figures(first, read, options, protocols, schedule), found)
    labels = "" if share == 1.0 else f", {100 * share:g} % of the labels"
    return {"data": f"{data}{labels}", **found}


def initial_encoder(run: str | Path, *, run_code: bool = False) -> nn.Module | None:
    """Return the encoder of a run as it was before training, or None if it cannot be built again.

    Args:
        run: Run directory or exported run.
        run_code: Allow running code that the run names, see ``load_encoder``.
    """
    try:
        found = load_encoder(run, "initial", run_code=run_code, normalise=False)
    except (FileError, ArgumentError):  # a user's own method, or initial weights that are gone
        return None
    trained = read_trained(run).config.get("trained") or {}
    return found if digest_of_weights(found) == trained.get("encoder", {}).get("initial_weights") else None


def _figures(
    encoder: nn.Module,
    read: Splits,
    options: TrainOptions,
    protocols: Sequence[Name],
    schedule: ClassifierTraining | None,
) -> dict[str, Any]:
    """Evaluate an encoder as at the end of a run, and by further protocols."""
    device = "cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    splits = Splits(*(part and part.prepared(options).to(device) for part in read))
    represent = Represent(encoder.to(device), options.epochs, options.seed)
    found: dict[str, Any] = splits.test.evaluate(splits, represent, options).figures
    for name in protocols:
        predicted = classified(encoder, read, options, schedule or USUAL[name], name)
        right = predicted.cpu() == read.test.labels.cpu()
        found[name] = float(right.double().mean())
        found.setdefault("correct", {})[name] = pack_bits(right.numpy())
    return found


def _with_share(read: Splits, share: float) -> Splits:
    """Return the splits with a share of the labelled items that classifiers are fitted to."""
    if not 0.0 < share <= 1.0:
        raise argument_error(WHO, "a share of the labels in (0, 1]", "share", share)
    if share == 1.0:
        return read
    items: Items = read.fitted
    rows = stratified(items.labelled(f"{WHO} with {100 * share:g} % of the labels"), len(items), share, 0, "more items")
    return Splits(read.train, read.test, items.take(torch.nonzero(rows)[:, 0]))


def classified(
    encoder: nn.Module, read: Splits, options: TrainOptions, schedule: ClassifierTraining, protocol: Name = "probe"
) -> Labels:
    """Train a linear classifier on an encoder by SGD with augmentation, and return the classes of the test items, [m].

    The inputs of the classifier are standardised by their mean and deviation over the training items, feature maps by
    those of each channel, so that the learning rate does not depend on their scale.

    Args:
        encoder: The encoder, which is not changed.
        read: The splits, as they were read.
        options: Options of the run, whose crops and flips are used for images.
        schedule: How the classifier is trained.
        protocol: "probe" classifies the features of the frozen encoder, "maps" its feature maps before pooling, and
            "finetune" trains the encoder, too.

    Raises:
        ArgumentError: If the items have no labels, or the encoder has no feature maps.
    """
    device = "cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    fine_tune = protocol == "finetune"
    crops = with_values(options, **CROPS) if read.fitted.has == "pixels" else options
    items: Any = read.fitted.prepared(crops).to(device)
    classes, y = torch.unique(items.labelled(f"{WHO} --protocol"), return_inverse=True)
    encoder = (deepcopy(encoder) if fine_tune else encoder).to(device).eval()
    inputs_of, mean, deviation = _inputs(encoder, items, protocol)
    weights = torch.zeros(len(mean), len(classes), device=device, requires_grad=True)
    bias = torch.zeros(len(classes), device=device, requires_grad=True)
    trained = [weights, bias, *(encoder.parameters() if fine_tune else ())]
    rate = schedule.learning_rate * schedule.batch_size / 256
    optimizer = torch.optim.SGD(trained, rate, 0.9, weight_decay=schedule.weight_decay, nesterov=True)
    steps = schedule.epochs * -(-len(items) // schedule.batch_size)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if schedule.decay else None

    def logits(inputs: Any) -> Tensor:
        with torch.set_grad_enabled(fine_tune and torch.is_grad_enabled()):
            found = inputs_of(inputs).float()
        return (found - mean) / deviation @ weights + bias

    encoder.train(fine_tune)
    for epoch in range(schedule.epochs):
        order = torch.randperm(len(items), generator=torch.Generator().manual_seed(schedule.seed + epoch)).to(device)
        for index in torch.split(order, schedule.batch_size):
            inputs = items.views(index, epoch, schedule.seed)[0]
            optimizer.zero_grad()
            cross_entropy(logits(inputs), y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if rates is not None:
                rates.step()
    encoder.eval()
    test = read.test.prepared(options).to(device)
    places = torch.arange(len(test), device=device)
    with torch.no_grad():
        parts = [logits(test.plain(index)).argmax(1) for index in torch.split(places, schedule.batch_size)]
    predicted: Labels = classes[torch.cat(parts)]
    return predicted


def _inputs(encoder: nn.Module, items: Any, protocol: Name) -> tuple[Callable[[Any], Tensor], Tensor, Tensor]:
    """Return what a classifier reads, as a function of the encoder's inputs, with its mean and deviation over items."""
    if protocol != "maps":
        mean, deviation = feature_scale(Represent(encoder).items(items))
        return features_of(encoder), mean, deviation
    maps_of: Any = getattr(encoder, "maps", None)
    if maps_of is None:
        raise argument_error(WHO, "--protocol probe for an encoder without feature maps", "protocol", protocol)
    number, total, squares = 0, torch.zeros(()), torch.zeros(())
    places = torch.arange(len(items), device=items.ids.device)
    with torch.no_grad():
        for index in torch.split(places, rows_at_once(items.plain(places[:1]))):
            maps = maps_of(items.plain(index))  # [b, c, h, w]
            values = maps.double().cpu().transpose(0, 1).flatten(1)  # [c, b h w]
            number, total, squares = number + values.shape[1], total + values.sum(1), squares + values.square().sum(1)
    mean = total / number  # [c]
    deviation = (squares / number - mean.square()).clamp_min(0.0).sqrt()
    deviation = torch.where(deviation > 1e-6 * (1.0 + mean.abs()), deviation, torch.inf)
    area = maps[0, 0].numel()
    mean, deviation = (one.float().repeat_interleave(area).to(places.device) for one in (mean, deviation))  # [c h w]
    return lambda inputs: maps_of(inputs).flatten(1), mean, deviation
