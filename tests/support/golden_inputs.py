"""The golden cases: numbers of the authors' own code in float64, and the inputs they were computed on.

``golden/<family>.json`` keeps only numbers. The inputs come back from their seeds, drawn by numpy's PCG64: the two
views from the seed itself, everything else from a child stream [seed, number], so that no draw moves another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Case = dict[str, Any]
FOLDER = Path(__file__).parents[1] / "golden"
_child_stream = {"labels": 1, "queue": 2, "z3": 7, "graphs": 8}


def families() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def cases_of(family: str) -> list[Case]:
    cases: list[Case] = json.loads((FOLDER / f"{family}.json").read_text())
    return cases


def inputs_of(case: Case) -> dict[str, Tensor]:
    """The tensors of a case, checked against the sums that were recorded with the losses."""
    spec = case["inputs"]
    arrays = _graphs(**spec) if "n_graphs" in spec else _views(**spec)
    for name, recorded in case["input_check"].items():
        # Sums round differently with another vector length of the CPU; a changed stream would be off by 0.1 or more.
        np.testing.assert_allclose(_summary(arrays[name]), recorded, rtol=1e-12, atol=1e-10, err_msg=name)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _views(seed: int, B: int, d: int, rho: float = 0.8, **options: Any) -> dict[str, np.ndarray]:  # noqa: N803
    rng = np.random.default_rng(seed)
    first, noise = rng.standard_normal((B, d)), rng.standard_normal((B, d))
    arrays = {"z1": _unit(first), "z2": _unit(rho * first + np.sqrt(1.0 - rho * rho) * noise)}
    for original, copy in options.get("dup", ()):
        for view in arrays.values():
            view[copy] = view[original]
    if "C" in options:
        arrays["labels"] = _stream(seed, "labels").integers(0, options["C"], B)
    if "labels_explicit" in options:
        arrays["labels"] = np.array(options["labels_explicit"])
    if "K_queue" in options:
        arrays["queue"] = _unit(_stream(seed, "queue").standard_normal((options["K_queue"], d)))
    if options.get("third"):
        arrays["z3"] = _unit(_stream(seed, "z3").standard_normal((B, d)))
    return arrays


def _graphs(seed: int, n_graphs: int, nodes_per_graph: int, d: int, scale: float) -> dict[str, np.ndarray]:
    rng = _stream(seed, "graphs")
    nodes = rng.standard_normal((n_graphs * nodes_per_graph, d))
    return {
        "l_enc": scale * nodes,
        "g_enc": scale * rng.standard_normal((n_graphs, d)),
        "batch": np.arange(n_graphs).repeat(nodes_per_graph),
    }


def _stream(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, _child_stream[name]])


def _unit(rows: np.ndarray) -> np.ndarray:
    unit: np.ndarray = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return unit


def _summary(array: np.ndarray) -> list[float]:
    flat = array.astype(np.float64).ravel()
    return [flat.sum(), flat[0], flat[-1], np.abs(flat).sum()]
