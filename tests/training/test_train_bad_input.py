"""Bad input to training is one clear sentence that names the fix, and nothing that was there is lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hardneg.cli.app import app
from hardneg.comparing import Comparison, compare
from hardneg.core.errors import ArgumentError, Damaged, FileError, InUse, NotWritten, UnknownName
from hardneg.io.files import write_atomically
from hardneg.training.data.images import ImageData
from hardneg.training.loop.runs import Run
from hardneg.training.loop.train import Loop
from hardneg.training.options import SimCLROptions
from hardneg.training.recipes import run_recipe
from support.errors import raises
from support.forks import CONTEXT
from support.training_runs import assert_same, everything, few_digits, run, short, stop_after

pytest.importorskip("accelerate", reason="training needs the extra train")

NUM_IMAGES = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad-input")


@pytest.fixture(scope="module")
def data(folder: Path) -> str:
    return few_digits(folder / "digits.npz", NUM_IMAGES)


@pytest.fixture(scope="module")
def whole(folder: Path, data: str) -> Path:
    """A finished run of three epochs."""
    run("simclr", folder / "whole", options_of(data))
    return folder / "whole"


@pytest.fixture
def begun(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same run, stopped in its second epoch."""
    stop_after(1, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run("simclr", tmp_path / "begun", options_of(data))
    monkeypatch.undo()
    return tmp_path / "begun"


def options_of(data: str, **options: Any) -> dict[str, Any]:
    return short(data, **{"epochs": 3, **options})


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


# Data.


@pytest.mark.parametrize("name", ["cifar", "mnist", "folder:", "digits:there", ""])
def test_an_unknown_data_set_lists_the_known_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownName) as found:
        run("simclr", tmp_path / "run", short(name))
    assert (found.value.where, found.value.name) == ("--data", name)
    assert found.value.known[:4] == ["digits", "fashion-mnist", "cifar10", "cifar100"]
    assert {"folder:PATH", "npz:PATH", "hf:NAME"} < set(found.value.known)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("fashion-mnist", "apt install dataset-fashion-mnist"),
        ("cifar10", "torchvision.datasets.CIFAR10"),
        ("folder:nowhere", "got nowhere, which is not a folder"),
        ("npz:nowhere.npz", "got nowhere.npz, which is not a file"),
    ],
)
def test_data_that_is_not_there_says_how_to_get_it(name: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=fix):
        run("simclr", tmp_path / "runs" / "run", short(name, data_root=str(tmp_path)))
    assert not (tmp_path / "runs").exists()  # a rejected run leaves no folder behind


def save_npz(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return f"npz:{path}"


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": noise(40, 8, 8, 2)}, r"1 or 3 channels.*got images=\(40, 8, 8, 2\)"),
        ({"images": noise(40, 64)}, r"got images=\(40, 64\)"),
        ({"images": noise(40, 8, 8) / 255.0}, r"needs uint8 images.*use \(images \* 255\)"),
        ({"images": noise(40, 8, 8), "labels": np.zeros(39, int)}, r"one per image \(40\).*got labels=\(39,\)"),
        ({"images": noise(40, 8, 8), "test_images": noise(8, 9, 9)}, r"of one size, got \(1, 8, 8\) and \(1, 9, 9\)"),
        (
            {"images": noise(40, 3, 8, 8), "test_images": noise(8, 8, 8)},
            r"of one size, got \(3, 8, 8\) and \(1, 8, 8\)",
        ),
        ({"pixels": noise(40, 8, 8)}, "needs an array `images`"),
    ],
)
def test_arrays_of_wrong_shapes_are_named(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    name = save_npz(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        run("simclr", tmp_path / "run", short(name))


def write_images(folder: Path, sizes: dict[str, tuple[int, int]], each: int = 24) -> str:
    image = pytest.importorskip("PIL.Image", reason="image files need the extra vision")
    for label, size in sizes.items():
        (folder / label).mkdir(parents=True)
        for i in range(each):
            image.fromarray(np.roll(noise(*size), i)).save(folder / label / f"{i}.png")
    return f"folder:{folder}"


def test_images_of_unequal_sizes_name_two_of_them_and_the_fix_works(tmp_path: Path) -> None:
    name = write_images(tmp_path / "photos", {"cat": (8, 8), "dog": (9, 12)})
    with raises(ArgumentError, who="data", got="(9, 12)", fix="size=64"):
        run("simclr", tmp_path / "run", short(name))
    # The directory of a run that failed at the door is free for the next try.
    result = run("simclr", tmp_path / "run", short(f"{name}@8", epochs=1))
    assert result["num_train"] + result["num_test"] == 48
    assert 0.0 <= result["knn"] <= 1.0


def test_ids_that_are_repeated_are_counted() -> None:
    images, labels = torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 0, 1, 1])
    with raises(ArgumentError, who="ImageData 'mine'", got="1 repeated"):
        ImageData(images, labels, torch.tensor([0, 1, 2, 2]), "mine", ("a", "b"))


# Labels.


@pytest.fixture
def one_class(tmp_path: Path) -> str:
    arrays = {"images": noise(64, 8, 8), "labels": np.zeros(64, int)}
    return save_npz(tmp_path / "one.npz", **arrays)


def test_one_class_trains_and_is_not_evaluated(one_class: str, tmp_path: Path) -> None:
    result = run("simclr", tmp_path / "run", short(one_class, epochs=1))
    assert np.isfinite(result["final"]["loss"])
    assert result["final"]["false_negatives"] == 1.0
    assert not {"knn", "linear", "1nn"} & result.keys()


def test_no_labels_train_and_leave_json_that_others_read(tmp_path: Path) -> None:
    name = save_npz(tmp_path / "plain.npz", images=noise(64, 8, 8))
    result = run("simclr", tmp_path / "run", short(name, epochs=1))
    assert result["final"]["false_negatives"] is None

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    for file in ("metrics.jsonl", "result.json"):
        text = (tmp_path / "run" / file).read_text()
        for part in text.splitlines() if file == "metrics.jsonl" else [text]:
            json.loads(part, parse_constant=refuse)


@pytest.mark.parametrize("labels", [np.zeros(64, int), None])
def test_supervised_training_and_comparing_need_two_classes(labels: Any, tmp_path: Path) -> None:
    arrays = {"images": noise(64, 8, 8)} | ({} if labels is None else {"labels": labels})
    name = save_npz(tmp_path / "few.npz", **arrays)
    message = "needs labels, got none" if labels is None else "needs at least two classes, got one"
    with pytest.raises(ValueError, match=f"supervised {message}"):
        run("supervised", tmp_path / "run", short(name))
    with pytest.raises(ValueError, match=f"compare {message}"):
        compare(Comparison(("simclr()", "hcl()"), 2, short(name)), tmp_path / "compare")
    assert not (tmp_path / "compare" / "runs").exists()


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": NUM_IMAGES + 1}, "--batch-size of at most the 96 images"),
        ({"batch_size": 80, "evaluate_on": "validation"}, "--batch-size of at most the 76 images"),
        ({"negatives": "Tlit(1.0)"}, "Did you mean Tilt"),
        ({"batches": "proximty()"}, "proximity"),
        ({"encoder": "resnet19"}, "--encoder: .* Did you mean resnet18"),
        ({"learning_rate": 1e30}, "needs finite losses and weights, got loss=nan at step .; lower --learning-rate"),
    ],
)
def test_options_that_cannot_be_name_themselves(
    options: dict[str, Any], message: str, data: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        run("simclr", tmp_path / "run", short(data, **options))


@pytest.mark.parametrize("options", [SimCLROptions(epochs=1), {"epochs": 1}])
def test_options_of_another_recipe_are_refused(options: Any, tmp_path: Path) -> None:
    with raises(ArgumentError, who="train", what="MoCoOptions", fix="'moco'"):
        run_recipe("moco", options, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_of_all_images_is_allowed(data: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--batch-size"):
        run("simclr", tmp_path, short(data, batch_size=1000))
    assert run("simclr", tmp_path, short(data, batch_size=NUM_IMAGES))["steps"] == 2


def test_equal_arms_and_unknown_tuning_are_refused(data: str, tmp_path: Path) -> None:
    same = Comparison(("simclr()", "simclr(temperature=0.5)"), 2, short(data))
    with raises(ArgumentError, who="compare", what="distinct arms", got="same options"):
        compare(same, tmp_path)
    tuned = Comparison(("simclr()", "hcl()"), 2, short(data), {"queue": (64.0,)})
    with raises(UnknownName, name="queue"):
        compare(tuned, tmp_path)
    assert not (tmp_path / "runs").exists()


# Checkpoints.


def test_another_recipe_other_options_or_no_resume_leave_the_run_alone(data: str, begun: Path) -> None:
    before = content(begun)
    for recipe, options, resume, message in (
        ("moco", {}, True, "which holds a checkpoint of recipe 'simclr'"),
        ("simclr", {"temperature": 0.3}, True, r"other options \(temperature: 0.5 -> 0.3\); resume with the same ones"),
        ("simclr", {"batch_size": 48, "seed": 1}, True, r"batch_size: 32 -> 48, seed: 0 -> 1"),
        ("simclr", {}, False, "already holds a run; use --resume to continue it, or another --out"),
    ):
        with pytest.raises(ValueError, match=message):
            run(recipe, begun, options_of(data, **options), resume=resume)
        assert content(begun) == before


def test_a_checkpoint_copied_from_another_run_is_refused(data: str, begun: Path, whole: Path, tmp_path: Path) -> None:
    run("moco", tmp_path / "moco", options_of(data, epochs=1))
    shutil.copy(tmp_path / "moco" / "checkpoint.pt", begun / "checkpoint.pt")
    before = content(begun)
    with pytest.raises(ValueError, match=r"is the checkpoint of another run .*moco.*delete it to train"):
        run("simclr", begun, options_of(data), resume=True)
    assert content(begun) == before
    (begun / "checkpoint.pt").unlink()
    run("simclr", begun, options_of(data), resume=True)
    assert_same(everything(begun), everything(whole))


@pytest.mark.parametrize("damage", ["empty", "half", "noise", "another file"])
def test_a_damaged_checkpoint_is_named_and_kept(damage: str, data: str, begun: Path) -> None:
    file = begun / "checkpoint.pt"
    good = file.read_bytes()
    if damage == "another file":
        torch.save({"weights": torch.zeros(3), "of": "simclr"}, file)
    else:
        file.write_bytes({"empty": b"", "half": good[: len(good) // 2], "noise": noise(1000).tobytes()}[damage])
    before = content(begun)
    with raises(Damaged, who="train", path="checkpoint.pt", got="the checksum at its end is missing"):
        run("simclr", begun, options_of(data), resume=True)
    assert content(begun) == before


@pytest.mark.parametrize(
    ("name", "advice"),
    [("result.json", "delete it to evaluate again from the checkpoint"), ("config.json", "restore a copy")],
)
def test_other_damaged_files_are_named(name: str, advice: str, data: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    file = tmp_path / "run" / name
    file.write_text(file.read_text()[:20])
    with pytest.raises(Damaged, match=f"{name} is damaged .*; {advice}"):
        run("simclr", tmp_path / "run", options_of(data), resume=True)
    if name == "result.json":
        file.unlink()
        run("simclr", tmp_path / "run", options_of(data), resume=True)
        assert_same(everything(tmp_path / "run"), everything(whole))


def test_a_finished_run_needs_no_checkpoint(data: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (tmp_path / "run" / name).write_bytes(b"damaged")
    assert run("simclr", tmp_path / "run", options_of(data), resume=True) == Run(whole).result()


def test_damaged_metrics_are_named_but_half_a_last_line_is_not(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    file, good = tmp_path / "run" / "metrics.jsonl", Run(whole).metrics()
    file.write_text(file.read_text() + '{"step": 99, "lo')
    assert Run(tmp_path / "run").metrics() == good
    file.write_text("{not json}\n" + file.read_text())
    with raises(Damaged, who="train", path="metrics.jsonl", fix="a copy"):
        Run(tmp_path / "run").metrics()


def test_a_file_in_the_place_of_a_folder_is_named(data: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with raises(FileError, who="--out", what="a folder", got="which is a file or lies below one"):
            run("simclr", out, options_of(data))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("out", ["", " "])
def test_an_empty_path_is_no_folder(out: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in (["train", "simclr"], ["compare", "--arm", "simclr()", "--arm", "hcl()"]):
        done = CliRunner().invoke(app, [*verb, "--data", data, "--out", out])
        assert done.exit_code == 2, done.output
        assert "--out needs the path of a folder" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder in which nobody can write")
def test_a_folder_that_cannot_be_made_is_an_error_with_its_path(data: str) -> None:
    with pytest.raises(NotWritten) as found:
        run("simclr", Path("/proc/run"), options_of(data))
    assert (found.value.path, found.value.errno) == (Path("/proc/run"), errno.ENOENT)


def test_a_run_that_the_recipe_rejects_leaves_no_folder(tmp_path: Path) -> None:
    name = save_npz(tmp_path / "plain.npz", images=noise(40, 8, 8))
    with pytest.raises(ArgumentError, match="labels"):
        run("supervised", tmp_path / "run", short(name))
    assert not (tmp_path / "run").exists()


def test_evaluate_says_why_there_are_no_embeddings(whole: Path, tmp_path: Path) -> None:
    def reported(path: Path) -> str:
        done = CliRunner().invoke(app, ["evaluate", str(path)])
        assert done.exit_code == 2
        return " ".join(done.stderr.split())

    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "embeddings.npz").unlink()
    assert "it was removed: delete result.json" in reported(tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text("{}")
    assert "no labels or a single class" in reported(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    assert "the run is not finished: repeat its command with --resume" in reported(tmp_path / "run")
    assert "train the run first" in reported(tmp_path / "nowhere")
    (tmp_path / "comparison.json").write_text("{}")
    assert "this is a comparison: evaluate one of its runs" in reported(tmp_path)


def test_a_run_in_use_is_left_alone(data: str, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exclusive = Run.exclusive
    monkeypatch.setattr(Run, "exclusive", lambda self: exclusive(self, patience=0.1))
    before = content(begun)
    with Run(begun).exclusive(), raises(InUse, who="train", fix="use another"):
        run("simclr", begun, options_of(data), resume=True)
    assert content(begun) == before


def test_ctrl_c_while_saving_is_ctrl_c(tmp_path: Path) -> None:
    """torch.save makes an error of its own of what its file raises; the old file stays."""

    class Interrupted:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            raise KeyboardInterrupt

        def flush(self) -> None:
            self.file.flush()

    (tmp_path / "state.pt").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "state.pt", lambda file: torch.save({"x": torch.zeros(9)}, Interrupted(file)))
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("state.pt", b"old")]


# A full disk.


def train_until_full(data: str, out: Path, room: int, messages: Any) -> None:
    """No file may grow beyond ``room`` bytes from the second checkpoint on."""
    torch.set_num_threads(1)
    save = Loop._save

    def saved(self: Loop) -> None:
        if self.epoch == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        save(self)

    Loop._save = saved  # type: ignore[method-assign]
    try:
        run("simclr", out, options_of(data))
    except OSError as error:
        messages.put((error.errno, str(error)))


@pytest.mark.parametrize("room", [0, 100_000])
def test_a_full_disk_leaves_the_old_checkpoint_whole(room: int, data: str, whole: Path, tmp_path: Path) -> None:
    messages = CONTEXT.Queue()
    child = CONTEXT.Process(target=train_until_full, args=(data, tmp_path, room, messages))
    child.start()
    number, message = messages.get(timeout=60)
    child.join(60)
    assert number == errno.EFBIG
    assert "checkpoint.pt could not be written" in message
    assert "free disk space, then use --resume" in message
    state = Run(tmp_path).load()
    assert state is not None
    assert state["epoch"] == 1
    assert not list(tmp_path.glob(".*.partial"))
    run("simclr", tmp_path, options_of(data), resume=True)
    assert_same(everything(tmp_path), everything(whole))


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_command_says_that_the_disk_is_full(
    data: str, begun: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [part for name, value in options_of(data).items() for part in (f"--{name.replace('_', '-')}", str(value))]
    before = (begun / "checkpoint.pt").read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    result = CliRunner().invoke(app, ["train", "simclr", "--out", str(begun), "--resume", *flags])
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert "free disk space, then use --resume" in result.stderr
    assert "Traceback" not in result.stderr
    monkeypatch.undo()
    assert (begun / "checkpoint.pt").read_bytes() == before
    run("simclr", begun, options_of(data), resume=True)
    assert_same(everything(begun), everything(whole))


def test_an_error_while_writing_keeps_the_file_and_its_own_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_atomically(file, lambda opened: opened.write(b"old"))
    with pytest.raises(TypeError):
        write_atomically(file, lambda opened: opened.write("text"))  # type: ignore[arg-type]
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_run_that_another_process_has_begun_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both found no folder: the one that comes second leaves the files of the first alone."""
    path = tmp_path / "run"
    with Run(path).exclusive():
        monkeypatch.setattr(Path, "exists", lambda self, **how: False)
        (path / "config.json").write_text("{}")
        with pytest.raises(InUse), Run(path).exclusive(patience=0.0):
            pass
        monkeypatch.undo()
        assert (path / "config.json").read_text() == "{}"
    assert path.exists()
