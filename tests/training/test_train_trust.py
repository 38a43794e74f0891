"""What is recorded, sealed and refused: a run never goes on with damaged files, other data or another encoder."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hardneg.training.recipes.__main__ as recipes_main
from hardneg.core.errors import ArgumentError, Damaged, DataChanged, DiskFull, FileError, HardnegWarning, NotFinite
from hardneg.core.options import option
from hardneg.core.schedules import linear
from hardneg.io.embeddings import load_embeddings
from hardneg.training.augmentation import from_transform
from hardneg.training.checkpoints import NEWEST, PREVIOUS
from hardneg.training.data.images import ImageData, load
from hardneg.training.loop import Loop, train
from hardneg.training.options import RECIPES, SimCLROptions, TrainOptions
from hardneg.training.recipes.__main__ import main
from hardneg.training.recipes.simclr import SimCLR
from hardneg.training.records import final_of, has_collapsed
from hardneg.training.runs import DATA_CHANGED, DIVERGED, NO_MEMORY, NO_ROOM, REFUSED, Run
from hardneg.training.trained import fingerprint
from support.training_runs import assert_same, everything, few_digits, run, short

pytest.importorskip("accelerate", reason="training needs the extra train")

EPOCHS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_digits(tmp_path_factory.mktemp("data") / "digits.npz", 96)


def options_of(data: str, **options: Any) -> dict[str, Any]:
    return short(data, **{"epochs": EPOCHS, **options})


def stop_after(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Loop._one_step

    def stopped(self: Loop, epoch: int, *rest: Any) -> None:
        if epoch == epochs:
            raise KeyboardInterrupt
        step(self, epoch, *rest)

    monkeypatch.setattr(Loop, "_one_step", stopped)


@pytest.fixture(scope="module")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    run("simclr", path, options_of(data))
    return path


@pytest.fixture
def begun(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was stopped after two of three epochs."""
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            run("simclr", tmp_path / "begun", options_of(data))
    return tmp_path / "begun"


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


# A user's own method.


@dataclass(frozen=True)
class MyOptions(TrainOptions):
    margin: float = option(0.1, "Mine.", "Mine", low=0.0)


class MyMethod(SimCLR):
    def loss_for(self, options: Any) -> Any:
        return super().loss_for(SimCLROptions(temperature=options.temperature))


def test_point_8_a_method_of_the_user_is_resumed(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = MyOptions(**options_of(data, epochs=2))
    expected = train("mine", MyMethod, options, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            train("mine", MyMethod, options, tmp_path / "stopped", quiet=True)
    resumed = train("mine", MyMethod, options, tmp_path / "stopped", quiet=True, resume=True)
    assert resumed["final"] == expected["final"]
    assert_same(everything(tmp_path / "stopped"), everything(tmp_path / "whole"))
    other = MyOptions(**options_of(data, epochs=2), margin=0.2)
    with pytest.raises(ValueError, match=r"other options \(margin: 0.1 -> 0.2\)"):
        train("mine", MyMethod, other, tmp_path / "stopped", quiet=True, resume=True)


# Schedules of the temperature and tau_plus.


@pytest.mark.parametrize(
    ("recipe", "options"), [("simclr", {}), ("moco", {"queue": 64}), ("moco", {"version": "v3"}), ("supervised", {})]
)
def test_point_4_schedules_of_temperature_and_tau_plus_train_and_go_on(
    recipe: str, options: dict[str, Any], data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(data, temperature="linear(0.5, 0.2)", tau_plus="linear(0.0, 0.05)", **options)
    run(recipe, tmp_path / "whole", options)
    found = [record["effective_temperature"] for record in Run(tmp_path / "whole").metrics()]
    expected = np.linspace(0.5, 0.2, len(found), endpoint=False)
    known = [i for i, value in enumerate(found) if value is not None]  # the queue of MoCo is empty at first
    assert len(known) >= len(found) - 1
    np.testing.assert_allclose([found[i] for i in known], expected[known], rtol=1e-3)
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, tmp_path / "stopped", options)
    run(recipe, tmp_path / "stopped", options, resume=True)
    assert_same(everything(tmp_path / "stopped"), everything(tmp_path / "whole"))
    config = Run(tmp_path / "stopped").config()
    assert config["options"]["temperature"] == "linear(0.5, 0.2)"
    with pytest.raises(ValueError, match="other options"):
        run(recipe, tmp_path / "stopped", options | {"temperature": "linear(0.5, 0.1)"}, resume=True)


def test_point_4_an_adaptive_temperature_moves_after_each_epoch(data: str, tmp_path: Path) -> None:
    run("simclr", tmp_path, options_of(data, temperature="adaptive(0.5, 0.1, rate=0.1)"))
    found = [record["effective_temperature"] for record in Run(tmp_path).metrics()]
    # The first mean loss is remembered; after the second epoch, whose loss is lower, the third begins at 0.4.
    assert found == pytest.approx([0.5] * 6 + [0.4] * 3, rel=1e-4)


def test_options_take_schedules_of_python() -> None:
    options = SimCLROptions(temperature=linear(0.5, 0.1))  # type: ignore[arg-type]
    assert options.temperature == SimCLROptions(temperature=" linear(0.5,0.1)").temperature == "linear(0.5, 0.1)"
    assert SimCLROptions().as_dict()["temperature"] == 0.5


# What was trained.


def test_point_9_a_run_records_what_was_trained(data: str, whole: Path) -> None:
    trained = Run(whole).config()["trained"]
    train_split = load(data, "train")
    assert trained["data"]["train"] == {
        "images": 96,
        "shape": [1, 8, 8],
        "classes": 10,
        "fingerprint": fingerprint(train_split),
    }
    assert trained["data"]["test"]["images"] == 120
    assert trained["encoder"]["name"] == "tiny"
    assert trained["encoder"]["class"] == "hardneg.training.encoders.Encoder"
    encoder = SimCLR(RECIPES["simclr"](**options_of(data)), train_split, 1).encoder
    assert trained["encoder"]["parameters"] == sum(weights.numel() for weights in encoder.parameters())
    assert "rotate=10.0" in trained["views"]
    result = Run(whole).result()
    assert result is not None
    assert result["trained"] == trained


def test_point_9_other_encoders_weights_and_views_have_other_records(data: str, whole: Path, tmp_path: Path) -> None:
    def trained(name: str, recipe: str = "simclr", **options: Any) -> dict[str, Any]:
        run(recipe, tmp_path / name, options_of(data, epochs=1, **options))
        return Run(tmp_path / name).config()["trained"]

    usual = Run(whole).config()["trained"]
    assert trained("same") == usual
    assert trained("seed", seed=1)["encoder"]["initial_weights"] != usual["encoder"]["initial_weights"]
    assert trained("dim", dim=16)["encoder"]["parameters"] < usual["encoder"]["parameters"]
    assert trained("views", augment="tiny(rotate=5)")["views"] != usual["views"]
    # The predictor of MoCo v3 is not a part of the encoder that methods are compared by.
    for version in ("v2", "v3"):
        assert trained(version, "moco", version=version, queue=64)["encoder"] == usual["encoder"]


def test_point_9_views_of_a_user_are_recorded_by_name(data: str, tmp_path: Path) -> None:
    def mine(image: torch.Tensor) -> torch.Tensor:
        return image + 0.1 * torch.randn_like(image)

    run("simclr", tmp_path, options_of(data, epochs=1), views=from_transform(mine))
    assert "mine" in Run(tmp_path).config()["trained"]["views"]
    assert "0x" not in Run(tmp_path).config()["trained"]["views"]


def test_a_run_does_not_go_on_with_another_encoder(data: str, begun: Path) -> None:
    def build(*what: Any) -> SimCLR:
        method = SimCLR(*what)
        method.encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32))
        return method

    with pytest.raises(ArgumentError, match=r"encoder that the run was begun with, .*Encoder of .*Sequential of 2080"):
        train("simclr", build, RECIPES["simclr"](**options_of(data)), begun, resume=True, quiet=True)


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
def test_point_17_a_run_does_not_go_on_with_other_data(
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


def test_point_17_the_process_of_a_run_has_a_code_for_other_data(
    own_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, out = options_of(f"npz:{own_data}", epochs=1), tmp_path / "run"
    assert code_of(out, options, monkeypatch=monkeypatch) is None
    change(own_data, labels=np.arange(96) % 10)
    assert code_of(out, options, monkeypatch=monkeypatch) == DATA_CHANGED
    assert capsys.readouterr().err.strip().splitlines()[-1].endswith("if it is meant to change.")
    assert code_of(out, options, "--allow-other-data", monkeypatch=monkeypatch) is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFinite("train", "finite losses"), DIVERGED),
        (DiskFull("file", 28, "No space left on device"), NO_ROOM),
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
    with pytest.raises(DataChanged, match="a method whose state fits its checkpoint"):
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


# Damage.


def test_point_18_a_damaged_checkpoint_falls_back_on_the_one_before(data: str, begun: Path, whole: Path) -> None:
    assert Run(begun).checkpoints.previous.exists()
    size = 8 * (begun / NEWEST).stat().st_size
    flip(begun / NEWEST, size // 3)
    with pytest.warns(HardnegWarning, match=r"checkpoint.pt is damaged .*resumes from the checkpoint before it"):
        run("simclr", begun, options_of(data), resume=True)
    assert_same(everything(begun), everything(whole))


def test_point_18_no_whole_checkpoint_is_refused_by_name(data: str, begun: Path) -> None:
    for name in (NEWEST, PREVIOUS):
        flip(begun / name, 4 * (begun / name).stat().st_size)
    before = {file: file.read_bytes() for file in begun.iterdir()}
    with pytest.raises(Damaged) as raised:
        run("simclr", begun, options_of(data), resume=True)
    assert raised.value.path == begun / NEWEST
    assert before == {file: file.read_bytes() for file in before}


@pytest.mark.parametrize("name", [NEWEST, "config.json", "result.json", "metrics.jsonl", "embeddings.npz"])
def test_point_18_flipped_bits_are_found(name: str, whole: Path, tmp_path: Path) -> None:
    """Each reading gives what was written, or raises Damaged with the file's name."""
    shutil.copytree(whole, tmp_path / "run")
    file, draw = tmp_path / "run" / name, random.Random(0)
    good = file.read_bytes()

    def content() -> Any:
        one = Run(tmp_path / "run")
        if name == "embeddings.npz":
            return [part.tolist() for part in load_embeddings(file)]
        return {
            NEWEST: lambda: str(one.checkpoints.load()),
            "config.json": one.config,
            "result.json": one.result,
            "metrics.jsonl": one.metrics,
        }[name]()

    expected, refused = content(), 0
    for _ in range(60):
        flip(file, draw.randrange(8 * len(good)))
        found = refused_or(content, file)
        refused += found is None
        if isinstance(found, dict):  # the name of the checksum itself may be hit, and what it covers is whole
            found = {key: value for key, value in found.items() if key in expected}
        assert found in (None, expected)
        file.write_bytes(good)
    assert refused >= 50


def refused_or(content: Callable[[], Any], file: Path) -> Any:
    """The content, or None if it is refused by the name of the file."""
    try:
        return content()
    except Damaged as error:
        return None if error.path == file else pytest.fail(str(error))


def test_point_18_the_end_of_the_last_record_counts(whole: Path, tmp_path: Path) -> None:
    """Half a last line is a killed writer's; a changed one is damage, also if its end was hit."""
    lines = Run(whole).metrics_path.read_bytes().splitlines(keepends=True)[-2:]
    expected, file, size = Run(whole).metrics()[-2:], tmp_path / "metrics.jsonl", 8 * sum(map(len, lines))
    for bit in [*range(size - 5 * 8, size), *range(size - 8 * len(lines[-1]), size, 41)]:
        file.write_bytes(b"".join(lines))
        flip(file, bit)
        found = refused_or(Run(tmp_path).metrics, file)
        assert found in (None, expected), bit
    file.write_bytes(b"".join(lines)[:-20])
    assert Run(tmp_path).metrics() == expected[:-1]


def test_files_without_checksums_are_read(data: str, begun: Path, whole: Path) -> None:
    """Without checksums, without a previous checkpoint, and without a record of what was trained."""
    state = Run(begun).load()
    torch.save(state, begun / NEWEST)
    (begun / PREVIOUS).unlink()
    config = Run(begun).config()
    del config["trained"]
    (begun / "config.json").write_text(json.dumps(config))
    records = Run(begun).metrics()
    Run(begun).metrics_path.write_text("".join(json.dumps(record) + "\n" for record in records))
    run("simclr", begun, options_of(data), resume=True)
    assert_same(everything(begun), everything(whole))


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": None},
        {"options": []},
        {"trained": {}},
        {"trained": {"encoder": {}, "data": {"train": 3}}},
        {"trained": "auto"},
    ],
    ids=str,
)
def test_a_config_of_another_shape_is_refused_by_name(change: dict[str, Any], data: str, begun: Path) -> None:
    (begun / "config.json").write_text(json.dumps(Run(begun).config() | change))
    with pytest.raises(Damaged, match="it lacks a recipe, its options and what was trained"):
        run("simclr", begun, options_of(data), resume=True)


def test_a_damaged_list_of_warnings_is_mentioned(tmp_path: Path) -> None:
    one = Run(tmp_path)
    one.warn("first")
    one.warn("second")
    assert [warned.text for warned in one.warned()] == ["first", "second"]
    flip(tmp_path / "warnings.json", 8 * (tmp_path / "warnings.json").read_text().index("second"))
    ((_, mentioned),) = one.warned()
    assert "warnings.json is damaged" in mentioned
    (tmp_path / "warnings.json").write_text('["no record"]')
    assert one.warned()[0].kind == "damaged"


# The lock.


@pytest.mark.skipif(os.name == "nt", reason="links of POSIX")
def test_point_20_a_lock_never_follows_a_link(data: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(precious)
    with pytest.raises(FileError, match=r"\.lock.*link") as raised:
        run("simclr", tmp_path / "run", options_of(data))
    assert raised.value.path == tmp_path / "run" / ".lock"
    assert precious.read_text() == "mine"
    (tmp_path / "run" / ".lock").unlink()
    os.link(precious, tmp_path / "run" / ".lock")
    with Run(tmp_path / "run").alone():
        assert precious.read_text() == "mine"


# Collapse and final figures.


def test_point_12_a_collapsed_run_warns_and_is_marked(data: str, whole: Path, tmp_path: Path) -> None:
    def dead(*what: Any) -> SimCLR:
        method = SimCLR(*what)
        head = method.encoder.head
        assert isinstance(head, torch.nn.Sequential)
        head.append(torch.nn.BatchNorm1d(32))  # whose scale of 0 leaves the same vector for all
        torch.nn.init.zeros_(head[-1].weight)
        torch.nn.init.ones_(head[-1].bias)
        for weights in method.encoder.parameters():
            weights.requires_grad_(False)
        head[-1].bias.requires_grad_(True)
        return method

    options = RECIPES["simclr"](**options_of(data))
    with pytest.warns(HardnegWarning, match=r"has collapsed: .*similarity of 1.000.* loss of 4.143"):
        result = train("simclr", dead, options, tmp_path / "dead", quiet=True)
    assert result["collapsed"] is True
    good = Run(whole).result()
    assert good is not None
    assert good["collapsed"] is False


def test_point_12_hardness_and_false_negatives_are_means(whole: Path) -> None:
    records, result = Run(whole).metrics(), Run(whole).result()
    assert result is not None
    final = result["final"]
    assert final["records"] == 3
    for name in ("hardness", "false_negatives", "loss"):
        assert final[name] == pytest.approx(np.mean([record[name] for record in records[-3:]]))
        assert final[name] != records[-1][name]
    assert final["step"] == records[-1]["step"]


def test_final_figures_of_records_without_answers() -> None:
    records = [{"step": step, "hardness": 0.1 * step, "false_negatives": None} for step in range(1, 101)]
    final = final_of(records)
    assert final["records"] == 10
    assert final["hardness"] == pytest.approx(0.1 * 95.5)
    assert final["false_negatives"] is None
    assert final_of(records[:1])["records"] == 1
    assert not has_collapsed(final)


@pytest.mark.parametrize(
    ("final", "collapsed"),
    [
        ({"uniform_hardness": 0.99, "loss": 4.1, "effective_number": 62.0}, True),
        (
            {"uniform_hardness": 0.99, "loss": 3.0, "effective_number": 62.0},
            False,
        ),  # a low temperature tells them apart
        ({"uniform_hardness": 0.2, "loss": 4.1, "effective_number": 62.0}, False),  # the loss of a first step
        ({"uniform_hardness": None, "loss": 4.1, "effective_number": 62.0}, False),
    ],
)
def test_collapse_is_similarity_and_loss(final: dict[str, Any], collapsed: bool) -> None:
    assert has_collapsed(final) is collapsed


def test_a_whole_run_warns_of_nothing(data: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HardnegWarning)
        run("simclr", tmp_path, options_of(data, epochs=1))
    assert not [one for one in caught if issubclass(one.category, HardnegWarning)]
