"""Training on image files: memory for folders of several sizes, and the speed of the data path.

    python benchmarks/images.py memory        # 2,000, 10,000 and 40,000 photos at 224 pixels
    python benchmarks/images.py speed         # beside a plain DataLoader with the same steps in Pillow
    python benchmarks/images.py plan          # batches of ImageNet-100 for eight ranks, without its images

The photos are JPEGs of 200 to 500 pixels, made in --folder and removed afterwards: 300 pictures, repeated with another
comment in each file. ``memory`` trains in a process of its own and samples the proportional set size (PSS) of
it and its workers, shared pages counted once; the run is evaluated on 64 further photos. ``speed`` reads, decodes,
crops and jitters batches without an encoder: all variants in turn for several rounds, seconds of the clock and of all
processors. ``plan`` makes the batches of all ranks from the neighbours of made-up vectors in 100 clusters. Results of
all parts are in one file.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from dense_loss import cpu_name, git
from PIL import Image, ImageEnhance, ImageFilter
from torch.utils.data import DataLoader, Dataset

from hardneg.training.augmentation.augment import CIFAR, IMAGENET, Augment

ROOT = Path(__file__).resolve().parent.parent
SIDE, PICTURES, TESTED = 224, 300, 64


def write_photos(folder: Path, count: int, first: int = 0) -> None:
    """JPEGs of different sizes and content; ``PICTURES`` of them are encoded, and the others differ by a comment."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [jpeg(number) for number in range(min(PICTURES, count))]
    for number in range(first, first + count):
        comment = str(number).encode()
        data = pictures[number % len(pictures)]
        data = data[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + data[2:]
        (folder / f"{number:06}.jpg").write_bytes(data)


def jpeg(number: int) -> bytes:
    """A picture of large and small shapes, about as many bytes per pixel as a photo."""
    random = np.random.RandomState(number)
    width, height = (int(side) for side in random.randint(200, 501, 2))
    parts = [
        np.asarray(Image.fromarray(random.randint(0, 256, (side, side, 3), np.uint8)).resize((width, height)), float)
        for side in (4, 16, 64)
    ]
    mixed = 0.6 * parts[0] + 0.25 * parts[1] + 0.15 * parts[2]
    file = io.BytesIO()
    Image.fromarray(mixed.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


# Memory


def train_here(data: str, out: str, begun: float, max_steps: int) -> None:
    """Train as ``hardneg train simclr`` with the flags of issue 18; print the seconds until the first step."""
    from hardneg.training.loop.train import Loop
    from hardneg.training.options import SimCLROptions
    from hardneg.training.recipes import run_recipe

    step = Loop._one_step
    first: list[float] = []

    def watched(self: Loop, *rest: Any) -> None:
        if not first:
            first.extend((time.time() - begun, time.process_time()))
        step(self, *rest)

    Loop._one_step = watched  # type: ignore
    torch.set_num_threads(1)
    options = SimCLROptions(
        data=data, encoder="tiny", batch_size=64, max_steps=max_steps, cache_images="none", workers=2, epochs=1
    )
    run_recipe("simclr", options, out, quiet=True)
    print(json.dumps(dict(zip(("seconds_to_first_step", "processor_seconds_to_first_step"), first, strict=True))))


def pss_of(root: int) -> int:
    """Proportional set size of a process and all below it, in bytes."""
    total, pending = 0, [root]
    while pending:
        process = pending.pop()
        try:
            for task in Path(f"/proc/{process}/task").iterdir():
                pending += map(int, (task / "children").read_text().split())
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def memory(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for count in options.images:
        folder = Path(tempfile.mkdtemp(prefix="hardneg-photos-", dir=options.folder))
        try:
            write_photos(folder / "train", count)
            write_photos(folder / "test", TESTED, first=count)
            found[str(count)] = one = memory_of(folder, options.max_steps)
        finally:
            shutil.rmtree(folder)
        print(f"{count:,} images: {one}", flush=True)
    return found


def memory_of(folder: Path, max_steps: int) -> dict[str, float]:
    command = [sys.executable, __file__, "train-here", f"folder:{folder}@{SIDE}", str(folder / "run")]
    command += [str(time.time()), str(max_steps)]
    begun, sampled = time.perf_counter(), [0]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT / "benchmarks")
    while job.poll() is None:
        sampled.append(pss_of(job.pid))
        time.sleep(0.5)
    assert job.stdout is not None
    if job.returncode:
        sys.exit(job.returncode)
    found: dict[str, float] = json.loads(job.stdout.read().splitlines()[-1])
    return {"peak_pss_mib": max(sampled) / 2**20, **found, "seconds": time.perf_counter() - begun}


# Speed


class InPillow(Dataset[Any]):
    """Two views of each file, all steps in Pillow in the worker, as torchvision's transforms make them of images."""

    def __init__(self, paths: list[Path], augment: Augment) -> None:
        self.paths, self.augment = paths, augment

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        with Image.open(self.paths[row]) as file:
            image = file.convert("RGB")
        random = np.random.default_rng()
        return self._view(image, random), self._view(image, random)

    def _view(self, image: Any, random: np.random.Generator) -> torch.Tensor:
        augment = self.augment
        image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, self._box(image.size, random))
        if random.random() < augment.flip_probability:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if random.random() < augment.jitter_probability:
            image = self._jittered(image, random)
        if random.random() < augment.grey_probability:
            image = image.convert("L").convert("RGB")
        if random.random() < augment.blur_probability:
            image = image.filter(ImageFilter.GaussianBlur(random.uniform(*augment.blur_sigma)))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255.0)
        mean, std = (torch.tensor(one)[:, None, None] for one in (augment.mean, augment.std))
        return pixels.sub_(mean).div_(std)

    def _box(self, size: tuple[int, int], random: np.random.Generator) -> tuple[float, float, float, float]:
        (width, height), augment = size, self.augment
        for _ in range(10):
            area = random.uniform(*augment.crop_scale) * width * height
            aspect = np.exp(random.uniform(*np.log(augment.crop_ratio)))
            wide, high = np.sqrt(area * aspect), np.sqrt(area / aspect)
            if wide <= width and high <= height:
                break
        wide, high = min(wide, width), min(high, height)
        left, top = random.uniform(0, width - wide), random.uniform(0, height - high)
        return left, top, min(left + wide, width), min(top + high, height)

    def _jittered(self, image: Any, random: np.random.Generator) -> Any:
        brightness, contrast, saturation, hue = self.augment.jitter
        for operation in random.permutation(4):
            if operation == 3:
                image = turned(image, random.uniform(-hue, hue))
                continue
            kind = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[operation]
            strength = (brightness, contrast, saturation)[operation]
            image = kind(image).enhance(random.uniform(1 - strength, 1 + strength))
        return image


def turned(image: Any, turns: float) -> Any:
    """The hue turned in HSV, as torchvision does it."""
    hue, saturation, value = image.convert("HSV").split()
    moved = (np.asarray(hue).astype(np.int16) + round(turns * 255)).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(moved), saturation, value)).convert("RGB")


def ours(folder: Path, batch_size: int, workers: int, augment: str, batches: str) -> Iterator[Any]:
    """The batches of the training loop, with their views, for epoch after epoch."""
    from accelerate import Accelerator

    from hardneg.batching.graph import build_graph
    from hardneg.batching.spec import parse_batches
    from hardneg.training.data.images import ImageData, load_splits
    from hardneg.training.data.lazy_images import Opening
    from hardneg.training.loop.loading import Loading
    from hardneg.training.loop.parts import sampler_for
    from hardneg.training.options import SimCLROptions

    options = SimCLROptions(
        data=f"folder:{folder}@{SIDE}", batch_size=batch_size, workers=workers, cache_images="none", augment=augment,
        batches=batches, device="cpu", epochs=1000,
    )  # fmt: skip
    data: ImageData = load_splits(options.data, how=Opening(cache="none")).train.prepared(options)
    spec = parse_batches(options.batches)
    sampler = sampler_for(Accelerator(cpu=True), options, spec, data)
    if spec.planner.needs == "graph":
        vectors = torch.nn.functional.normalize(torch.randn(len(data), 64, generator=torch.Generator().manual_seed(0)))
        sampler.data = build_graph(vectors, 10, None, torch.Generator().manual_seed(0))
    loading = Loading(data, sampler, options, lambda epoch, batch: True, pin=False)
    for epoch in range(options.epochs):
        for positions, fetched in loading.epoch(epoch):
            yield data.views(positions, epoch, options.seed, fetched)


def plain(folder: Path, batch_size: int, workers: int, augment: Augment) -> Iterator[Any]:
    """The batches of a plain ``DataLoader``, for epoch after epoch."""
    paths = sorted((folder / "train").iterdir())
    loader = DataLoader(
        InPillow(paths, augment), batch_size, shuffle=True, num_workers=workers, drop_last=True,
        persistent_workers=workers > 0,
    )  # fmt: skip
    while True:
        yield from loader


def speed(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="hardneg-photos-", dir=options.folder))
    try:
        write_photos(folder / "train", options.photos)
        write_photos(folder / "test", 8, first=options.photos)
        sizes = options.batch_size, options.workers
        found = {}
        for name, augment in (("cifar", CIFAR), ("imagenet", IMAGENET)):
            if name not in options.augment:
                continue
            make: dict[str, Callable[[], Iterator[Any]]] = {
                "plain": lambda augment=augment: plain(folder, *sizes, augment),  # type: ignore[misc]
                "uniform": lambda name=name: ours(folder, *sizes, name, "uniform()"),  # type: ignore[misc]
                "proximity": lambda name=name: ours(folder, *sizes, name, "proximity(num_neighbours=10)"),  # type: ignore[misc]
            }
            found[name] = {"augment": asdict(augment) | {"dtype": "float32"}, **compared(make, options)}
            print(name, json.dumps({key: value for key, value in found[name].items() if key != "augment"}), flush=True)
    finally:
        shutil.rmtree(folder)
    return found


def compared(make: dict[str, Callable[[], Iterator[Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """Images per second of each variant, in processes of their own so that only one of them has workers."""
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in make}
    for _ in range(options.rounds):
        for name, build in make.items():
            rounds[name].append(in_a_fork(build, options))
    clock = {name: median(one[0] for one in each) for name, each in rounds.items()}
    processor = {name: median(one[1] for one in each) for name, each in rounds.items()}
    return {
        "images_per_second": clock,
        "images_per_processor_second": processor,
        "of_plain": ratio(rounds, "uniform", "plain"),
        "of_uniform": ratio(rounds, "proximity", "uniform"),
        "rounds": rounds,
    }


def ratio(rounds: dict[str, list[tuple[float, float]]], one: str, other: str) -> dict[str, float]:
    """The median over the rounds of the ratio of two variants."""
    pairs = [*zip(rounds[one], rounds[other], strict=True)]
    return {name: median(a[i] / b[i] for a, b in pairs) for i, name in enumerate(("clock", "processor"))}


def in_a_fork(build: Callable[[], Iterator[Any]], options: argparse.Namespace) -> tuple[float, float]:
    """Images per second of the clock and of the processors, without start and first batches."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        batches, marks = build(), []
        for number in range(options.warm + options.batches + 1):
            if number in (options.warm, options.warm + options.batches):
                marks.append((time.perf_counter(), processor_seconds()))
            next(batches)
        seconds, spent = (after - before for before, after in zip(*marks, strict=True))
        os.write(writer, json.dumps([options.batches * options.batch_size / one for one in (seconds, spent)]).encode())
        for worker in children_of(os.getpid()):
            os.kill(worker, 9)
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        clock, processor = json.loads(file.read())
    return clock, processor


def children_of(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(one) for task in tasks for one in (task / "children").read_text().split()]


def processor_seconds() -> float:
    """Of this process and its running children."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = own.ru_utime + own.ru_stime
    for child in children_of(os.getpid()):
        fields = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


# Plan


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """Coverage, balance and seconds of the batches of all ranks."""
    from hardneg.batching.graph import build_graph
    from hardneg.batching.sampler import PlannedBatchSampler
    from hardneg.batching.spec import parse_batches

    torch.set_num_threads(1)
    random, spec = torch.Generator().manual_seed(0), parse_batches(options.batches)
    labels = torch.arange(options.items) % 100
    vectors = torch.randn(100, 64, generator=random)[labels] + torch.randn(options.items, 64, generator=random)
    begun = time.process_time()
    planner: Any = spec.planner
    graph = build_graph(
        torch.nn.functional.normalize(vectors), planner.num_neighbours, planner.num_candidates, random
    )  # fmt: skip
    found: dict[str, Any] = {"graph_processor_seconds": time.process_time() - begun, "ranks": []}
    seen = np.zeros((options.epochs, options.items), np.int64)
    same_class, pairs = 0, 0
    for rank in range(options.ranks):
        sampler = PlannedBatchSampler(
            planner, options.items, options.batch_size // options.ranks, graph, drop_last=True, coverage=spec.coverage,
            segment=spec.refresh, total_epochs=200, num_replicas=options.ranks, rank=rank,
        )  # fmt: skip
        begun, sizes = time.process_time(), []
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for batch in sampler:
                sizes.append(len(batch))
                np.add.at(seen[epoch], batch, 1)
                here = labels[batch]
                same_class += int((here[:, None] == here).sum()) - len(batch)
                pairs += len(batch) * (len(batch) - 1)
        spent = (time.process_time() - begun) / options.epochs
        found["ranks"].append({"batches": len(sizes), "sizes": sorted(set(sizes)), "processor_seconds": spent})
    return found | {
        "seen_in_an_epoch": [float((one > 0).mean()) for one in seen],
        "seen_in_all_epochs": float((seen.sum(0) > 0).mean()),
        "most_often_in_an_epoch": int(seen.max()),
        "pairs_of_one_class_in_the_part_of_a_rank": same_class / pairs,
    }


def main() -> None:
    options = read_options()
    if options.part == "train-here":
        train_here(options.data, options.out, options.begun, options.max_steps)
        return
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    found = {"memory": memory, "speed": speed, "plan": plan}[options.part](options)
    command = shlex.join(["python", "benchmarks/images.py", *sys.argv[1:]])
    made = {"command": command, "commit": git("rev-parse", "HEAD"), "cpu": cpu_name(), "load": os.getloadavg()[0]}
    made["uncommitted"] = bool(git("status", "--porcelain", "--", "src", "benchmarks/images.py"))
    options.out.write_text(json.dumps({**known, options.part: {"provenance": made, **found}}, indent=1) + "\n")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name in ("memory", "speed", "plan"):
        part = parts.add_parser(name)
        part.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where photos are made")
        part.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "images.json")
        if name == "memory":
            part.add_argument("--images", type=int, nargs="+", default=[2_000, 10_000, 40_000])
            part.add_argument("--max-steps", type=int, default=20)
        elif name == "plan":
            part.add_argument("--items", type=int, default=126_689, help="as in ImageNet-100")
            part.add_argument("--ranks", type=int, default=8)
            part.add_argument("--batch-size", type=int, default=512, help="of all ranks together")
            part.add_argument("--epochs", type=int, default=3)
            part.add_argument("--batches", default="proximity()")
        else:
            part.add_argument("--photos", type=int, default=1_024)
            part.add_argument("--batch-size", type=int, default=64)
            part.add_argument("--batches", type=int, default=8, help="timed in each round")
            part.add_argument("--warm", type=int, default=5, help="batches before the time is taken")
            part.add_argument("--rounds", type=int, default=5)
            part.add_argument("--workers", type=int, default=2)
            part.add_argument("--augment", nargs="+", default=["cifar", "imagenet"])
    job = parts.add_parser("train-here")
    for name, kind in (("data", str), ("out", str), ("begun", float), ("max_steps", int)):
        job.add_argument(name, type=kind)
    return parser.parse_args()


if __name__ == "__main__":
    main()
