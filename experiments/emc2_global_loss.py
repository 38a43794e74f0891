"""Which estimator reaches the minimum of the global contrastive loss with a batch of 4? Figure 7 of Yau et al. 2024.

    python experiments/emc2_global_loss.py --out runs/emc2_global_loss

500 of scikit-learn's digits with two fixed augmentations each, so that the loss over the whole data set and its
gradient can be computed exactly. One small encoder is trained by plain SGD with each method, from the same weights and
on the same batches. Leaves in --out: results.json and emc2_global_loss.png.

The global loss: mean over the 1,000 anchors of -s+ + log sum of e^s over both views of the 499 others, at temperature
0.2 (eq. 1 of the paper; the positive is not in the denominator).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample, normalize

import hardneg as hn
from hardneg import papers
from hardneg.core.types import Keys
from hardneg.losses.global_softmax import EMC2, SogCLR
from hardneg.state.cache import Cache
from hardneg.state.pools import Bank

try:
    import matplotlib
    from sklearn.datasets import load_digits
except ImportError as missing:
    sys.exit(f"emc2_global_loss.py needs {missing.name}, which is not installed: pip install 'hardneg[eval,report]'")
matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclass(frozen=True)
class Options:
    out: str = "runs/emc2_global_loss"
    seeds: int = 5
    steps: int = 3000
    batch_size: int = 4
    items: int = 500
    dim: int = 32
    temperature: float = 0.2  # the paper's beta = 5
    learning_rate: float = 0.1  # at the start; it falls linearly to 0, so that the noise of SGD does too
    gamma: float = 0.9  # SogCLR
    refresh: float = 0.1  # share of the negative cache encoded afresh in each step
    evaluations: int = 25
    only: str = ""  # names of methods, joined by ;


Step = Callable[[nn.Module, Tensor], Tensor]
"""(encoder, ids of the batch) -> a loss to step on."""


def two_augmentations(items: int) -> Tensor:
    """[2, items, 64]: shifted, rotated, zoomed and noisy copies of the first digits, drawn once."""
    generator = torch.Generator().manual_seed(0)
    images = torch.tensor(load_digits().images[:items], dtype=torch.float32)[:, None] / 16.0
    views = []
    for _ in range(2):
        angle = 0.25 * (2.0 * torch.rand(items, generator=generator) - 1.0)
        zoom = 1.0 + 0.15 * (2.0 * torch.rand(items, generator=generator) - 1.0)
        shift = 0.2 * (2.0 * torch.rand(items, 2, generator=generator) - 1.0)
        rows = (torch.cos(angle), -torch.sin(angle), shift[:, 0], torch.sin(angle), torch.cos(angle), shift[:, 1])
        grid = affine_grid(torch.stack(rows, 1).view(-1, 2, 3) * zoom[:, None, None], list(images.shape), False)
        moved = grid_sample(images, grid, align_corners=False)
        views.append((moved + 0.1 * torch.randn(moved.shape, generator=generator)).flatten(1))
    return torch.stack(views)


class Encoder(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x: Tensor) -> Tensor:
        return normalize(self.layers(x), dim=-1)


def global_loss(encoder: nn.Module, views: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Of the anchors ids against the whole data set, exact."""
    everyone = torch.arange(views.shape[1])
    z1, z2 = encoder(views[0]), encoder(views[1])
    pool = Keys(torch.cat([z1, z2]), torch.cat([everyone, everyone]))
    anchors = Keys(torch.cat([z1[ids], z2[ids]]), torch.cat([ids, ids]))
    scores = hn.score(anchors, torch.cat([z2[ids], z1[ids]]), pool, temperature)
    losses = hn.info_nce(scores, hn.Uniform().log_weights(scores), positives_in_denominator="none")
    return losses.mean()


def measure(encoder: nn.Module, views: Tensor, temperature: float) -> tuple[float, float]:
    """The global loss and the squared norm of its gradient."""
    loss = global_loss(encoder, views, torch.arange(views.shape[1]), temperature)
    gradients = torch.autograd.grad(loss, list(encoder.parameters()))
    return loss.item(), sum(gradient.square().sum().item() for gradient in gradients)


def methods(views: Tensor, options: Options, seed: int) -> dict[str, Step]:
    """Each with the scale of the mean loss over the batch's 2b anchors, so that one learning rate serves all."""
    items, temperature = options.items, options.temperature

    def on_batch(loss: nn.Module) -> Step:
        return lambda encoder, ids: loss(encoder(views[0, ids]), encoder(views[1, ids]), ids=ids)

    def encoding(loss: EMC2) -> Step:
        def step(encoder: nn.Module, ids: Tensor) -> Tensor:
            again = lambda states, which: encoder(views[which, states])  # noqa: E731
            return loss(encoder(views[0, ids]), encoder(views[1, ids]), ids=ids, encode=again)  # type: ignore[no-any-return]

        return step

    return {
        "all negatives": lambda encoder, ids: global_loss(encoder, views, ids, temperature),
        "SimCLR": on_batch(papers.simclr(temperature)),
        "SogCLR": on_batch(SogCLR(items, temperature, options.gamma, divide_by_temperature=True)),
        "negative cache": negative_cache(views, options, seed),
        "EMC2, Algorithm 1": encoding(EMC2(items, temperature, proposals="data set", seed=seed)),
        "EMC2, states re-encoded": encoding(EMC2(items, temperature, seed=seed)),
        "EMC2, bank": on_batch(EMC2(items, temperature, remember=Bank(items, options.dim), seed=seed)),
        "EMC2, states by their last score": on_batch(EMC2(items, temperature, seed=seed)),
    }


def negative_cache(views: Tensor, options: Options, seed: int) -> Step:
    """All items cached, one random view each; one Gumbel draw per anchor, a share of the cache refreshed per step."""
    cache = Cache(options.items, options.dim, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    loss = papers.negative_cache(options.temperature)

    def step(encoder: nn.Module, ids: Tensor) -> Tensor:
        def encode(items: Tensor) -> Tensor:
            return encoder(views[torch.randint(2, items.shape, generator=generator), items])

        if len(cache) == 0:
            cache.push(Keys(encode(torch.arange(options.items)).detach(), torch.arange(options.items)))
        z1, z2 = encoder(views[0, ids]), encoder(views[1, ids])
        value = loss(torch.cat([z1, z2]), torch.cat([z2, z1]), cache, encode, torch.cat([ids, ids]))
        cache.refresh(encode, options.refresh)
        return value

    return step


def train(name: str, seed: int, views: Tensor, options: Options) -> dict[str, list[float]]:
    torch.manual_seed(seed)
    encoder = Encoder(options.dim)
    step_of = methods(views, options, seed)[name]
    batches = torch.Generator().manual_seed(seed)
    curve: dict[str, list[float]] = {"step": [], "loss": [], "squared_gradient": []}
    every = max(options.steps // options.evaluations, 1)
    for step in range(options.steps + 1):
        if step % every == 0:
            loss, squared = measure(encoder, views, options.temperature)
            for key, value in (("step", step), ("loss", loss), ("squared_gradient", squared)):
                curve[key].append(value)
        rate = options.learning_rate * (1.0 - step / options.steps)
        ids = torch.randperm(options.items, generator=batches)[: options.batch_size]
        gradients = torch.autograd.grad(step_of(encoder, ids), list(encoder.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(encoder.parameters(), gradients, strict=True):
                parameter -= rate * gradient
    return curve


def summarise(curves: list[dict[str, list[float]]]) -> dict[str, float]:
    """Means over the last fifth of the run and over the seeds."""
    tail = max(len(curves[0]["step"]) // 5, 1)
    losses = torch.tensor([curve["loss"][-tail:] for curve in curves]).mean(1)
    squared = torch.tensor([curve["squared_gradient"][-tail:] for curve in curves]).mean(1)
    deviation = losses.std(correction=min(1, len(curves) - 1)).item()
    return {"loss": losses.mean().item(), "loss_deviation": deviation, "squared_gradient": squared.mean().item()}


def show(results: dict[str, dict[str, float]]) -> None:
    table = Table(title="Last fifth of the run, mean over seeds")
    for name in ("method", "global loss", "over seeds", "squared gradient"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name, row in results.items():
        table.add_row(name, f"{row['loss']:.4f}", f"{row['loss_deviation']:.4f}", f"{row['squared_gradient']:.4f}")
    Console().print(table)


def plot(curves: dict[str, list[dict[str, list[float]]]], options: Options, path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11.0, 4.4), layout="constrained")
    styles = {
        "all negatives": ("0.3", "-"),
        "SimCLR": ("C0", "-"),
        "SogCLR": ("C2", "-"),
        "negative cache": ("C1", "-"),
        "EMC2, Algorithm 1": ("C4", "-"),
        "EMC2, states re-encoded": ("C3", "-"),
        "EMC2, bank": ("C3", "--"),
        "EMC2, states by their last score": ("C3", ":"),
    }
    for name, runs in curves.items():
        color, style = styles[name]
        for axis, key in zip(axes, ("loss", "squared_gradient"), strict=True):
            mean = torch.tensor([run[key] for run in runs]).mean(0)
            axis.plot(runs[0]["step"], mean, color=color, linestyle=style, linewidth=1.6, label=name)
    axes[0].set(ylabel="global loss (exact)", xlabel="SGD steps")
    axes[1].set(ylabel="squared norm of its gradient", xlabel="SGD steps", yscale="log")
    axes[0].set_title(f"{options.items} digits, two fixed views, batch {options.batch_size}", loc="left")
    axes[1].set_title("one seed" if options.seeds == 1 else f"mean of {options.seeds} seeds", loc="left")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Options):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    start, curves, results = time.perf_counter(), {}, {}
    views = two_augmentations(options.items)
    for name in [name for name in methods(views, options, 0) if not options.only or name in options.only.split(";")]:
        curves[name] = [train(name, seed, views, options) for seed in range(options.seeds)]
        results[name] = summarise(curves[name])
        print(f"{name}: {results[name]['loss']:.4f} ({time.perf_counter() - start:.0f} s)", flush=True)
    record: dict[str, Any] = {"options": asdict(options), "results": results, "curves": curves}
    record |= {"cpu_seconds": time.process_time(), "commit": commit(), "torch": torch.__version__}
    record |= {"machine": platform.processor() or platform.machine(), "hardneg": hn.__version__}
    (out / "results.json").write_text(json.dumps(record, indent=1))
    plot(curves, options, out / "emc2_global_loss.png")
    show(results)
    print(f"Wrote {out}/results.json and {out}/emc2_global_loss.png.")


if __name__ == "__main__":
    main()
