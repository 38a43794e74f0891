"""Shared by all tests: one thread, fixed seeds, markers, warnings that appear again, and unit vectors to score."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import typer.testing
from hypothesis import settings
from torch import Tensor
from torch.nn.functional import normalize

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read at the first import of the kernels, whichever test that is in

from hardneg.core.errors import forget_warnings
from support import disk as disk
from support.ordering import spread
from support.vectors import make_unit_vectors

torch.set_num_threads(1)
if not torch.cuda.is_available():  # torch would keep each seed for absent devices with a stack trace: 1 ms per seed
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None
gc.disable()  # until all tests are collected: what is imported stays
settings.register_profile("steady", derandomize=True)  # the same examples in every run of the tests
settings.register_profile("search", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

# Built anew, with the flags of all recipes, the command takes longer than what most tests run by it.
typer.testing._get_command = cache(typer.testing._get_command)  # type: ignore[attr-defined]

collect_ignore = ["support"]  # scripts and helpers, which would be imported to look for doctests
pytest_plugins = ["support.budget", "support.comparisons", "support.reports"]  # --budget, and fixtures of several files
UnitVectors = Callable[..., Tensor]
_beside = Path(__file__).parents[2] / "shared" / "data"
if _beside.is_dir():  # real data beside the checkout, as the Makefile has it
    os.environ.setdefault("HARDNEG_DATA", str(_beside))
LISTED = {
    marker: (Path(__file__).parent / f"{marker}.txt").read_text(encoding="utf-8").splitlines()[1:]
    for marker in ("slow", "long")
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--write-outputs``."""
    parser.addoption("--write-outputs", action="store_true", help="write what the Python blocks of the docs print")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import files that are listed as a whole where their marker is left out."""
    file = str(collection_path.relative_to(config.rootpath))
    left_out = [marker for marker in LISTED if f"not {marker}" in (config.option.markexpr or "")]
    return True if any(file in LISTED[marker] for marker in left_out) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what tests/slow.txt and tests/long.txt list; skip ``gpu`` without one.

    An entry is a file, a class, a test with all its cases or one case. Of several workers, each begins with some of the
    whole files.
    """
    for item in items:
        name = item.nodeid.partition("[")[0]
        entries = {item.nodeid, name, _file_of(item), name.rpartition("::")[0]}
        for marker, listed in LISTED.items():
            if not entries.isdisjoint(listed):
                item.add_marker(marker)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = spread(items, workers, _file_of, lambda item: _file_of(item) in LISTED["slow"])
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter collect everything at its end: some extensions report what is left."""
    gc.unfreeze()


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def heard_again() -> Iterator[None]:
    """A warning that appears once appears again in the next test."""
    forget_warnings()
    yield
    forget_warnings()


@pytest.fixture(autouse=True, scope="module")
def forgotten_accelerators() -> None:
    """Accelerate keeps the precision and device of a process; those of other tests are not this one's."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def unit_vectors() -> UnitVectors:
    """``unit_vectors(8, 4, seed=1)`` gives [8, 4]; rows of unit norm in float64, the same for the same arguments."""
    return make_unit_vectors


@pytest.fixture
def two_unit_views() -> tuple[Tensor, Tensor]:
    """Two correlated views of 8 instances with 6 features, [8, 6] each, in float64."""
    first = make_unit_vectors(8, 6, seed=1)
    return first, normalize(0.8 * first + 0.6 * make_unit_vectors(8, 6, seed=2), dim=-1)


@pytest.fixture
def triton_can_run() -> Iterator[None]:
    """Skip unless Triton kernels can run, on a GPU or in Triton's interpreter."""
    from hardneg.kernels.triton.language import installed, interpreted
    from support.kernel_inputs import DEVICE

    if not installed:
        pytest.skip("triton 3.4 or newer is not installed")
    if DEVICE == "cpu" and not interpreted:
        pytest.skip("triton was imported without TRITON_INTERPRET=1, and there is no GPU")
    with np.errstate(all="ignore"):  # NumPy need not warn of the infinities of masks
        yield
