"""Libraries that import only beside an old torchvision."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import pytest


def library(name: str) -> Any:
    """The module, or a skip of the whole file that says where it runs."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchvision cannot load its image files here, and nothing reads any
            return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not fit this torch
        if os.environ.get("HARDNEG_INTEGRATIONS"):
            raise
        pytest.skip(f"{name} cannot be imported ({error}); `make test-integrations` runs this", allow_module_level=True)
