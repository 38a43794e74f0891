"""``--encode-chunk``: every recipe trains as with the whole batch, resumes, and warns of batch statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardneg.core.errors import HardnegWarning, forget_warnings
from hardneg.training.encoders import Encoder
from hardneg.training.loop.runs import Run
from hardneg.training.loop.train import Loop
from hardneg.training.options import RECIPES
from support.training_runs import assert_same, everything, few_digits, run, short

pytest.importorskip("accelerate", reason="training needs the extra train")

OF_IMAGES = [name for name, options in RECIPES.items() if ":" not in options.data]
CHUNK = 24  # views: of 64, or MoCo's 32
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "moco v3": ("moco", {"version": "v3", "head_norm": "layer", "seed": 2}),
    "byol": ("byol", {"head_norm": "layer", "temperature": 0.5}),
    "swav": ("swav", {"head_norm": "layer", "num_prototypes": 6}),
    "nnclr": ("nnclr", {"head_norm": "layer"}),
    "local-aggregation": ("local-aggregation", {"warmup": 0}),
}


@pytest.mark.parametrize("name", sorted({*OF_IMAGES, *MORE}))
def test_chunks_train_as_the_whole_batch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, more = MORE.get(name, (name, {}))
    options = short(few_digits(tmp_path / "digits.npz", 64), epochs=1, **{"temperature": 0.3, "seed": 1, **more})
    run(recipe, tmp_path / "whole", options)
    sizes, forward = [], Encoder.forward
    monkeypatch.setattr(Encoder, "forward", lambda self, images: sizes.append(len(images)) or forward(self, images))
    run(recipe, tmp_path / "chunks", options | {"encode_chunk": CHUNK})
    assert max(sizes) == CHUNK
    whole, chunks = (np.array([r["loss"] for r in Run(tmp_path / n).metrics()]) for n in ("whole", "chunks"))
    np.testing.assert_allclose(chunks, whole, rtol=1e-5)
    states = [Run(tmp_path / name).load() for name in ("whole", "chunks")]
    one, two = ([slot["exp_avg"] for slot in state["optimizer"]["state"].values()] for state in states if state)
    for left, right in zip(one, two, strict=True):
        assert (left - right).norm() <= 1e-3 * left.norm()


def test_a_run_in_chunks_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = short(few_digits(tmp_path / "digits.npz", 64), encode_chunk=CHUNK, precision="bf16")
    run("simclr", tmp_path / "whole", options)
    save = Loop._save

    def saved(self: Loop) -> None:
        save(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_save", saved)
        with pytest.raises(KeyboardInterrupt):
            run("simclr", tmp_path / "stopped", options)
    run("simclr", tmp_path / "stopped", options, resume=True)
    assert_same(everything(tmp_path / "stopped"), everything(tmp_path / "whole"))


def test_batch_statistics_are_warned_of(tmp_path: Path) -> None:
    forget_warnings()
    options = short(few_digits(tmp_path / "digits.npz", 64), epochs=1, encoder="resnet18", encode_chunk=CHUNK, dim=8)
    with pytest.warns(HardnegWarning, match=f"chunks of {CHUNK} rows"):
        run("simclr", tmp_path / "run", options | {"batch_size": 16})
