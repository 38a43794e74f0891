"""Protocols of papers on the encoder of a finished run: transfer to other data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hardneg.core.errors import argument_error
from hardneg.training.data.items import Splits
from hardneg.training.data.kinds import kind_of
from hardneg.training.encoders import Represent
from hardneg.training.loop.runs import Run
from hardneg.training.options.base import Weights
from hardneg.training.trained import load_encoder, options_in


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
    options = options_in(disk.whole_config())
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
