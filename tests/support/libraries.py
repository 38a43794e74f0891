"""Libraries that need not be installed, and parts that have other places in other versions."""

from __future__ import annotations

import importlib
import inspect
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


def part_of_sentence_transformers(name: str) -> Any:
    """Its ``losses`` or ``modules``, wherever the installed version has them, or a skip."""
    library("sentence_transformers")
    try:
        return importlib.import_module(f"sentence_transformers.sentence_transformer.{name}")
    except ModuleNotFoundError:  # before version 5.4
        return importlib.import_module("sentence_transformers." + {"modules": "models"}.get(name, name))


def tokens(model: Any, texts: list[str]) -> dict[str, Any]:
    """What a SentenceTransformer makes of texts; before version 5.3 by ``tokenize``."""
    made: dict[str, Any] = (getattr(model, "preprocess", None) or model.tokenize)(texts)
    return made


def needs_option(function: Any, name: str) -> pytest.MarkDecorator:
    """Skips where the installed version of ``function`` does not have the option."""
    missing = name not in inspect.signature(function).parameters
    return pytest.mark.skipif(missing, reason=f"this version of {function.__name__} has no {name}")
