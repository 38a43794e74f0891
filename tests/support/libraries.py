"""Libraries that need not be installed."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import pytest

NEEDS_OLD_TORCHVISION = ("timm", "lightly", "open_clip")


def library(name: str) -> Any:
    """The module, or a skip that says why: of the test, or of the whole file at its top."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the old torchvision cannot load images, and nothing reads any
            return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not fit this torch
        if os.environ.get("HARDNEG_INTEGRATIONS"):
            raise
        elsewhere = "; make test-integrations runs this" if name.split(".")[0] in NEEDS_OLD_TORCHVISION else ""
        pytest.skip(f"{name} cannot be imported ({error}){elsewhere}", allow_module_level=True)
