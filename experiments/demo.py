"""Does tilting the negatives beat tuning the temperature? Three losses on scikit-learn's digits, in about a minute.

    python experiments/demo.py --out runs/demo

Each loss trains the same small encoder: for one seed, from the same weights, on the same batches and the same views.
The encoder is judged by its nearest neighbours on digits of other hands that were moved at random; digits left as they
are cannot tell the losses apart, since raw pixels already name 96 in 100 of them. A tilt of beta repels like
temperature / (1 + beta), so HCL at temperature 0.5 with beta 1 is to be compared with SimCLR at 0.25, not at 0.5.

Leaves in --out: results.json, every figure and how it came about, and demo.png.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import hardneg as hn

try:
    import matplotlib
    import sklearn
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator
    from sklearn.datasets import load_digits
except ImportError as missing:
    sys.exit(f"demo.py needs {missing.name}, which is not installed: pip install 'hardneg[eval,report]'")


@dataclass(frozen=True)
class Options:
    out: str = "runs/demo"
    seeds: int = 3
    epochs: int = 20
    batch_size: int = 128
    learning_rate: float = 5e-3
    train_images: int = 1300
    neighbours: int = 10
    shift: float = 0.2  # of half the image's width
    rotation: float = 15.0  # degrees
    zoom: float = 0.15
    noise: float = 0.15  # of a full stroke

    def __post_init__(self) -> None:
        for name, low, high in (
            ("seeds", 1, math.inf),
            ("epochs", 1, math.inf),
            ("train_images", 2, 1300),
            ("batch_size", 2, self.train_images),
            ("neighbours", 1, self.train_images),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"demo.py needs {name} in [{low}, {high}], got {name}={getattr(self, name)}.")


@dataclass(frozen=True)
class Arm:
    name: str
    negatives: str
    temperature: float
    tau_plus: float
    colour: str


UNTUNED = Arm("SimCLR 0.5", "Uniform()", temperature=0.5, tau_plus=0.0, colour="#8a8a8a")
UNTILTED = Arm("SimCLR 0.25", "Uniform()", temperature=0.25, tau_plus=0.0, colour="#0072b2")
TILTED = Arm("HCL 0.5", "Tilt(1.0)", temperature=0.5, tau_plus=0.1, colour="#d55e00")
ARMS = (UNTUNED, UNTILTED, TILTED)
BETAS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # along the curves of the plot

Run = dict[str, Any]
Runs = dict[str, list[Run]]  # by the name of the arm, one for each seed


class Encoder(nn.Module):
    """8 x 8 pixels to 128 features, which the neighbours are found by, and a head on top that only the loss sees."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),  # [b, 16, 8, 8]
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),  # [b, 32, 4, 4]
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 128),
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images))


def moved(images: Tensor, options: Options, generator: torch.Generator) -> Tensor:
    """Shifts, turns and zooms each image [b, 1, 8, 8] by its own random amounts."""

    def between(size: float) -> Tensor:  # [b], uniform in [-size, size]
        return size * (2.0 * torch.rand(len(images), generator=generator) - 1.0)

    angle, scale = between(math.radians(options.rotation)), 1.0 + between(options.zoom)
    cos, sin, right, down = scale * angle.cos(), scale * angle.sin(), between(options.shift), between(options.shift)
    affine = torch.stack([cos, -sin, right, sin, cos, down], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def two_views(images: Tensor, options: Options, generator: torch.Generator) -> Tensor:
    """[2b, 1, 8, 8]: each image twice, moved and noisy in two ways."""
    views = moved(torch.cat([images, images]), options, generator)
    return views + options.noise * torch.randn(views.shape, generator=generator)


def load(options: Options) -> dict[str, Tensor]:
    """The first 1300 digits (or fewer) to train on, the last 497 to test: the file is in the order of the writers."""
    pixels, names = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0, torch.tensor(names)
    test, test_labels = images[1300:], labels[1300:]
    return {
        "train": images[: options.train_images],
        "train_labels": labels[: options.train_images],
        "test": test,
        "test_labels": test_labels,
        "moved": moved(test.repeat(4, 1, 1, 1), options, torch.Generator().manual_seed(1)),
        "moved_labels": test_labels.repeat(4),
    }


@torch.no_grad()
def knn_accuracy(features: nn.Module, digits: dict[str, Tensor], neighbours: int) -> dict[str, float]:
    """Share of held-out digits named rightly by the most similar training digits, a vote being e^(similarity / 0.1)."""
    known = F.normalize(features(digits["train"]), dim=-1)
    found = {}
    for name, part in (("knn", "moved"), ("knn_as_given", "test")):
        nearest = (F.normalize(features(digits[part]), dim=-1) @ known.T).topk(neighbours, dim=-1)  # [n, neighbours]
        votes = torch.zeros(len(digits[part]), 10)
        votes.scatter_add_(1, digits["train_labels"][nearest.indices], (nearest.values / 0.1).exp())
        found[name] = (votes.argmax(-1) == digits[f"{part}_labels"]).float().mean().item()
    return found


def train(arm: Arm, seed: int, options: Options, digits: dict[str, Tensor], tick: Callable[[], None]) -> Run:
    """One run: what was seen along it, and what any tilt would make of the trained encoder's negatives."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    encoder = Encoder()
    loss = hn.ContrastiveLoss(arm.negatives, temperature=arm.temperature, tau_plus=arm.tau_plus)
    images, labels = digits["train"], digits["train_labels"]
    num_steps = len(images) // options.batch_size
    optimizer = torch.optim.AdamW(encoder.parameters(), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, options.epochs * num_steps)
    # One batch, the same in every run, is watched: how hard and how false are its negatives?
    watched = two_views(images[:256], options, torch.Generator().manual_seed(2))  # [2b, 1, 8, 8]

    def look(epoch: int, mean_loss: float | None) -> dict[str, float | None]:
        encoder.eval()
        knn = knn_accuracy(encoder.body, digits, options.neighbours)
        negatives = loss.diagnose(*encoder(watched).chunk(2), labels=labels[:256]).summary()
        encoder.train()
        return {"epoch": epoch, "loss": mean_loss, "cpu_seconds": spent, **knn, **negatives}

    spent = 0.0
    history = [look(0, None)]
    for epoch in range(1, options.epochs + 1):
        start, losses = time.process_time(), []
        order = torch.randperm(len(images), generator=generator)
        for batch in order[: num_steps * options.batch_size].chunk(num_steps):
            z1, z2 = encoder(two_views(images[batch], options, generator)).chunk(2)  # [b, 64] each
            value = loss(z1, z2)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            losses.append(value.item())
        spent += time.process_time() - start
        if epoch % 2 == 0 or epoch == options.epochs:
            history.append(look(epoch, sum(losses) / num_steps))
        tick()

    encoder.eval()
    with torch.no_grad():
        scores = loss.scores(*encoder(watched).chunk(2), labels=labels[:256])
        tilts = {beta: hn.diagnose(scores, hn.Tilt(beta).log_weights(scores)).summary() for beta in BETAS}
    curve = [{"beta": beta} | {name: tilts[beta][name] for name in ("hardness", "false_negatives")} for beta in BETAS]
    return {"seed": seed, "history": history, "final": history[-1], "tilts": curve}


def mean(runs: list[Run], name: str, when: int = -1) -> float:
    return sum(run["history"][when][name] for run in runs) / len(runs)


def judge(runs: Runs) -> dict[str, Any]:
    """Whether the tilt beats the untilted loss at its effective temperature: do the ranges of the seeds overlap?"""
    tilted, untilted = ([run["final"]["knn"] for run in runs[arm.name]] for arm in (TILTED, UNTILTED))
    gain = 100 * (mean(runs[TILTED.name], "knn") - mean(runs[UNTILTED.name], "knn"))
    if len(tilted) == 1:
        outcome, finding = "unknown", "cannot be told from one seed to differ from"
    elif min(tilted) > max(untilted):
        outcome, finding = "beats", "beats, with every seed above all of its,"
    elif max(tilted) < min(untilted):
        outcome, finding = "loses", "loses, with every seed below all of its, to"
    else:
        outcome, finding = "tie", "does not beat, beyond the spread of the seeds,"
    sentence = (
        f"The tilted loss ({TILTED.name}) {finding} the untilted one at its effective temperature "
        f"({UNTILTED.name}): {gain:+.1f} points of kNN accuracy on moved digits; debiasing is in that difference too."
    )
    return {"outcome": outcome, "gain_points": gain, "sentence": sentence}


def show(console: Console, runs: Runs, pixels: dict[str, float]) -> None:
    title = "Held-out digits, moved and as given, and the negatives trained with"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("\nloss")
    for name in ("kNN %\nmoved", "\neach seed", "as\ngiven", "hard-\nness", "false\nneg. %", "effect.\ntemp."):
        table.add_column(name, justify="right")
    for name in ("clam-\nped %", "CPU\ns"):
        table.add_column(name, justify="right")
    for arm in ARMS:
        of_arm = runs[arm.name]
        table.add_row(
            arm.name,
            f"{100 * mean(of_arm, 'knn'):.1f}",
            " ".join(f"{100 * run['final']['knn']:.1f}" for run in of_arm),
            f"{100 * mean(of_arm, 'knn_as_given'):.1f}",
            f"{mean(of_arm, 'hardness'):.2f}",
            f"{100 * mean(of_arm, 'false_negatives'):.1f}",
            f"{mean(of_arm, 'effective_temperature'):.3g}",
            f"{100 * mean(of_arm, 'clamped'):.1f}",
            f"{mean(of_arm, 'cpu_seconds'):.1f}",
        )
    table.add_section()
    untrained = {name: mean(runs[UNTUNED.name], name, when=0) for name in pixels}
    for name, knn in (("untrained", untrained), ("raw pixels", pixels)):
        table.add_row(name, f"{100 * knn['knn']:.1f}", "", f"{100 * knn['knn_as_given']:.1f}")
    console.print(table)


def plot(runs: Runs, pixels: dict[str, float], path: Path) -> None:
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
    plt.rcParams.update({"grid.color": "#e8e8e8", "axes.axisbelow": True, "legend.frameon": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.8), layout="constrained")
    for arm in ARMS:
        of_arm, label = runs[arm.name], arm.name.replace(" ", ", temperature ")
        epochs = [seen["epoch"] for seen in of_arm[0]["history"]]
        knn = 100 * torch.tensor([[seen["knn"] for seen in run["history"]] for run in of_arm])  # [seeds, looks]
        left.plot(epochs, knn.mean(0), color=arm.colour, linewidth=2, label=label)
        left.fill_between(epochs, knn.amin(0), knn.amax(0), color=arm.colour, alpha=0.15, linewidth=0)
        tilts = [[[at["hardness"], 100 * at["false_negatives"]] for at in run["tilts"]] for run in of_arm]
        hardness, false = torch.tensor(tilts).mean(0).unbind(1)  # [betas] each
        right.plot(hardness, false, color=arm.colour, linewidth=1.5, marker=".", label=label)
        trained_at = mean(of_arm, "hardness"), 100 * mean(of_arm, "false_negatives")
        right.plot(*trained_at, "o", color=arm.colour, markersize=10, markeredgecolor="white")
    note = {"xytext": (14, -4), "textcoords": "offset points", "va": "top"}
    right.annotate("HCL trains here, at beta 1", trained_at, color=TILTED.colour, **note)
    right.annotate("SimCLR trains here, at beta 0", (hardness[0], false[0]), color=UNTILTED.colour, **note)
    left.axhline(100 * pixels["knn"], color="#444444", linewidth=1, linestyle=":", label="raw pixels")
    left.set(xlabel="epoch", ylabel="kNN accuracy (%)", title="Held-out digits, moved: mean and range of the seeds")
    left.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    left.legend(loc="lower right")
    right.set(
        xlabel="hardness: mean similarity of the negatives", ylabel="false negatives: share of the same digit (%)"
    )
    right.set(title=f"What a tilt costs each trained encoder, beta 0 to {BETAS[-1]:g}", ylim=(0, 100))
    right.legend(loc="upper left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def provenance() -> dict[str, Any]:
    """What it takes to get the same figures again."""
    commit = None
    if shutil.which("git"):
        ask = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() or None
    modules = {"torch": torch, "hardneg": hn, "scikit-learn": sklearn, "matplotlib": matplotlib}
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit,
        "versions": {"python": platform.python_version()} | {name: m.__version__ for name, m in modules.items()},
        "machine": f"{platform.system()} {platform.machine()}",
    }


def read_options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Options):
        flag, default = "--" + field.name.replace("_", "-"), field.default
        parser.add_argument(flag, type=type(default), default=default, metavar="", help=f"{default}")
    try:
        return Options(**vars(parser.parse_args()))
    except ValueError as error:
        parser.error(str(error))


def main() -> None:
    options, console, start = read_options(), Console(), time.perf_counter()
    plt.switch_backend("Agg")
    torch.set_num_threads(1)  # on images this small more threads wait for each other
    digits = load(options)
    pixels = knn_accuracy(nn.Flatten(), digits, options.neighbours)

    runs: Runs = {arm.name: [] for arm in ARMS}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=options.seeds * len(ARMS) * options.epochs)
        for seed in range(options.seeds):
            for arm in ARMS:
                progress.update(task, description=f"{arm.name}, seed {seed}")
                runs[arm.name].append(train(arm, seed, options, digits, lambda: progress.advance(task)))

    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    plot(runs, pixels, out / "demo.png")
    results = provenance() | {"options": asdict(options), "pixels": pixels, "verdict": judge(runs)}
    results["arms"] = [asdict(arm) | {"runs": runs[arm.name]} for arm in ARMS]
    results["seconds"] = time.perf_counter() - start
    (out / "results.json").write_text(json.dumps(results, indent=1, allow_nan=False))
    show(console, runs, pixels)
    console.print(results["verdict"]["sentence"], highlight=False)
    console.print(f"In {results['seconds']:.0f} s: {out / 'results.json'}, {out / 'demo.png'}", highlight=False)


if __name__ == "__main__":
    main()
