"""Every recipe for images on files that are decoded when needed: cut, resumed, exported and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hardneg as hn
from hardneg.io.embeddings import load_evaluated
from hardneg.training.data.images import load
from hardneg.training.export import export
from hardneg.training.recipes import METHODS
from support.image_folders import write_folder
from support.libraries import library
from support.training_runs import assert_same, everything, interrupted, run

pytest.importorskip("accelerate", reason="training needs the extra train")

OF_OTHER_DATA = {"simcse", "pairs", "clip", "quick-thoughts", "graphcl", "infograph"}
MORE: dict[str, dict[str, Any]] = {
    "instance": {"num_draws": 8},
    "cmc": {"num_draws": 8},
    "moco": {"queue": 16},
    "local-aggregation": {"clusters": 4, "warmup": 0},
    "negative-cache": {"cache": 16},
}


@pytest.mark.filterwarnings("ignore:The run in")  # random pixels make a loss fall slowly: the run may seem collapsed
@pytest.mark.parametrize("recipe", [name for name in METHODS if name not in OF_OTHER_DATA])
def test_resumed_exported_and_loaded(recipe: str, tmp_path: Path) -> None:
    library("safetensors")
    write_folder(tmp_path / "photos", {"a": 24, "b": 24}, (40, 30, 3))
    data = f"folder:{tmp_path / 'photos'}@16"
    options = {"data": data, "cache_images": "none", "encoder": "tiny", "epochs": 2, "batch_size": 8, "dim": 16}
    options |= {"device": "cpu", "log_every": 1, **MORE.get(recipe, {})}
    with interrupted(7):
        run(recipe, tmp_path / "cut", options)
    run(recipe, tmp_path / "cut", options, resume=True)
    run(recipe, tmp_path / "whole", options)
    assert_same(everything(tmp_path / "cut"), everything(tmp_path / "whole"))
    expected = load_evaluated(tmp_path / "cut" / "embeddings.npz")[0]
    images = load(data, "test", cache="none").pixels(slice(None))
    for source in (tmp_path / "cut", export(tmp_path / "cut", "safetensors")):
        encoder: Any = hn.load_encoder(source)
        with torch.no_grad():
            torch.testing.assert_close(encoder.features(images), expected, rtol=0, atol=1e-6)
