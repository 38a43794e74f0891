"""Images that are decoded when they are needed: crops of the original pixels, any number of workers, resumed runs."""

from __future__ import annotations

import os
import signal
import time
import warnings
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError
from hardneg.training.augmentation import from_transform
from hardneg.training.augmentation.augment import CIFAR, Augment
from hardneg.training.data.image_sources import Ends, Files, Strings
from hardneg.training.data.images import ImageData, load
from hardneg.training.data.lazy_images import LazyImages
from hardneg.training.loop.loading import WorkerEnded
from hardneg.training.loop.runs import Run
from hardneg.training.loop.train import Loop
from hardneg.training.options import SimCLROptions
from hardneg.training.recipes import run_recipe
from support.errors import raises
from support.forks import CONTEXT
from support.image_folders import random_images, write_folder, write_photos
from support.training_runs import assert_same, everything, interrupted, run, short

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
pytestmark = pytest.mark.filterwarnings("ignore:The run in .* has collapsed")  # runs of a few steps do
PROXIMITY = "proximity(num_candidates=40, num_neighbours=6, restart=0.3, refresh=4)"


class TestLazyImages:
    def test_are_like_a_tensor(self, tmp_path: Path) -> None:
        pixels = write_folder(tmp_path, {"cat": 3, "dog": 4})
        lazy, decoded = (load(f"folder:{tmp_path}", "all", cache=cache) for cache in ("none", "memory"))
        assert isinstance(lazy.images, LazyImages)
        assert isinstance(decoded.images, torch.Tensor)
        assert tuple(lazy.images.shape) == tuple(decoded.images.shape) == (7, 3, 12, 10)
        assert np.array_equal(lazy.pixels(slice(7)).permute(0, 2, 3, 1).numpy(), pixels)
        some = torch.tensor([5, 0, 5])
        assert torch.equal(lazy.pixels(some), decoded.images[some])
        assert torch.equal(lazy.take(torch.tensor([6, 2])).pixels(slice(2)), decoded.images[[6, 2]])
        assert torch.equal(lazy.digests, decoded.digests)
        options = SimCLROptions(augment="cifar")
        one, other = (data.prepared(options).views(some, 1, 2) for data in (lazy, decoded))
        assert torch.equal(one[1], other[1])

    def test_large_images_are_decoded_at_a_fraction(self, tmp_path: Path) -> None:
        smooth = Image.fromarray(random_images(4, 4, 3)).resize((400, 300), Image.Resampling.BICUBIC)
        for suffix in ("jpg", "png"):
            smooth.save(tmp_path / f"x.{suffix}", quality=95)
        data = load(f"folder:{tmp_path}@16", "all", cache="none")
        for picture in data.images.pictures():  # 75 pixels are more than three times 16, 38 are not
            assert picture.size == (100, 75)
            assert np.abs(np.asarray(picture, float) - np.asarray(smooth.resize((100, 75)))).mean() < 4
        assert torch.equal(data.pixels(slice(2)), load(f"folder:{tmp_path}@16", "all", cache="memory").pixels(slice(2)))

    def test_turned_images_have_the_size_that_is_shown(self, tmp_path: Path) -> None:
        tags = Image.Exif()
        tags[0x0112] = 6
        upright = np.zeros((20, 10), np.uint8)
        upright[:10] = 255
        Image.fromarray(np.rot90(upright)).save(tmp_path / "x.png", exif=tags)
        data = load(f"folder:{tmp_path}", "all", cache="none")
        assert np.array_equal(data.pixels(slice(1))[0, 0].numpy(), upright)

    def test_a_changed_file_is_named(self, tmp_path: Path) -> None:
        write_folder(tmp_path, {"cat": 2})
        data = load(f"folder:{tmp_path}", "all", cache="none")
        Image.fromarray(random_images(12, 10, 3, seed=9)).save(tmp_path / "cat" / "001.png")
        with raises(ArgumentError, who="data", got="other content in"):
            data.pixels(slice(2))
        (tmp_path / "cat" / "000.png").unlink()
        with raises(ArgumentError, who="data", got="000.png"):
            data.pixels(slice(1))
        skipping = load(f"folder:{tmp_path}", "all", cache="none", bad_images="skip")
        (tmp_path / "cat" / "001.png").unlink()
        with pytest.warns(match="A grey image takes its place"):
            assert (skipping.pixels(slice(1)) == 128).all()

    @pytest.mark.parametrize("size", [None, 8])
    def test_pixels_are_kept_on_disk(self, size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HARDNEG_DATA", str(tmp_path / "cache"))
        write_folder(tmp_path / "images", {"cat": 3, "dog": 2})
        torn = tmp_path / "images" / "cat" / "001.png"
        torn.write_bytes(b"no image")
        options = {"size": size, "bad_images": "skip"}
        with pytest.warns(match="Skipped"):
            whole = load(f"folder:{tmp_path}/images", "all", cache="none", **options).pixels(slice(4))
        read = Files.read

        def only_the_torn(self: Files, position: int) -> bytes:
            assert position == 1, "decoded again"
            return read(self, position)

        for reader in (read, only_the_torn):
            monkeypatch.setattr(Files, "read", reader)
            kept = load(f"folder:{tmp_path}/images", "all", cache="disk", **options)
            assert torch.equal(kept.pixels(slice(4)), whole)
            assert kept.images.kept is not None
        assert len(list((tmp_path / "cache" / "decoded").glob("*.pixels"))) == 1

    def test_without_space_nothing_is_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HARDNEG_DATA", str(tmp_path / "cache"))
        write_folder(tmp_path / "images", {"cat": 3})
        monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=100))
        with pytest.warns(match="Decoded images are not kept"):
            data = load(f"folder:{tmp_path}/images", "all", cache="disk")
        assert data.images.kept is None
        assert data.pixels(slice(3)).shape == (3, 3, 12, 10)

    def test_an_image_larger_than_memory_is_refused_by_its_header(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_folder(tmp_path, {"cat": 1})
        monkeypatch.setattr("hardneg.training.data.decoding.memory_bytes", lambda: 2 * 3 * 12 * 10 - 1)
        monkeypatch.setattr("hardneg.training.data.lazy_images.decode", None)
        with raises(ArgumentError, who="data", what="images that fit into memory", got="10 x 12 pixels"):
            load(f"folder:{tmp_path}", "all", cache="none")

    def test_unreadable_files_are_skipped(self, tmp_path: Path) -> None:
        images = write_folder(tmp_path, {"cat": 3, "dog": 2})
        (tmp_path / "cat" / "001.png").write_bytes(b"no image")
        with pytest.warns(match=r"Skipped 1 of 5 .*001\.png"):
            data = load(f"folder:{tmp_path}", "all", bad_images="skip")
        assert (data.ids.tolist(), data.labels.tolist()) == ([0, 2, 3, 4], [0, 0, 1, 1])
        assert np.array_equal(data.images.permute(0, 2, 3, 1).numpy(), images[[0, 2, 3, 4]])


class TestCrops:
    def test_are_cut_from_the_original_pixels(self) -> None:
        """Values are columns: a crop is a ramp between the sides of its box, which may be outside the middle."""
        wide = Image.fromarray(np.tile(np.arange(240, dtype=np.uint8), (60, 1)))
        crops = CIFAR.crops([wide] * 64, torch.arange(64), 0, 0, (16, 16)).float()[:, :, 0]
        assert tuple(crops.shape) == (2, 64, 16, 16)
        left, right = crops[..., 0].mean(-1), crops[..., -1].mean(-1)
        pixel = (right - left) / 15
        area = pixel * 16 * 60 / (60 * 240)
        assert area.min() > 0.1
        assert (left.min() < 30) & (right.max() > 210), "the middle are columns 90 to 150"
        assert (crops.diff(dim=-1) - pixel[..., None, None]).abs().mean() < 1

    def test_are_those_of_the_same_parameters(self) -> None:
        """The box that ``draw`` gives for an image of its size, resized by area on a smooth picture."""
        augment = Augment(flip_probability=0.0, jitter_probability=0.0, grey_probability=0.0)
        smooth = np.add.outer(np.arange(40) * 3, np.arange(50) * 2).astype(np.uint8)
        ids = torch.arange(6)
        crops = augment.crops([Image.fromarray(smooth)] * 6, ids, 3, 4, (16, 16))
        drawn = augment.draw(ids, torch.ones_like(ids), 3, 4, (40, 50))
        for crop, (left, top, width, height) in zip(crops[1, :, 0], drawn.box.T.tolist(), strict=True):
            rows = top + (np.arange(16) + 0.5) * height / 16 - 0.5
            columns = left + (np.arange(16) + 0.5) * width / 16 - 0.5
            expected = np.add.outer(rows * 3, columns * 2)
            assert np.abs(crop.numpy()[1:-1, 1:-1] - expected[1:-1, 1:-1]).max() < 1.6

    def test_do_not_depend_on_the_batch(self, tmp_path: Path) -> None:
        data = load(write_photos(tmp_path), "all", cache="none").prepared(SimCLROptions(augment="cifar"))
        first, second = data.views(torch.arange(24), 1, 2)
        some = torch.tensor([7, 3])
        alone, other = data.views(some, 1, 2, data.fetch(some, 1, 2))
        assert torch.equal(alone, first[some])
        assert torch.equal(other, second[some])
        assert not torch.equal(data.views(some, 2, 2)[0], alone)

    def test_a_transform_of_images_sees_all_of_their_pixels(self, tmp_path: Path) -> None:
        seen: list[tuple[int, ...]] = []

        def transform(image: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(image.shape))
            return image[:, :16, :16] + 0.1 * torch.rand(1)

        data = load(write_photos(tmp_path), "all", cache="none").prepared(SimCLROptions(), from_transform(transform))
        first, second = data.views(torch.arange(4), 0, 0)
        assert {shape[1:] for shape in seen} == {picture.size[::-1] for picture in data.images[:4].pictures()}
        assert tuple(first.shape) == (4, 3, 16, 16)
        assert not torch.equal(first, second)


class TestRuns:
    @pytest.fixture
    def photos(self, tmp_path: Path) -> str:
        return write_photos(tmp_path / "photos", 60)

    def test_workers_and_interruptions_change_nothing(self, photos: str, tmp_path: Path) -> None:
        options = short(photos, batch_size=6, cache_images="none", batches=PROXIMITY, dim=8)
        run("simclr", tmp_path / "whole", options | {"workers": 0})
        for step in (7, 11):  # before and after a graph that prefetched batches must wait for
            with interrupted(step):
                run("simclr", tmp_path / "cut", options | {"workers": 2, "save_every_steps": 1}, resume=True)
        run("simclr", tmp_path / "cut", options | {"workers": 1, "save_every_steps": 1}, resume=True)
        assert_same(kept_of(tmp_path / "cut"), kept_of(tmp_path / "whole"))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_ten_kills_at_random_moments_change_nothing(self, workers: int, photos: str, tmp_path: Path) -> None:
        """The process itself is killed; runs that end before their kill are compared, and a new one is begun."""
        options = short(photos, batch_size=6, cache_images="none", batches=PROXIMITY, dim=8, workers=workers, epochs=4)
        options |= {"save_every_steps": 1, "augment": "imagenet"}
        begun = time.monotonic()
        assert train_in_a_process(tmp_path / "whole", options) == 0
        whole, most = kept_of(tmp_path / "whole"), time.monotonic() - begun
        random, kills, number, in_the_middle = np.random.default_rng(workers), 0, 0, 0
        while kills < 10 or number == 0:
            out, begun = tmp_path / str(number), time.monotonic()
            code = train_in_a_process(out, options, kill_after=random.uniform(0.2, 1.0) * most if kills < 10 else None)
            kills += code != 0
            in_the_middle += code != 0 and (out / "checkpoint.pt").exists()
            if code == 0:
                assert_same(kept_of(out), whole)
                number, most = number + 1, min(most, time.monotonic() - begun)  # the first run also waits for imports
        if not (tmp_path / str(number) / "result.json").exists():
            assert train_in_a_process(tmp_path / str(number), options) == 0
        assert_same(kept_of(tmp_path / str(number)), whole)
        assert in_the_middle

    def test_a_lost_file_stops_a_run_that_can_be_resumed(self, photos: str, tmp_path: Path) -> None:
        options = short(photos, batch_size=6, cache_images="none", dim=8, workers=1)
        run("simclr", tmp_path / "whole", options)
        lost = next((tmp_path / "photos").rglob("007.jpg"))
        with interrupted(1):
            run("simclr", tmp_path / "cut", options)
        kept, fetch = lost.read_bytes(), ImageData.fetch

        def losing(self: ImageData, index: torch.Tensor, epoch: int, seed: int) -> Any:
            if epoch == 1:
                lost.unlink(missing_ok=True)
            return fetch(self, index, epoch, seed)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ImageData, "fetch", losing)
            with raises(ArgumentError, who="data", got="007.jpg"):
                run("simclr", tmp_path / "cut", options, resume=True)
        lost.write_bytes(kept)
        run("simclr", tmp_path / "cut", options, resume=True)
        assert_same(everything(tmp_path / "cut"), everything(tmp_path / "whole"))

    def test_a_killed_worker_stops_a_run_that_can_be_resumed(self, photos: str, tmp_path: Path) -> None:
        options = short(photos, batch_size=6, cache_images="none", dim=8, workers=2)
        run("simclr", tmp_path / "whole", options)
        step = Loop._one_step

        def killing(self: Loop, *rest: Any) -> None:
            if self.step == 3:
                os.kill(active_children()[0].pid, signal.SIGKILL)
            step(self, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Loop, "_one_step", killing)
            with raises(WorkerEnded, who="train", fix="continue with --resume"):
                run("simclr", tmp_path / "cut", options)
        saved = Run(tmp_path / "cut").load()
        assert saved is not None
        assert saved["step"] > 3
        run("simclr", tmp_path / "cut", options, resume=True)
        assert_same(kept_of(tmp_path / "cut"), kept_of(tmp_path / "whole"))

    def test_the_size_is_estimated_before_training(
        self, photos: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = short(photos, batch_size=6, cache_images="none", dim=8, workers=2, max_steps=1)
        run_recipe("simclr", SimCLROptions(**options), tmp_path / "run")
        # 2 workers hold 2 batches each, and training has one, of 6 x 2 crops of 768 bytes.
        assert "48 images of 16 x 16 pixels" in (shown := capsys.readouterr().err)
        assert "0.046 MB of crops" in shown

    def test_max_steps_stop_within_an_epoch(self, photos: str, tmp_path: Path) -> None:
        result = run("simclr", tmp_path, short(photos, batch_size=6, dim=8, max_steps=3))
        assert (result["steps"], result["share_seen"]) == (3, pytest.approx(18 / 48))
        assert run("simclr", tmp_path, short(photos, batch_size=6, dim=8, max_steps=3), resume=True) == result


def train_in_a_process(out: Path, options: dict[str, Any], kill_after: float | None = None) -> int:
    """Return the exit code; the process is killed after so many seconds."""
    child = CONTEXT.Process(target=train_here, args=(out, options))
    child.start()
    child.join(kill_after or 300)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode in (0, -9)
    return int(child.exitcode)


def train_here(out: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run("simclr", out, options, resume=True)


def kept_of(out: Path) -> dict[str, Any]:
    """All that a run leaves, but for times."""
    found = everything(out)
    for name in ("of", "begun_seconds"):
        found["state"].pop(name)
    return found


def test_paths_take_one_array() -> None:
    names = ["a/0.jpg", "", "\udcff.png", "bäh/1.jpg"]
    paths = Strings(names)
    assert [*paths] == paths[:] == names
    assert paths[-1] == names[-1]
    with pytest.raises(IndexError):
        paths[4]


@pytest.mark.parametrize("length", [0, 100, 5000, 20_000])
def test_digests_see_both_ends(length: int, tmp_path: Path) -> None:
    data = random_images(length).tobytes()
    (tmp_path / "x").write_bytes(data)
    ends = Files(tmp_path, ["x"]).ends(0)
    assert ends == Ends.of(data)
    changed = [data + b"x", *(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in {0, length - 1} if length)]
    assert ends.digest() not in {Ends.of(one).digest() for one in changed}
