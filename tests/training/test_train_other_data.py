"""A run never resumes with other data, and its process has an exit code for each failure."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hardneg.training.recipes.__main__ as recipes_main
from hardneg.core.errors import Damaged, DataChanged, DiskFull, NotFinite
from hardneg.training.data.images import ImageData, load
from hardneg.training.loop.data_record import fingerprint
from hardneg.training.loop.runs import DATA_CHANGED, DIVERGED, NO_DISK_SPACE, NO_MEMORY, REFUSED, Run
from hardneg.training.recipes.__main__ import main
from support.errors import raises
from support.training_runs import few_digits, options_of, run, stop_after

pytest.importorskip("accelerate", reason="training needs the extra train")


# Data.


def change(data: Path, **arrays: Any) -> None:
    with np.load(data) as before:
        np.savez(data, **{name: arrays.get(name, before[name]) for name in before.files})


@pytest.fixture
def own_data(tmp_path: Path) -> Path:
    few_digits(tmp_path / "own.npz", 96)
    return tmp_path / "own.npz"


def arrays_of(path: Path) -> dict[str, Any]:
    with np.load(path) as found:
        return {name: found[name].copy() for name in found.files}


@pytest.mark.parametrize("what", ["a pixel", "a label", "a test label", "the number of images"])
@pytest.mark.parametrize("finished", [False, True])
def test_a_run_does_not_go_on_with_other_data(
    what: str, finished: bool, own_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, out = options_of(f"npz:{own_data}", epochs=2), tmp_path / "run"
    with monkeypatch.context() as patch:
        if not finished:
            stop_after(1, patch)
            with pytest.raises(KeyboardInterrupt):
                run("simclr", out, options)
        else:
            run("simclr", out, options)
    before = Run(out).config()["trained"]["data"]
    arrays = arrays_of(own_data)
    if what == "a pixel":
        arrays["images"][3, 0, 0] ^= 1
    elif what == "the number of images":
        arrays["images"], arrays["labels"] = arrays["images"][:-1], arrays["labels"][:-1]
    else:
        name = "labels" if what == "a label" else "test_labels"
        arrays[name][5] = (arrays[name][5] + 1) % 10
    change(own_data, **arrays)
    with pytest.raises(DataChanged) as raised:
        run("simclr", out, options, resume=True)
    split = "test" if what == "a test label" else "train"
    now = fingerprint(load(f"npz:{own_data}", split))
    assert before[split]["fingerprint"] in raised.value.what
    assert now in (raised.value.got or "")
    assert "--allow-other-data" in (raised.value.fix or "")
    assert Run(out).config()["trained"]["data"] == before
    result = run("simclr", out, options, resume=True, allow_other_data=True)
    if finished:  # nothing was trained on the new data
        assert result["trained"]["data"] == before
    else:
        assert result["trained"]["data"][split]["fingerprint"] == now
        assert result["trained"]["earlier_data"] == [before]


def code_of(out: Path, options: dict[str, Any], *flags: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exit code of the process of a run, in this one."""
    monkeypatch.setattr(sys, "argv", ["recipes", "simclr", str(out), json.dumps(options), *flags])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    try:
        main()
    except SystemExit as stopped:
        return stopped.code


def test_the_process_of_a_run_has_a_code_for_other_data(
    own_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, out = options_of(f"npz:{own_data}", epochs=1), tmp_path / "run"
    assert code_of(out, options, monkeypatch=monkeypatch) is None
    change(own_data, labels=np.arange(96) % 10)
    assert code_of(out, options, monkeypatch=monkeypatch) == DATA_CHANGED
    assert capsys.readouterr().err.strip().splitlines()[-1].endswith("if the change is intended.")
    assert code_of(out, options, "--allow-other-data", monkeypatch=monkeypatch) is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFinite("train", "finite losses"), DIVERGED),
        (DiskFull("file", 28, "No space left on device"), NO_DISK_SPACE),
        (torch.OutOfMemoryError("CUDA out of memory"), NO_MEMORY),
        (MemoryError(), NO_MEMORY),
        (Damaged("train", "a checkpoint", "file"), REFUSED),
    ],
)
def test_the_process_of_a_run_has_a_code_for_each_failure(
    error: Exception,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(recipes_main, "run_recipe", fail)
    assert code_of(tmp_path, {}, monkeypatch=monkeypatch) == code
    assert capsys.readouterr().err.strip() == (str(error) or "MemoryError")


def test_a_run_of_a_method_with_a_state_for_each_image_needs_as_many(own_data: Path, tmp_path: Path) -> None:
    options = options_of(f"npz:{own_data}", epochs=1)
    run("sogclr", tmp_path / "run", options)
    (tmp_path / "run" / "result.json").unlink()
    arrays = arrays_of(own_data)
    change(own_data, images=arrays["images"][:-1], labels=arrays["labels"][:-1])
    with raises(DataChanged, who="train", what="its checkpoint"):
        run("sogclr", tmp_path / "run", options, resume=True, allow_other_data=True)


def test_a_fingerprint_is_of_the_content() -> None:
    images = torch.arange(4 * 64, dtype=torch.int64).remainder(256).to(torch.uint8).view(4, 1, 8, 8)
    labels, ids = torch.tensor([0, 1, 0, 1]), torch.arange(4)
    usual = fingerprint(ImageData(images, labels, ids, "mine", ("a", "b")))
    assert fingerprint(ImageData(images, labels, ids, "other", ("c", "d"))) == usual
    assert (
        fingerprint(ImageData(images.transpose(2, 3).contiguous().transpose(2, 3), labels, ids, "x", ("a", "b")))
        == usual
    )
    others = [
        ImageData(images.flip(0), labels, ids, "mine", ("a", "b")),
        ImageData(images.view(4, 1, 4, 16), labels, ids, "mine", ("a", "b")),
        ImageData(images, labels.flip(0), ids, "mine", ("a", "b")),
        ImageData(images, None, ids, "mine"),
        ImageData(images, labels, ids + 1, "mine", ("a", "b")),
    ]
    assert len({usual, *map(fingerprint, others)}) == 6
