"""The state of every recipe, saved between two steps, continues in a new method to the same bits."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hardneg.training import recipes
from hardneg.training.data.inputs import joined
from hardneg.training.data.items import Items
from hardneg.training.loop.method import Batch, Method
from hardneg.training.loop.parts import splits
from hardneg.training.options import RECIPES
from support.graphs import graph_file
from support.texts import image_text_table, pair_table, text_file, vector_file
from support.training_runs import few_digits, flat

pytest.importorskip("accelerate", reason="training needs the extra train")

SIZE, TOTAL = 40, 12
CASES: dict[str, dict[str, Any]] = {
    "simclr": {"negatives": "Tilt(linear(0.5, 2.0))", "temperature": "cosine(0.5, 0.2)"},
    "supervised": {},
    "simcse": {},
    "pairs": {},
    "clip": {},
    "clip, sogclr": {"denominator": "sogclr"},
    "clip, emc2": {"denominator": "emc2"},
    "clip, images and texts": {"objective": "sigmoid"},
    "quick-thoughts": {"encoders": "two"},
    "moco": {"queue": 20, "momentum": 0.9},
    "moco, v3": {"version": "v3", "momentum": 0.9, "hidden_dim": 12},
    "byol": {"hidden_dim": 12},
    "swav": {"hidden_dim": 12, "num_prototypes": 6, "queue": 12, "num_crops": 1, "frozen_epochs": 0},
    "nnclr": {"hidden_dim": 12, "queue": 15},
    "fnc": {"num_support": 1, "threshold": 0.2},
    "sogclr": {"negatives": "Tilt(1.0)"},
    "isogclr": {},
    "emc2": {},
    "emc2, data set": {"proposals": "data set", "num_steps": 4},
    "emc2, encoded again": {"reencode": True},
    "instance": {"num_draws": 10},
    "cmc": {"num_draws": 10},
    "local-aggregation": {"clusters": 4},
    "negative-cache": {"cache": 30, "num_draws": 2},
    "graphcl": {},
    "infograph": {},
}
"""Options of each recipe; a second case of a recipe is named behind a comma."""

DATA = {
    "simcse": text_file,
    "pairs": pair_table,
    "clip": vector_file,
    "clip, sogclr": vector_file,
    "clip, emc2": vector_file,
    "clip, images and texts": image_text_table,
    "quick-thoughts": text_file,
    "graphcl": graph_file,
    "infograph": graph_file,
}
SUFFIX = {text_file: "txt", pair_table: "jsonl", vector_file: "npz", image_text_table: "jsonl", graph_file: "npz"}


def test_every_recipe_has_a_case() -> None:
    assert {name.partition(",")[0] for name in CASES} == set(RECIPES)


@pytest.mark.parametrize("name", CASES)
def test_a_saved_state_continues_to_the_same_bits(name: str, tmp_path: Path) -> None:
    one, data = made(name, tmp_path, seed=0)
    for step in range(3):
        train(one, data, step)
    saved = io.BytesIO()
    torch.save(one.state_dict(), saved)

    other, _ = made(name, tmp_path, seed=1)  # whose first weights are others
    assert differing(one, other)
    other.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    assert not differing(one, other)
    for step in range(3, 6):
        losses = [train(method, data, step) for method in (one, other)]
        assert torch.isfinite(losses[0])
        assert torch.equal(losses[0], losses[1])
    assert not differing(one, other)
    assert differing(one, torch.load(io.BytesIO(saved.getvalue()), weights_only=True))


def made(name: str, folder: Path, seed: int) -> tuple[Method, Items]:
    """A method with weights of this seed, and its data, as the loop makes them."""
    recipe = name.partition(",")[0]
    maker = DATA.get(name, few_digits)
    data = maker(folder / f"data.{SUFFIX.get(maker, 'npz')}", SIZE)
    common = {"data": data, "epochs": 2, "batch_size": 6, "dim": 8, "device": "cpu"}
    options = RECIPES[recipe](**common | CASES[name])
    items = splits(options).train.prepared(options)
    module, _, build = recipes.METHODS[recipe].partition(".")
    torch.manual_seed(seed)
    return getattr(importlib.import_module(f"{recipes.__name__}.{module}"), build)(options, items, TOTAL), items


def train(method: Method, data: Items, step: int) -> Tensor:
    """One step of plain gradient descent on six items, as in the loop; its loss."""
    ids = (torch.arange(6) + 6 * step) % len(data)
    torch.manual_seed(step)
    method.set_progress(step, TOTAL)
    labels = None if data.labels is None else data.labels[ids]
    batch = Batch(joined(data.views(ids, 0, 0)), ids, labels, data.mined(ids))
    loss = method.loss_of(method.encoder, batch)
    method.zero_grad()
    loss.backward()
    with torch.no_grad():
        for weights in method.parameters():
            if weights.grad is not None:
                weights -= 0.05 * weights.grad
    method.after_step()
    return loss.detach()


def differing(one: Method, other: Method | dict[str, Any]) -> set[str]:
    """Names of the parts of the state that differ in a bit."""
    left, right = (flat(each.state_dict() if isinstance(each, Method) else each) for each in (one, other))
    assert left.keys() == right.keys()
    return {name for name, value in left.items() if value.tobytes() != right[name].tobytes()}
