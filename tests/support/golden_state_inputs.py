"""Inputs of the golden cases with state: banks, clusters, queues and sequences of steps, drawn from their seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Case = dict[str, Any]
Inputs = dict[str, Tensor]
FOLDER = Path(__file__).parents[1] / "golden" / "state"
_streams = {"queue": 2, "bank": 3, "clusters": 4, "bank2": 9}


def cases_of(family: str) -> list[Case]:
    cases: list[Case] = json.loads((FOLDER / f"{family}.json").read_text())
    return cases


def inputs_of(case: Case) -> Inputs:
    return _checked(_arrays(case["inputs"]), case["input_check"])


def steps_of(case: Case) -> list[tuple[Inputs, Case]]:
    """Inputs and recorded values of each step of a sequence."""
    common = {name: value for name, value in case["inputs"].items() if name != "steps"}
    found = []
    checks = zip(case["inputs"]["steps"], case["step_input_check"], case["steps"], strict=True)
    for own, check, recorded in checks:
        found.append((_checked(_arrays({**common, **own}), check), recorded))
    return found


def summary(values: Tensor | np.ndarray) -> list[float]:
    """What is recorded of an array: its sum, first and last entry, and the sum of absolute values."""
    flat = np.asarray(values.detach() if isinstance(values, Tensor) else values, dtype=np.float64).ravel()
    return [flat.sum(), flat[0], flat[-1], np.abs(flat).sum()]


def unit(rows: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return scaled


def _arrays(spec: dict[str, Any]) -> dict[str, np.ndarray]:
    seed, shape, rho = spec["seed"], (spec["B"], spec["d"]), spec.get("rho", 0.8)
    rng = np.random.default_rng(seed)
    first, noise = rng.standard_normal(shape), rng.standard_normal(shape)
    arrays = {"z1": unit(first), "z2": unit(rho * first + np.sqrt(1.0 - rho * rho) * noise)}
    if "K_queue" in spec:
        arrays["queue"] = _unit_rows(seed, "queue", spec["K_queue"], spec["d"])
    if "N_bank" in spec:
        arrays["bank"] = _unit_rows(seed, "bank", spec["N_bank"], spec["d"])
    if spec.get("two_banks"):
        arrays["bank2"] = _unit_rows(seed, "bank2", spec["N_bank"], spec["d"])
    if "indices" in spec:
        arrays["indices"] = np.array(spec["indices"])
    if "plant" in spec:  # an instance's entry in the bank is close to it
        own = arrays["indices"]
        arrays["bank"][own] = unit(arrays["z1"] + spec["plant"] * arrays["bank"][own])
    if "n_kmeans" in spec:
        rng = np.random.default_rng([seed, _streams["clusters"]])
        arrays["clusters"] = rng.integers(0, spec["k_clusters"], (spec["n_kmeans"], spec["N_bank"]))
    return arrays


def _unit_rows(seed: int, stream: str, rows: int, dim: int) -> np.ndarray:
    return unit(np.random.default_rng([seed, _streams[stream]]).standard_normal((rows, dim)))


def _checked(arrays: dict[str, np.ndarray], recorded: dict[str, list[float]]) -> Inputs:
    for name, expected in recorded.items():
        np.testing.assert_allclose(summary(arrays[name]), expected, rtol=1e-12, atol=1e-10, err_msg=name)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
