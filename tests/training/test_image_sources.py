"""Every source of images: the same splits, crops of the original pixels, and runs that resume with any workers."""

from __future__ import annotations

import io
import json
import os
import signal
import tarfile
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError, FileError, NoFile, UnknownName
from hardneg.training.data.given import Part, give
from hardneg.training.data.image_files import parse_splits
from hardneg.training.data.images import load, load_splits
from hardneg.training.data.lazy_images import LazyImages, Opening
from hardneg.training.loop.runs import Run
from hardneg.training.loop.train import Loop
from support.errors import raises
from support.forks import CONTEXT
from support.image_folders import random_images
from support.training_runs import flat as flat_state
from support.training_runs import run, short

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The run in .* has collapsed"),
    pytest.mark.filterwarnings("ignore:The images in .* have no classes"),
]
TRAIN, TEST, SIDE = 16, 6, 8


class Written(NamedTuple):
    """A data set in the format of a source."""

    name: str
    sizes: list[tuple[int, int]]  # of the training images in order
    root: str | None = None
    labelled: bool = True


def picture(number: int, side: int | None = None) -> Any:
    random = np.random.RandomState(number)
    size = (side, side) if side else tuple(int(one) for one in random.randint(12, 40, 2))
    return Image.fromarray(random_images(4, 4, 3, seed=number)).resize(size, Image.Resampling.BICUBIC)


def jpeg(number: int, side: int | None = None) -> bytes:
    file = io.BytesIO()
    picture(number, side).save(file, "JPEG")
    return file.getvalue()


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def sizes(numbers: Any, side: int | None = None) -> list[tuple[int, int]]:
    return [picture(number, side).size for number in numbers]


def folders(place: Path) -> Written:
    for number in range(TRAIN + TEST):
        split = "train" if number < TRAIN else "val"
        put(place / split / f"class{number % 2}" / f"{number:03}.jpg", jpeg(number))
    return Written(f"folder:{place}@{SIDE}", sizes([*range(0, TRAIN, 2), *range(1, TRAIN, 2)]))


def flat(place: Path) -> Written:
    for number in range(TRAIN):
        put(place / f"{number:03}.jpg", jpeg(number))
    return Written(f"folder:{place}@{SIDE}", sizes(range(TRAIN)), labelled=False)


def tiny_imagenet(place: Path) -> Written:
    """As downloaded: 64 x 64 pixels, class folders with images/ for training, a table of annotations for val."""
    for number in range(TRAIN):
        wnid = f"n0{number % 2}"
        put(place / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", jpeg(number, 64))
        put(place / "train" / wnid / f"{wnid}_boxes.txt", b"x\t0\t0\t9\t9\n")
    for number in range(TEST):
        put(place / "val" / "images" / f"val_{number}.JPEG", jpeg(number, 64))
        put(place / "test" / "images" / f"test_{number}.JPEG", jpeg(number, 64))
    rows = [f"val_{number}.JPEG\tn0{number % 2}\t0\t0\t9\t9\n" for number in range(TEST)]
    put(place / "val" / "val_annotations.txt", "".join(rows).encode())
    return Written(f"folder:{place}", sizes(range(TRAIN), 64))


def imagenet(place: Path) -> Written:
    """As downloaded from Kaggle: class folders for training, a flat val/ and its classes in a table above."""
    inside = place / "ILSVRC" / "Data" / "CLS-LOC"
    for number in range(TRAIN):
        put(inside / "train" / f"n0{number % 2}" / f"n0{number % 2}_{number:02}.JPEG", jpeg(number))
    for number in range(TEST):
        put(inside / "val" / f"ILSVRC2012_val_{number:08}.JPEG", jpeg(number))
    rows = [f"ILSVRC2012_val_{number:08},n0{number % 2} 1 2 3 4\n" for number in range(TEST)]
    put(place / "LOC_val_solution.csv", ("ImageId,PredictionString\n" + "".join(rows)).encode())
    return Written(f"folder:{inside}@{SIDE}", sizes([*range(0, TRAIN, 2), *range(1, TRAIN, 2)]))


def table(place: Path) -> Written:
    rows = ["file,breed,part"]
    for number in range(TRAIN + TEST):
        put(place / "photos" / f"{number}.jpg", jpeg(number))
        rows.append(f"photos/{number}.jpg,class{number % 2},{'train' if number < TRAIN else 'test'}")
    put(place / "list.csv", "\n".join(rows).encode())
    return Written(f"list:{place}/list.csv[file,breed,part]@{SIDE}", sizes(range(TRAIN)))


def shards(place: Path) -> Written:
    place.mkdir(parents=True, exist_ok=True)
    for split, numbers in (("train", range(TRAIN)), ("val", range(TRAIN, TRAIN + TEST))):
        for shard in range(2):
            with tarfile.open(place / f"birds-{split}-{shard:03}.tar", "w") as archive:
                for number in [*numbers][shard::2]:
                    label = str(number % 2) if number % 4 < 2 else json.dumps({"label": number % 2})
                    suffix = "cls" if number % 4 < 2 else "json"
                    for name, content in (
                        (f"{number:03}.jpg", jpeg(number)),
                        (f"{number:03}.{suffix}", label.encode()),
                    ):
                        entry = tarfile.TarInfo(name)
                        entry.size = len(content)
                        archive.addfile(entry, io.BytesIO(content))
    return Written(f"tar:{place}@{SIDE}", sizes([*range(0, TRAIN, 2), *range(1, TRAIN, 2)]))


def stl10(place: Path) -> Written:
    """Binaries: images of 96 x 96 as planes of columns, labels from 1."""
    for name, count in (("unlabeled", TRAIN), ("train", TRAIN), ("test", TEST)):
        planes = np.stack([np.asarray(picture(number, 96)).transpose(2, 1, 0) for number in range(count)])
        put(place / "stl10_binary" / f"{name}_X.bin", planes.tobytes())
        if name != "unlabeled":
            labels = (np.arange(count) % 2 + 1).astype(np.uint8)
            put(place / "stl10_binary" / f"{name}_y.bin", labels.tobytes())
    return Written("stl10", sizes(range(TRAIN), 96), str(place))


def arrow(place: Path) -> Written:
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})

    def part(numbers: range) -> Any:
        rows = {"img": [{"bytes": jpeg(n), "path": None} for n in numbers], "label": [n % 2 for n in numbers]}
        return datasets.Dataset.from_dict(rows, features=features)

    parts = {"train": part(range(TRAIN)), "test": part(range(TRAIN, TRAIN + TEST))}
    datasets.DatasetDict(parts).save_to_disk(str(place))
    return Written(f"hf:{place}@{SIDE}", sizes(range(TRAIN)))


class Photos(torch.utils.data.Dataset[Any]):
    """Examples as a user's class returns them: an image of PIL and its class."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return Image.open(io.BytesIO(jpeg(self.numbers[row]))), self.numbers[row] % 2


def examples(place: Path) -> Written:
    name = give("photos", Part(Photos(range(TRAIN))), Part(Photos(range(TRAIN, TRAIN + TEST))))
    return Written(f"{name}@{SIDE}", sizes(range(TRAIN)))


def paths(place: Path) -> Written:
    every = [put(place / f"{number:03}.jpg", jpeg(number)) for number in range(TRAIN + TEST)]
    labels = [f"class{number % 2}" for number in range(TRAIN + TEST)]
    name = give("paths", Part(every[:TRAIN], labels[:TRAIN]), Part(every[TRAIN:], labels[TRAIN:]))
    return Written(f"{name}@{SIDE}", sizes(range(TRAIN)))


SOURCES = (folders, flat, tiny_imagenet, imagenet, table, shards, stl10, arrow, examples, paths)
every_source = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)


@every_source
def test_splits_are_found_and_images_have_their_original_pixels(
    source: Callable[[Path], Written], tmp_path: Path
) -> None:
    written = source(tmp_path / "data")
    train, test, probe = load_splits(written.name, written.root, Opening(cache="none"))
    assert isinstance(train.images, LazyImages)
    assert [picture.size for picture in train.images.pictures()] == written.sizes
    fitted = train if probe is None else probe
    assert len(fitted.ids) == TRAIN
    if written.labelled:
        assert len(test) == TEST
        assert (fitted.labels.bincount().tolist(), test.labels.bincount().tolist()) == ([8, 8], [3, 3])
        assert set(test.ids.tolist()).isdisjoint(train.ids.tolist())
    else:
        assert (train.labels, test.labels) == (None, None)
    side = written.sizes[0][0] if len(set(written.sizes)) == 1 else None
    first = np.asarray(picture(0, side), float)
    assert np.abs(np.asarray(train.images[:1].pictures()[0], float) - first).mean() < 6, "but for the losses of JPEG"
    kept = load_splits(written.name, written.root, Opening(cache="memory"))[0]
    assert torch.equal(kept.pixels(slice(TRAIN)), train.pixels(slice(TRAIN)))
    assert torch.equal(kept.digests, train.digests)


def run_until_killed(
    source: Callable[[Path], Written], place: Path, out: Path, options: dict[str, Any], die_at: int
) -> None:
    """Kill the process itself, with its workers left over, before a step."""
    torch.set_num_threads(1)
    if source in (examples, paths):
        source(place)  # given to this process
    step = Loop._one_step

    def dying(self: Loop, *rest: Any) -> None:
        if self.step == die_at:
            (out.parent / "workers.txt").write_text(" ".join(str(one.pid) for one in active_children()))
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, *rest)

    Loop._one_step = dying  # type: ignore[method-assign]
    run("simclr", out, options, resume=True)


@every_source
def test_killed_runs_resume_with_other_workers(source: Callable[[Path], Written], tmp_path: Path) -> None:
    written = source(tmp_path / "data")
    options = short(written.name, data_root=written.root, cache_images="none", encoder="tiny", batch_size=4, dim=4)
    options |= {"epochs": 1, "save_every_steps": 1, "augment": "cifar"}
    run("simclr", tmp_path / "whole", options | {"workers": 0})
    child = CONTEXT.Process(
        target=run_until_killed, args=(source, tmp_path / "data", tmp_path / "killed", options | {"workers": 2}, 2)
    )
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    workers = [int(one) for one in (tmp_path / "workers.txt").read_text().split()]
    assert len(workers) == 2
    run("simclr", tmp_path / "killed", options | {"workers": 1}, resume=True)
    until = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < until, "workers end with the process that has started them"
        time.sleep(0.1)
    metrics, states = zip(*(saved(tmp_path / name) for name in ("killed", "whole")), strict=True)
    assert metrics[0] == metrics[1]
    assert states[0] == states[1]


def saved(path: Path) -> tuple[str, dict[str, bytes]]:
    """The records of a run, and its weights and optimiser."""
    state = flat_state({name: Run(path).load()[name] for name in ("method", "optimizer", "rng", "seen")})
    return (path / "metrics.jsonl").read_text(), {name: value.tobytes() for name, value in state.items()}


class TestSplits:
    def test_are_chosen_by_name(self, tmp_path: Path) -> None:
        written = table(tmp_path / "a")
        train, test, probe = load_splits(written.name, splits="train=test,test=train,probe=test+train")
        assert (len(train), len(test), len(probe)) == (TEST, TRAIN, TRAIN + TEST)
        assert (train.ids[0], test.ids[0], probe.ids[0]) == (0, TEST, TRAIN + TEST)
        train, test, probe = load_splits("stl10", stl10(tmp_path / "b").root, splits="train=train+unlabeled,test=test")
        assert (len(train), train.labels, probe) == (2 * TRAIN, None, None)
        train, test, _ = load_splits(folders(tmp_path / "c").name, splits="train=val,test=train")
        assert (len(train), len(test)) == (TEST, TRAIN)

    @pytest.mark.parametrize("text", ["test=a", "train", "train=", "train=a,train=b", "valid=a,train=b"])
    def test_that_cannot_be_read_are_named(self, text: str) -> None:
        with raises(ArgumentError, who="data", what="splits for train, test, probe"):
            parse_splits(text)

    def test_that_do_not_exist_are_named(self, tmp_path: Path) -> None:
        with raises(ArgumentError, who="data", got="'dev' in splits"):
            load_splits(table(tmp_path).name, splits="train=train,test=dev")
        with raises(ArgumentError, who="data", what="no --splits for digits"):
            load_splits("digits", splits="train=train")


class TestWrongFiles:
    def test_lists_name_a_missing_column_and_a_repeated_path(self, tmp_path: Path) -> None:
        put(tmp_path / "x.csv", b"name,label\na.jpg,1\n")
        with raises(ArgumentError, who="data", what="a column of paths"):
            load(f"list:{tmp_path}/x.csv")
        with raises(UnknownName, name="file"):
            load(f"list:{tmp_path}/x.csv[file]")
        put(tmp_path / "x.csv", b"path,label\na.jpg,1\na.jpg,2\n")
        with raises(ArgumentError, who="data", got="a.jpg in several rows"):
            load(f"list:{tmp_path}/x.csv")

    def test_lists_with_some_labels_are_refused(self, tmp_path: Path) -> None:
        put(tmp_path / "x.csv", b"path,label\na.jpg,1\nb.jpg,\n")
        with raises(ArgumentError, who="data", got="1 of 2 without one"):
            load(f"list:{tmp_path}/x.csv")

    def test_shards_are_named(self, tmp_path: Path) -> None:
        with raises(NoFile, who="data", what="a shard of WebDataset"):
            load(f"tar:{tmp_path}/no-{{1..2}}.tar")
        with raises(NoFile, who="data", what="shards of WebDataset"):
            load(f"tar:{tmp_path}")
        with raises(ArgumentError, who="data", fix="download them first"):
            load("tar:https://example.org/birds-{000..999}.tar")
        with tarfile.open(tmp_path / "packed.tar", "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("x.jpg"))
        with raises(FileError, who="data", what="an uncompressed tar file"):
            load(f"tar:{tmp_path}")
        with tarfile.open(tmp_path / "packed.tar", "w") as archive:
            for suffix in ("jpg", "png"):
                archive.addfile(tarfile.TarInfo(f"x.{suffix}"))
        with raises(ArgumentError, who="data", got="two for 'x'"):
            load(f"tar:{tmp_path}")

    def test_binaries_of_another_length_are_named(self, tmp_path: Path) -> None:
        put(tmp_path / "stl10_binary" / "train_X.bin", bytes(3 * 96 * 96 + 1))
        with raises(FileError, who="data", what="records of 27,648 bytes"):
            load("stl10", root=tmp_path)
        with raises(NoFile, who="data", what="the folder stl10_binary"):
            load("stl10", root=tmp_path / "none")
